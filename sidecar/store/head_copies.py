"""Signed copies of a memory's last heads (witnesses), so that an old head that was put back is noticed.

A head has a generation, which rises with every write. The process that moves the head writes a copy beside it under
that number. A head with a lower generation than a copy was put back by someone, and one that is missing or altered was
removed or changed. Either way the newest copy tells where the head really was. If the copies are missing too, the
snapshots tell: each was signed with the generation of the head it was made to become.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import field, replace
from datetime import UTC, datetime

from sidecar.errors import ObjectRefused, SnapshotDamaged
from sidecar.host.values import dataclass
from sidecar.host.work import gather_few
from sidecar.ids import MemoryKeys
from sidecar.ports import Store
from sidecar.store.manifest import Head, Manifest

LOG = logging.getLogger("sidecar")
KEPT = 3
"""Copies that are kept."""
UNDER_WAY = 600.0
"""Seconds after which an export that has not moved the head yet is worth a warning."""
PARALLEL_READS = 8
BY_COPY = "by the signed copy of it"
BY_SNAPSHOTS = "by the signed snapshots that were made later"
FOLLOWS = (
    "Snapshot {snapshot} was made to follow on the head, {head}, and is not the head: its export was cut short, or the head was"
    " put back. `rollback` makes it the head."
)


@dataclass(slots=True)
class LaterHead:
    """What is known beyond a head that was read."""

    head: Head | None = None
    """A later head, if there was one."""
    by: str = BY_COPY
    """What shows that it was later."""
    said: list[str] = field(default_factory=list)
    """Further warnings."""

    def words(self, memory: str, snapshot: str, problem: str) -> list[str]:
        """Return the warnings, given that the head was read with ``snapshot``, or could not be read because of
        ``problem``."""
        if self.head is None:
            return self.said
        what = problem.removesuffix(".") or f"The head of {memory} was removed"
        if snapshot:
            what = f"The head of {memory} was put back to {snapshot}, an earlier one"
        return [f"{what}; {self.head.snapshot} is taken, {self.by}.", *self.said]


@dataclass(frozen=True, slots=True)
class HeadCopies:
    """Reads and writes the copies of heads of one store."""

    store: Store
    seen: dict[str, Head] = field(default_factory=dict)
    """By memory, the latest head this process knows of."""
    told: set[str] = field(default_factory=set)
    made: dict[str, Manifest | None] = field(default_factory=dict)
    """By object key, snapshots after a head that were read; ``None`` for one that was never to become a head."""

    def tell(self, notices: list[str]) -> str:
        """Log each warning once; return them as one text."""
        for notice in notices:
            if notice not in self.told:
                self.told.add(notice)
                LOG.warning(notice)
        return " ".join(notices)

    async def add(self, head: Head, before: Head | None) -> None:
        """Write a copy of a head that was just written; and of the one before, if its writer died before it could."""
        keys, there = MemoryKeys.of(head.memory), await self.list_generations(head.memory)
        # This also removes what a writer left that was delayed for long.
        old = [one for one in there if one <= head.generation - KEPT]
        missed = before is not None and before.generation not in there and before.format >= head.format
        new = [head, *([before] if before and missed else [])]
        await asyncio.gather(
            *(self.store.put(keys.witness(one.generation), one.encode()) for one in new),
            self.store.delete([keys.witness(generation) for generation in old]),
        )
        self.seen[head.memory] = head

    async def clear(self, memory: str) -> None:
        """Remove all copies before a head of a raised format is written: a version that does not know the format would
        take an older copy for the head."""
        await self.store.delete([MemoryKeys.of(memory).witness(one) for one in await self.list_generations(memory)])

    async def list_generations(self, memory: str) -> list[int]:
        """Return the generations of the copies, latest first; their contents are not read."""
        prefix = MemoryKeys.of(memory).heads
        names = [info.key[len(prefix) :] async for info in self.store.list(prefix)]
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    async def list_made_after(self, memory: str, head: Head | None, ids: Iterable[str]) -> list[Manifest]:
        """Return the snapshots listed after a head that were made to become a later one, the latest first."""
        if head is None:
            return []

        async def read(snapshot: str) -> Manifest | None:
            key = MemoryKeys.of(memory).snapshot(snapshot)
            if key not in self.made:
                try:
                    stored = await self.store.get(key)
                    manifest = Manifest.decode(stored.data, memory, snapshot) if stored else None
                except SnapshotDamaged:
                    return None  # an export and `verify` report it
                self.made[key] = manifest if manifest is not None and manifest.generation else None
            return self.made[key]

        found = await gather_few(read, (snapshot for snapshot in ids if snapshot > head.newest), PARALLEL_READS)
        return sorted(filter(None, found), key=lambda made: (made.generation, made.snapshot), reverse=True)

    async def find_later(
        self, memory: str, head: Head | None, generations: list[int], made: list[Manifest]
    ) -> LaterHead:
        """Return what is later than this head: among the copies, the snapshots made after it, or what this process has
        seen."""
        later = await self._find_later_copy(memory, head, generations)
        last = later.head or head
        beyond = [one for one in made if last and one.generation > last.generation and not last.was_head(one.snapshot)]
        if last is not None and beyond and beyond[0].generation > last.generation + 1:
            # It was made over a head that was later than this one.
            later.head, later.by = _extend_head(last, beyond), BY_SNAPSHOTS
        elif last is not None and beyond and (datetime.now(UTC) - beyond[0].time).total_seconds() > UNDER_WAY:
            later.said.append(FOLLOWS.format(snapshot=beyond[0].snapshot, head=last.snapshot))
        last, seen = later.head or head, self.seen.get(memory)
        if head is not None and last and seen and seen.generation > last.generation and seen.was_head(head.snapshot):
            later.head, later.by = seen, "as it was seen before"
        elif last is not None:
            self.seen[memory] = last
        return later

    async def forget(self, memory: str) -> None:
        """Remove the copies before a memory is deleted, so that the deleted head is not reported as missing."""
        self.seen.pop(memory, None)
        keys = MemoryKeys.of(memory)
        await self.store.delete([keys.witness(generation) for generation in await self.list_generations(memory)])

    async def _find_later_copy(self, memory: str, head: Head | None, generations: list[int]) -> LaterHead:
        """Return the newest valid copy that is later than the head."""
        later = LaterHead()
        for generation in generations:
            if generation <= (head.generation if head else 0):
                break
            try:
                stored = await self.store.get(MemoryKeys.of(memory).witness(generation))
                found = Head.decode(stored.data, memory) if stored else None
            except (ObjectRefused, SnapshotDamaged) as problem:
                later.said.append(f"{problem.message} It is in the place of a copy of a later head.")
                continue
            if found is not None and found.generation == generation:
                later.head = found
                break
        return later


def _extend_head(head: Head, made: list[Manifest]) -> Head:
    """Return the head that the latest of these snapshots was to become, with the snapshots it grew out of in its history."""
    by_id = {one.snapshot: one for one in made}
    line: list[Manifest] = []
    following: Manifest | None = made[0]
    while following is not None and following not in line:
        line.append(following)
        following = by_id.get(following.parent)
    for one in reversed(line):
        head = replace(Head.at(one, datetime.fromisoformat(one.created), head), generation=one.generation)
    return head
