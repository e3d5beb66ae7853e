"""Files on this machine that only their owner can read, whatever the umask."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from sidecar.errors import UsageError

PRIVATE = 0o600


def open_private(path: str, flags: int) -> int:
    """An ``opener`` for ``open``: a file that it creates is readable by its owner only."""
    return os.open(path, flags, PRIVATE)


@contextmanager
def write_whole(target: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces ``target`` only once all of it is written. Raise ``UsageError`` if it cannot be
    written."""
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with open(partial, "xb", opener=open_private) as file:
            yield file
        os.replace(partial, target)
    except OSError as problem:
        raise UsageError(f"{target} cannot be written: {problem.strerror}.") from None
    finally:
        partial.unlink(missing_ok=True)


def write_new(target: Path, text: str) -> None:
    """Write a new file. Raise ``UsageError`` if it exists, or cannot be written; nothing is left then."""
    try:
        with open(target, "x", encoding="utf-8", opener=open_private) as file:
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                target.unlink()
                raise
    except FileExistsError:
        raise UsageError(f"{target} is there already, and is left as it is.", hint="Name another file.") from None
    except OSError as problem:
        raise UsageError(f"{target} cannot be written: {problem.strerror}.") from None


def restrict_to_owner(descriptor: int) -> bool | None:
    """Make an open file readable by its owner only. Return ``True`` if that was done, ``None`` if it was not needed or
    it is not a regular file, ``False`` if it failed."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or not status.st_mode & 0o077:
        return None
    try:
        os.fchmod(descriptor, PRIVATE)
    except OSError:
        return False
    return True
