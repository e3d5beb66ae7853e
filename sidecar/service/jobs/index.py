"""Update the search index in the background: after each change, every ``every`` seconds, and after the database
was unavailable. An index on this machine is kept from its first search on: a service that nobody searches does without.

No operation waits for this or depends on it: an export is done when it is in the store. Also the metrics of the index.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from sidecar.errors import SidecarError
from sidecar.models.answers import Event
from sidecar.search.upkeep import IndexResult, SearchIndex
from sidecar.service.event_types import FORGOT, HEAD_CHANGES
from sidecar.service.events import Events

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0


class IndexUpdater:
    """One task that updates the index, memory by memory."""

    def __init__(self, index: SearchIndex, events: Events, metrics: IndexMetrics, every: float) -> None:
        self._index = index
        self._events = events
        self._metrics = metrics
        self._every = every
        self._changed: dict[str, None] = {}
        self._wake = asyncio.Event()
        self._failures = 0
        self._rest = asyncio.Event()
        """Set while there is nothing to update, or the database cannot be used."""
        self._missed: dict[str, bool] = {}
        """Memories whose last update failed, and whether another attempt may succeed."""
        self._told: dict[str, str] = {}
        self._log = structlog.get_logger("sidecar")
        self._task: asyncio.Task[None] | None = None
        self._caught_up = asyncio.Event()

    def start(self) -> None:
        """Subscribe to the events and start the task."""
        self._index.caught_up = self._caught_up
        self._events.subscribe(self._on_event)
        self._task = asyncio.create_task(self._run())

    async def close(self, seconds: float) -> None:
        """Wait at most ``seconds`` for pending updates, unless Postgres is unavailable, then stop the task."""
        if self._task is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._rest.wait()
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=seconds)

    def update_soon(self, memory: str) -> None:
        """Enqueue a memory whose head has moved, or that was deleted."""
        self._changed[memory] = None
        self._metrics.behind(len(self._changed))
        self._wake.set()
        if not self._failures and self._caught_up.is_set():
            self._rest.clear()

    def _on_event(self, event: Event) -> None:
        if event.type in HEAD_CHANGES or event.type == FORGOT:
            self.update_soon(event.memory)

    async def _run(self) -> None:
        """Update all memories at first, every ``every`` seconds, and after each failure; in between, those that
        changed."""
        await self._wait_for_use()
        due = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - time.monotonic())):
                    await self._wake.wait()
            self._wake.clear()
            all_of_them = time.monotonic() >= due
            try:
                await self._catch_up(None if all_of_them else list(self._changed))
            except SidecarError as problem:
                due = time.monotonic() + await self._on_failure(problem)
            except Exception:  # a bug; it will be tried again
                self._log.exception("a mistake of ours in indexing")
                due = time.monotonic() + LONGEST_PAUSE
            else:
                self._on_success()
                due = time.monotonic() + self._every if all_of_them else due
                if any(self._missed.values()):
                    due = min(due, time.monotonic() + LONGEST_PAUSE)
                if not self._changed:
                    self._rest.set()

    async def _wait_for_use(self) -> None:
        """Wait until an index on this machine is searched, or was before."""
        if self._index.embedded:
            self._rest.set()
            try:
                begun = await self._index.is_begun()
            except SidecarError:  # the store does not answer: the first search will see
                begun = False
            if not begun:
                await self._index.in_use.wait()
            self._rest.clear()

    async def _catch_up(self, memories: Sequence[str] | None) -> None:
        """Update these memories, or with ``None`` all that are behind."""
        if memories is None:
            memories = list(dict.fromkeys([*self._changed, *await self._index.behind()]))
            self._missed = {}
        left = dict.fromkeys(memories)
        for memory in memories:
            self._metrics.behind(len({*left, *self._changed, *self._missed}))
            # Removed before the memory is read: a change during the read adds it again.
            self._changed.pop(memory, None)
            async for done in self._update_memory(memory):
                self._log_result(done)
            left.pop(memory)
        self._metrics.behind(len({*self._changed, *self._missed}))

    async def _update_memory(self, memory: str) -> AsyncIterator[IndexResult]:
        """Update one memory and yield the results. Raise a ``SearchError`` if the problem is not this memory's."""
        try:
            async for done in self._index.catch_up([memory]):
                yield done
        except SidecarError:
            raise
        except Exception as problem:  # a bug; the other memories are updated even so
            self._log.exception("a mistake of ours in indexing", memory=memory)
            yield IndexResult(memory=memory, state="failed", problem=f"{type(problem).__name__}: {problem}")

    def _log_result(self, done: IndexResult) -> None:
        """Log, count and publish the result of one update. The same problem of a memory is reported once."""
        about: dict[str, Any] = {
            "snapshot": done.snapshot,
            "records": done.records,
            "written": done.written,
            "removed": done.removed,
        }
        said = "; ".join(filter(None, [done.problem, *done.problems]))
        if said and self._told.get(done.memory) != said:
            self._log.warning("not all of a memory can be searched", memory=done.memory, problem=said)
            self._events.publish("index.incomplete", memory=done.memory, snapshot=done.snapshot, problem=said)
        self._told = {**self._told, done.memory: said} if said else _leave_out(self._told, done.memory)
        self._missed.pop(done.memory, None)
        if done.state == "failed":
            self._missed[done.memory] = done.retryable
            self._metrics.count_failure()
        elif done.state != "current":
            self._metrics.written(done.written, done.removed)
            self._log.info("indexed", memory=done.memory, **about)
            self._events.publish("index.updated", memory=done.memory, **about)

    async def _on_failure(self, problem: SidecarError) -> float:
        """Report the first failure, wait before the next attempt, and return in how many seconds everything is due
        again."""
        self._failures += 1
        self._rest.set()
        self._metrics.count_failure()
        if self._failures == 1:
            self._log.warning("search is not kept up to date", **problem.as_dict())
            self._events.publish("index.down", error=problem.as_dict())
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self._failures - 1, 10))
        pause *= random.uniform(0.75, 1.25)
        await asyncio.sleep(min(pause, self._every))
        return 0.0

    def _on_success(self) -> None:
        self._caught_up.set()
        if not self._missed:
            self._metrics.note_success()
        if self._failures:
            self._failures = 0
            self._log.info("search is up to date again")
            self._events.publish("index.recovered")


def _leave_out(told: dict[str, str], memory: str) -> dict[str, str]:
    return {name: said for name, said in told.items() if name != memory}


class IndexMetrics:
    """The Prometheus metrics of the search index."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._success = Gauge(
            "memory_sidecar_index_last_success_timestamp_seconds",
            "When this service last found or made what can be searched up to date",
            registry=registry,
        )
        self._behind = Gauge(
            "memory_sidecar_index_behind",
            "Memories that have changed and cannot be searched as they are now",
            registry=registry,
        )
        self._failures = Counter(
            "memory_sidecar_index_failures", "Attempts to bring it up to date that failed", registry=registry
        )
        self._written = Counter("memory_sidecar_index_records_written", "Records written", registry=registry)
        self._removed = Counter("memory_sidecar_index_records_removed", "Records removed", registry=registry)

    def behind(self, memories: int) -> None:
        self._behind.set(memories)

    def count_failure(self) -> None:
        self._failures.inc()

    def written(self, written: int, removed: int) -> None:
        self._written.inc(written)
        self._removed.inc(removed)

    def note_success(self) -> None:
        self._success.set(time.time())
