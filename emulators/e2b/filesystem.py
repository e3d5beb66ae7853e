"""The daemon's ``filesystem.Filesystem`` service: stat, list, make, move, remove."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from emulators.e2b.connect import caller, refusal
from emulators.e2b.files import resolved
from emulators.sandboxes import User
from emulators.server import Exchange
from emulators.transfers import group_of, owner_of, text, walk
from emulators.values import moment

if TYPE_CHECKING:
    from emulators.e2b.control import E2BSandbox

Asked = dict[str, object]


def answer(exchange: Exchange, sandbox: E2BSandbox, method: str) -> None:
    """Answer one call of the service."""
    asked, user = exchange.request.json(), caller(exchange.request, sandbox)
    try:
        exchange.json(200, METHODS[method](user, asked))
    except FileNotFoundError as error:
        raise refusal("not_found", f"path not found: {error.filename}") from None
    except PermissionError as error:
        raise refusal("permission_denied", str(error)) from None
    except OSError as error:
        raise refusal("internal", str(error)) from None


def _stat(user: User, asked: Asked) -> Asked:
    return {"entry": _entry(_path(user, asked))}


def _list(user: User, asked: Asked) -> Asked:
    folder = _path(user, asked)
    folder.stat()
    if not folder.is_dir():
        raise refusal("invalid_argument", f"path is not a directory: {folder}")
    depth = asked.get("depth")
    return {"entries": [_entry(path) for path in walk(folder, int(depth) if isinstance(depth, int) and depth else 1)]}


def _make(user: User, asked: Asked) -> Asked:
    folder = _path(user, asked)
    if folder.is_dir():
        raise refusal("already_exists", f"directory already exists: {folder}")
    if folder.exists():
        raise refusal("invalid_argument", f"path already exists but it is not a directory: {folder}")
    folder.mkdir(parents=True)
    return {"entry": _entry(folder)}


def _move(user: User, asked: Asked) -> Asked:
    source, target = _path(user, asked, "source"), _path(user, asked, "destination")
    source.lstat()
    target.parent.mkdir(parents=True, exist_ok=True)
    source.rename(target)
    return {"entry": _entry(target)}


def _remove(user: User, asked: Asked) -> Asked:
    path = _path(user, asked)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.is_symlink() or path.exists():
        _check_sticky(user, path)
        path.unlink()
    return {}


def _check_sticky(user: User, path: Path) -> None:
    """Where everybody may write, only its owner removes a file. The daemon becomes the user of the call for it."""
    folder = path.parent.stat()
    others = user.uid not in (None, 0, path.lstat().st_uid, folder.st_uid)
    if others and folder.st_mode & stat.S_ISVTX:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))


METHODS: dict[str, Callable[[User, Asked], Asked]] = {
    "Stat": _stat,
    "ListDir": _list,
    "MakeDir": _make,
    "Move": _move,
    "Remove": _remove,
}


def _path(user: User, asked: Asked, key: str = "path") -> Path:
    return resolved(user, str(asked.get(key, "")))


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
