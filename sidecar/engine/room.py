"""Is there room in the store for one more snapshot?"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from sidecar.errors import LimitExceeded
from sidecar.ids import ROOT
from sidecar.limits import CODES
from sidecar.ports import Store
from sidecar.retention.forgetting import make_room

if TYPE_CHECKING:
    from sidecar.engine.parts import Engine

STALE_SECONDS = 300.0


class StoreUse:
    """How many bytes all memories have in a store: counted by a listing now and then, and in between by what is added here.

    What others add shows after five minutes at the latest. What is removed never makes an export fail: before one is
    refused, it is counted again.
    """

    def __init__(self) -> None:
        self._bytes = 0
        self._counted = -STALE_SECONDS

    async def bytes(self, store: Store, *, fresh: bool = False) -> int:
        if fresh or time.monotonic() - self._counted >= STALE_SECONDS:
            self._bytes = sum([info.size async for info in store.list(ROOT)])
            self._counted = time.monotonic()
        return self._bytes

    def add(self, count: int) -> None:
        self._bytes += count


def room_left(engine: Engine, sizes: Mapping[str, int]) -> int | None:
    """How much a memory may still get, by a listing of it; ``None`` when there is no limit, or more room can be made."""
    limits = engine.limits
    if not limits.memory_bytes or limits.trims("memory_bytes"):
        return None
    return max(0, limits.memory_bytes - sum(sizes.values()))


async def check_room(engine: Engine, memory: str, added: int, held: int, keep: Collection[str]) -> dict[str, int]:
    """Make sure that ``added`` bytes may come to the ``held`` ones of a memory; return what each limit is used to then.

    Where a limit says "trim", old snapshots are forgotten first, but for those to ``keep``; what they alone needed no longer
    counts, though it goes only after the grace period. Raise ``LimitExceeded``.
    """
    limits, used, listed = engine.limits, {}, held
    if limits.memory_bytes:
        if held + added > limits.memory_bytes and limits.trims("memory_bytes"):
            held = await _trimmed(engine, memory, limits.memory_bytes - added, keep)
        used["memory_bytes"] = held + added
        if held + added > limits.memory_bytes:
            raise _full(engine, "memory_bytes", f"{memory} would have {held + added:,} bytes in the store")
    if limits.store_bytes:
        store = engine.repository.store
        total = await engine.use.bytes(store) + added
        if total > limits.store_bytes:
            total = await engine.use.bytes(store, fresh=True) + added
        if total > limits.store_bytes and limits.trims("store_bytes"):
            total += await _trimmed(engine, memory, listed - (total - limits.store_bytes), keep) - listed
        used["store_bytes"] = total
        if total > limits.store_bytes:
            raise _full(engine, "store_bytes", f"The store would hold {total:,} bytes")
    return used


async def _trimmed(engine: Engine, memory: str, most: int, keep: Collection[str]) -> int:
    labelled = engine.retention.policy_for(memory).labelled
    return await make_room(engine.repository, memory, most, keep, labelled)


def _full(engine: Engine, key: str, what: str) -> LimitExceeded:
    also = "Nothing was added; forget snapshots of it, or raise the limit."
    if engine.limits.trims(key):
        also = "Nothing was added; there are no snapshots that may be forgotten for it."
    return LimitExceeded(f"{what}; limits.{key} allows {getattr(engine.limits, key):,}. {also}", code=CODES[key])
