"""Tarballs on this side: read whole to be adopted, written whole or not at all when downloaded."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from sidecar.errors import UsageError

CHUNK = 1 << 18


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A file to send, and its size. Raise ``UsageError`` when it cannot be read."""
    try:
        file = path.open("rb")
    except OSError as problem:
        raise UsageError(f"{path} cannot be read: {problem.strerror}.") from None
    with file:
        yield file, os.fstat(file.fileno()).st_size


@contextmanager
def written_whole(target: Path) -> Iterator[BinaryIO]:
    """A file that takes its place only once all of it is written. Raise ``UsageError`` when it cannot be."""
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("xb") as file:
            yield file
        os.replace(partial, target)
    except OSError as problem:
        raise UsageError(f"{target} cannot be written: {problem.strerror}.") from None
    finally:
        partial.unlink(missing_ok=True)
