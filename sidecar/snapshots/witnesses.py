"""Signed copies of a memory's last heads, so that an old head put back is noticed.

A head says how often it was written. Whoever moves it writes a copy beside it under that number; a head with a lower number
than a copy has was put back by somebody, and one that is missing, or was altered, was taken away. Either way the newest
copy tells where the head really was.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from sidecar.errors import ObjectRefused, SnapshotDamaged
from sidecar.ids import Keys
from sidecar.ports import Store
from sidecar.snapshots.manifest import Head

LOG = logging.getLogger("sidecar")
KEPT = 3
"""Copies that stay."""
CLEARED = 8
"""So many before those are deleted each time: a writer that died may have left one."""


@dataclass(frozen=True, slots=True)
class Witnesses:
    store: Store
    seen: dict[str, Head] = field(default_factory=dict)
    """By memory, the latest head this process knows of."""
    told: set[str] = field(default_factory=set)

    def tell(self, notice: str) -> None:
        """Into the log, once."""
        if notice not in self.told:
            self.told.add(notice)
            LOG.warning(notice)

    async def add(self, head: Head) -> None:
        """Write down a head that was just written."""
        keys = Keys.of(head.memory)
        old = range(max(1, head.generation - KEPT - CLEARED + 1), head.generation - KEPT + 1)
        await asyncio.gather(
            self.store.put(keys.witness(head.generation), head.encode()),
            self.store.delete([keys.witness(generation) for generation in old]),
        )
        self._remember(head)

    async def generations(self, memory: str) -> list[int]:
        """Of the copies there are, latest first; none of them is looked at."""
        prefix = Keys.of(memory).heads
        names = [info.key[len(prefix) :] async for info in self.store.list(prefix)]
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    async def later(self, memory: str, head: Head | None, generations: list[int]) -> Head | None:
        """The latest head that is later than this one: of the copies, or of what this process has seen."""
        known = head.generation if head else 0
        for generation in generations:
            if generation <= known:
                break
            if (found := await self._read(memory, generation)) is not None:
                self._remember(found)
                return found
        seen = self.seen.get(memory)
        if head is not None and seen is not None and seen.generation > known and seen.was(head.snapshot):
            return seen
        if head is not None:
            self.seen[memory] = head
        return None

    async def forget(self, memory: str) -> None:
        """Before a memory is deleted: what is deleted on purpose is not missed."""
        self.seen.pop(memory, None)
        keys = Keys.of(memory)
        await self.store.delete([keys.witness(generation) for generation in await self.generations(memory)])

    async def _read(self, memory: str, generation: int) -> Head | None:
        try:
            stored = await self.store.get(Keys.of(memory).witness(generation))
            head = Head.decode(stored.data, memory) if stored else None
        except (ObjectRefused, SnapshotDamaged):
            return None  # a copy that proves nothing
        return head if head is not None and head.generation == generation else None

    def _remember(self, head: Head) -> None:
        before = self.seen.get(head.memory)
        if before is None or before.generation < head.generation:
            self.seen[head.memory] = head
