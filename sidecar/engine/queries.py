"""Read-only queries of a store: its memories, their snapshots, the contents of a snapshot, and the difference between
two."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from sidecar.engine.core import View
from sidecar.errors import MemoryNotFound, SnapshotDamaged, SnapshotNotFound, UsageError
from sidecar.format.index import Entry as IndexEntry
from sidecar.host.files import open_spool
from sidecar.host.values import dataclass
from sidecar.host.work import gather_few
from sidecar.ids import ROOT, build_memory_key, check_memory_id, is_snapshot_id
from sidecar.models.answers import (
    Change,
    Counts,
    Difference,
    Entry,
    Memories,
    Memory,
    Review,
    Size,
    Snapshot,
    Snapshots,
)
from sidecar.policy.review import PENDING
from sidecar.ports import ObjectInfo
from sidecar.store.folders import read_id
from sidecar.store.manifest import Head, Manifest, check_sizes
from sidecar.store.pins import AutomaticPin, list_automatic_pins
from sidecar.store.repository import PARALLEL_READS, HeadState, Repository, Survey
from sidecar.store.reviews import ReviewRow, Reviews, read_reviews_or_none
from sidecar.store.selectors import resolve_snapshot

LOG = logging.getLogger("sidecar")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotReading:
    """A snapshot as it was read, with every entry in it."""

    manifest: Manifest
    row: Snapshot
    entries: list[Entry]
    head: str = ""
    """The memory's head, as far as it can be read."""


async def list_memories(
    repository: Repository, view: View | None = None, *, limit: int = 0, after: str = ""
) -> Memories:
    """List the memories of the store, or those that ``view`` shows: at most ``limit`` (0: all), those that follow
    ``after``. Pages are in the order of the memories' names in the store.

    All of them take one listing and one request for each; a page takes a listing of names and two for each.
    """
    url = repository.store.url
    if not limit and not after:
        return Memories(store=url, memories=await _list_all(repository, view))
    names = _choose_names(await repository.store.folders(ROOT, most=MOST_NAMES), view, after)
    if limit >= len(names) and not after:
        return Memories(store=url, memories=await _list_all(repository, view))
    rows: list[Memory] = []
    # One more than asked for tells whether there is another page; not every name is a memory that the caller sees.
    for start in range(0, len(names), max(1, limit)):
        for row in await gather_few(
            lambda name: _look_into(repository, name, view), names[start : start + limit + 1], PARALLEL_READS
        ):
            if row is not None and all(row.memory != known.memory for known in rows[-1:]):
                rows.append(row)
        if len(rows) > limit:
            page = rows[:limit]
            return Memories(store=url, memories=sorted(page, key=lambda row: row.memory), next=page[-1].memory)
    return Memories(store=url, memories=sorted(rows, key=lambda row: row.memory))


async def describe_folders(
    repository: Repository, folders: Iterable[str], view: View | None, *, limit: int
) -> Memories:
    """Return the rows of the memories in these folders, in that order: at most ``limit`` of those that ``view`` shows."""
    seen = [folder for folder in folders if view is None or view.may_see_folder(folder)]
    rows: list[Memory] = []
    while seen and len(rows) < limit:
        some, seen = seen[:limit], seen[limit:]
        found = await gather_few(lambda name: _look_into(repository, name, view), some, PARALLEL_READS)
        rows += [row for row in found if row is not None]
    return Memories(store=repository.store.url, memories=rows[:limit])


MOST_NAMES = 1_000_000


def _choose_names(names: Iterable[str], view: View | None, after: str) -> list[str]:
    """Return the folders that follow that of ``after`` and may be seen, in order."""
    passed = build_memory_key(check_memory_id(after)) if after else ""
    return sorted(name for name in names if name > passed and (view is None or view.may_see_folder(name)))


