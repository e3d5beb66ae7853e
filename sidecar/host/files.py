"""Files of the sidecar on its own disk. Only their owner can read them, whatever the umask.

A spool is the scratch folder of one operation: everything that is received is written and checked there first.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import BinaryIO

from sidecar.errors import SidecarError, UsageError
from sidecar.host.values import dataclass

PRIVATE = 0o600
CHUNK = 1 << 20
SPOOL_PREFIX = "memory-sidecar-spool-"


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


class SpoolFull(SidecarError):
    """The temporary folder of the sidecar is full."""

    code = "spool-full"
    default_hint = "Free space in the temporary folder, or point TMPDIR to a larger disk; nothing was changed."


def build_full_error(problem: OSError) -> SpoolFull | None:
    """Return the error to raise if a file could not be written because the temporary folder is full; ``None`` for other
    errors."""
    if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    return SpoolFull(f"No space left in {tempfile.gettempdir()}.")


@dataclass(frozen=True, slots=True)
class SpooledFile:
    """A file in a spool, with its size and hash."""

    path: Path
    size: int
    sha256: str


class Spool:
    """The scratch folder of one operation, removed when it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names = itertools.count(1)

    def new(self) -> Path:
        """Return a path in the folder that is not used yet."""
        return self.folder / str(next(self._names))

    async def take(self, chunks: AsyncIterator[bytes], *, most: int | None = None) -> SpooledFile:
        """Write a stream to a file and hash it. Reading stops beyond ``most`` bytes; the caller notices that by the
        size."""
        path, digest, size = self.new(), hashlib.sha256(), 0
        try:
            with _open_new(path) as file:
                async for chunk in chunks:
                    size += len(chunk)
                    await asyncio.to_thread(_append_chunk, file, digest, chunk)
                    if most is not None and size > most:
                        break
        except OSError as problem:
            if full := build_full_error(problem):
                raise full from None
            raise
        return SpooledFile(path, size, digest.hexdigest())


def _open_new(path: Path) -> BinaryIO:
    return open(path, "wb", opener=open_private)


def _append_chunk(file: BinaryIO, digest: hashlib._Hash, chunk: bytes) -> None:
    digest.update(chunk)
    file.write(chunk)


@asynccontextmanager
async def open_spool() -> AsyncIterator[Spool]:
    """Yield a spool for one operation. Folders that killed processes left behind are removed first."""
    folder, lock = await asyncio.to_thread(_make_folder)
    try:
        yield Spool(folder)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        os.close(lock)


def _make_folder() -> tuple[Path, int]:
    """Create a folder, and lock it to show that it is in use. Folders without a lock are left-overs and are removed."""
    for left in Path(tempfile.gettempdir()).glob(f"{SPOOL_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=SPOOL_PREFIX))
        with contextlib.suppress(FileNotFoundError):  # another process removed it as a left-over before it was locked
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


async def read_chunks(path: Path, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
    """Yield a file, or a part of it, in chunks."""
    with path.open("rb") as file:
        file.seek(start)
        left = length
        while chunk := await asyncio.to_thread(file.read, CHUNK if left is None else min(CHUNK, left)):
            if left is not None:
                left -= len(chunk)
            yield chunk
