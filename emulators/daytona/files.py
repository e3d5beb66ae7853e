"""The toolbox's files: bulk transfers in multipart bodies, and the usual errands."""

from __future__ import annotations

import json
import mimetypes
import os
import re
import shutil
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from emulators.daytona.errors import complaint, speechless
from emulators.multipart import parts
from emulators.server import Exchange, Refused
from emulators.transfers import content, group_of, owner_of, send_announced, store, text, walk, wanted_range
from emulators.values import moment
from emulators.wire import Gone

if TYPE_CHECKING:
    from emulators.daytona.control import DaytonaSandbox

BOUNDARY = "DAYTONA-FILE-BOUNDARY"


def resolved(sandbox: DaytonaSandbox, path: str) -> Path:
    """A path as the daemon reads it: one that is not absolute starts in the working folder; ``~`` is a name."""
    return Path(os.path.normpath(sandbox.work / path))


def bulk_upload(exchange: Exchange, sandbox: DaytonaSandbox) -> None:
    """Write each ``files[n].file`` to the ``files[n].path`` that came before it."""
    request, user = exchange.request, sandbox.users[sandbox.USER]
    paths: dict[str, str] = {}
    written: list[dict[str, object]] = []
    errors = []
    try:
        for part in parts(request.header("Content-Type"), request.chunks()):
            index, _, kind = part.name.partition(".")
            if kind == "path":
                paths[index] = b"".join(part.content).decode("utf-8", "surrogateescape")
            elif kind == "file" and index in paths:
                target = resolved(sandbox, paths[index])
                try:
                    size = store(exchange, sandbox, target, part.content, user)
                    written.append({"path": text(paths[index]), "bytes": size})
                except OSError as error:
                    errors.append(f"{text(paths[index])}: open {text(str(target))}: {(error.strerror or '').lower()}")
            elif kind == "file":
                errors.append(f"missing {index}.path metadata before file part")
    except (ValueError, Gone) as error:
        # Also when it ends before its last boundary, while the connection stays.
        errors.append(str(error) or "unexpected EOF")
    if errors:
        raise Refused(400, {"errors": errors})
    exchange.json(200, {"files": written})


def upload(exchange: Exchange, sandbox: DaytonaSandbox) -> None:
    """Write the ``file`` of a form to the path that the query names."""
    path, request = _path(exchange, sandbox), exchange.request
    try:
        for part in parts(request.header("Content-Type"), request.chunks()):
            if part.name == "file":
                store(exchange, sandbox, path, part.content, sandbox.users[sandbox.USER])
                exchange.empty(200)
                return
    except (ValueError, OSError):
        pass
    raise speechless(400)


def bulk_download(exchange: Exchange, sandbox: DaytonaSandbox) -> None:
    """Send each file as a part of a multipart answer, and an ``error`` part for each that cannot be read."""
    asked = exchange.request.json().get("paths")
    if not isinstance(asked, list) or not asked:
        raise Refused(400, {"error": "request body must be {paths: [...]} and non-empty"})
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
            size = os.fstat(file.fileno()).st_size
            yield _part_head("file", path, mimetypes.guess_type(path)[0] or "application/octet-stream", size)
            yield from exchange.shaped(content(file.fileno()), size, target)
    except OSError as error:
        body = json.dumps(_unreadable(target, error).body).encode()
        yield _part_head("error", path, "application/json", len(body))
        yield body


def _part_head(name: str, path: str, kind: str, size: int) -> bytes:
    # Both ways, as the clients differ in which they read; only the second holds every name.
    plain = re.sub(r"[^ -~]", "_", path).replace("\\", "\\\\").replace('"', '\\"')
    filename = f"filename=\"{plain}\"; filename*=utf-8''{quote(path, safe='', errors='surrogateescape')}"
    lines = [
        f'Content-Disposition: form-data; name="{name}"; {filename}',
        f"Content-Length: {size}",
        f"Content-Type: {kind}",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def download(exchange: Exchange, sandbox: DaytonaSandbox) -> None:
    """Send one file as it is, or a part of it."""
    path = _path(exchange, sandbox)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start, length = wanted_range(exchange.request.header("Range"), size)
            file.seek(start)
            pieces = exchange.shaped(content(file.fileno(), length), length, path)
            headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
            if partial := length != size:
                headers["Content-Range"] = f"bytes {start}-{start + length - 1}/{size}"
            send_announced(exchange, pieces, status=206 if partial else 200, headers=headers, length=length)
    except OSError as error:
        raise _wordless(path, error) from None


def list_folder(exchange: Exchange, sandbox: DaytonaSandbox) -> None:
    folder = _path(exchange, sandbox)
    depth = exchange.request.query.get("depth", "")
    try:
        found = [_entry(path) for path in walk(folder, int(depth) if depth.isdigit() else 1)]
    except OSError as error:
        raise _wordless(folder, error) from None
    exchange.json(200, found)


def info(exchange: Exchange, sandbox: DaytonaSandbox) -> None:
    path = _path(exchange, sandbox)
    try:
        exchange.json(200, _entry(path))
    except OSError as error:
        raise _wordless(path, error) from None


def delete(exchange: Exchange, sandbox: DaytonaSandbox) -> None:
    path = _path(exchange, sandbox)
    try:
        if not path.is_dir() or path.is_symlink():
            path.unlink()
        elif exchange.request.query.get("recursive", "").lower() == "true":
            shutil.rmtree(path)
        else:
            raise speechless(400)
    except OSError as error:
        raise _wordless(path, error) from None
    exchange.empty(204)


def make_folder(exchange: Exchange, sandbox: DaytonaSandbox) -> None:
    path = _path(exchange, sandbox)
    try:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(int(exchange.request.query.get("mode") or "755", 8))
    except ValueError:
        raise speechless(400) from None
    except OSError as error:
        raise _wordless(path, error) from None
    exchange.empty(201)


def move(exchange: Exchange, sandbox: DaytonaSandbox) -> None:
    source, target = _path(exchange, sandbox, "source"), _path(exchange, sandbox, "destination")
    try:
        source.lstat()
        target.parent.lstat()
        if target.is_file() and not source.samefile(target):
            raise complaint(409, f"destination already exists: {text(str(target))}", code="CONFLICT")
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
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return complaint(404, f"file not found: {shown}", code="FILE_NOT_FOUND")
    if isinstance(error, PermissionError):
        return complaint(403, f"permission denied: {shown}", code="FILE_ACCESS_DENIED")
    if isinstance(error, IsADirectoryError):
        return complaint(400, f"path must be a file: {shown}", code="INVALID_FILE_PATH")
    return complaint(500, f"{error.strerror}: {shown}", code="FILE_READ_FAILED")


def _wordless(path: Path, error: OSError) -> Refused:
    """The same as the calls for one file answer it: without a word where the caller is to blame."""
    refused = _unreadable(path, error)
    return speechless(refused.status) if refused.status in (400, 404) else refused
