"""A file of a memory as its readers get it, and what they raise."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from typing import BinaryIO

from sidecar.host.values import dataclass


class Unreadable(Exception):
    """Part of a snapshot that cannot be read as records; the message says why."""


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """A file on this machine, with the path that it has in its snapshot."""

    place: str
    path: str
    project: str = ""
    """Where the project was that it belongs to."""
    mtime: int = 0
    """In nanoseconds."""
    data: bytes | None = None
    """What is in it, if that is in memory; then there is nothing at ``place``."""

    def open(self) -> BinaryIO:
        """Open it to read."""
        return open(self.place, "rb") if self.data is None else io.BytesIO(self.data)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def at(self) -> datetime | None:
        """When it was written; ``None`` if that makes no sense."""
        try:
            return datetime.fromtimestamp(self.mtime // 1_000_000_000, UTC)
        except (ValueError, OverflowError, OSError):
            return None
