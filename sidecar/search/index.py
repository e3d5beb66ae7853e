"""Keep the rows of a sink equal to what the heads of a store hold.

The store is the truth, and rows are only ever read out of it: whatever was missed, for however long, is caught up with by
looking again. Two who do this at once take turns, memory by memory; who has its turn reads the head again before it
writes, so rows of an older snapshot never replace those of a newer one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sidecar.errors import (
    SearchDenied,
    SearchUnfit,
    SearchUnreachable,
    SidecarError,
    SnapshotDamaged,
    SnapshotError,
)
from sidecar.host.spool import open_spool
from sidecar.records.snapshot import fetch_records
from sidecar.search.port import MemoryRef, Query, SearchDatabase, SearchHits, WriteCounts
from sidecar.store.repository import PARALLEL_READS, HeadState, Repository
from sidecar.store.store_id import ensure_store_id, read_store_id

ATTEMPTS = 5
"""A head may move while its snapshot is read; then it is read again, so often."""


class HeadKeepsMoving(SnapshotError):
    """The head moved each time its snapshot had been read. The next try finds it."""

    code = "head-restless"
    retryable = True
    default_hint = "Nothing to do: the rows are brought up to date by the next try."


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexResult:
    """What came of bringing the rows of one memory up to date."""

    memory: str
    state: str
    """"current": nothing was to be done; "written"; "removed": there is no such memory any more; "failed"."""
    snapshot: str = ""
    records: int = 0
    written: int = 0
    removed: int = 0
    problems: list[str] = field(default_factory=list)
    """What of the snapshot could not be read."""
    problem: str = ""
    """Why it failed."""
    retryable: bool = False
    """Whether it may go well in a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What was found, and in which of its memories the rows are not those of the head."""

    found: SearchHits
    behind: list[str]
    unindexed: list[str] = field(default_factory=list)
    """Where nothing was found: those of the memories asked for (or of all) that were never indexed, so not looked at."""


class MemoryIndex:
    """The rows of one store in a sink."""

    def __init__(self, repository: Repository, sink: SearchDatabase) -> None:
        self._repository = repository
        self._sink = sink
        self._id = ""

    async def update_memory(self, memory: str) -> IndexResult:
        """Make the rows of a memory equal to its head, or remove them when it has none.

        Raise a ``SinkError``, a ``StoreError``, or a ``SnapshotError`` when the head's snapshot cannot be read.
        """
        self._id = self._id or await ensure_store_id(self._repository.store)
        place = MemoryRef(self._id, memory)
        for _ in range(ATTEMPTS):
            state = await self._read_head(memory)
            if state.head is None:
                done = await self._remove_rows(place)
            elif (await self._sink.standing(place.store, memory)).get(memory) == state.snapshot:
                return IndexResult(memory=memory, state="current", snapshot=state.snapshot)
            else:
                done = await self._write_rows(place, state.snapshot)
            if done is not None:
                return done
        raise HeadKeepsMoving(f"The head of {memory} moves faster than it can be read.")

    async def catch_up(self, memories: Sequence[str] | None = None) -> AsyncIterator[IndexResult]:
        """Bring everything up to date: all memories, or those named, and whatever has rows but is not in the store.

        One that cannot be read or written does not keep the others from it. Raise a ``SinkError`` when the sink can do
        nothing at all.
        """
        for memory in await self.behind() if memories is None else memories:
            try:
                yield await self.update_memory(memory)
            except (SearchUnreachable, SearchDenied, SearchUnfit):
                raise
            except SidecarError as problem:
                yield IndexResult(memory=memory, state="failed", problem=problem.message, retryable=problem.retryable)

    async def behind(self) -> list[str]:
        """The memories whose rows are not what the store holds. One whose head cannot be read is among them."""
        held = await self._sink.standing(await self._read_store_id())
        there = await self._repository.memories()
        wrong = await self._list_differing({memory: held.get(memory) for memory in there})
        return wrong + sorted(held.keys() - set(there))

    async def search(self, query: Query) -> SearchResult:
        """Raise a ``SinkError`` or a ``StoreError``."""
        found = await self._sink.search(replace(query, store=await self._read_store_id()))
        behind = await self._list_differing({hit.memory: hit.snapshot for hit in found.hits})
        return SearchResult(
            found=found, behind=behind, unindexed=[] if found.hits else await self._list_unindexed(query.memories)
        )

    async def _list_unindexed(self, wanted: Sequence[str]) -> list[str]:
        held = await self._sink.standing(await self._read_store_id())
        there = await self._repository.memories()
        return [memory for memory in there if memory not in held and (not wanted or memory in wanted)]

    async def _list_differing(self, held: Mapping[str, str | None]) -> list[str]:
        """Of memories and the snapshots their rows are of, those whose head is another one or cannot be read."""
        turns = asyncio.Semaphore(PARALLEL_READS)

        async def differs(memory: str, snapshot: str | None) -> bool:
            async with turns:
                state = await self._repository.head(memory)
            if state.head is None and not state.problem:
                return snapshot is not None
            return snapshot != state.snapshot

        answers = await asyncio.gather(*(differs(memory, snapshot) for memory, snapshot in held.items()))
        return sorted(memory for memory, wrong in zip(held, answers, strict=True) if wrong)

    async def _read_head(self, memory: str) -> HeadState:
        state = await self._repository.head(memory)
        if state.problem:
            raise SnapshotDamaged(f"The head of {memory} cannot be read: {state.problem}")
        return state

    async def _write_rows(self, place: MemoryRef, snapshot: str) -> IndexResult | None:
        """``None``: the head is another one by now."""

        async def still() -> bool:
            return (await self._repository.head(place.memory)).snapshot == snapshot

        try:
            manifest = await self._repository.manifest(place.memory, snapshot)
            async with open_spool() as scratch:
                records = await fetch_records(self._repository.store, manifest, scratch)
                written = await self._sink.replace(place, snapshot, records, still)
        except SnapshotError:
            if await still():
                raise
            return None  # it went because another took its place
        return None if written is None else _build_result(place, snapshot, written, records.problems)

    async def _remove_rows(self, place: MemoryRef) -> IndexResult | None:
        async def still() -> bool:
            state = await self._repository.head(place.memory)
            return state.head is None and not state.problem

        removed = await self._sink.remove(place, still)
        if removed is None:
            return None
        return IndexResult(memory=place.memory, state="removed" if removed else "current", removed=removed)

    async def _read_store_id(self) -> str:
        """The store's own name, or ``""``: who only looks gives it none."""
        self._id = self._id or await read_store_id(self._repository.store)
        return self._id


def _build_result(place: MemoryRef, snapshot: str, written: WriteCounts, problems: list[str]) -> IndexResult:
    return IndexResult(
        memory=place.memory,
        state="written",
        snapshot=snapshot,
        records=written.records,
        written=written.written,
        removed=written.removed,
        problems=problems,
    )
