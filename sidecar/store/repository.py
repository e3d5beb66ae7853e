"""Memories in a store: their heads, manifests and packs.

Packs and manifests are written under fresh names and never changed. A snapshot exists once its manifest does; it is the
one to restore once the head, replaced by compare-and-swap, names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from dataclasses import replace
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
from sidecar.host.values import dataclass
from sidecar.host.work import gather_few
from sidecar.ids import MemoryKeys, check_memory_id, check_new_memory_id, is_snapshot_id, make_snapshot_id
from sidecar.ports import Store, StoredObject
from sidecar.store.folders import list_memories
from sidecar.store.head_copies import HeadCopies
from sidecar.store.manifest import FORMAT, LONGEST_HISTORY, NOT_KNOWN, REVIEWED, Head, Manifest, rebuild_head
from sidecar.store.reviews import read_reviews_or_none
from sidecar.store.store_id import ensure_store_id, read_store_id

LOG = logging.getLogger("sidecar")
PARALLEL_READS = 8
MOST_BEYOND = 20
"""At most this many snapshots after the head are read before an export."""


@dataclass(frozen=True, slots=True)
class HeadState:
    """A head as it was read: ``version`` is what a swap must still find. ``problem`` is set if it cannot be read."""

    head: Head | None = None
    version: str | None = None
    problem: str = ""
    notice: str = ""
    """A warning if the head was altered or may have been; if it had to be found elsewhere, where."""
    store: str = ""
    """The store's id, if the head does not have it and it was read separately."""

    @property
    def store_id(self) -> str:
        """The store's id, from the head or read separately; "" if it is not known."""
        return (self.head.store if self.head else "") or self.store

    @property
    def snapshot(self) -> str:
        """The head's snapshot; "" if there is no head."""
        return self.head.snapshot if self.head else ""

    def trouble(self, manifests: Mapping[str, Manifest | SnapshotDamaged], accepted: Collection[str] = ()) -> str:
        """Return what is wrong with the head of a memory that has these snapshots, of which some were ``accepted`` in a
        review; "" if nothing is, or there never was a head."""
        if self.problem:
            return self.problem
        if self.snapshot:
            named = f"The head names snapshot {self.snapshot}, which has no manifest."
            return "" if self.snapshot in manifests else named
        eligible = any(
            not isinstance(one, Manifest) or one.is_eligible or name in accepted for name, one in manifests.items()
        )
        return "The head is missing." if self.version is None and eligible else ""


@dataclass(frozen=True, slots=True)
class Survey:
    """What a memory has in the store, from one listing."""

    snapshots: list[str]
    """Snapshot ids, newest first."""
    sizes: dict[str, int]
    damaged: set[str]
    """Snapshots that were found damaged."""
    pinned: set[str]


