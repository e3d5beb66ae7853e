"""The daemon's file transfers: ``GET`` and ``POST /files``."""

from __future__ import annotations

import errno
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from emulators.multipart import parts
from emulators.sandboxes import User
from emulators.server import Exchange, Refused
from emulators.transfers import content, send_announced, store, wanted_range
from emulators.wire import Gone

if TYPE_CHECKING:
    from emulators.e2b.control import E2BSandbox

GZIP = 16 + zlib.MAX_WBITS


def resolved(user: User, path: str) -> Path:
    """A path as the daemon reads it: ``~`` is the user's home, and what is not absolute starts there."""
    if path == "~" or path.startswith("~/"):
        path = path[2:]
    return Path(os.path.normpath(user.home / path))


def _caller(exchange: Exchange, sandbox: E2BSandbox) -> User:
    name = exchange.request.query.get("username", "")
    user = sandbox.user_named(name)
    if user is None:
        raise _refusal(401, f"error looking up user '{name}': user: unknown user {name}")
    return user


def download(exchange: Exchange, sandbox: E2BSandbox, *, compress: bool) -> None:
    """Send a file: compressed on the fly and of no announced length where the client accepts it, else as it is."""
    path = resolved(_caller(exchange, sandbox), exchange.request.query.get("path", ""))
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise _refusal(404, f"path '{path}' does not exist") from None
    except IsADirectoryError:
        raise _refusal(400, f"path '{path}' is a directory") from None
    except OSError as error:
        raise _refusal(500, f"error opening file '{path}': {error.strerror}") from None
    with file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise _refusal(400, f"path '{path}' is not a regular file")
        start, length = wanted_range(exchange.request.header("Range"), info.st_size)
        partial = (start, length) != (0, info.st_size)
        file.seek(start)
        headers = {"Content-Type": "application/octet-stream", "Vary": "Accept-Encoding"}
        if partial:
            headers["Content-Range"] = f"bytes {start}-{start + length - 1}/{info.st_size}"
        pieces = exchange.shaped(content(file.fileno(), length), length, path)
        if compress and not partial and "gzip" in exchange.request.header("Accept-Encoding").lower():
            exchange.start(200, {**headers, "Content-Encoding": "gzip"})
            for piece in _compressed(pieces):
                exchange.connection.send(piece)
        else:
            send_announced(exchange, pieces, status=206 if partial else 200, headers=headers, length=length)
        exchange.connection.finish()


def _compressed(pieces: Iterator[bytes]) -> Iterator[bytes]:
    # Stored, not squeezed: on one machine with its client, the work would be charged to the client's clock.
    squeeze = zlib.compressobj(0, zlib.DEFLATED, GZIP)
    for piece in pieces:
        yield squeeze.compress(piece) + squeeze.flush(zlib.Z_SYNC_FLUSH)
    yield squeeze.flush()


def upload(exchange: Exchange, sandbox: E2BSandbox) -> None:
    """Write one file from an octet-stream, or several from a multipart body."""
    request = exchange.request
    path, user = request.query.get("path"), _caller(exchange, sandbox)
    written = []
    if request.header("Content-Type").startswith("multipart/"):
        try:
            for part in parts(request.header("Content-Type"), request.chunks()):
                if part.name == "file":
                    target = resolved(user, path if path is not None else part.filename or "")
                    written.append(_write(exchange, sandbox, user, target, part.content))
        except ValueError as error:
            raise _refusal(400, f"error parsing multipart form: {error}") from None
    elif path is None:
        raise _refusal(400, "path is required for octet-stream uploads")
    else:
        body = request.chunks()
        if request.header("Content-Encoding") == "gzip":
            body = _decompressed(body)
        written.append(_write(exchange, sandbox, user, resolved(user, path), body))
    exchange.json(200, written)


def _write(
    exchange: Exchange, sandbox: E2BSandbox, user: User, path: Path, pieces: Iterator[bytes]
) -> dict[str, object]:
    try:
        store(exchange, sandbox, path, pieces, user)
    except IsADirectoryError:
        raise _refusal(400, f"path '{path}' is a directory") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _refusal(507, "not enough disk space available") from None
        reason = (error.strerror or "").lower()
        raise _refusal(500, f"error opening file '{path}': open {path}: {reason}") from None
    return {"path": str(path), "name": path.name, "type": "file"}


def _decompressed(body: Iterator[bytes]) -> Iterator[bytes]:
    expand = zlib.decompressobj(GZIP)
    for piece in body:
        try:
            yield expand.decompress(piece)
        except zlib.error:
            raise _refusal(400, "error decompressing the body") from None
    if not expand.eof:
        raise Gone


def _refusal(status: int, message: str) -> Refused:
    return Refused(status, {"code": status, "message": message})
