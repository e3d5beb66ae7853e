"""A small server that speaks S3 as Supabase Storage does (seen in August 2026), before moto, which keeps the objects.

Its errors are in a namespace; conditions on writes are ignored, with 200; a list of what to delete has to be called XML; a
key has only characters of a small set; a request that is signed for another region gets a bare 403; and all of it is below a
path. Signatures themselves are not checked: moto does not.
"""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from tests.parts.s3_servers import S3Server

PATH = "/storage/v1/s3"
REGION = "us-east-1"
_KEY = re.compile(r"[\w/!\-.*'() &$@=;:+,?]*\Z", re.ASCII)
_ERROR = re.compile(rb"<Error>")
_NOT_PASSED_ON = {"host", "connection", "if-match", "if-none-match", "transfer-encoding", "content-length"}


def refused_by_supabase(key: str) -> bool:
    """Whether it takes no object of that name."""
    return not _KEY.match(key)


@contextmanager
def supabase(behind: S3Server) -> Iterator[S3Server]:
    """``behind`` keeps the objects."""
    address = urlsplit(behind.endpoint)

    class Dialect(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do(self) -> None:
            body = self._body()
            target = urlsplit(self.path)
            key = unquote(target.path.removeprefix(f"{PATH}/").partition("/")[2])
            deletes = self.command == "POST" and "delete" in parse_qs(target.query, keep_blank_values=True)
            if not target.path.startswith(f"{PATH}/"):
                self._answer(404, b"", {})
            elif self._region(target.query) != REGION:
                self._answer(403, b"", {})
            elif refused_by_supabase(key):
                self._refuse("InvalidKey", f"Invalid key: {key}")
            elif deletes and self.headers.get("Content-Type") != "application/xml":
                self._refuse("InvalidRequest", "must have required property 'Body'")
            else:
                self._pass_on(target.path.removeprefix(PATH), target.query, body)

        def _region(self, query: str) -> str:
            signed = self.headers.get("Authorization", "") or parse_qs(query).get("X-Amz-Credential", [""])[0]
            scope = signed.partition("Credential=")[2] or signed
            return [*scope.split("/"), "", "", ""][2]

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _pass_on(self, path: str, query: str, body: bytes) -> None:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _NOT_PASSED_ON}
            behind = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
            try:
                behind.request(self.command, f"{path}?{query}" if query else path, body, headers)
                answer = behind.getresponse()
                self._answer(answer.status, answer.read(), dict(answer.getheaders()))
            finally:
                behind.close()

        def _refuse(self, code: str, message: str) -> None:
            error = f"<Error><Code>{code}</Code><Message>{message.replace('&', '')}</Message></Error>"
            self._answer(400, error.encode(), {"Content-Type": "application/xml"})

        def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            if status >= 300:
                body = _ERROR.sub(b'<Error xmlns="http://s3.amazonaws.com/doc/2006-03-01/">', body, count=1)
            self.send_response_only(status)
            length = headers.get("Content-Length", headers.get("content-length", str(len(body))))
            for name, value in headers.items():
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    for method in ("GET", "PUT", "POST", "DELETE", "HEAD"):
        setattr(Dialect, f"do_{method}", Dialect.do)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Dialect)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_address[1]}{PATH}"
        yield S3Server(endpoint, behind.access_key, behind.secret_key)
    finally:
        server.shutdown()
        server.server_close()
