"""Quotas: check whether the store has room for one more snapshot, and plan which old ones to remove for it."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sidecar.errors import LimitExceeded
from sidecar.ids import ROOT
from sidecar.policy.limits import CODES
from sidecar.policy.retention import SnapshotFacts
from sidecar.ports import Store
from sidecar.store.retention import RoomPlan, plan_room

if TYPE_CHECKING:
    from sidecar.engine.core import Engine

STALE_SECONDS = 300.0
FORGOTTEN = "To make room in the store for this one, {count:,} of the oldest snapshots of {memory} {were} forgotten."


class StoreUse:
    """How many bytes all memories use in a store: counted by a listing every ``STALE_SECONDS``, and in between by
    adding what this process stores.

    What other services add is therefore counted after five minutes at the latest. Removals by others never make an
    export fail wrongly: before an export is refused, the store is listed again.
    """

    def __init__(self) -> None:
        self._bytes = 0
        self._counted = -STALE_SECONDS

    async def bytes(self, store: Store, *, fresh: bool = False) -> int:
        """Return the bytes in use; ``fresh`` forces a new listing."""
        if fresh or time.monotonic() - self._counted >= STALE_SECONDS:
            self._bytes = sum([info.size async for info in store.list(ROOT)])
            self._counted = time.monotonic()
        return self._bytes

    def add(self, count: int) -> None:
        self._bytes += count


@dataclass(frozen=True, slots=True)
class RoomFound:
    """The result of ``check_room``: how much of each limit will be used, and the plan for snapshots to remove, if one
    is needed."""

    used: Mapping[str, int]
    room: RoomPlan | None = None

    @property
    def going(self) -> Collection[str]:
        """The snapshots that are to be removed."""
        return self.room.going if self.room is not None else ()

    async def make(self, engine: Engine) -> list[str]:
        """Remove the planned snapshots, once the new one is stored. Return warnings about it."""
        gone = await self.room.make(engine.repository) if self.room is not None and self.room.going else 0
        if not gone or self.room is None:
            return []
        if engine.forgot is not None:
            engine.forgot(self.room.memory, gone)
        return [FORGOTTEN.format(count=gone, memory=self.room.memory, were="was" if gone == 1 else "were")]


def compute_room_left(engine: Engine, sizes: Mapping[str, int]) -> int | None:
    """Return how many bytes a memory may still add to the store, by a listing of it. ``None`` if there is no limit, or
    if old snapshots may be removed to make room."""
    limits = engine.limits
    if not limits.memory_bytes or limits.trims("memory_bytes"):
        return None
    return max(0, limits.memory_bytes - sum(sizes.values()))


async def check_room(
    engine: Engine, memory: str, coming: SnapshotFacts, added: int, growth: int, held: int, keep: Collection[str]
) -> RoomFound:
    """Check that the snapshot ``coming`` may add ``added`` bytes to the ``held`` ones; ``growth`` of them is the growth
    of the head.

    If the exceeded limits are set to trim, plan which old snapshots to remove, except those to ``keep``. Packs that
    only those snapshots need no longer count, although they are deleted only after the grace period. Nothing is removed
    yet. Raise ``LimitExceeded`` if that would not be enough.
    """
    limits, used = engine.limits, {}
    if engine.charge is not None:
        await engine.charge(memory, added)
    if limits.memory_bytes:
        used["memory_bytes"] = held + added
    if limits.store_bytes:
        store = engine.repository.store
        used["store_bytes"] = await engine.use.bytes(store) + added
        if used["store_bytes"] > limits.store_bytes:
            used["store_bytes"] = await engine.use.bytes(store, fresh=True) + added
    over = _find_excess(engine, used)
    if not over:
        return RoomFound(_leave_out_hidden(engine, used))
    room = None
    if all(map(limits.trims, over)):
        labelled = engine.retention.build_policy_for(memory).labelled
        # How many bytes the memory's snapshots may have together so that the limit that is exceeded most is met. The
        # growth of the head is left out, because it is not part of any snapshot.
        most = held + added - growth - max(over.values())
        room = await plan_room(engine.repository, memory, coming, most, keep, labelled)
        used = {key: have - (held + added) + room.bytes + growth for key, have in used.items()}
        over = _find_excess(engine, used)
    if over:
        raise _build_full_error(engine, memory, used, next(iter(over)))
    return RoomFound(_leave_out_hidden(engine, used), room)


def _leave_out_hidden(engine: Engine, used: Mapping[str, int]) -> dict[str, int]:
    """Return what a caller may be told: not how much others have in the store, if it may not see all memories."""
    return {key: have for key, have in used.items() if key != "store_bytes" or engine.view is None}


def _find_excess(engine: Engine, used: Mapping[str, int]) -> dict[str, int]:
    """Return by how much each exceeded limit is exceeded."""
    most = {key: getattr(engine.limits, key) for key in used}
    return {key: have - most[key] for key, have in used.items() if have > most[key]}


def _build_full_error(engine: Engine, memory: str, used: Mapping[str, int], key: str) -> LimitExceeded:
    which = (
        f"{memory} would have {{:,}} bytes in the store" if key == "memory_bytes" else "The store would hold {:,} bytes"
    )
    also = "Nothing was added; forget snapshots of it, or raise the limit."
    if engine.limits.trims(key):
        also = "Nothing was added, and nothing forgotten: without the snapshots that may be forgotten it is still too much."
    if key == "store_bytes" and engine.view is not None:
        return LimitExceeded(f"The store has no room for more. {also}", code=CODES[key])
    most = getattr(engine.limits, key)
    return LimitExceeded(f"{which.format(used[key])}; limits.{key} allows {most:,}. {also}", code=CODES[key])
