"""Memories in a store: their heads, manifests and packs.

Packs and manifests are written under fresh names and never again. A snapshot counts once its manifest is there; it is
the one to restore once the head, replaced by compare-and-swap, names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from sidecar.errors import (
    BadMemoryId,
    NotSigned,
    ObjectRefused,
    SnapshotDamaged,
    SnapshotError,
    SnapshotNotFound,
    SwapLost,
    UnknownFormat,
)
from sidecar.ids import MemoryKeys, check_memory_id, check_new_memory_id, is_snapshot_id, make_snapshot_id
from sidecar.ports import Store, StoredObject
from sidecar.store.folders import list_memories
from sidecar.store.history import rebuild_head
from sidecar.store.manifest import FORMAT, LONGEST_HISTORY, NOT_KNOWN, Head, Manifest
from sidecar.store.store_id import ensure_store_id, read_store_id
from sidecar.store.witnesses import HeadCopies

LOG = logging.getLogger("sidecar")
PARALLEL_READS = 8
MOST_BEYOND = 20
"""So many snapshots after the head are looked at before an export."""


@dataclass(frozen=True, slots=True)
class HeadState:
    """A head as it was read: ``version`` is what a swap must still find. ``problem`` is set when it cannot be read."""

    head: Head | None = None
    version: str | None = None
    problem: str = ""
    notice: str = ""
    """What somebody did, or may have done, to it; when the head had to be found elsewhere, where."""
    store: str = ""
    """The store's id, where the head does not have it and it was read by itself."""

    @property
    def store_id(self) -> str:
        return (self.head.store if self.head else "") or self.store

    @property
    def snapshot(self) -> str:
        return self.head.snapshot if self.head else ""

    def trouble(self, manifests: Mapping[str, Manifest | SnapshotDamaged]) -> str:
        """What is wrong with the head of a memory that has these snapshots; empty when nothing is, or there never was one."""
        if self.problem:
            return self.problem
        if self.snapshot:
            named = f"The head names snapshot {self.snapshot}, which has no manifest."
            return "" if self.snapshot in manifests else named
        eligible = any(not isinstance(one, Manifest) or not one.rejected for one in manifests.values())
        return "The head is missing." if self.version is None and eligible else ""


@dataclass(frozen=True, slots=True)
class Survey:
    """What a memory has in the store, from one listing."""

    snapshots: list[str]
    """Newest first."""
    sizes: dict[str, int]
    damaged: set[str]
    """Snapshots that somebody found damaged."""
    pinned: set[str]


