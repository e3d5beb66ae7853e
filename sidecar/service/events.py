"""Events: each is delivered once to every listener that is fast enough."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import structlog

from sidecar.models.answers import Event
from sidecar.service.event_types import ACCEPTED

REMEMBERED = 500
WAITING = 200


class Events:
    """Publishes events. Listeners receive the events after they subscribed, and can request recent ones that they
    missed."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._past: deque[Event] = deque(maxlen=REMEMBERED)
        self._queues: set[asyncio.Queue[Event]] = set()
        self._subscribers: list[tuple[Callable[[Event], None], bool]] = []

    def publish(
        self, kind: str, again: bool = False, /, *, memory: str = "", sandbox: str = "", **details: Any
    ) -> None:
        """Publish an event. This is the one place from which the metrics, webhooks, search index and listeners of a
        service learn that a memory changed.

        ``again``: the same was published before, such as a problem that continues. Only subscribers that asked for
        repetitions get it, to count it.
        """
        number = 0 if again else next(self._numbers)
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        event = Event(number=number, type=kind, at=at, memory=memory, sandbox=sandbox, details=details)
        for call, repetitions in self._subscribers:
            if repetitions or not again:
                call(event)
        if again:
            return
        self._past.append(event)
        for queue in self._queues:
            # A listener that is too slow misses events, and notices it by their numbers.
            with suppress(asyncio.QueueFull):
                queue.put_nowait(event)

    def subscribe(self, call: Callable[[Event], None], *, repetitions: bool = False) -> None:
        """Call ``call`` with every event from now on; if wanted, also with repetitions."""
        self._subscribers.append((call, repetitions))

    @property
    def recent(self) -> tuple[Event, ...]:
        """The last events, oldest first."""
        return tuple(self._past)

    async def listen(self, after: int | None = None) -> AsyncIterator[Event]:
        """Yield events as they are published; first the recent ones with a number above ``after``."""
        with self._open_queue() as queue:
            newest = self._past[-1].number if self._past else 0
            # Numbers start at 1 in each process: a higher one is from another process and means nothing here.
            last = newest if after is None else after if after <= newest else 0
            for event in [event for event in self._past if event.number > last]:
                last = event.number
                yield event
            while True:
                event = await queue.get()
                if event.number > last:
                    yield event

    @contextmanager
    def _open_queue(self) -> Any:
        queue: asyncio.Queue[Event] = asyncio.Queue(WAITING)
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)


def publish_accepted(events: Events, *, memory: str, sandbox: str = "", **details: Any) -> None:
    """Log and publish that something became the head although guards objected."""
    structlog.get_logger("sidecar").warning("accepted what guards objected to", memory=memory, **details)
    events.publish(ACCEPTED, memory=memory, sandbox=sandbox, **details)
