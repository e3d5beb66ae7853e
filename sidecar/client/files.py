"""Local tarballs to upload."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from sidecar.errors import UsageError

CHUNK = 1 << 18


@contextmanager
def open_archive(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Yield a file to send, and its size. Raise ``UsageError`` if it cannot be read."""
    try:
        file = path.open("rb")
    except OSError as problem:
        raise UsageError(f"{path} cannot be read: {problem.strerror}.") from None
    with file:
        yield file, os.fstat(file.fileno()).st_size
