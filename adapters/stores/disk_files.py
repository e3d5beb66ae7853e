"""Files, folders and locks on a disk: safe against crashes and other processes, and what the errors of the disk mean."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from sidecar.errors import StoreDenied, StoreError, StoreFull, StoreMissing, StoreUnreachable, StoreUnsafe
from sidecar.host.values import dataclass

LOCK_PATIENCE = 30.0
_MOUNTS = Path("/proc/self/mountinfo")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NOT_A_FOLDER = {errno.ENOTDIR, errno.EEXIST}
_GONE = {errno.EIO, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN}


@dataclass(frozen=True, slots=True)
class FileModes:
    """The modes of files and folders that a store creates, whatever the umask."""

    file: int
    folder: int


PRIVATE = FileModes(0o600, 0o700)
SHARED = FileModes(0o660, 0o2770)
"""For a group. With setgid, what is created in a folder belongs to the folder's group, whichever user creates it."""


def is_mount(path: Path) -> bool:
    """Return whether a filesystem is mounted exactly at ``path``, bind mounts of the same disk included."""
    real = path.resolve()
    if os.path.ismount(real):
        return True
    # ismount compares devices and so misses a folder bound from the same disk; Linux lists both.
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    return str(real) in {_unescape(line.split(" ")[4]) for line in lines}


def sync_folder(folder: Path) -> None:
    """Make changes to the names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path, modes: FileModes) -> None:
    """Create ``folder`` and its parents durably; an existing one keeps its mode. Raise ``FileNotFoundError`` if another
    process removes one of them at the same time."""
    if folder.is_dir():
        return
    make_folder(folder.parent, modes)
    with suppress(FileExistsError):
        folder.mkdir(modes.folder)
        if modes.folder & ~folder.stat().st_mode:  # the umask removed a bit, and mkdir ignores setgid
            folder.chmod(modes.folder)
        sync_folder(folder.parent)
    if not stat.S_ISDIR(folder.stat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def open_in_folder(path: Path, mode: str, modes: FileModes) -> BinaryIO:
    """Open a file to write, creating its folder first."""
    for _ in range(16):
        # Another process that removes empty folders may remove it right here; once the file is in it, it stays.
        with suppress(FileNotFoundError):
            make_folder(path.parent, modes)
            return _open_with_modes(path, mode, modes)
    return _open_with_modes(path, mode, modes)


def remove_empty_folders(folder: Path, root: Path) -> None:
    """Remove the empty folders below ``folder``, then ``folder`` and its parents as ``remove_empty_parents`` does."""
    for below, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            Path(below).rmdir()
    remove_empty_parents(folder, root)


def remove_empty_parents(folder: Path, root: Path) -> None:
    """Remove ``folder`` and its parents below ``root`` until one is not empty, and make that durable."""
    while folder != root:
        try:
            folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            break
        folder = folder.parent
    with suppress(FileNotFoundError, NotADirectoryError):
        sync_folder(folder)


def find_open_to_others(root: Path, modes: FileModes, most: int) -> Path | None:
    """Return one of the first ``most`` files below ``root`` that other users can read although ``modes`` does not allow
    it."""
    read, enter = (0o004, 0o001) if modes.file & 0o060 else (0o044, 0o011)
    if not all(folder.stat().st_mode & enter for folder in (root, *root.parents)):
        return None
    seen = 0
    for top, folders, files in os.walk(root):
        folders[:] = [name for name in folders if os.lstat(os.path.join(top, name)).st_mode & enter]
        for name in files:
            place = Path(top, name)
            with suppress(FileNotFoundError):
                if place.lstat().st_mode & read:
                    return place
            seen += 1
            if seen >= most:
                return None
    return None


@contextmanager
def hold_lock(path: Path, modes: FileModes) -> Iterator[None]:
    """Hold the lock file at ``path``, created if missing, against every other process and thread.

    The kernel releases it when its holder dies. Raise ``StoreUnreachable`` if another process keeps it for too long,
    and ``StoreUnsafe`` if the filesystem has no locks.
    """
    deadline = time.monotonic() + LOCK_PATIENCE
    while True:
        with open_in_folder(path, "ab", modes) as file:
            if _try_lock(file) and _is_still_named(file, path):
                yield
                return
        if time.monotonic() > deadline:
            raise StoreUnreachable(
                f"{path} has been locked by another process for {LOCK_PATIENCE:.0f} s.",
                hint="See which process holds that file, then try again; nothing was changed.",
            )
        time.sleep(random.uniform(0.001, 0.02))


def _try_lock(file: BinaryIO) -> bool:
    """Return whether the lock was taken. Raise ``StoreUnsafe`` if the filesystem has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        raise StoreUnsafe(
            f"The filesystem of {file.name} has no file locks: two writers could overwrite each other there.",
            hint="Use a local disk, a volume or an S3 store.",
        ) from error
    return True


def _is_still_named(file: BinaryIO, path: Path) -> bool:
    """Return False if the lock file was deleted, and perhaps created again, between opening and locking it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _open_with_modes(path: Path, mode: str, modes: FileModes) -> BinaryIO:
    """Open a file so that a new one gets these modes whatever the umask."""

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags, modes.file)
        status = os.fstat(descriptor)
        if modes.file & ~status.st_mode and status.st_uid == os.geteuid():  # the umask removed a bit
            os.fchmod(descriptor, modes.file)
        return descriptor

    return open(path, mode, opener=opener)  # type: ignore[return-value]


def _unescape(mount: str) -> str:
    """Decode the three-digit octal escapes that mountinfo uses for blanks and the like."""
    for code in ("040", "011", "012", "134"):
        mount = mount.replace(f"\\{code}", chr(int(code, 8)))
    return mount


class translate_disk_errors:  # noqa: N801 - reads as a statement: with translate_disk_errors(root): ...
    """Inside this block an ``OSError`` becomes the ``StoreError`` that says what to do about it."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError):
            raise _translate_error(self._root, error) from error


def _translate_error(root: Path, error: OSError) -> StoreError:
    said = error.strerror or type(error).__name__
    where = error.filename if isinstance(error.filename, str) else str(root)
    if error.errno in _FULL:
        return StoreFull(f"The disk of {root} is full: {said}.")
    if error.errno in _DENIED:
        return StoreDenied(
            f"{where} may not be used: {said}.",
            hint=f"Give this user read and write access to {root} and all below it, or choose another store."
            " A store that several users of a group write to needs ?shared=group in its URL, for all of them.",
        )
    if error.errno in _NOT_A_FOLDER:
        return StoreMissing(
            f"{where} is a file, where {root} needs a folder.", hint="Move that file away, or correct the store URL."
        )
    if error.errno in _GONE:
        return StoreUnreachable(f"The disk of {root} does not answer: {said}.", hint="Check that disk, then try again.")
    return StoreError(f"{where} could not be used: {said}.")
