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
    """An ``opener`` for ``open``: a file it makes is for its owner alone."""
    return os.open(path, flags, PRIVATE)


@contextmanager
def write_whole(target: Path) -> Iterator[BinaryIO]:
    """A file that takes its place only once all of it is written. Raise ``UsageError`` when it cannot be."""
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
    """Write a file that is not there yet. Raise ``UsageError`` when it is, or cannot be written: then there is none."""
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
    """Make an open file readable for its owner alone. ``None``: it is so already, or no file; ``False``: it cannot be."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or not status.st_mode & 0o077:
        return None
    try:
        os.fchmod(descriptor, PRIVATE)
    except OSError:
        return False
    return True
