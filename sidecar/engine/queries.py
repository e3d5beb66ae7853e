"""Read-only queries of a store: its memories, their snapshots, the contents of a snapshot, and the difference between
two."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from sidecar.engine.core import View
from sidecar.errors import MemoryNotFound, SnapshotDamaged, SnapshotNotFound, UsageError
from sidecar.format.index import Entry as IndexEntry
from sidecar.host.files import open_spool
from sidecar.host.values import dataclass
from sidecar.ids import check_memory_id
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
from sidecar.store.fetch import check_sizes, fetch_entries
from sidecar.store.manifest import Head, Manifest
from sidecar.store.pins import AutomaticPin, list_automatic_pins
from sidecar.store.repository import HeadState, Repository, Survey
from sidecar.store.reviews import ReviewRow, Reviews, read_reviews_or_none
from sidecar.store.selectors import resolve_snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotReading:
    """A snapshot as it was read, with every entry in it."""

    manifest: Manifest
    row: Snapshot
    entries: list[Entry]
    head: str = ""
    """The memory's head, as far as it can be read."""


async def list_memories(repository: Repository, view: View | None = None) -> Memories:
    """List every memory of the store, or those that ``view`` shows."""
    if view is None:
        found = await repository.memories()
    else:
        found = [memory for memory in await repository.memories(view.may_see_folder) if view.sees(memory)]
    rows = [await _build_memory_row(repository, memory) for memory in found]
    return Memories(store=repository.store.url, memories=rows)


async def describe_memory(repository: Repository, memory: str) -> Memory:
    """Return the row of one memory. Raise ``MemoryNotFound``."""
    row = await _build_memory_row(repository, check_memory_id(memory))
    if not row.snapshots and row.head is None:
        raise build_not_found_error(repository, memory)
    return row


async def _build_memory_row(repository: Repository, memory: str) -> Memory:
    state = await repository.head(memory)
    survey = await repository.survey(memory)
    reviews = await read_reviews_or_none(repository.store, memory, survey.sizes)
    return Memory(
        memory=memory,
        head=state.snapshot or None,
        snapshots=len(survey.snapshots),
        created=state.head.created if state.head else None,
        files=state.head.files if state.head else 0,
        bytes=state.head.bytes if state.head else 0,
        stored_bytes=sum(survey.sizes.values()),
        problem=state.problem,
        pending=len(set(reviews.pending).intersection(survey.snapshots)),
    )


def build_not_found_error(repository: Repository, memory: str) -> MemoryNotFound:
    """Build the error for a memory that does not exist."""
    return MemoryNotFound(f"There is no memory {memory!r} in {repository.store.url}.")


async def list_existing_ids(repository: Repository, memory: str) -> list[str]:
    """Return the ids of a memory's snapshots, newest first. Raise ``MemoryNotFound`` if there are none."""
    if ids := await repository.list_snapshot_ids(check_memory_id(memory)):
        return ids
    raise build_not_found_error(repository, memory)


async def list_snapshots(repository: Repository, memory: str) -> Snapshots:
    """Return the head, with any problem of it, and every snapshot, newest first. Raise ``MemoryNotFound``."""
    survey = await repository.survey(check_memory_id(memory))
    if not (ids := survey.snapshots):
        raise build_not_found_error(repository, memory)
    standings = await _read_standings(repository, memory, ids, survey)
    return Snapshots(
        memory=memory,
        head=standings.state.snapshot or None,
        problem=standings.state.trouble(standings.manifests, standings.reviews.accepted),
        snapshots=[standings.row(name) for name in sorted(standings.manifests, reverse=True)],
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
    async with open_spool() as scratch:
        entries, _, _ = await fetch_entries(repository.store, manifest, scratch)
    return manifest, entries
