"""Memories in a store: their heads, manifests and packs.

Packs and manifests are written under fresh names and never changed. A snapshot exists once its manifest does; it is the
one to restore once the head, replaced by compare-and-swap, names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from dataclasses import field, replace
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
from sidecar.format.checksums import decode_checksummed
from sidecar.host.values import dataclass
from sidecar.host.work import gather_few
from sidecar.ids import (
    ROOT,
    MemoryKeys,
    build_memory_key,
    check_memory_id,
    check_new_memory_id,
    is_snapshot_id,
    make_snapshot_id,
)
from sidecar.ports import ObjectInfo, Store, StoredObject
from sidecar.store.folders import list_memories
from sidecar.store.head_copies import HeadCopies
from sidecar.store.manifest import (
    FORMAT,
    LONGEST_HISTORY,
    NOT_KNOWN,
    REVIEWED,
    Head,
    Manifest,
    check_sizes,
    rebuild_head,
)
from sidecar.store.recall import Recall, Recalled
from sidecar.store.reviews import ACCEPTED, Reviews, read_reviews_or_none
from sidecar.store.store_id import ensure_store_id, read_store_id

LOG = logging.getLogger("sidecar")
PARALLEL_READS = 32
MOST_BEYOND = 20
"""At most this many snapshots after the head are read before an export."""
MOST_RECENT = 100
"""So many of the latest heads, and what was stored since the oldest of them, are known of a memory that has too many
objects to list them all."""


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
    versions: dict[str, str] = field(default_factory=dict)
    """The versions of the objects, where the listing tells them."""
    now: float = 0.0
    """When the latest of these objects was written, by the store's clock: it cannot be earlier now."""
    complete: bool = True
    """Nothing is missing. Otherwise the memory has too many objects: ``snapshots`` has the recent ones, ``sizes`` those
    objects that were asked for, and pins are not known."""


