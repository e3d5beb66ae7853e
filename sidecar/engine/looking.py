"""Look into a store: its memories, their snapshots, what is in one, and what differs between two."""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.errors import MemoryNotFound, SnapshotDamaged, UsageError
from sidecar.ids import check_memory_id
from sidecar.inside.index import Entry
from sidecar.repository import HeadState, Repository
from sidecar.snapshots.fetch import fetch_entries
from sidecar.snapshots.manifest import Manifest
from sidecar.snapshots.resolving import resolve
from sidecar.spool import spool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    memory: str
    head: str | None
    snapshots: int
    created: str | None = None
    """When the head was made."""
    files: int = 0
    bytes: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRow:
    snapshot: str
    standing: str
    """"head", "earlier head", "diverged", "rejected" or "damaged"."""
    created: str = ""
    parent: str = ""
    label: str = ""
    conversation: str = ""
    sandbox: str = ""
    origin: str = ""
    rejected: str = ""
    problem: str = ""
    files: int = 0
    bytes: int = 0
    packs: int = 0
    pinned: bool = False
    """No rule may take it."""
    dropped: int = 0
    """How many files a size limit left out."""
    scrubbed: int = 0
    """How many private passages and credentials were taken out before it was stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRow:
    path: str
    type: str
    mode: int
    size: int
    mtime: int
    digest: str
    block: int
    target: str
    database: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A snapshot and every entry in it."""

    manifest: Manifest
    row: SnapshotRow
    entries: list[EntryRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRow:
    path: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRow:
    path: str
    old_size: int
    new_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    old: str
    new: str
    added: list[SizeRow]
    removed: list[SizeRow]
    changed: list[ChangeRow]


async def list_memories(repository: Repository) -> list[MemoryRow]:
    return [await _memory_row(repository, memory) for memory in await repository.memories()]


async def describe_memory(repository: Repository, memory: str) -> MemoryRow:
    """Raise ``MemoryNotFound``."""
    row = await _memory_row(repository, check_memory_id(memory))
    if not row.snapshots and row.head is None:
        raise not_found(repository, memory)
    return row


async def _memory_row(repository: Repository, memory: str) -> MemoryRow:
    state = await repository.head(memory)
    return MemoryRow(
        memory=memory,
        head=state.snapshot or None,
        snapshots=len(await repository.snapshot_ids(memory)),
        created=state.head.created if state.head else None,
        files=state.head.files if state.head else 0,
        bytes=state.head.bytes if state.head else 0,
        problem=state.problem,
    )


def not_found(repository: Repository, memory: str) -> MemoryNotFound:
    return MemoryNotFound(f"There is no memory {memory!r} in {repository.store.url}.")


async def existing_snapshots(repository: Repository, memory: str) -> list[str]:
    """The ids of a memory's snapshots, newest first. Raise ``MemoryNotFound`` when there are none."""
    if ids := await repository.snapshot_ids(check_memory_id(memory)):
        return ids
    raise not_found(repository, memory)


async def list_snapshots(repository: Repository, memory: str) -> tuple[HeadState, list[SnapshotRow]]:
    """The head and a row for each snapshot, newest first. Raise ``MemoryNotFound``."""
    ids = await existing_snapshots(repository, memory)
    state = await repository.head(memory)
    manifests, pinned = await repository.manifests(memory, ids), await repository.pinned(memory)
    return state, [_snapshot_row(name, manifests[name], state, name in pinned) for name in ids if name in manifests]


def _snapshot_row(snapshot: str, manifest: Manifest | SnapshotDamaged, state: HeadState, pinned: bool) -> SnapshotRow:
    place = standing(snapshot, manifest, state)
    if isinstance(manifest, SnapshotDamaged):
        return SnapshotRow(snapshot=snapshot, standing=place, problem=manifest.message, pinned=pinned)
    return SnapshotRow(
        snapshot=snapshot,
        standing=place,
        created=manifest.created,
        parent=manifest.parent,
        label=manifest.label,
        conversation=manifest.conversation,
        sandbox=manifest.sandbox,
        origin=manifest.origin,
        rejected=manifest.rejected,
        files=manifest.files,
        bytes=manifest.bytes,
        packs=len(manifest.packs),
        pinned=pinned,
        dropped=manifest.dropped,
        scrubbed=sum(manifest.taken_out),
    )


def standing(snapshot: str, manifest: Manifest | SnapshotDamaged, state: HeadState) -> str:
    """How a snapshot relates to the head: it is it, was it, or stands beside it."""
    if isinstance(manifest, SnapshotDamaged):
        return "damaged"
    if snapshot == state.snapshot:
        return "head"
    if state.head and state.head.was(snapshot):
        return "earlier head"
    return "rejected" if manifest.rejected else "diverged"


async def show_snapshot(repository: Repository, memory: str, wanted: str) -> Contents:
    manifest, entries = await _entries(repository, memory, wanted)
    state = await repository.head(memory)
    return Contents(
        manifest=manifest,
        row=_snapshot_row(manifest.snapshot, manifest, state, manifest.snapshot in await repository.pinned(memory)),
        entries=[_entry_row(entries[path]) for path in sorted(entries)],
    )


def _entry_row(entry: Entry) -> EntryRow:
    row = entry._asdict()
    del row["sums"]
    return EntryRow(**row)


async def compare(repository: Repository, memory: str, old: str, new: str) -> Difference:
    """What changed from one snapshot to another; ``old`` may be empty: the parent of ``new``."""
    later, after = await _entries(repository, memory, new)
    if not old and not later.parent:
        raise UsageError(
            f"{later.snapshot} has no parent to compare it with.", hint="Name two snapshots: diff MEMORY A B."
        )
    earlier, before = await _entries(repository, memory, old or later.parent)
    both = [path for path in sorted(after) if path in before]
    return Difference(
        old=earlier.snapshot,
        new=later.snapshot,
        added=[SizeRow(path=path, size=after[path].size) for path in sorted(after) if path not in before],
        removed=[SizeRow(path=path, size=before[path].size) for path in sorted(before) if path not in after],
        changed=[
            ChangeRow(path=path, old_size=before[path].size, new_size=after[path].size)
            for path in both
            if _contents(after[path]) != _contents(before[path])
        ],
    )


def _contents(entry: Entry) -> tuple[object, ...]:
    return entry.type, entry.mode, entry.size, entry.digest, entry.target


async def _entries(repository: Repository, memory: str, wanted: str) -> tuple[Manifest, dict[str, Entry]]:
    manifest = await repository.manifest(memory, await resolve(repository, check_memory_id(memory), wanted))
    async with spool() as scratch:
        entries, _, _ = await fetch_entries(repository.store, manifest, scratch)
    return manifest, entries
