"""Is there room in the store for one more snapshot?"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING

from sidecar.errors import LimitExceeded
from sidecar.ids import ROOT
from sidecar.limits import CODES
from sidecar.ports import Store

if TYPE_CHECKING:
    from sidecar.engine.parts import Engine

STALE_SECONDS = 300.0

MakeRoom = Callable[[str, int, Collection[str]], Awaitable[int]]
"""Given a memory, so many bytes, and the snapshots that have to stay: forget old snapshots of it until that much is free,
as far as possible. Return how much was freed."""


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
    if not limits.memory_bytes or (limits.trims("memory_bytes") and engine.make_room is not None):
        return None
    return max(0, limits.memory_bytes - sum(sizes.values()))


async def check_room(engine: Engine, memory: str, added: int, held: int, keep: Collection[str]) -> dict[str, int]:
    """Make sure that ``added`` bytes may come to the ``held`` ones of a memory; return what each limit is used to then.

    Where a limit says "trim", old snapshots are forgotten first, but for those to ``keep``. Raise ``LimitExceeded``.
    """
    limits, used = engine.limits, {}
    if limits.memory_bytes:
        freed = await _freed(engine, "memory_bytes", memory, held + added - limits.memory_bytes, keep)
        used["memory_bytes"] = held = held - freed + added
        if held > limits.memory_bytes:
            raise _full(engine, "memory_bytes", f"{memory} would have {held:,} bytes in the store")
    if limits.store_bytes:
        store = engine.repository.store
        total = await engine.use.bytes(store) + added
        if total > limits.store_bytes:
            total = await engine.use.bytes(store, fresh=True) + added
        if await _freed(engine, "store_bytes", memory, total - limits.store_bytes, keep):
            total = await engine.use.bytes(store, fresh=True) + added
        used["store_bytes"] = total
        if total > limits.store_bytes:
            raise _full(engine, "store_bytes", f"The store would hold {total:,} bytes")
    return used


async def _freed(engine: Engine, key: str, memory: str, missing: int, keep: Collection[str]) -> int:
    if missing <= 0 or engine.make_room is None or not engine.limits.trims(key):
        return 0
    return await engine.make_room(memory, missing, keep)


def _full(engine: Engine, key: str, what: str) -> LimitExceeded:
    also = "Nothing was added; forget snapshots of it, or raise the limit."
    if engine.limits.trims(key):
        also = "Nothing was added; there are no snapshots that may be forgotten for it."
        if engine.make_room is None:
            also = "Nothing was added; set [retention], and old snapshots are forgotten first."
    return LimitExceeded(f"{what}; limits.{key} allows {getattr(engine.limits, key):,}. {also}", code=CODES[key])
