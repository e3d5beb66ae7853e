"""Progress reports of an operation."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the progress of one operation."""

    def about(self, snapshot: str) -> None:
        """The operation makes or restores this snapshot."""
        ...

    def step(self, name: str, total: int | None = None) -> None:
        """A new step begins; ``total`` is the expected number of bytes, if known."""
        ...

    def advance(self, count: int) -> None:
        """``count`` more bytes of the present step are done."""
        ...


class NoProgress:
    """Ignores all progress."""

    def about(self, snapshot: str) -> None:
        return None

    def step(self, name: str, total: int | None = None) -> None:
        return None

    def advance(self, count: int) -> None:
        return None
