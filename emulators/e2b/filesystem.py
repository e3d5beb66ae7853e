"""The daemon's ``filesystem.Filesystem`` service: stat, list, make, move, remove."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from emulators.e2b.connect import refusal
from emulators.e2b.files import resolved
from emulators.server import Exchange
from emulators.transfers import group_of, owner_of, text, walk
from emulators.values import moment

if TYPE_CHECKING:
    from emulators.e2b.control import E2BSandbox

Asked = dict[str, object]


def answer(exchange: Exchange, sandbox: E2BSandbox, method: str) -> None:
    """Answer one call of the service."""
    asked = exchange.request.json()
    try:
        exchange.json(200, METHODS[method](sandbox, asked))
    except FileNotFoundError as error:
        raise refusal("not_found", f"path not found: {error.filename}") from None
    except PermissionError as error:
        raise refusal("permission_denied", str(error)) from None
    except OSError as error:
        raise refusal("internal", str(error)) from None


def _stat(sandbox: E2BSandbox, asked: Asked) -> Asked:
    return {"entry": _entry(_path(sandbox, asked))}


def _list(sandbox: E2BSandbox, asked: Asked) -> Asked:
    folder = _path(sandbox, asked)
    folder.stat()
    if not folder.is_dir():
        raise refusal("invalid_argument", f"path is not a directory: {folder}")
    depth = asked.get("depth")
    return {"entries": [_entry(path) for path in walk(folder, int(depth) if isinstance(depth, int) and depth else 1)]}


def _make(sandbox: E2BSandbox, asked: Asked) -> Asked:
    folder = _path(sandbox, asked)
    if folder.is_dir():
        raise refusal("already_exists", f"directory already exists: {folder}")
    if folder.exists():
        raise refusal("invalid_argument", f"path already exists but it is not a directory: {folder}")
    folder.mkdir(parents=True)
    return {"entry": _entry(folder)}


def _move(sandbox: E2BSandbox, asked: Asked) -> Asked:
    source, target = _path(sandbox, asked, "source"), _path(sandbox, asked, "destination")
    source.lstat()
    target.parent.mkdir(parents=True, exist_ok=True)
    source.rename(target)
    return {"entry": _entry(target)}


def _remove(sandbox: E2BSandbox, asked: Asked) -> Asked:
    path = _path(sandbox, asked)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return {}


METHODS: dict[str, Callable[[E2BSandbox, Asked], Asked]] = {
    "Stat": _stat,
    "ListDir": _list,
    "MakeDir": _make,
    "Move": _move,
    "Remove": _remove,
}


def _path(sandbox: E2BSandbox, asked: Asked, key: str = "path") -> Path:
    return resolved(sandbox, str(asked.get(key, "")))


def _entry(path: Path) -> Asked:
    info = path.lstat()
    link = stat.S_ISLNK(info.st_mode)
    kind = "FILE_TYPE_DIRECTORY" if path.is_dir() else "FILE_TYPE_FILE"
    entry: Asked = {
        "name": text(path.name),
        "type": kind,
        "path": text(str(path)),
        "size": str(info.st_size),
        "mode": stat.S_IMODE(info.st_mode),
        "permissions": stat.filemode(info.st_mode),
        "owner": owner_of(info),
        "group": group_of(info),
        "modifiedTime": moment(info.st_mtime),
        "isSymlink": link,
    }
    if link:
        entry["symlinkTarget"] = text(os.readlink(path))
    return entry