async def _list_all(repository: Repository, view: View | None) -> list[Memory]:
    """Return the rows of all memories, from one listing."""
    folders: dict[str, list[ObjectInfo]] = {}
    async for info in repository.store.list(ROOT):
        folder = info.key[len(ROOT) :].partition("/")[0]
        if view is None or view.may_see_folder(folder):
            folders.setdefault(folder, []).append(info)
    found = await gather_few(lambda one: _read_folder(repository, *one, view), folders.items(), PARALLEL_READS)
    return sorted(filter(None, found), key=lambda row: row.memory)


async def _look_into(repository: Repository, folder: str, view: View | None) -> Memory | None:
    return await _read_folder(
        repository, folder, [info async for info in repository.store.list(f"{ROOT}{folder}/")], view
    )


async def _read_folder(
    repository: Repository, folder: str, infos: Sequence[ObjectInfo], view: View | None
) -> Memory | None:
    """Return the row of the memory in a folder; ``None`` if there is none, or ``view`` does not show it."""
    prefix = f"{ROOT}{folder}/"
    snapshots = [info.key for info in infos if info.key.startswith(f"{prefix}snapshots/")]
    heads = {info.key: info.version for info in infos if info.key == f"{prefix}head.json"}
    if not snapshots and not heads:
        return None
    state = await repository.find_head(folder, *heads.values()) if heads else None
    if state is not None and state.head is not None:
        memory = state.head.memory
    else:
        memory, problem = await read_id(repository.store, folder, [*heads, *snapshots])
        if problem:
            LOG.warning(problem)
        if not memory:
            return None
        state = None
    if view is not None and not view.sees(memory):
        return None
    if state is None:
        state = await repository.head(memory)
    names = (key[len(prefix) + len("snapshots/") :].removesuffix(".json") for key in snapshots)
    ids = [name for name in names if is_snapshot_id(name)]
    reviews = await read_reviews_or_none(repository.store, memory, [info.key for info in infos])
    return _build_row(memory, state, ids, sum(info.size for info in infos), reviews)


async def describe_memory(repository: Repository, memory: str) -> Memory:
    """Return the row of one memory. Raise ``MemoryNotFound``."""
    state = await repository.head(check_memory_id(memory))
    survey = await repository.survey(memory)
    reviews = await read_reviews_or_none(repository.store, memory, survey.sizes)
    row = _build_row(memory, state, survey.snapshots, sum(survey.sizes.values()), reviews)
    if not row.snapshots and row.head is None:
        raise build_not_found_error(repository, memory)
    return row


def _build_row(memory: str, state: HeadState, snapshots: Collection[str], size: int, reviews: Reviews) -> Memory:
    return Memory(
        memory=memory,
        head=state.snapshot or None,
        snapshots=len(snapshots),
        created=state.head.created if state.head else None,
        files=state.head.files if state.head else 0,
        bytes=state.head.bytes if state.head else 0,
        stored_bytes=size,
        problem=state.problem,
        pending=len(set(reviews.pending).intersection(snapshots)),
    )


def build_not_found_error(repository: Repository, memory: str) -> MemoryNotFound:
    """Build the error for a memory that does not exist."""
    return MemoryNotFound(f"There is no memory {memory!r} in {repository.store.url}.")


async def list_existing_ids(repository: Repository, memory: str) -> list[str]:
    """Return the ids of a memory's snapshots, newest first. Raise ``MemoryNotFound`` if there are none."""
    if ids := await repository.list_snapshot_ids(check_memory_id(memory)):
        return ids
    raise build_not_found_error(repository, memory)


