"""Move bytes directly between the sandbox and the bucket, by presigned links that name one object and expire after
minutes.

A link's URL is a credential: anyone who has it can use it, so it is never printed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, BinaryIO, List, Union

from sidecar.format.protocol import IncomingPart, Link, OutgoingPart, SendAnswer, SendQuestion
from sidecar.format.refusal import Refusal

CHUNK = 1 << 20
REACH_SECONDS = 5.0
IDLE_SECONDS = 60.0

Part = Union[IncomingPart, OutgoingPart]


def send(question: SendQuestion) -> SendAnswer:
    """Upload each part of a file to its link, then remove the folder that contains the file."""
    path = question.path
    with open(path, "rb") as file:
        for part in question.parts:
            _transfer(part, file, path)
    shutil.rmtree(os.path.dirname(path), ignore_errors=True)
    return SendAnswer("sent", question.memory, question.snapshot)


def fetch(parts: List[IncomingPart], path: str) -> None:
    """Download all parts into one file, in order. Raise Refusal (``no-direct``) unless each has the expected length and
    hash."""
    with open(path, "wb") as file:
        for part in parts:
            start = file.tell()
            _transfer(part, file, path)
            file.flush()
            if file.tell() - start != part.bytes or _hash_part(path, start, part.bytes) != part.sha256:
                raise Refusal("no-direct", "What came from the bucket is not what is stored there.")


def _transfer(part: Part, file: BinaryIO, path: str) -> None:
    """Transfer one part with Python, or with curl if Python cannot verify the server's TLS. Raise Refusal (``no-direct``)."""
    link = part.link
    assert link is not None
    address = urllib.parse.urlsplit(link.url)
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), REACH_SECONDS).close()
        if isinstance(part, OutgoingPart):
            _put(link, part, file)
        else:
            _get(link, part, file)
    except urllib.error.HTTPError as refused:
        raise Refusal("no-direct", "The bucket answered %d." % refused.code) from None
    except (OSError, ValueError) as problem:
        trouble = getattr(problem, "reason", problem)
        if "ssl" not in type(trouble).__module__ or not shutil.which("curl"):
            raise Refusal("no-direct", "The bucket cannot be reached: %s." % type(trouble).__name__) from None
        _transfer_by_curl(link, part, file, path)


def _put(link: Link, part: OutgoingPart, file: BinaryIO) -> None:
    """Upload one region of the file."""
    body = _Region(file, part.start, part.bytes)
    _send_request(link, "PUT", body).close()  # type: ignore[arg-type]


def _get(link: Link, part: IncomingPart, file: BinaryIO) -> None:
    """Download one part; stop as soon as it is longer than announced."""
    start = file.tell()
    with _send_request(link, "GET", None) as answer:
        for chunk in iter(lambda: answer.read(CHUNK), b""):
            file.write(chunk)
            if file.tell() - start > part.bytes:
                return


def _send_request(link: Link, method: str, body: BinaryIO | None) -> Any:
    question = urllib.request.Request(link.url, data=body, headers=link.headers, method=method)
    return urllib.request.urlopen(question, timeout=IDLE_SECONDS)


class _Region:
    """A region of a file, readable like a file of its own."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        file.seek(start)
        self._file = file
        self._left = length

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(min(self._left, size if size >= 0 else self._left))
        self._left -= len(data)
        return data


def _transfer_by_curl(link: Link, part: Part, file: BinaryIO, path: str) -> None:
    """Transfer one part with curl, which has its own certificates. The URL goes to its standard input, where other
    users cannot see it."""
    piece = path + ".part"
    lines = ['url = "%s"' % link.url, 'max-time = "3600"', 'connect-timeout = "%d"' % REACH_SECONDS]
    lines += ['header = "%s: %s"' % header for header in link.headers.items()]
    try:
        if isinstance(part, OutgoingPart):
            with open(piece, "wb") as target:
                shutil.copyfileobj(_Region(file, part.start, part.bytes), target, CHUNK)
        lines.append('%s = "%s"' % ("upload-file" if isinstance(part, OutgoingPart) else "output", piece))
        told = "\n".join(lines).encode()
        done = subprocess.run(["curl", "--silent", "--fail", "--config", "-"], input=told, capture_output=True)
        if done.returncode != 0:
            raise Refusal("no-direct", "The bucket cannot be reached: curl ended with %d." % done.returncode)
        if isinstance(part, IncomingPart):
            with open(piece, "rb") as source:
                shutil.copyfileobj(source, file, CHUNK)
    finally:
        if os.path.exists(piece):
            os.unlink(piece)


def _hash_part(path: str, start: int, length: int) -> str:
    """Return the SHA-256 of a region of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        region = _Region(file, start, length)
        for chunk in iter(lambda: region.read(CHUNK), b""):
            digest.update(chunk)
    return digest.hexdigest()
