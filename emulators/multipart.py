"""Multipart bodies as they stream in: each part's head, then its content piece by piece."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesHeaderParser
from urllib.parse import unquote

from emulators.wire import Gone


@dataclass(frozen=True, slots=True)
class Part:
    """One part. Its content must be read before the next part is asked for."""

    name: str
    filename: str | None
    content: Iterator[bytes]


def parts(content_type: str, body: Iterator[bytes]) -> Iterator[Part]:
    """The parts of a body. Raise ``Gone`` when it ends before its last boundary, ``ValueError`` without a boundary."""
    message = Message()
    message["Content-Type"] = content_type
    boundary = message.get_param("boundary")
    if not isinstance(boundary, str):
        raise ValueError("no boundary")
    source = _Source(body, b"\r\n--" + boundary.encode("latin-1"))
    for _ in source.until_boundary():
        pass
    while source.take(2) != b"--":
        head = source.head()
        disposition = str(head.get("Content-Disposition", ""))
        name, filename = _parameter(disposition, "name"), _parameter(disposition, "filename")
        content = source.until_boundary()
        yield Part(name or "", filename, content)
        # Whoever read it may have stopped half way: the next part begins after the boundary all the same.
        for _ in source.until_boundary() if not source.at_boundary else ():
            pass


class _Source:
    def __init__(self, body: Iterator[bytes], delimiter: bytes) -> None:
        self._body = body
        self._delimiter = delimiter
        # The first boundary has no line before it to end.
        self._buffer = b"\r\n"
        self.at_boundary = False

    def _more(self) -> None:
        piece = next(self._body, b"")
        if not piece:
            raise Gone
        self._buffer += piece

    def take(self, count: int) -> bytes:
        while len(self._buffer) < count:
            self._more()
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def head(self) -> Message:
        while b"\r\n\r\n" not in self._buffer:
            self._more()
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        return BytesHeaderParser().parsebytes(head + b"\r\n\r\n")

    def until_boundary(self) -> Iterator[bytes]:
        """The content before the next boundary, which is passed by then; whether it is, ``at_boundary`` says."""
        self.at_boundary = False
        while True:
            at = self._buffer.find(self._delimiter)
            if at >= 0:
                content, self._buffer = self._buffer[:at], self._buffer[at + len(self._delimiter) :]
                self.at_boundary = True
                if content:
                    yield content
                return
            # What might be the start of a boundary waits for the bytes that follow.
            safe = len(self._buffer) - len(self._delimiter)
            if safe > 0:
                content, self._buffer = self._buffer[:safe], self._buffer[safe:]
                yield content
            self._more()


def _parameter(disposition: str, name: str) -> str | None:
    """A quoted parameter with what browsers escape in it (quotes and line ends) put back."""
    found = re.search(rf'(?:^|;)\s*{name}="((?:[^"\\]|\\.)*)"', disposition)
    if found is None:
        return None
    raw = re.sub(r"\\(.)", r"\1", found[1])
    raw = raw.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    return re.sub(r"%(?:22|0[aAdD])", lambda match: unquote(match[0]), raw)
