"""Requests byte by byte, as no HTTP library would send them."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

END = b"\r\n\r\n"


@dataclass(frozen=True)
class Answer:
    status: int
    """0: the connection was closed without one."""
    headers: dict[str, str]
    body: bytes


def request(
    method: str, path: str, headers: Iterable[tuple[str, str]], body: bytes = b"", version: str = "1.1"
) -> bytes:
    """The bytes of a request; its length is said when it has a body."""
    lines = [f"{method} {path} HTTP/{version}", *(f"{name}: {value}" for name, value in headers)]
    lines += [f"Content-Length: {len(body)}"] if body else []
    return "\r\n".join([*lines, "Connection: close"]).encode("utf-8", "surrogateescape") + END + body


def send(port: int, data: bytes, timeout: float = 15) -> Answer:
    """What comes back for these bytes until the service closes, or has said all it announced."""
    with socket.create_connection(("127.0.0.1", port), timeout) as connection:
        with suppress(ConnectionError):  # it may refuse before it has read all
            connection.sendall(data)
        return receive(connection)


def receive(connection: socket.socket) -> Answer:
    got = b""
    with suppress(ConnectionError):
        while not _is_whole(got) and (chunk := connection.recv(1 << 16)):
            got += chunk
            if got.startswith(b"HTTP/1.1 100 ") and END in got:
                got = got.partition(END)[2]
    head, _, body = got.partition(END)
    if not head.startswith(b"HTTP/1."):
        return Answer(0, {}, got)
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Answer(int(first.split()[1]), headers, body)


def _is_whole(got: bytes) -> bool:
    head, end, body = got.partition(END)
    for line in head.lower().split(b"\r\n"):
        if end and line.startswith(b"content-length:"):
            return len(body) >= int(line.partition(b":")[2])
    return False
