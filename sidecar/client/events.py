"""Parse server-sent events, line by line."""

from __future__ import annotations

import json

import msgspec

from sidecar.client.problems import UnexpectedAnswer
from sidecar.models.answers import Event

SILENCE_SECONDS = 60.0
"""The service sends a comment more often than that; a longer silence means a dead connection."""
PAUSE_SECONDS = 1.0
"""The wait before connecting again, after the service ended a stream."""


class EventParser:
    """Parses the lines of a stream into events, and remembers the last number, to continue after a cut."""

    def __init__(self, after: int | None) -> None:
        self.last = after
        self._data: list[str] = []

    def begin(self) -> None:
        """Start a new stream: discard an incomplete event of the former one."""
        self._data.clear()

    def parse_line(self, line: str) -> Event | None:
        """Return the event that this line completes, if any. Raise ``UnexpectedAnswer``."""
        if line.startswith("data:"):
            self._data.append(line.removeprefix("data:").removeprefix(" "))
        if line or not self._data:
            return None
        text, self._data = "\n".join(self._data), []
        try:
            event = msgspec.convert(json.loads(text), Event)
        except (ValueError, msgspec.ValidationError) as problem:
            raise UnexpectedAnswer(f"An event is not what was expected: {problem}.") from None
        self.last = event.number
        return event
