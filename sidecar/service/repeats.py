"""What is said again and again in the log: a few times a minute, and then how often more."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

MOST = 3
SECONDS = 60.0
KINDS = 200
REST = "other messages"


@dataclass(slots=True)
class _Kind:
    since: float
    said: int = 0
    held_back: int = 0


class LogThrottle:
    """Lets the first few messages of a kind pass in each minute, and counts the others."""

    def __init__(self, most: int = MOST, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._seconds = seconds
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}

    def may_pass(self, kind: str) -> bool:
        """Whether this message may pass. It is counted if not."""
        now = self._clock()
        if kind not in self._kinds and len(self._kinds) >= KINDS:
            kind = REST  # what can be caused from outside must not fill the memory either
        entry = self._kinds.setdefault(kind, _Kind(now))
        if entry.said < self._most:
            entry.said += 1
            return True
        entry.held_back += 1
        return False

    def take_counts(self, *, all_of_them: bool = False) -> list[tuple[str, int]]:
        """The kinds whose minute is over, or all of them, with how many messages were held back; they start afresh."""
        now = self._clock()
        over = [kind for kind, entry in self._kinds.items() if all_of_them or now - entry.since >= self._seconds]
        counts = [(kind, self._kinds.pop(kind).held_back) for kind in over]
        return [(kind, count) for kind, count in counts if count]
