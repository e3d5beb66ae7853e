"""Files: to the wire, from the wire, and what is said about them, whatever protocol frames it."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from emulators.sandboxes import Sandbox, User
from emulators.server import Exchange
from emulators.wire import CHUNK, Reset


def content(descriptor: int, length: int | None = None) -> Iterator[bytes]:
    """An open file from where it stands: ``length`` bytes of it, or all; less when it is shorter by then."""
    left = length
    while left is None or left > 0:
        chunk = os.read(descriptor, CHUNK if left is None else min(CHUNK, left))
        if not chunk:
            return
        left = None if left is None else left - len(chunk)
        yield chunk


def send_announced(
    exchange: Exchange, pieces: Iterator[bytes], *, status: int, headers: Mapping[str, str], length: int
) -> None:
    """Answer with content whose length is said beforehand. When less comes, the connection breaks."""
    if exchange.truncated:
        # A clean end needs the announced length to be the short one.
        body = b"".join(pieces)
        exchange.start(status, headers, len(body))
        exchange.connection.send(body)
        return
    exchange.start(status, headers, length)
    sent = 0
    for piece in pieces:
        exchange.connection.send(piece)
        sent += len(piece)
    if sent < length:
        raise Reset


def store(exchange: Exchange, sandbox: Sandbox, path: Path, pieces: Iterator[bytes], user: User | None = None) -> int:
    """Write an upload over what is there, as both daemons do: one that breaks off leaves a part of the file.

    What is made is the user's. Return how many bytes were written.
    """
    if any(path.is_relative_to(folder) for folder in sandbox.read_only):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    sandbox.uploaded.append(path)
    new = [] if path.parent.is_dir() else [path.parent]
    path.parent.mkdir(parents=True, exist_ok=True)
    new += [] if path.exists() else [path]
    written = 0
    with path.open("wb", buffering=0) as file:
        for made in new:
            (user or sandbox.users[sandbox.USER]).own(made)
        for piece in exchange.shaped(pieces):
            written += file.write(piece)
    return written


def wanted_range(header: str, size: int) -> tuple[int, int]:
    """Where in a file of that size to begin and how much to send, by a ``Range`` header; all of it, by any other."""
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", header)
    if found is None or int(found[1]) >= size:
        return 0, size
    end = min(int(found[2]), size - 1) if found[2] else size - 1
    return int(found[1]), max(0, end - int(found[1]) + 1)


def walk(folder: Path, depth: int) -> Iterator[Path]:
    """What is in a folder, down to ``depth`` levels, links not followed."""
    for path in sorted(folder.iterdir()):
        yield path
        if depth > 1 and path.is_dir() and not path.is_symlink():
            yield from walk(path, depth - 1)


def owner_of(info: os.stat_result) -> str:
    try:
        return pwd.getpwuid(info.st_uid).pw_name
    except KeyError:
        return str(info.st_uid)


def group_of(info: os.stat_result) -> str:
    try:
        return grp.getgrgid(info.st_gid).gr_name
    except KeyError:
        return str(info.st_gid)


def text(name: str) -> str:
    """A file's name as JSON can say it: what is not UTF-8 in it is replaced."""
    return os.fsencode(name).decode("utf-8", "replace")
