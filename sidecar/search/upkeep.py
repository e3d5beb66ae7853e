"""Keep the search index equal to the heads of a store.

The store is the truth, and records are only ever read from it: whatever was missed, for however long, is made up for by
comparing again. Two processes that do this at once take turns, memory by memory; the one whose turn it is reads the
head again before it writes, so records of an older snapshot never replace those of a newer one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import field, replace

from sidecar.errors import (
    SearchDenied,
    SearchUnfit,
    SearchUnreachable,
    SidecarError,
    SnapshotDamaged,
    SnapshotError,
)
from sidecar.host.files import open_spool
from sidecar.host.values import dataclass
from sidecar.host.work import gather_few
from sidecar.layouts import Layout
from sidecar.models.answers import Found
from sidecar.records.snapshot import fetch_records
from sidecar.search.port import MemoryRef, Query, SearchDatabase, WriteCounts
from sidecar.store.repository import PARALLEL_READS, HeadState, Repository
from sidecar.store.store_id import ensure_store_id, read_store_id

ATTEMPTS = 5
"""How often a snapshot is read again because its head moved in the meantime."""


class HeadKeepsMoving(SnapshotError):
    """The head moved each time its snapshot had been read. The next try finds it."""

    code = "head-restless"
    retryable = True
    default_hint = "Nothing to do: the rows are brought up to date by the next try."


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexResult:
    """The result of updating the records of one memory."""

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
    """Whether another attempt may succeed."""


class SearchIndex:
    """The records of one store in a search database."""

    def __init__(
        self, repository: Repository, database: SearchDatabase, layouts: Mapping[str, Layout] | None = None
    ) -> None:
        self._repository = repository
        self._database = database
        self._layouts = layouts
        self._id = ""

    async def update_memory(self, memory: str) -> IndexResult:
        """Make the records of a memory equal to its head, or remove them if it has none.

        Raise a ``SearchError``, a ``StoreError``, or a ``SnapshotError`` if the head's snapshot cannot be read.
        """
        self._id = self._id or await ensure_store_id(self._repository.store)
        place = MemoryRef(self._id, memory)
        for _ in range(ATTEMPTS):
            state = await self._read_head(memory)
            if state.head is None:
                done = await self._remove_rows(place)
            elif (await self._database.standing(place.store, memory)).get(memory) == state.snapshot:
                return IndexResult(memory=memory, state="current", snapshot=state.snapshot)
            else:
                done = await self._write_rows(place, state.snapshot)
            if done is not None:
                return done
        raise HeadKeepsMoving(f"The head of {memory} moves faster than it can be read.")

    async def catch_up(self, memories: Sequence[str] | None = None) -> AsyncIterator[IndexResult]:
        """Update all memories, or those named, and yield the result of each. Records of memories that are not in the
        store any more are removed.

        A memory that cannot be read or written does not stop the others. Raise a ``SearchError`` if the database cannot
        be used at all.
        """
        for memory in await self.behind() if memories is None else memories:
            try:
                yield await self.update_memory(memory)
            except (SearchUnreachable, SearchDenied, SearchUnfit):
                raise
            except SidecarError as problem:
                yield IndexResult(memory=memory, state="failed", problem=problem.message, retryable=problem.retryable)

    async def behind(self) -> list[str]:
        """Return the memories whose records differ from the store, including those whose head cannot be read."""
        held = await self._database.standing(await self._read_store_id())
        there = await self._repository.memories()
        wrong = await self._list_differing({memory: held.get(memory) for memory in there})
        return wrong + sorted(held.keys() - set(there))

    async def search(self, query: Query) -> Found:
        """Search the records of this store. Raise a ``SearchError`` or a ``StoreError``."""
        found = await self._database.search(replace(query, store=await self._read_store_id()))
        return Found(
            query=query.words,
            hits=found.hits,
            more=found.more,
            behind=await self._list_differing({hit.memory: hit.snapshot for hit in found.hits}),
            unindexed=[] if found.hits else await self._list_unindexed(query.memories),
        )

    async def _list_unindexed(self, wanted: Sequence[str]) -> list[str]:
        held = await self._database.standing(await self._read_store_id())
        there = await self._repository.memories()
        return [memory for memory in there if memory not in held and (not wanted or memory in wanted)]

    async def _list_differing(self, held: Mapping[str, str | None]) -> list[str]:
        """Return the memories whose head is not the given snapshot, or cannot be read."""

        async def differs(memory: str) -> bool:
            state = await self._repository.head(memory)
            if state.head is None and not state.problem:
                return held[memory] is not None
            return held[memory] != state.snapshot

        answers = await gather_few(differs, held, PARALLEL_READS)
        return sorted(memory for memory, wrong in zip(held, answers, strict=True) if wrong)

    async def _read_head(self, memory: str) -> HeadState:
        state = await self._repository.head(memory)
        if state.problem:
            raise SnapshotDamaged(f"The head of {memory} cannot be read: {state.problem}")
        return state

    async def _write_rows(self, place: MemoryRef, snapshot: str) -> IndexResult | None:
        """Write the records of a snapshot. Return ``None`` if the head has moved in the meantime."""

        async def still() -> bool:
            return (await self._repository.head(place.memory)).snapshot == snapshot

        try:
            manifest = await self._repository.manifest(place.memory, snapshot)
            async with open_spool() as scratch:
                records = await fetch_records(self._repository.store, manifest, scratch, self._layouts)
                written = await self._database.replace(place, snapshot, records, still)
        except SnapshotError:
            if await still():
                raise
            return None  # it was removed because the head has moved
        return None if written is None else _build_result(place, snapshot, written, records.problems)

    async def _remove_rows(self, place: MemoryRef) -> IndexResult | None:
        """Remove the records of a memory. Return ``None`` if it has a head again."""

        async def still() -> bool:
            state = await self._repository.head(place.memory)
            return state.head is None and not state.problem

        removed = await self._database.remove(place, still)
        if removed is None:
            return None
        return IndexResult(memory=place.memory, state="removed" if removed else "current", removed=removed)

    async def _read_store_id(self) -> str:
        """Return the store's id, or ``""``; a read-only operation does not create one."""
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
