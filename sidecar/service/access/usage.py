"""How much of its quotas a named token uses: the bytes that its memories take in the store, and how many they are.

The store is listed once for all tokens, when the first of them needs it and every ``STALE_SECONDS`` after that, in the
background; never for a single call. In between, what this service stores and removes is counted. What other services
do is therefore known after five minutes at the latest. Nobody is refused by an old count: before that, the store is
listed again, though not more often than every ``FRESH_SECONDS``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import field

import structlog

from sidecar.errors import QuotaBytes, QuotaMemories, SidecarError
from sidecar.host.values import dataclass
from sidecar.ids import ROOT, MemoryKeys, build_memory_key, is_plain_id
from sidecar.models.answers import Event
from sidecar.ports import Store
from sidecar.service.access.grants import Caller, compile_memories
from sidecar.service.event_types import DELETED
from sidecar.store.folders import read_id

STALE_SECONDS = 300.0
FRESH_SECONDS = 30.0
MOST_CHANGES = 10_000
"""After so many changes since a listing, it is dropped."""


@dataclass(frozen=True, slots=True)
class _Listing:
    """The bytes in each folder of a memory, as listed; ``began`` by the monotonic clock."""

    began: float
    sizes: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Change:
    """So many bytes were stored in a memory, or removed."""

    at: float
    memory: str
    size: int


@dataclass(slots=True)
class _Holding:
    """What one token has."""

    listing: _Listing
    sizes: dict[str, int]
    """The bytes of each of its memories."""
    total: int = field(init=False)

    def __post_init__(self) -> None:
        self.total = sum(self.sizes.values())

    def add(self, memory: str, size: int) -> None:
        self.total += size
        self.sizes[memory] = self.sizes.get(memory, 0) + size

    def remove(self, memory: str) -> None:
        self.total -= self.sizes.pop(memory, 0)


class Usage:
    """What the named tokens with quotas have in one store."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._listing: _Listing | None = None
        self._keeps_changes = False
        self._turn = asyncio.Lock()
        self._refreshing: asyncio.Task[None] | None = None
        self._ids: dict[str, str] = {}
        """The memory in each folder whose name does not tell; that never changes."""
        self._holdings: dict[tuple[str, tuple[str, ...]], _Holding] = {}
        self._since: list[_Change] = []
        """What was stored and removed since the listing began."""
        self._coming: dict[str, _Change] = {}
        """What exports are about to store, by memory: it is counted before it is there."""

    async def check(self, caller: Caller, memory: str, added: int = 0) -> None:
        """Check that a caller may add so many bytes to a memory, or anything at all. Raise ``QuotaBytes`` or
        ``QuotaMemories``."""
        if not caller.quotas.bytes and not caller.quotas.memories:
            return
        holding = await self._find_holding(caller)
        problem = _find_excess(caller, holding, memory, added)
        if problem is not None and self._clock() - holding.listing.began >= FRESH_SECONDS:
            await self._list_store(older_than=FRESH_SECONDS)
            problem = _find_excess(caller, await self._find_holding(caller), memory, added)
        if problem is not None:
            raise problem

    async def charge(self, caller: Caller, memory: str, added: int) -> None:
        """Count bytes that are about to be stored for a caller. Raise ``QuotaBytes`` or ``QuotaMemories`` if they are
        too many."""
        self._drop_coming(memory)
        await self.check(caller, memory, added)
        if caller.quotas.bytes or caller.quotas.memories:
            self._coming[memory] = self.add(memory, added)

    def count(self, event: Event) -> None:
        """Count what an event says was stored or removed, by whomever."""
        kind, _, outcome = event.type.partition(".")
        if kind in ("export", "restore"):
            memory = str(event.details.get("saved_first_memory") or event.memory)
            self._drop_coming(memory)
            if size := int(event.details.get("packed_bytes", 0)):
                self.add(memory, size)
        elif kind == "retention" and outcome == "forgot":
            self.add(event.memory, -int(event.details.get("bytes", 0)))
        elif event.type == DELETED:
            self._forget(event.memory)

    def add(self, memory: str, size: int) -> _Change:
        """Count bytes that were stored in a memory, or removed."""
        change = _Change(self._clock(), memory, size)
        if self._keeps_changes:
            self._since.append(change)
        for (_, patterns), holding in self._holdings.items():
            if compile_memories(patterns)(memory):
                holding.add(memory, size)
        if len(self._since) > MOST_CHANGES:  # nobody has asked for long
            self._listing, self._since, self._holdings, self._keeps_changes = None, [], {}, False
        return change

    def _forget(self, memory: str) -> None:
        """Count that a memory was deleted."""
        self._since = [change for change in self._since if change.memory != memory]
        if self._listing is not None:
            self._listing.sizes.pop(build_memory_key(memory), None)
        for holding in self._holdings.values():
            holding.remove(memory)

    def _drop_coming(self, memory: str) -> None:
        """Take back what was counted for an export that has ended."""
        change = self._coming.pop(memory, None)
        if change is None:
            return
        self._since = [other for other in self._since if other is not change]
        for holding in self._holdings.values():
            if memory in holding.sizes and holding.listing.began <= change.at:
                holding.add(memory, -change.size)
                if not holding.sizes[memory]:  # it would have been a new memory
                    holding.remove(memory)

    async def _find_holding(self, caller: Caller) -> _Holding:
        """Return what a caller has, from the latest listing. An old one is replaced in the background."""
        listing = self._listing or await self._list_store(older_than=STALE_SECONDS)
        idle = self._refreshing is None or self._refreshing.done()
        if idle and self._clock() - listing.began >= STALE_SECONDS:
            self._refreshing = asyncio.create_task(self._refresh())
        key = (caller.id, caller.memories)
        holding = self._holdings.get(key)
        if holding is None or holding.listing is not listing:
            holding = _Holding(listing, await self._pick_sizes(caller, listing))
            for change in self._since:
                if change.at >= listing.began and caller.covers(change.memory):
                    holding.add(change.memory, change.size)
            self._holdings = {known: one for known, one in self._holdings.items() if known[0] != caller.id}
            self._holdings[key] = holding
        return holding

    async def _refresh(self) -> None:
        try:
            await self._list_store(older_than=STALE_SECONDS)
        except SidecarError as problem:
            structlog.get_logger("sidecar").warning("the use of quotas is not counted again", **problem.as_dict())

    async def _list_store(self, *, older_than: float) -> _Listing:
        """List the store, unless that was done since: of callers that wait here, one does it for all."""
        async with self._turn:
            began = self._clock()
            if self._listing is not None and began - self._listing.began < older_than:
                return self._listing
            self._keeps_changes = True
            sizes: dict[str, int] = {}
            async for info in self._store.list(ROOT):
                folder = info.key[len(ROOT) :].partition("/")[0]
                sizes[folder] = sizes.get(folder, 0) + info.size
            self._listing = _Listing(began, sizes)
            self._since = [change for change in self._since if change.at >= began]
            self._ids = {folder: id for folder, id in self._ids.items() if folder in sizes}
            return self._listing

    async def _pick_sizes(self, caller: Caller, listing: _Listing) -> dict[str, int]:
        """Return the bytes of each memory that the caller's token is for. Only folders are looked into that may be
        one."""
        found = {}
        for folder, size in list(listing.sizes.items()):
            if caller.may_cover_folder(folder) and caller.covers(memory := await self._find_id(folder)):
                found[memory] = size
        return found

    async def _find_id(self, folder: str) -> str:
        """Return the memory in a folder; empty if nothing there tells."""
        if is_plain_id(folder):
            return folder
        if folder not in self._ids:
            keys = MemoryKeys(f"{ROOT}{folder}/")
            told = [keys.head, *[info.key async for info in self._store.list(keys.snapshots)][:1]]
            if not (memory := (await read_id(self._store, folder, told))[0]):
                return ""
            self._ids[folder] = memory
        return self._ids[folder]


def _find_excess(caller: Caller, holding: _Holding, memory: str, added: int) -> QuotaBytes | QuotaMemories | None:
    """Return the error if the caller would have too much, or has all that it may have already."""
    quotas = caller.quotas
    if quotas.memories and memory not in holding.sizes and len(holding.sizes) >= quotas.memories:
        return QuotaMemories(f"This token has {len(holding.sizes):,} memories; it may have {quotas.memories:,}.")
    if quotas.bytes and holding.total + max(added, 1) > quotas.bytes:
        would = f" and would take {holding.total + added:,}" if added else ""
        return QuotaBytes(
            f"The memories of this token take {holding.total:,} bytes in the store{would}; they may take {quotas.bytes:,}."
        )
    return None