@dataclass(frozen=True, slots=True)
class Repository:
    """Reads and writes one store. Knows nothing of sandboxes."""

    store: Store
    witnesses: HeadCopies | None = None
    """In a signed store: copies of heads, to tell one that was put back."""

    async def head(self, memory: str) -> HeadState:
        """The head of a memory; an empty state when it has none."""
        if self.witnesses is None:
            return await self._load_head(memory)
        witnesses = self.witnesses
        state, copies, ids = await asyncio.gather(
            self._load_head(memory), witnesses.list_generations(memory), self.list_snapshot_ids(memory)
        )
        made = await witnesses.list_made_after(memory, state.head, ids)
        if made or copies[:1] > [state.head.generation if state.head else 0]:
            # It may just have moved, and the copy or the snapshot been written after it was read.
            state = await self._load_head(memory)
        later = await witnesses.find_later(memory, state.head, copies, made)
        notice = witnesses.tell(later.words(memory, state.snapshot, state.problem))
        return HeadState(later.head, state.version, notice=notice) if later.head else replace(state, notice=notice)

    async def _load_head(self, memory: str) -> HeadState:
        version = None
        try:
            stored = await self.store.get(MemoryKeys.of(memory).head)
            if stored is None:
                return HeadState()
            version = stored.version
            return HeadState(Head.decode(stored.data, memory), version)
        except ObjectRefused as refused:
            return HeadState(None, refused.version, refused.message)
        except SnapshotDamaged as damage:
            return HeadState(None, version, damage.message)

    async def list_snapshot_ids(self, memory: str) -> list[str]:
        """Every snapshot of a memory that has a manifest, newest first."""
        keys = MemoryKeys.of(memory)
        names = [
            info.key[len(keys.snapshots) :].removesuffix(".json") async for info in self.store.list(keys.snapshots)
        ]
        return sorted(filter(is_snapshot_id, names), reverse=True)

    async def survey(self, memory: str) -> Survey:
        """List everything of a memory once."""
        keys = MemoryKeys.of(memory)
        sizes = {info.key: info.size async for info in self.store.list(keys.prefix)}
        names = [key[len(keys.snapshots) :].removesuffix(".json") for key in sizes if key.startswith(keys.snapshots)]
        damaged = {key[len(keys.damaged) :] for key in sizes if key.startswith(keys.damaged)}
        if damaged:
            # An earlier version calls a snapshot damaged whose format it does not know.
            damaged -= {
                name for name, why in (await self.read_damage(memory, damaged)).items() if why.endswith(NOT_KNOWN)
            }
        pinned = {key[len(keys.pins) :] for key in sizes if key.startswith(keys.pins)}
        return Survey(sorted(filter(is_snapshot_id, names), reverse=True), sizes, damaged, pinned)

    async def pinned(self, memory: str) -> set[str]:
        """The snapshots of a memory that no rule may take."""
        keys = MemoryKeys.of(memory)
        return {info.key[len(keys.pins) :] async for info in self.store.list(keys.pins)}

    async def mark_damaged(self, memory: str, snapshot: str, damage: SnapshotError) -> None:
        """Remember that a snapshot was found damaged, so that nothing is built on it and it does not hold up others.

        Not of one that is only not signed by a key given here, or in a format that is not known here: for others it may be
        whole.
        """
        if not isinstance(damage, NotSigned | UnknownFormat):
            await self.store.put(MemoryKeys.of(memory).damage(snapshot), damage.message.encode("utf-8", "replace"))

    async def read_damage(self, memory: str, snapshots: Iterable[str]) -> dict[str, str]:
        """What was found wrong with snapshots, as ``mark_damaged`` was told."""
        keys = {MemoryKeys.of(memory).damage(snapshot): snapshot for snapshot in snapshots}
        notes = await self.read_small_objects(keys)
        return {keys[key]: stored.data.decode("utf-8", "replace") for key, stored in notes.items()}

    async def read_small_objects(self, keys: Iterable[str]) -> dict[str, StoredObject]:
        """Many small objects at once, without those that are not there or are not believed."""
        turns = asyncio.Semaphore(PARALLEL_READS)

        async def read(key: str) -> tuple[str, StoredObject | None]:
            async with turns:
                try:
                    return key, await self.store.get(key)
                except ObjectRefused:
                    return key, None

        read_all = await asyncio.gather(*(read(key) for key in keys))
        return {key: stored for key, stored in read_all if stored is not None}

    async def clear_damaged(self, memory: str, snapshots: Iterable[str]) -> None:
        await self.store.delete([MemoryKeys.of(memory).damage(snapshot) for snapshot in snapshots])

    async def manifest(self, memory: str, snapshot: str) -> Manifest:
        """Raise ``SnapshotNotFound`` or ``SnapshotDamaged``."""
        stored = await self.store.get(MemoryKeys.of(memory).snapshot(snapshot))
        if stored is None:
            raise SnapshotNotFound(f"{memory} has no snapshot {snapshot}.")
        return Manifest.decode(stored.data, memory, snapshot)

    async def manifests(self, memory: str, ids: Iterable[str]) -> dict[str, Manifest | SnapshotDamaged]:
        """Many manifests at once; for a damaged one, what is wrong with it."""
        turns = asyncio.Semaphore(PARALLEL_READS)

        async def read(snapshot: str) -> tuple[str, Manifest | SnapshotDamaged | None]:
            async with turns:
                try:
                    return snapshot, await self.manifest(memory, snapshot)
                except SnapshotDamaged as damage:
                    return snapshot, damage
                except SnapshotNotFound:  # forgotten since it was listed
                    return snapshot, None

        read_all = await asyncio.gather(*(read(snapshot) for snapshot in ids))
        return {snapshot: manifest for snapshot, manifest in read_all if manifest is not None}

    async def make_next_id(self, memory: str, state: HeadState, ids: Iterable[str]) -> tuple[str, list[str]]:
        """An id for a new snapshot, and what is wrong with those that are listed as if they came after the head.

        It follows the head, or without one the newest snapshot that can be read: a name alone can be anybody's.
        """
        newest = state.head.newest if state.head else ""
        beyond = [snapshot for snapshot in ids if snapshot > newest]
        found = await self.manifests(memory, beyond[:MOST_BEYOND] if newest else beyond)
        refused = [manifest.message for manifest in found.values() if isinstance(manifest, SnapshotDamaged)]
        readable = [snapshot for snapshot, manifest in found.items() if isinstance(manifest, Manifest)]
        return make_snapshot_id(datetime.now(UTC), newest or max(readable, default="")), refused

    async def memories(self) -> list[str]:
        """The id of every memory in the store, from its head or else from any of its manifests."""
        found, problems = await list_memories(self.store)
        for problem in problems:
            LOG.warning(problem)
        return found

    async def heads(self) -> list[Head]:
        """The head of every memory that has one which can be read."""
        states = [await self.head(memory) for memory in await self.memories()]
        return [state.head for state in states if state.head is not None]

    async def commit(self, manifest: Manifest) -> None:
        """Make a snapshot whose packs are stored readable under its id."""
        await self.store.swap(
            MemoryKeys.of(manifest.memory).snapshot(manifest.snapshot), manifest.encode(), expected=None
        )

    async def move_head(self, state: HeadState, manifest: Manifest) -> Head:
        """Point the head at a snapshot, if nobody moved it since ``state`` was read. Raise ``HeadMoved`` otherwise.

        One that takes the place of a head which is damaged or gone remembers what the manifests say was head before.
        """
        store = state.store_id or await self._ensure_id()
        head = Head.at(manifest, datetime.now(UTC), state.head, store)
        if state.head is None and (before := await self.rebuild_head(manifest.memory)) is not None:
            past = [one for one in before.history if one[0] != manifest.snapshot]
            head = replace(head, history=[*head.history, *past][:LONGEST_HISTORY])
        key = MemoryKeys.of(manifest.memory).head
        if self.witnesses is not None and head.format > (state.head.format if state.head else FORMAT):
            await self.witnesses.clear(manifest.memory)
        try:
            await self.store.swap(key, head.encode(), expected=state.version)
        except SwapLost:
            there = await self.head(manifest.memory)
            if state.head is not None and there.head == state.head:
                # The same head, only sealed or signed anew: nobody moved it.
                return await self.move_head(there, manifest)
            # An answer that got lost and was retried looks like a defeat; the store knows better.
            if there.snapshot != manifest.snapshot:
                raise
        if self.witnesses is not None:
            await self.witnesses.add(head, state.head)
        await self.keep(manifest)
        return head

    async def rebuild_head(self, memory: str) -> Head | None:
        """What was head, as the manifests tell it; for when the head itself cannot be read."""
        manifests = await self.manifests(memory, await self.list_snapshot_ids(memory))
        return rebuild_head(manifest for manifest in manifests.values() if isinstance(manifest, Manifest))

    async def add_store_id(self, state: HeadState) -> HeadState:
        """The same state with the store's id in it, which is only asked for where the head does not have it."""
        if state.store_id:
            return state
        try:
            return replace(state, store=await read_store_id(self.store))
        except SnapshotDamaged as damage:
            return replace(state, notice=" ".join(filter(None, [state.notice, damage.message])))

    async def begin(self, state: HeadState) -> HeadState:
        """The same, in a store that is about to be written: one that has no id gets one."""
        return state if state.store_id else replace(state, store=await self._ensure_id())

    async def _ensure_id(self) -> str:
        """The store's id; "" where something else is in its place, which ``verify`` and an export tell."""
        try:
            return await ensure_store_id(self.store)
        except SnapshotDamaged:
            return ""

    async def keep(self, manifest: Manifest) -> None:
        """See that a snapshot just made the head, or pinned, is still there.

        Whoever forgets snapshots looks at the head and the pins again after removing a manifest, and puts it back if need
        be. Who moves the head or pins does so first and calls this after. Whichever of the two is later sees the other.
        """
        key = MemoryKeys.of(manifest.memory).snapshot(manifest.snapshot)
        with contextlib.suppress(SwapLost, ObjectRefused):  # somebody else put it back, or something in its place
            if await self.store.get(key) is None:
                await self.store.swap(key, manifest.encode(), expected=None)

    async def fence(self, memory: str) -> None:
        """Write the head anew as it is: whoever read it before can no longer move it."""
        while (state := await self.head(memory)).head is not None:
            head = replace(state.head, generation=state.head.generation + 1)
            with contextlib.suppress(SwapLost):
                await self.store.swap(MemoryKeys.of(memory).head, head.encode(), expected=state.version)
                if self.witnesses is not None:
                    await self.witnesses.add(head, state.head)
                return

    async def has_eligible(self, memory: str, ids: Iterable[str]) -> bool:
        """Whether any of these snapshots could be the memory's head; one that cannot be read may have been."""
        manifests = await self.manifests(memory, ids)
        return any(not isinstance(manifest, Manifest) or not manifest.rejected for manifest in manifests.values())

    async def iterate_candidates(self, memory: str) -> AsyncIterator[str]:
        """What to restore, best first: the head, what was head before it, then the rest, newest first.

        Where the head cannot be read, the manifests tell what was.
        """
        state = await self.head(memory)
        ids = await self.list_snapshot_ids(memory)
        head = state.head or await self.rebuild_head(memory)
        past = [snapshot for snapshot, _ in head.history] if head else []
        for snapshot in dict.fromkeys(
            [snapshot for snapshot in past if snapshot in ids or snapshot == state.snapshot] + ids
        ):
            yield snapshot

    async def delete_memory(self, memory: str) -> int:
        """Remove every byte of a memory, its head first. Return how many objects went."""
        keys = MemoryKeys.of(memory)
        if self.witnesses is not None:
            await self.witnesses.forget(memory)
        await self.store.delete([keys.head])
        return await self.store.purge(keys.prefix)

    async def exists(self, memory: str) -> bool:
        async for _ in self.store.list(MemoryKeys.of(memory).prefix):
            return True
        return False

    async def check_new_memory(self, memory: str) -> None:
        """Raise ``BadMemoryId`` for an id that no new memory may have, unless there is such a memory from before."""
        check_memory_id(memory)
        try:
            check_new_memory_id(memory)
        except BadMemoryId:
            keys = MemoryKeys.of(memory)
            async for info in self.store.list(keys.prefix):
                if not info.key.startswith(keys.calls):  # which whoever calls leaves, whatever comes of it
                    return
            raise
