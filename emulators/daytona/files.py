"""The toolbox's files: bulk transfers in multipart bodies, and the usual errands."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from emulators.daytona.errors import DAEMON, refusal
from emulators.multipart import parts
from emulators.server import Exchange, Refused
from emulators.transfers import content, group_of, owner_of, send_announced, store, text, walk
from emulators.values import moment

if TYPE_CHECKING:
    from emulators.daytona.control import DaytonaSandbox

BOUNDARY = "DAYTONA-FILE-BOUNDARY"


def resolved(sandbox: DaytonaSandbox, path: str) -> Path:
    """A path as the daemon reads it: one that is not absolute starts in the working folder; ``~`` is a name."""
    return Path(os.path.normpath(sandbox.work / path))


def bulk_upload(exchange: Exchange, sandbox: DaytonaSandbox) -> None:
    """Write each ``files[n].file`` to the ``files[n].path`` that came before it."""
    request = exchange.request
    paths: dict[str, str] = {}
    errors = []
    try:
        for part in parts(request.header("Content-Type"), request.chunks()):
            index, _, kind = part.name.partition(".")
            if kind == "path":
                paths[index] = b"".join(part.content).decode("utf-8", "surrogateescape")
            elif kind == "file" and index in paths:
                try:
                    store(exchange, resolved(sandbox, paths[index]), part.content)
                except OSError as error:
                    errors.append(f"{text(paths[index])}: {error.strerror}")
            elif kind == "file":
                errors.append(f"missing {index}.path metadata before file part")
    except ValueError as error:
        raise refusal(400, str(error), code="BAD_REQUEST", source=DAEMON) from None
    if errors:
        raise Refused(400, {"errors": errors})
    exchange.json(200, {})


def bulk_download(exchange: Exchange, sandbox: DaytonaSandbox) -> None:
    """Send each file as a part of a multipart answer, and an ``error`` part for each that cannot be read."""
    asked = exchange.request.json().get("paths")
    if not isinstance(asked, list) or not asked:
        raise refusal(400, "request body must be {paths: [...]} and non-empty", code="BAD_REQUEST", source=DAEMON)
    exchange.start(200, {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"})
    between = ""
    for path in map(str, asked):
        exchange.connection.send(f"{between}--{BOUNDARY}\r\n".encode())
        between = "\r\n"
        for piece in _part(exchange, sandbox, path):
            exchange.connection.send(piece)
    exchange.connection.send(f"{between}--{BOUNDARY}--\r\n".encode())
    exchange.connection.finish()


def _part(exchange: Exchange, sandbox: DaytonaSandbox, path: str) -> Iterator[bytes]:
    target = resolved(sandbox, path)
    try:
        with target.open("rb") as file:
            yield _part_head("file", path, "application/octet-stream")
            yield from exchange.shaped(content(file.fileno()), os.fstat(file.fileno()).st_size, target)
    except OSError as error:
        yield _part_head("error", path, "application/json")
        yield json.dumps(_unreadable(target, error).body).encode()


def _part_head(name: str, path: str, kind: str) -> bytes:
    # Both ways, as the clients differ in which they read; only the second holds every name.
    plain = re.sub(r"[^ -~]", "_", path).replace("\\", "\\\\").replace('"', '\\"')
    filename = f"filename=\"{plain}\"; filename*=utf-8''{quote(path, safe='', errors='surrogateescape')}"
    return f'Content-Disposition: form-data; name="{name}"; {filename}\r\nContent-Type: {kind}\r\n\r\n'.encode()


def download(exchange: Exchange, sandbox: DaytonaSandbox) -> None:
    """Send one file as it is."""
    path = _path(exchange, sandbox)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            pieces = exchange.shaped(content(file.fileno(), size), size, path)
            headers = {"Content-Type": "application/octet-stream"}
            send_announced(exchange, pieces, status=200, headers=headers, length=size)
    except OSError as error:
        raise _unreadable(path, error) from None


def list_folder(exchange: Exchange, sandbox: DaytonaSandbox) -> None:
    folder = _path(exchange, sandbox)
    depth = exchange.request.query.get("depth", "")
    try:
        found = [_entry(path) for path in walk(folder, int(depth) if depth.isdigit() else 1)]
    except OSError as error:
        raise _unreadable(folder, error) from None
    exchange.json(200, found)


def info(exchange: Exchange, sandbox: DaytonaSandbox) -> None:
    path = _path(exchange, sandbox)
    try:
        exchange.json(200, _entry(path))
    except OSError as error:
        raise _unreadable(path, error) from None


def delete(exchange: Exchange, sandbox: DaytonaSandbox) -> None:
    path = _path(exchange, sandbox)
    try:
        if not path.is_dir() or path.is_symlink():
            path.unlink()
        elif exchange.request.query.get("recursive", "").lower() == "true":
            shutil.rmtree(path)
        else:
            said = "cannot delete directory without recursive flag"
            raise refusal(400, said, code="BAD_REQUEST", source=DAEMON)
    except OSError as error:
        raise _unreadable(path, error) from None
    exchange.empty(204)


def make_folder(exchange: Exchange, sandbox: DaytonaSandbox) -> None:
    path = _path(exchange, sandbox)
    try:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(int(exchange.request.query.get("mode") or "755", 8))
    except ValueError:
        raise refusal(400, "invalid mode format", code="BAD_REQUEST", source=DAEMON) from None
    except OSError as error:
        raise _unreadable(path, error) from None
    exchange.empty(201)


def move(exchange: Exchange, sandbox: DaytonaSandbox) -> None:
    source, target = _path(exchange, sandbox, "source"), _path(exchange, sandbox, "destination")
    try:
        source.lstat()
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
    except OSError as error:
        raise _unreadable(source, error) from None
    exchange.empty(200)


def _path(exchange: Exchange, sandbox: DaytonaSandbox, key: str = "path") -> Path:
    return resolved(sandbox, exchange.request.query.get(key, ""))


def _entry(path: Path) -> dict[str, object]:
    info = path.stat() if path.exists() else path.lstat()
    modified = datetime.fromtimestamp(info.st_mtime, UTC)
    return {
        "name": text(path.name),
        "path": text(str(path)),
        "isDir": stat.S_ISDIR(info.st_mode),
        "size": info.st_size,
        "mode": stat.filemode(info.st_mode),
        "permissions": f"{stat.S_IMODE(info.st_mode):04o}",
        "modTime": modified.strftime("%Y-%m-%d %H:%M:%S.%f +0000 UTC"),
        "modifiedAt": moment(info.st_mtime),
        "owner": owner_of(info),
        "group": group_of(info),
    }


def _unreadable(path: Path, error: OSError) -> Refused:
    shown = text(str(path))
    if isinstance(error, FileNotFoundError):
        return refusal(404, f"file not found: {shown}", code="FILE_NOT_FOUND", source=DAEMON)
    if isinstance(error, PermissionError):
        return refusal(403, f"permission denied: {shown}", code="FILE_ACCESS_DENIED", source=DAEMON)
    if isinstance(error, IsADirectoryError):
        return refusal(400, f"path must be a file: {shown}", code="INVALID_FILE_PATH", source=DAEMON)
    return refusal(500, f"{error.strerror}: {shown}", code="FILE_READ_FAILED", source=DAEMON)