@dataclass(frozen=True, slots=True)
class Repository:
    """Reads and writes one store. Knows nothing of sandboxes."""

    store: Store
    witnesses: HeadCopies | None = None
    """In a signed store: copies of heads, to detect a head that was put back."""
    recall: Recall = field(default_factory=Recall)
    """What need not be read again, if a listing says that it is as it was."""

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

    async def find_head(self, folder: str, listed: str = "") -> HeadState | None:
        """Return the head of the memory in a folder of the store, whose name may not tell the id; ``None`` if it is not
        valid. ``listed``: its version, as a listing shows it."""
        try:
            stored = await self._read(MemoryKeys(f"{ROOT}{folder}/").head, listed)
            memory = decode_checksummed(stored.data).get("memory") if stored is not None else None
            if stored is None or not isinstance(memory, str) or build_memory_key(memory) != folder:
                return None
            head = Head.decode(stored.data, memory)
        except (ValueError, BadMemoryId, ObjectRefused, SnapshotDamaged):
            return None
        return HeadState(head, stored.version) if self.witnesses is None else await self.head(memory)

    async def _load_head(self, memory: str, listed: str = "") -> HeadState:
        """Read the head object alone; a damaged or refused one is reported in ``problem``. ``listed``: its version, as a
        listing shows it."""
        version = None
        try:
            stored = await self._read(MemoryKeys.of(memory).head, listed)
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
        return await self._build_survey(memory, [info async for info in self.store.list(MemoryKeys.of(memory).prefix)])

    async def _build_survey(self, memory: str, infos: Iterable[ObjectInfo], *, complete: bool = True) -> Survey:
        keys = MemoryKeys.of(memory)
        sizes: dict[str, int] = {}
        versions: dict[str, str] = {}
        now = 0.0
        for info in infos:
            sizes[info.key] = info.size
            now = max(now, info.modified)
            if info.version:
                versions[info.key] = info.version
        self.recall.compare(versions)
        names = [key[len(keys.snapshots) :].removesuffix(".json") for key in sizes if key.startswith(keys.snapshots)]
        damaged = {key[len(keys.damaged) :] for key in sizes if key.startswith(keys.damaged)}
        if damaged:
            # An earlier version marks a snapshot as damaged if it does not know its format.
            damaged -= {
                name for name, why in (await self.read_damage(memory, damaged)).items() if why.endswith(NOT_KNOWN)
            }
        pinned = {key[len(keys.pins) :] for key in sizes if key.startswith(keys.pins)}
        snapshots = sorted(filter(is_snapshot_id, names), reverse=True)
        return Survey(snapshots, sizes, damaged, pinned, versions, now, complete)

    async def open(self, memory: str) -> tuple[HeadState, Survey]:
        """Return the head, and what a memory has, with a number of requests that does not depend on how much it has.

        A head that this process has read or written is not read again if the listing shows that it is the same.
        """
        key, prefix = MemoryKeys.of(memory).head, MemoryKeys.of(memory).prefix
        if self.witnesses is not None:
            return await asyncio.gather(self.head(memory), self.survey(memory))
        recalled = self.recall.peek(key)
        if recalled is not None and memory in self.recall.large:
            with contextlib.suppress(SnapshotDamaged):
                survey = await self._survey_recent(memory, Head.decode(recalled, memory))
                return await self._load_head(memory, survey.versions.get(key, "")), survey
        if recalled is not None:
            seen = await self.store.glance(prefix)
            survey = await self._build_survey(memory, seen.objects, complete=seen.complete)
            state = await self._load_head(memory, survey.versions.get(key, ""))
        else:
            state, seen = await asyncio.gather(self._load_head(memory), self.store.glance(prefix))
            survey = await self._build_survey(memory, seen.objects, complete=seen.complete)
        if not seen.complete:
            self.recall.large.add(memory)
            survey = await (self._survey_recent(memory, state.head) if state.head else self.survey(memory))
        return state, survey

    async def _survey_recent(self, memory: str, head: Head) -> Survey:
        """Return what was stored lately. ``head`` may be an earlier one."""
        keys = MemoryKeys.of(memory)
        known = sorted({snapshot for snapshot, _ in head.history}, reverse=True)[:MOST_RECENT]
        after = keys.snapshot(known[-1] if known else head.snapshot).removesuffix(".json")
        listed = self.recall.find_recent(memory)
        if listed is None:
            top, recent = await asyncio.gather(
                self.store.glance(keys.prefix, level=True), self.store.glance(keys.snapshots, after=after)
            )
            listed = [*recent.objects]
            self.recall.keep_recent(memory, listed)
            if not recent.complete:
                return await self.survey(memory)
        else:
            top = await self.store.glance(keys.prefix, level=True)
        if not top.complete:
            return await self.survey(memory)
        folder = keys.damaged[len(keys.prefix) :].rstrip("/")
        damaged = [info async for info in self.store.list(keys.damaged)] if folder in top.folders else []
        return await self._build_survey(memory, [*top.objects, *listed, *damaged], complete=False)

    def recall_by(self, survey: Survey) -> Recalled:
        """Return what need not be read again, by what a survey showed."""
        return Recalled(self.recall, survey.versions, partial=not survey.complete)

    async def check_present(self, manifest: Manifest, survey: Survey) -> None:
        """Raise ``SnapshotDamaged`` unless every object of a snapshot is there with its size.

        Where the survey is not complete, the store is asked for each pack that was not seen a short time ago.
        """
        if survey.complete:
            check_sizes(manifest, survey.sizes)
            return
        keys = MemoryKeys.of(manifest.memory)

        async def look(key: str) -> None:
            if (size := self.recall.seen(key)) is not None:
                survey.sizes[key] = size
                return
            async for info in self.store.list(key):
                survey.sizes[key] = info.size
                self.recall.note_seen(key, info.size)

        wanted = [key for pack in manifest.packs for key in (keys.pack(pack.id, pack.codec), keys.index(pack.id))]
        await gather_few(look, [key for key in wanted if key not in survey.sizes], PARALLEL_READS)
        check_sizes(manifest, survey.sizes)

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

    async def _read(self, key: str, listed: str = "") -> StoredObject | None:
        """Read a small object, unless a listing shows that it is as it was."""
        if listed and (data := self.recall.find(key, listed)) is not None:
            return StoredObject(data, listed)
        stored = await self.store.get(key)
        if stored is not None:
            self.recall.keep(key, stored.data, stored.version)
        return stored

    async def manifest(self, memory: str, snapshot: str, survey: Survey | None = None) -> Manifest:
        """Read a manifest, unless ``survey`` shows that it is as this process knows it. Raise ``SnapshotNotFound`` or
        ``SnapshotDamaged``."""
        key = MemoryKeys.of(memory).snapshot(snapshot)
        stored = await self._read(key, survey.versions.get(key, "") if survey is not None else "")
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
        states = await gather_few(self.head, await self.memories(), PARALLEL_READS)
        return [state.head for state in states if state.head is not None]

    async def commit(self, manifest: Manifest) -> None:
        """Write the manifest of a snapshot whose packs are stored: from now on it can be read."""
        key, data = MemoryKeys.of(manifest.memory).snapshot(manifest.snapshot), manifest.encode()
        version = await self.store.swap(key, data, expected=None)
        self.recall.keep(key, data, version)
        self.recall.add_recent(manifest.memory, ObjectInfo(key, len(data), manifest.time.timestamp(), version))

    async def move_head(self, state: HeadState, manifest: Manifest, *, keep: bool = True) -> Head:
        """Point the head at a snapshot, if it was not moved since ``state`` was read. Raise ``SwapLost`` otherwise.

        A head that replaces a damaged or missing one remembers what the manifests say was head before. Without ``keep``
        it is not made sure that the snapshot still exists: for one that was just made on top of that head, of which
        ``sidecar.store.marks`` says that the swap fails if it does not.
        """
        store = state.store_id or await self._ensure_id()
        head = Head.at(manifest, datetime.now(UTC), state.head, store)
        if state.head is None and (before := await self.rebuild_head(manifest.memory)) is not None:
            past = [one for one in before.history if one[0] != manifest.snapshot]
            head = replace(head, history=[*head.history, *past][:LONGEST_HISTORY])
            if before.format == REVIEWED:
                head = replace(head, format=REVIEWED)
        key = MemoryKeys.of(manifest.memory).head
        if self.witnesses is not None and head.format > (state.head.format if state.head else FORMAT):
            await self.witnesses.clear(manifest.memory)
        try:
            data = head.encode()
            self.recall.keep(key, data, await self.store.swap(key, data, expected=state.version))
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
        if keep:
            await self.keep(manifest)
        return head

    async def rebuild_head(self, memory: str) -> Head | None:
        """Return the head that the manifests tell; for when the head itself cannot be read."""
        manifests = await self.manifests(memory, await self.list_snapshot_ids(memory))
        reviews = await read_reviews_or_none(self.store, memory)
        return rebuild_head(reviews.leave_out_unaccepted(manifests), reviews.accepted, reviews.replaced)

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
                key, data = MemoryKeys.of(memory).head, head.encode()
                self.recall.keep(key, data, await self.store.swap(key, data, expected=state.version))
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
        if any(not isinstance(manifest, Manifest) for manifest in manifests.values()):
            return True
        reviews = await read_reviews_or_none(self.store, memory) if manifests else Reviews()
        left = reviews.leave_out_unaccepted(manifests)
        return any(manifest.is_eligible or manifest.snapshot in reviews.accepted for manifest in left)

    async def iterate_candidates(self, memory: str) -> AsyncIterator[str]:
        """Yield what to restore, best first: the head, what was head before it, then the rest, newest first.

        If the head cannot be read, the manifests tell what was head. What was declined, or is listed as one that waits, is
        not among the rest.
        """
        state = await self.head(memory)
        ids = await self.list_snapshot_ids(memory)
        head = state.head or await self.rebuild_head(memory)
        past = [snapshot for snapshot, _ in head.history] if head else []
        past = [one for one in dict.fromkeys(past) if one in ids or one == state.snapshot]
        for snapshot in past:
            yield snapshot
        reviews = await read_reviews_or_none(self.store, memory)
        for snapshot in ids:
            if snapshot not in past and reviews.get_decision(snapshot) in ("", ACCEPTED):
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
