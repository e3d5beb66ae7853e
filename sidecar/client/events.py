"""Server-sent events, line by line."""

from __future__ import annotations

import json

import msgspec

from sidecar.client.answers import Event
from sidecar.client.problems import UnexpectedAnswer

SILENCE_SECONDS = 60.0
"""The service breathes more often than that; longer silence is a dead connection."""
PAUSE_SECONDS = 1.0
"""Before listening again, when the service ended a stream."""


class EventParser:
    """Makes events of a stream's lines, and knows where to go on when the stream is cut."""

    def __init__(self, after: int | None) -> None:
        self.last = after
        self._data: list[str] = []

    def begin(self) -> None:
        """A new stream: what was left of the former one is void."""
        self._data.clear()

    def parse_line(self, line: str) -> Event | None:
        """The event that this line ends, if it ends one. Raise ``UnexpectedAnswer``."""
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