async def list_snapshots(repository: Repository, memory: str, *, limit: int = 0, after: str = "") -> Snapshots:
    """Return the head, with any problem of it, and the snapshots, newest first: at most ``limit`` (0: all), those that
    follow ``after``. Raise ``MemoryNotFound``."""
    survey = await repository.survey(check_memory_id(memory))
    if not survey.snapshots:
        raise build_not_found_error(repository, memory)
    ids = [snapshot for snapshot in survey.snapshots if not after or snapshot < after]
    page = ids[:limit] if limit else ids
    standings = await _read_standings(repository, memory, page, survey)
    # The head's manifest is read with every page, to tell what is wrong with it.
    shown = [name for name in sorted(standings.manifests, reverse=True) if len(page) == len(ids) or name >= page[-1]]
    return Snapshots(
        memory=memory,
        head=standings.state.snapshot or None,
        problem=standings.state.trouble(standings.manifests, standings.reviews.accepted),
        snapshots=[standings.row(name) for name in shown if not after or name < after],
        next=page[-1] if len(page) < len(ids) else None,
    )


@dataclass(frozen=True, slots=True)
class _Standings:
    """Everything that is needed to tell how snapshots relate to the head."""

    state: HeadState
    head: Head | None
    """The head; if it cannot be read, as rebuilt from the manifests."""
    manifests: Mapping[str, Manifest | SnapshotDamaged]
    damaged: Mapping[str, str]
    """The problems of the snapshots that are known to be damaged."""
    pinned: Collection[str]
    automatic: Mapping[str, AutomaticPin]
    reviews: Reviews

    def row(self, snapshot: str) -> Snapshot:
        manifest, pin = self.manifests[snapshot], self.automatic.get(snapshot)
        row = Snapshot(
            snapshot=snapshot,
            standing="damaged",
            pinned=snapshot in self.pinned,
            pinned_because=pin.words if pin else "",
        )
        if isinstance(manifest, SnapshotDamaged):
            return replace(row, problem=manifest.message)
        return replace(
            row,
            standing=self._find_standing(manifest),
            created=manifest.created,
            parent=manifest.parent,
            label=manifest.label,
            conversation=manifest.conversation,
            sandbox=manifest.sandbox,
            origin=manifest.origin,
            rejected=manifest.rejected,
            pending=self.reviews.find_reason(manifest),
            review=_build_review(self.reviews.rows.get(snapshot)),
            problem=self.damaged.get(snapshot, ""),
            files=manifest.files,
            bytes=manifest.bytes,
            packs=len(manifest.packs),
            stored_bytes=manifest.packed_bytes,
            dropped=manifest.dropped,
            scrubbed=sum(manifest.taken_out),
            changes=_read_changes(manifest),
        )

    def _find_standing(self, manifest: Manifest) -> str:
        if manifest.snapshot in self.damaged:
            return "damaged"
        if manifest.snapshot == self.state.snapshot:
            return "head"
        if self.head is not None and self.head.was_head(manifest.snapshot):
            return "earlier head"
        decided = self.reviews.get_decision(manifest.snapshot)
        if decided or manifest.pending:
            return decided or PENDING
        return "rejected" if manifest.rejected else "diverged"


def _build_review(row: ReviewRow | None) -> Review | None:
    if row is None or row.decision == PENDING:
        return None
    return Review(decision=row.decision, by=row.by, at=row.at, because=row.because, within=row.within)


def _read_changes(manifest: Manifest) -> dict[str, Counts] | None:
    if manifest.changes is None:
        return None
    return {
        kind: Counts(added=added, changed=changed, removed=removed)
        for kind, (added, changed, removed) in manifest.changes.items()
    }


async def _read_standings(repository: Repository, memory: str, ids: Collection[str], survey: Survey) -> _Standings:
    """Read the head, the manifests, the damage and the pins of some snapshots. ``survey`` is a listing made before."""
    state = await repository.head(memory)
    manifests = await repository.manifests(memory, ids)
    if state.snapshot and state.snapshot not in manifests:  # it has moved since the listing, or its manifest is missing
        manifests |= await repository.manifests(memory, [state.snapshot])
    whole = [manifest for manifest in manifests.values() if isinstance(manifest, Manifest)]
    damaged = _find_cut_short(whole, survey.sizes)
    if damaged:  # an export may have added a pack and its manifest during the listing
        damaged = _find_cut_short(whole, (await repository.survey(memory)).sizes)
    noted = await repository.read_damage(memory, survey.damaged.intersection(ids) - set(damaged))
    damaged |= {name: f"{why} `memory-sidecar verify {memory}` looks again." for name, why in noted.items()}
    head = state.head or (await repository.rebuild_head(memory) if ids else None)
    automatic = await list_automatic_pins(repository, memory) if survey.pinned else {}
    reviews = await read_reviews_or_none(repository.store, memory, survey.sizes)
    return _Standings(state, head, manifests, damaged, survey.pinned, automatic, reviews)


