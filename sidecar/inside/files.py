"""The program's own small files in a sandbox: for its user alone, and never believed to be what they should be.

The agent of the sandbox can write all of them: put a link, a pipe or a terabyte in the place of any.
"""

from __future__ import annotations

import os
import stat
from typing import BinaryIO

PRIVATE = 0o600
MOST_BYTES = 1 << 20


def read(path: str, most: int = MOST_BYTES) -> bytes:
    """A file's bytes. Raise OSError when it cannot be read, ValueError when it is no plain file or has more than ``most``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            raise ValueError("%s is not what was written there" % path)
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError("%s grows while it is read" % path)
    return data


def write(path: str, data: bytes) -> None:
    """Put a file in its place, whole or not at all."""
    new = path + ".new"
    with create(new) as file:
        file.write(data)
    if os.path.isdir(path) and not os.path.islink(path):
        remove(path)
    os.replace(new, path)


def create(path: str) -> BinaryIO:
    """Open a new file; whatever was there is gone. It belongs to whom its folder does: root works in others' homes, too."""
    remove(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, PRIVATE)
    give(descriptor, os.path.dirname(path))
    return open(descriptor, "wb")


def remove(path: str) -> None:
    """Have nothing at a path, whatever was there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):  # what unlinking a folder is called differs
        import shutil

        shutil.rmtree(path)


def private(path: str, flags: int) -> int:
    """An ``opener`` for ``open``: a file it makes is for its user alone."""
    return os.open(path, flags, PRIVATE)


def give(descriptor: int, folder: str) -> None:
    """Have a file of ours belong to whom a folder does."""
    status = os.stat(folder)
    if os.geteuid() == 0 and status.st_uid != 0:
        os.fchown(descriptor, status.st_uid, status.st_gid)
