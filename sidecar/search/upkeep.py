"""Keep the search index equal to the heads of a store.

The store is the truth, and records are only ever read from it: whatever was missed, for however long, is made up for by
comparing again. Two processes that do this at once take turns, memory by memory; the one whose turn it is reads the
head again before it writes, so records of an older snapshot never replace those of a newer one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import field, replace

from sidecar.errors import (
    IndexReset,
    SearchDenied,
    SearchUnfit,
    SearchUnreachable,
    SidecarError,
    SnapshotDamaged,
    SnapshotError,
    UsageError,
)
from sidecar.host.files import open_spool
from sidecar.host.values import dataclass
from sidecar.host.work import gather_few
from sidecar.layouts import Layout
from sidecar.models.answers import Found
from sidecar.records.snapshot import SnapshotLine, fetch_records
from sidecar.search.port import MemoryRef, Moment, Query, SearchDatabase, Still, WriteCounts
from sidecar.store.manifest import Manifest
from sidecar.store.repository import PARALLEL_READS, HeadState, Repository
from sidecar.store.store_id import ensure_store_id, read_store_id

ATTEMPTS = 5
"""How often a snapshot is read again because its head moved in the meantime."""
LONGEST_QUERY = 1000
FIRST_SECONDS = 5.0
"""How long a search in a service waits for what was never indexed, if it found nothing."""

ReadLine = Callable[[str, str], Awaitable[Sequence[Manifest]]]
"""Returns what a snapshot of a memory grew out of, the oldest first, and itself."""


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
    """The records of one store in a search database.

    ``read_line`` makes the past searchable: of memories for which that was asked, or with ``keep_history`` of all.
    """

    def __init__(
        self,
        repository: Repository,
        database: SearchDatabase,
        layouts: Mapping[str, Layout] | None = None,
        *,
        read_line: ReadLine | None = None,
        keep_history: bool = False,
        embedded: bool = False,
    ) -> None:
        self._repository = repository
        self._database = database
        self._layouts = layouts
        self._read_line = read_line
        self._keep_history = keep_history
        self._id = ""
        self.embedded = embedded
        """It is on this machine, and nobody else keeps it up to date."""
        self.in_use = asyncio.Event()
        """Set once somebody has searched."""
        self.caught_up: asyncio.Event | None = None
        """Set by who keeps it up to date in the background, once everything was."""

    async def update_memory(self, memory: str, *, history: bool = False) -> IndexResult:
        """Make the records of a memory equal to its head, or remove them if it has none. ``history``: from here on, keep
        what is known no more too.

        Raise a ``SearchError``, a ``StoreError``, or a ``SnapshotError`` if the head's snapshot cannot be read.
        """
        self._id = self._id or await ensure_store_id(self._repository.store)
        place = MemoryRef(self._id, memory)
        for attempt in range(ATTEMPTS):
            state = await self._read_head(memory)
            try:
                done = await self._equal(place, state, history=history or self._keep_history)
            except IndexReset:  # it is empty now, so that this can be done at once
                if attempt == ATTEMPTS - 1:
                    raise
                continue
            if done is not None:
                return done
        raise HeadKeepsMoving(f"The head of {memory} moves faster than it can be read.")

    async def _equal(self, place: MemoryRef, state: HeadState, *, history: bool) -> IndexResult | None:
        """Make the records of a memory equal to its head. Return ``None`` if it has moved in the meantime."""
        if state.head is None:
            return await self._remove_rows(place)
        held = (await self._database.standing(place.store, place.memory)).get(place.memory)
        line = (await self._database.lines(place.store, place.memory)).get(place.memory, ())
        if self._read_line is not None and (history or line):
            return await self._write_line(place, state.snapshot, line if held else ())
        if held == state.snapshot:
            return IndexResult(memory=place.memory, state="current", snapshot=state.snapshot)
        return await self._write_rows(place, state.snapshot)

    async def catch_up(
        self, memories: Sequence[str] | None = None, *, history: bool = False
    ) -> AsyncIterator[IndexResult]:
        """Update all memories, or those named, and yield the result of each. Records of memories that are not in the
        store any more are removed.

        A memory that cannot be read or written does not stop the others. Raise a ``SearchError`` if the database cannot
        be used at all.
        """
        for memory in await self.behind(history=history) if memories is None else memories:
            try:
                yield await self.update_memory(memory, history=history)
            except (SearchUnreachable, SearchDenied, SearchUnfit):
                raise
            except SidecarError as problem:
                yield IndexResult(memory=memory, state="failed", problem=problem.message, retryable=problem.retryable)

    async def behind(self, memories: Sequence[str] = (), *, history: bool = False) -> list[str]:
        """Return the memories, or those of the named ones, whose records differ from the store, including those whose
        head cannot be read. ``history``: also those of which only the present is there, or more of the past than the
        store still has."""
        store = await self._read_store_id()
        try:
            held = await self._database.standing(store)
            lines = await self._database.lines(store) if history or self._keep_history else {}
        except IndexReset:
            held, lines = {}, {}
        there = list(memories) or await self._repository.memories()
        wrong = set(await self._list_differing({memory: held.get(memory) for memory in there}))
        if history or self._keep_history:
            wrong |= {memory for memory in there if memory in held and memory not in lines}
        if history:
            same = [memory for memory in there if memory in lines and memory not in wrong]
            wrong |= {memory for memory in same if await self._has_forgotten(memory, lines[memory])}
        return sorted(wrong) + ([] if memories else sorted(held.keys() - set(there)))

    async def _has_forgotten(self, memory: str, line: Sequence[str]) -> bool:
        return not set(line) <= set(await self._repository.list_snapshot_ids(memory))

    async def search(self, query: Query) -> Found:
        """Search the records of this store. Raise a ``SearchError``, a ``StoreError``, or ``UsageError`` for a query that
        is too long."""
        if len(query.words) > LONGEST_QUERY:
            raise UsageError(f"A search has at most {LONGEST_QUERY:,} characters.")
        self.in_use.set()
        query = replace(query, store=await self._read_store_id())
        found = await self._search_once(query)
        if found.unindexed and self.caught_up is not None and not self.caught_up.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_SECONDS):
                    await self.caught_up.wait()
            found = await self._search_once(query)
        return found

    async def _search_once(self, query: Query) -> Found:
        try:
            found = await self._database.search(query)
        except IndexReset:
            found = await self._database.search(query)
        held = await self._database.standing(query.store) if query.history or not found.hits else {}
        lines = await self._database.lines(query.store) if query.history else {}
        wanted = set(query.memories)
        return Found(
            query=query.words,
            hits=found.hits,
            more=found.more,
            behind=await self._list_differing({hit.memory: hit.snapshot for hit in found.hits}),
            unindexed=[] if found.hits else await self._list_unindexed(query.memories, held),
            without_past=[
                memory for memory in held if query.history and memory not in lines and (not wanted or memory in wanted)
            ],
        )

    async def _list_unindexed(self, wanted: Sequence[str], held: Mapping[str, str]) -> list[str]:
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
        still = self._make_still(place, snapshot)
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

    async def _write_line(self, place: MemoryRef, head: str, held: Sequence[str]) -> IndexResult | None:
        """Write what is missing of the line of a head, snapshot by snapshot, and remove what was forgotten of it.

        ``held`` are those that were written. Interrupted, it goes on after the last one. Return ``None`` if the head has
        moved in the meantime.
        """
        assert self._read_line is not None
        still = self._make_still(place, head)
        try:
            line = list(await self._read_line(place.memory, head))
        except SnapshotError:
            if await still():
                raise
            return None
        ids = [manifest.snapshot for manifest in line]
        left = [one for one in held if one in ids]
        start = ids.index(held[-1]) + 1 if left and held[-1] in ids else 0
        if start and len(left) < len(held):
            await self._database.forget(place, sorted(set(held) - set(left)))
        written = WriteCounts()
        problems: list[str] = []
        begun = start > 0
        async with open_spool() as scratch:
            snapshots = SnapshotLine(self._repository.store, place.memory, scratch, self._layouts)
            for manifest in line[start:]:
                try:
                    records = await snapshots.read(manifest)
                except SnapshotDamaged as damage:
                    if not await still():
                        return None
                    if manifest.snapshot == head:
                        raise
                    problems.append(damage.message)
                    continue
                moment = Moment(manifest.created, begins=not begun)
                done = await self._database.replace(place, manifest.snapshot, records, still, moment)
                if done is None:
                    return None
                begun, written = True, _add_counts(written, done)
                problems = [*problems, *records.problems] if manifest.snapshot == head else problems
        if start == len(ids):
            return IndexResult(memory=place.memory, state="current", snapshot=head)
        return _build_result(place, head, written, problems)

    def _make_still(self, place: MemoryRef, snapshot: str) -> Still:
        async def still() -> bool:
            return (await self._repository.head(place.memory)).snapshot == snapshot

        return still

    async def _remove_rows(self, place: MemoryRef) -> IndexResult | None:
        """Remove the records of a memory. Return ``None`` if it has a head again."""

        async def still() -> bool:
            state = await self._repository.head(place.memory)
            return state.head is None and not state.problem

        removed = await self._database.remove(place, still)
        if removed is None:
            return None
        return IndexResult(memory=place.memory, state="removed" if removed else "current", removed=removed)

    async def is_begun(self) -> bool:
        """Return whether anything of this store was ever indexed."""
        return bool(await self._database.standing(await self._read_store_id()))

    async def _read_store_id(self) -> str:
        """Return the store's id, or ``""``; a read-only operation does not create one."""
        self._id = self._id or await read_store_id(self._repository.store)
        return self._id


def _add_counts(before: WriteCounts, now: WriteCounts) -> WriteCounts:
    written, removed = before.written + now.written, before.removed + now.removed
    return WriteCounts(records=now.records, written=written, removed=removed)


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
