"""The token that a service on loopback creates for its user, in a file that only this user can read.

``serve`` creates it at its first start; clients on the same machine read it. There is one per user, and it does not
change.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from pathlib import Path

from sidecar.errors import BadConfig

SHORTEST = 16
LONGEST = 4096
OTHERS = 0o077
OTHERS_MAY_WRITE = 0o022
WITHOUT = 'Or give a token in MEMORY_SIDECAR_TOKEN or [service] token_file, or go without: [service] token = "off".'


class TokenNotKept(BadConfig):
    """There is no place to keep a token in."""


def find_token_path() -> Path:
    """Return the path of the token file. Raise ``TokenNotKept`` if this user has no home."""
    state = os.environ.get("XDG_STATE_HOME", "")
    # A relative path is to be ignored: https://specifications.freedesktop.org/basedir-spec/latest/
    if not os.path.isabs(state):
        try:
            state = str(Path.home() / ".local" / "state")
        except RuntimeError:
            raise _build_not_kept_error("There is no home folder to keep the service's token in.") from None
    return Path(state) / "memory-sidecar" / "token"


def read_token() -> str:
    """Return the token, or "" if there is none. Raise ``BadConfig`` if the file is readable by other users or not owned
    by this one."""
    try:
        path = find_token_path()
    except TokenNotKept:
        return ""
    return _read_token_file(path)


def ensure_token() -> str:
    """Return the token; create it if there is none. Services that start at the same time get the same one.

    Raise ``BadConfig`` like ``read_token``, and ``TokenNotKept`` if it cannot be written.
    """
    path = find_token_path()
    if token := _read_token_file(path):
        return token
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _check_folder(path.parent)
        # Written under a temporary name and then linked: the token file is always complete, and the link fails if
        # another service was first, whose token is then read.
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".token-") as draft:
            draft.write(f"{secrets.token_hex(32)}\n".encode())
            draft.flush()
            os.fsync(draft.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(draft.name, path)
    except OSError as problem:
        raise _build_not_kept_error(f"The service's token cannot be kept in {path}: {problem.strerror}.") from None
    if not (token := _read_token_file(path)):
        raise _build_not_kept_error(f"The service's token, kept in {path}, was removed at once.")
    return token


def check_token_folder() -> None:
    """Check that ``ensure_token`` would succeed, without creating anything. Raise the same errors."""
    path = find_token_path()
    if _read_token_file(path):
        return
    if path.parent.is_dir():
        _check_folder(path.parent)
    nearest = next(folder for folder in path.parents if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise _build_not_kept_error(f"The service's token cannot be kept in {path}: {nearest} cannot be written.")


def _read_token_file(path: Path) -> str:
    """Return the token in a file, or "" if there is none. Raise ``BadConfig`` if the file is not private or not a
    token."""
    try:
        # Do not follow a link to another file, and do not block on a pipe.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as problem:
        raise BadConfig(f"The token file {path} cannot be read: {problem.strerror}.", hint=WITHOUT) from None
    with open(file, "rb") as opened:
        seen = os.fstat(file)
        if not stat.S_ISREG(seen.st_mode):
            raise _build_unsafe_error(path, "is not an ordinary file")
        if seen.st_uid != os.geteuid():
            raise _build_unsafe_error(path, "belongs to another user")
        if seen.st_mode & OTHERS:
            raise _build_unsafe_error(path, f"can be read or changed by others (mode {stat.S_IMODE(seen.st_mode):04o})")
        token = opened.read(LONGEST).decode("ascii", "replace").strip()
    if len(token) < SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        raise _build_unsafe_error(path, "does not hold a token")
    return token


def _check_folder(folder: Path) -> None:
    seen = folder.stat()
    if seen.st_uid != os.geteuid():
        raise BadConfig(f"The folder {folder} belongs to another user; no token is kept there.", hint=WITHOUT)
    if seen.st_mode & OTHERS_MAY_WRITE:
        hint = f"chmod 700 {folder}. {WITHOUT}"
        raise BadConfig(f"Others may write to the folder {folder}; no token is kept there.", hint=hint)


def _build_unsafe_error(path: Path, why: str) -> BadConfig:
    hint = f"Remove it: the next start of the service makes a new one. {WITHOUT}"
    return BadConfig(f"The token file {path} {why}; it is not used.", hint=hint)


def _build_not_kept_error(message: str) -> TokenNotKept:
    hint = f"Set XDG_STATE_HOME to a folder that can be written. {WITHOUT}"
    return TokenNotKept(message, hint=hint, at=("service", "token"))
