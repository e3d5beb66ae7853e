"""Translate the operating system's disk errors into errors of the sidecar."""

from __future__ import annotations

import errno
from pathlib import Path
from types import TracebackType

from sidecar.errors import StoreDenied, StoreError, StoreFull, StoreMissing, StoreUnreachable

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NOT_A_FOLDER = {errno.ENOTDIR, errno.EEXIST}
_GONE = {errno.EIO, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN}


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