@dataclass(frozen=True, slots=True)
class Repository:
    """Reads and writes one store. Knows nothing of sandboxes."""

    store: Store
    witnesses: HeadCopies | None = None
    """In a signed store: copies of heads, to detect a head that was put back."""

    async def head(self, memory: str) -> HeadState:
        """Return the head of a memory; an empty state if it has none."""
        if self.witnesses is None:
            return await self._load_head(memory)
        witnesses = self.witnesses
        state, copies, ids = await asyncio.gather(
            self._load_head(memory), witnesses.list_generations(memory), self.list_snapshot_ids(memory)
        )
        made = await witnesses.list_made_after(memory, state.head, ids)
        if made or copies[:1] > [state.head.generation if state.head else 0]:
            # The head may just have moved, and the copy or the snapshot may have been written after it was read.
            state = await self._load_head(memory)
        later = await witnesses.find_later(memory, state.head, copies, made)
        notice = witnesses.tell(later.words(memory, state.snapshot, state.problem))
        return HeadState(later.head, state.version, notice=notice) if later.head else replace(state, notice=notice)

    async def _load_head(self, memory: str) -> HeadState:
        """Read the head object alone; a damaged or refused one is reported in ``problem``."""
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
        """Return every snapshot of a memory that has a manifest, newest first."""
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
            # An earlier version marks a snapshot as damaged if it does not know its format.
            damaged -= {
                name for name, why in (await self.read_damage(memory, damaged)).items() if why.endswith(NOT_KNOWN)
            }
        pinned = {key[len(keys.pins) :] for key in sizes if key.startswith(keys.pins)}
        return Survey(sorted(filter(is_snapshot_id, names), reverse=True), sizes, damaged, pinned)

    async def pinned(self, memory: str) -> set[str]:
        """Return the snapshots of a memory that no rule may remove."""
        keys = MemoryKeys.of(memory)
        return {info.key[len(keys.pins) :] async for info in self.store.list(keys.pins)}

    async def mark_damaged(self, memory: str, snapshot: str, damage: SnapshotError) -> None:
        """Record that a snapshot was found damaged, so that nothing is built on it and it does not hold up others.

        Not for one that is only not signed by a key given here, or in a format not known here: for others it may be
        intact.
        """
        if not isinstance(damage, NotSigned | UnknownFormat):
            await self.store.put(MemoryKeys.of(memory).damage(snapshot), damage.message.encode("utf-8", "replace"))

    async def read_damage(self, memory: str, snapshots: Iterable[str]) -> dict[str, str]:
        """Return what was found wrong with snapshots, as ``mark_damaged`` recorded it."""
        keys = {MemoryKeys.of(memory).damage(snapshot): snapshot for snapshot in snapshots}
        notes = await self.read_small_objects(keys)
        return {keys[key]: stored.data.decode("utf-8", "replace") for key, stored in notes.items()}

    async def read_small_objects(self, keys: Iterable[str]) -> dict[str, StoredObject]:
        """Read many small objects at once; missing and refused ones are left out."""

        async def read(key: str) -> tuple[str, StoredObject | None]:
            try:
                return key, await self.store.get(key)
            except ObjectRefused:
                return key, None

        read_all = await gather_few(read, keys, PARALLEL_READS)
        return {key: stored for key, stored in read_all if stored is not None}

    async def clear_damaged(self, memory: str, snapshots: Iterable[str]) -> None:
        """Remove the record that snapshots are damaged."""
        await self.store.delete([MemoryKeys.of(memory).damage(snapshot) for snapshot in snapshots])

    async def manifest(self, memory: str, snapshot: str) -> Manifest:
        """Read a manifest. Raise ``SnapshotNotFound`` or ``SnapshotDamaged``."""
        stored = await self.store.get(MemoryKeys.of(memory).snapshot(snapshot))
        if stored is None:
            raise SnapshotNotFound(f"{memory} has no snapshot {snapshot}.")
        return Manifest.decode(stored.data, memory, snapshot)

    async def manifests(self, memory: str, ids: Iterable[str]) -> dict[str, Manifest | SnapshotDamaged]:
        """Read many manifests at once; for a damaged one the error is returned."""

        async def read(snapshot: str) -> tuple[str, Manifest | SnapshotDamaged | None]:
            try:
                return snapshot, await self.manifest(memory, snapshot)
            except SnapshotDamaged as damage:
                return snapshot, damage
            except SnapshotNotFound:  # forgotten since it was listed
                return snapshot, None

        read_all = await gather_few(read, ids, PARALLEL_READS)
        return {snapshot: manifest for snapshot, manifest in read_all if manifest is not None}

    async def make_next_id(self, memory: str, state: HeadState, ids: Iterable[str]) -> tuple[str, list[str]]:
        """Return an id for a new snapshot, and the problems of snapshots listed as if they came after the head.

        The id follows the head, or without one the newest snapshot that can be read: anyone could have written a mere
        name.
        """
        newest = state.head.newest if state.head else ""
        beyond = [snapshot for snapshot in ids if snapshot > newest]
        found = await self.manifests(memory, beyond[:MOST_BEYOND] if newest else beyond)
        refused = [manifest.message for manifest in found.values() if isinstance(manifest, SnapshotDamaged)]
        readable = [snapshot for snapshot, manifest in found.items() if isinstance(manifest, Manifest)]
        return make_snapshot_id(datetime.now(UTC), newest or max(readable, default="")), refused

    async def memories(self, in_folder: Callable[[str], bool] | None = None) -> list[str]:
        """Return the id of every memory in the store, from its head or else from any of its manifests; ``in_folder``:
        only of those in folders that it returns true for."""
        found, problems = await list_memories(self.store, in_folder)
        for problem in problems:
            LOG.warning(problem)
        return found

    async def heads(self) -> list[Head]:
        """Return the head of every memory that has one which can be read."""
        states = [await self.head(memory) for memory in await self.memories()]
        return [state.head for state in states if state.head is not None]

    async def commit(self, manifest: Manifest) -> None:
        """Write the manifest of a snapshot whose packs are stored: from now on it can be read."""
        await self.store.swap(
            MemoryKeys.of(manifest.memory).snapshot(manifest.snapshot), manifest.encode(), expected=None
        )

    async def move_head(self, state: HeadState, manifest: Manifest) -> Head:
        """Point the head at a snapshot, if it was not moved since ``state`` was read. Raise ``SwapLost`` otherwise.

        A head that replaces a damaged or missing one remembers what the manifests say was head before.
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
                # The same head, only encrypted or signed again: it was not moved.
                return await self.move_head(there, manifest)
            # If the answer of a successful swap got lost and was retried, that looks like a lost race; the store tells
            # the truth.
            if there.snapshot != manifest.snapshot:
                raise
        if self.witnesses is not None:
            await self.witnesses.add(head, state.head)
        await self.keep(manifest)
        return head

    async def rebuild_head(self, memory: str) -> Head | None:
        """Return the head that the manifests tell; for when the head itself cannot be read."""
        manifests = await self.manifests(memory, await self.list_snapshot_ids(memory))
        whole = [manifest for manifest in manifests.values() if isinstance(manifest, Manifest)]
        return rebuild_head(whole, (await read_reviews_or_none(self.store, memory)).accepted)

    async def add_store_id(self, state: HeadState) -> HeadState:
        """Return the state with the store's id in it, which is read only if the head does not have it."""
        if state.store_id:
            return state
        try:
            return replace(state, store=await read_store_id(self.store))
        except SnapshotDamaged as damage:
            return replace(state, notice=" ".join(filter(None, [state.notice, damage.message])))

    async def begin(self, state: HeadState) -> HeadState:
        """Return the state with the store's id, creating the id if the store has none: it is about to be written."""
        return state if state.store_id else replace(state, store=await self._ensure_id())

    async def _ensure_id(self) -> str:
        """Return the store's id; "" if something else is in its place, which ``verify`` and an export report."""
        try:
            return await ensure_store_id(self.store)
        except SnapshotDamaged:
            return ""

    async def keep(self, manifest: Manifest) -> None:
        """Make sure that a snapshot just made the head, or pinned, still exists.

        Forgetting snapshots reads the head and the pins again after removing a manifest, and puts the manifest back if
        needed. Moving the head or pinning happens first, and this is called after. So whichever of the two is later
        sees the other.
        """
        key = MemoryKeys.of(manifest.memory).snapshot(manifest.snapshot)
        # Another process may have put it back, or something else is in its place.
        with contextlib.suppress(SwapLost, ObjectRefused):
            if await self.store.get(key) is None:
                await self.store.swap(key, manifest.encode(), expected=None)

    async def fence(self, memory: str) -> None:
        """Write the head again with a higher generation: processes that read it before can no longer move it."""
        while (state := await self.head(memory)).head is not None:
            head = replace(state.head, generation=state.head.generation + 1)
            with contextlib.suppress(SwapLost):
                await self.store.swap(MemoryKeys.of(memory).head, head.encode(), expected=state.version)
                if self.witnesses is not None:
                    await self.witnesses.add(head, state.head)
                return

    async def raise_head(self, memory: str, *, fence: bool = False) -> HeadState:
        """Make sure that the head, if there is one, has the format of a memory under review, which earlier versions refuse,
        and return it: they would make what grows out of a snapshot that waits the head. With ``fence``, write it again
        in any case: an export that read it before can no longer move it."""
        while (state := await self.add_store_id(await self.head(memory))).head is not None:
            if state.head.format == REVIEWED and not fence:
                break
            head = replace(state.head, format=REVIEWED, generation=state.head.generation + 1)
            if self.witnesses is not None and state.head.format != REVIEWED:
                # An earlier version would take the newest copy that it can read.
                await self.witnesses.clear(memory)
            with contextlib.suppress(SwapLost):
                await self.store.swap(MemoryKeys.of(memory).head, head.encode(), expected=state.version)
                if self.witnesses is not None:
                    await self.witnesses.add(head, state.head)
                fence = False
        return state

    async def has_eligible(self, memory: str, ids: Iterable[str]) -> bool:
        """Return whether any of these snapshots could be the memory's head; one that cannot be read may have been."""
        manifests = await self.manifests(memory, ids)
        if any(not isinstance(manifest, Manifest) or manifest.is_eligible for manifest in manifests.values()):
            return True
        return bool(manifests) and not (await read_reviews_or_none(self.store, memory)).accepted.keys().isdisjoint(
            manifests
        )

    async def iterate_candidates(self, memory: str) -> AsyncIterator[str]:
        """Yield what to restore, best first: the head, what was head before it, then the rest, newest first.

        If the head cannot be read, the manifests tell what was head.
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
        """Remove every object of a memory, its head first. Return how many were removed."""
        keys = MemoryKeys.of(memory)
        if self.witnesses is not None:
            await self.witnesses.forget(memory)
        await self.store.delete([keys.head])
        return await self.store.purge(keys.prefix)

    async def exists(self, memory: str) -> bool:
        """Return whether the store has any object of this memory."""
        async for _ in self.store.list(MemoryKeys.of(memory).prefix):
            return True
        return False

    async def check_new_memory(self, memory: str) -> None:
        """Raise ``BadMemoryId`` for an id that no new memory may have, unless such a memory exists from before."""
        check_memory_id(memory)
        try:
            check_new_memory_id(memory)
        except BadMemoryId:
            keys = MemoryKeys.of(memory)
            async for info in self.store.list(keys.prefix):
                if not info.key.startswith(keys.calls):  # left by a call, also by one that failed
                    return
            raise
