"""Where an operation stands, for whoever watches."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    def about(self, snapshot: str) -> None:
        """It is about this snapshot."""
        ...

    def step(self, name: str, total: int | None = None) -> None:
        """A new step begins; ``total`` bytes are expected, if that is known."""
        ...

    def advance(self, count: int) -> None:
        """So many bytes of the present step are done."""
        ...


class NoProgress:
    """Nobody watches."""

    def about(self, snapshot: str) -> None:
        return None

    def step(self, name: str, total: int | None = None) -> None:
        return None

    def advance(self, count: int) -> None:
        return None
