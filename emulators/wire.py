"""HTTP/1.1 on a loopback socket: just what the providers' clients speak, and full control over how it breaks."""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from email.message import Message
from http import HTTPStatus
from http.client import parse_headers
from io import BufferedReader
from socket import SocketIO
from urllib.parse import parse_qsl, unquote, urlsplit

CHUNK = 256 * 1024


class Gone(Exception):
    """The client went away, or broke the protocol."""


class Dropped(Exception):
    """This connection is to be closed without another byte."""


class Reset(Exception):
    """This connection is to be reset."""


class Held(Exception):
    """This connection is to stay open, and silent, for as long as the client waits."""


class Request:
    """One request: its head parsed, its body still on the wire."""

    def __init__(self, method: str, target: str, headers: Message, source: BufferedReader[SocketIO]) -> None:
        self.method = method
        split = urlsplit(target)
        self.path = unquote(split.path)
        self.query = dict(parse_qsl(split.query, keep_blank_values=True, errors="surrogateescape"))
        self.headers = headers
        self._source = source
        self._chunked = "chunked" in headers.get("Transfer-Encoding", "").lower()
        self._left = 0 if self._chunked else int(headers.get("Content-Length") or 0)
        self._ended = not self._chunked and not self._left

    def header(self, name: str) -> str:
        return str(self.headers.get(name, ""))

    def chunks(self) -> Iterator[bytes]:
        """The rest of the body, piece by piece. Raise ``Gone`` when the client stops half way."""
        while not self._ended:
            if not self._left and not self._next_chunk():
                return
            piece = self._source.read1(min(self._left, CHUNK))
            if not piece:
                raise Gone
            self._left -= len(piece)
            if not self._left:
                self._end_chunk()
            yield piece

    def body(self) -> bytes:
        return b"".join(self.chunks())

    def json(self) -> dict[str, object]:
        """The body as a JSON object; an empty body, or anything else, is an empty one."""
        with suppress(ValueError):
            value = json.loads(self.body() or b"{}")
            if isinstance(value, dict):
                return value
        return {}

    def _next_chunk(self) -> bool:
        line = self._source.readline(1024)
        try:
            self._left = int(line.split(b";")[0], 16)
        except ValueError:
            raise Gone from None
        if self._left:
            return True
        while self._source.readline(65536) not in (b"\r\n", b"\n", b""):
            pass
        self._ended = True
        return False

    def _end_chunk(self) -> None:
        if self._chunked:
            self._source.readline(8)
        else:
            self._ended = True


class Connection:
    """One client's connection: reads requests, writes answers."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._source = BufferedReader(SocketIO(sock, "r"), 65536)
        self._chunked = False
        self.muted = False
        """Answers are swallowed: the server acts, and the client never hears of it."""

    def next_request(self) -> Request | None:
        """The next request, or ``None`` when the client is done."""
        line = self._source.readline(65537).decode("latin-1").split()
        if len(line) != 3:
            return None
        headers = parse_headers(self._source)
        if headers.get("Expect", "").lower() == "100-continue":
            self._send(b"HTTP/1.1 100 Continue\r\n\r\n")
        return Request(line[0], line[1], headers, self._source)

    def answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """A whole answer at once."""
        length = {} if status == HTTPStatus.NO_CONTENT else {"Content-Length": str(len(body))}
        self._send(_head(status, {**headers, **length}) + body)

    def start(self, status: int, headers: Mapping[str, str], length: int | None = None) -> None:
        """Begin an answer whose body follows by ``send``: of that length, or in HTTP chunks and ended by ``finish``."""
        self._chunked = length is None
        framing = {"Transfer-Encoding": "chunked"} if length is None else {"Content-Length": str(length)}
        self._send(_head(status, {**headers, **framing}))

    def send(self, data: bytes) -> None:
        if data:
            self._send(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def finish(self) -> None:
        if self._chunked:
            self._send(b"0\r\n\r\n")

    def hold(self) -> None:
        """Wait until the client has gone or the server closes; bytes that still come in are left alone."""
        watch = select.poll()
        watch.register(self._sock, getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR)
        watch.poll()

    def sever(self) -> None:
        """Break the connection from another thread, whatever it is busy with."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        with suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def close(self) -> None:
        with suppress(OSError):
            self._source.close()
        with suppress(OSError):
            self._sock.close()

    def _send(self, data: bytes) -> None:
        if self.muted:
            return
        try:
            self._sock.sendall(data)
        except OSError:
            raise Gone from None


class Listener:
    """Accepts connections on 127.0.0.1 and serves each in a thread of its own until closed."""

    def __init__(self, port: int, serve: Callable[[Connection, Request], None]) -> None:
        self._serve = serve
        self._socket = socket.create_server(("127.0.0.1", port), backlog=128)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name=f"emulator-{self.port}", daemon=True).start()

    def close(self) -> None:
        """Stop listening and break every connection."""
        with self._lock:
            self._closed = True
            clients = list(self._open)
        for sock in (self._socket, *clients):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._socket.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    if self._closed:
                        sock.close()
                        return
                    self._open.add(sock)
                threading.Thread(target=self._converse, args=(sock,), daemon=True).start()

    def _converse(self, sock: socket.socket) -> None:
        connection = Connection(sock)
        try:
            while request := connection.next_request():
                self._serve(connection, request)
                for _ in request.chunks():
                    pass  # What an answer did not need is read off, so that the next request can follow.
                if request.header("Connection").lower() == "close":
                    break
        except Held:
            connection.hold()
        except Reset:
            connection.reset()
        except (Gone, Dropped, OSError):
            pass
        finally:
            with self._lock:
                self._open.discard(sock)
            connection.close()


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Unknown"
    lines = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8")
