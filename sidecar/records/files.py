"""A file of a memory as its readers get it, and what they raise."""

from __future__ import annotations

from datetime import UTC, datetime

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