def _find_cut_short(manifests: Iterable[Manifest], sizes: Mapping[str, int]) -> dict[str, str]:
    """Return the problem of each snapshot that, by the listing, lacks a pack or has one of the wrong size."""
    found = {}
    for manifest in manifests:
        try:
            check_sizes(manifest, sizes)
        except SnapshotDamaged as damage:
            found[manifest.snapshot] = damage.message
    return found


async def read_contents(repository: Repository, memory: str, wanted: str) -> SnapshotReading:
    """Return a snapshot with all its entries. Raise ``SnapshotNotFound``."""
    manifest, entries = await _read_entries(repository, memory, wanted)
    standings = await _read_standings(repository, memory, [manifest.snapshot], await repository.survey(memory))
    if manifest.snapshot not in standings.manifests:
        raise SnapshotNotFound(f"{memory} has no snapshot {manifest.snapshot}.")
    return SnapshotReading(
        manifest=manifest,
        row=standings.row(manifest.snapshot),
        entries=[_build_entry_row(entries[path]) for path in sorted(entries)],
        head=standings.state.snapshot,
    )


def _build_entry_row(entry: IndexEntry) -> Entry:
    row = entry._asdict()
    del row["sums"]
    return Entry(**row)


async def compare_snapshots(repository: Repository, memory: str, old: str, new: str) -> Difference:
    """Return what changed from one snapshot to another. If ``old`` is empty, ``new`` is compared with its parent."""
    later, after = await _read_entries(repository, memory, new)
    if not old and not later.parent:
        raise UsageError(
            f"{later.snapshot} has no parent to compare it with.", hint="Name two snapshots: diff MEMORY A B."
        )
    earlier, before = await _read_entries(repository, memory, old or later.parent)
    return compare_entries(memory, (earlier.snapshot, later.snapshot), before, after)


def compare_entries(
    memory: str, snapshots: tuple[str, str], before: Mapping[str, IndexEntry], after: Mapping[str, IndexEntry]
) -> Difference:
    """Return what differs between the entries of two snapshots."""
    both = [path for path in sorted(after) if path in before]
    return Difference(
        memory=memory,
        from_=snapshots[0],
        to=snapshots[1],
        added=[Size(path=path, size=after[path].size) for path in sorted(after) if path not in before],
        removed=[Size(path=path, size=before[path].size) for path in sorted(before) if path not in after],
        changed=[
            Change(path=path, old_size=before[path].size, new_size=after[path].size)
            for path in both
            if _pick_contents(after[path]) != _pick_contents(before[path])
        ],
    )


def _pick_contents(entry: IndexEntry) -> tuple[object, ...]:
    """Return the fields of an entry that a comparison looks at: everything that matters but its time."""
    return entry.type, entry.mode, entry.size, entry.digest, entry.target


async def _read_entries(repository: Repository, memory: str, wanted: str) -> tuple[Manifest, dict[str, IndexEntry]]:
    manifest = await repository.manifest(memory, await resolve_snapshot(repository, check_memory_id(memory), wanted))
    from sidecar.store.fetch import fetch_entries  # late: it unpacks, and most queries read no pack

    async with open_spool() as scratch:
        entries, _, _ = await fetch_entries(repository.store, manifest, scratch)
    return manifest, entries
