"""What a server was asked: enough to count steps, never a header or a body."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Literal

Step = Literal[
    "create", "info", "list", "connect", "timeout", "pause", "kill", "start", "stop", "archive", "activity",
    "command", "signal", "upload", "download", "filesystem", "health", "home", "other",
]  # fmt: skip
"""What a request is for: first the control planes' steps, then those inside a sandbox."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request. ``status`` is 0 while it is under way, and stays so when no answer was given."""

    step: Step
    method: str
    path: str
    sandbox: str | None
    status: int = 0


class Calls:
    """The requests of a server in the order they came, safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[int, Call] = {}
        self._next = 0

    def begin(self, call: Call) -> int:
        """Note a request as it comes in; return the ticket to settle it with."""
        with self._lock:
            self._next += 1
            self._calls[self._next] = call
            return self._next

    def settle(self, ticket: int, status: int) -> None:
        """Note the answer of a request, unless it was cleared meanwhile."""
        with self._lock:
            if ticket in self._calls:
                self._calls[ticket] = replace(self._calls[ticket], status=status)

    def list(self) -> list[Call]:
        with self._lock:
            return list(self._calls.values())

    def clear(self) -> None:
        with self._lock:
            self._calls.clear()
