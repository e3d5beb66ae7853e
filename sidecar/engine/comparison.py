"""What differs between two snapshots, record by record: of one memory, of two, or of a snapshot and what just arrived
from a sandbox."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field

from sidecar.engine.core import Engine
from sidecar.engine.queries import compare_entries
from sidecar.errors import UsageError
from sidecar.host.files import Spool, open_spool
from sidecar.host.values import dataclass
from sidecar.host.work import run_in_thread
from sidecar.ids import check_memory_id
from sidecar.layouts.sources import MESSAGE
from sidecar.models.records import Comparison, RecordChange
from sidecar.ports import Store
from sidecar.records.comparison import (
    ChangedRecord,
    Layouts,
    Version,
    add_counts,
    compare_files,
    compare_units,
    describe_changes,
    list_needed,
    make_side,
)
from sidecar.records.rows import make_change
from sidecar.records.workspace import Workspace
from sidecar.store.manifest import Manifest
from sidecar.store.repository import Repository
from sidecar.store.selectors import resolve_snapshot

MOST_TOLD = 10_000
"""More records or files than this are counted, and not described."""
MOST_TEXT = 32 << 20
"""Once the records that were described have so many characters, the others are counted only."""


async def compare_records(
    engine: Engine, memory: str, old: str, new: str, *, other: str = "", messages: bool = False
) -> Comparison:
    """Return what differs from snapshot ``old`` to ``new``; without ``old``, to the parent of ``new``. ``other`` is the
    memory of ``new``, if that is another one. ``messages`` are counted, and described only on request.

    Raise ``MemoryNotFound``, ``SnapshotNotFound``, ``SnapshotDamaged`` or ``UsageError``.
    """
    repository = engine.repository
    later = await read_manifest(repository, other or memory, new)
    if not old and not other and not later.parent:
        raise UsageError(
            f"{later.snapshot} has no parent to compare it with.", hint="Name two snapshots: diff MEMORY A B."
        )
    earlier = await read_manifest(repository, memory, old or ("latest" if other else later.parent))
    async with open_spool() as scratch:
        before, after = await stage_versions(repository.store, earlier, later, engine.layouts, scratch)
        return await run_in_thread(describe, memory, (earlier.snapshot, later.snapshot), before, after, messages)


async def read_manifest(repository: Repository, memory: str, wanted: str) -> Manifest:
    """Return the manifest of the snapshot that is meant."""
    return await repository.manifest(memory, await resolve_snapshot(repository, check_memory_id(memory), wanted))


async def stage_versions(
    store: Store, earlier: Manifest, later: Manifest, layouts: Layouts, scratch: Spool
) -> tuple[Version, Version]:
    """Put the files of two snapshots that differ on this machine. Packs that both have are fetched once."""
    needed: set[str] = set()
    spaces = [Workspace(store, one.memory, scratch, needed.__contains__) for one in (earlier, later)]
    same = earlier.memory == later.memory
    entries = [
        await spaces[0].read_entries(earlier),
        await (spaces[0] if same else spaces[1]).read_entries(later),
    ]
    sides = [make_side(one, found, layouts) for one, found in zip((earlier, later), entries, strict=True)]
    needed |= list_needed(*sides)
    if same and _begins_with(later, earlier):
        old_files = await spaces[0].advance(earlier)
        new_files = await spaces[0].advance(later, keep=True)
    elif same and _begins_with(earlier, later):
        new_files = await spaces[0].advance(later)
        old_files = await spaces[0].advance(earlier, keep=True)
    else:
        old_files = await spaces[0].advance(earlier)
        new_files = await spaces[1].advance(later)
    return Version(sides[0].entries, sides[0].units, old_files), Version(sides[1].entries, sides[1].units, new_files)


def _begins_with(whole: Manifest, beginning: Manifest) -> bool:
    """Return whether one snapshot has the packs of another, and then some."""
    return [pack.id for pack in whole.packs[: len(beginning.packs)]] == [pack.id for pack in beginning.packs]


def describe(memory: str, snapshots: tuple[str, str], before: Version, after: Version, messages: bool) -> Comparison:
    """Compare two versions whose files are here, and describe what differs."""

    def wanted(kind: str) -> bool:
        return messages or kind != MESSAGE

    units = list(compare_units(before, after))
    described = Described()
    for unit in units:
        if not unit.problem:
            described.take(describe_changes(unit, before.files, after.files, wanted))
    told = {path for unit in units if unit.counts for path in unit.paths}
    files = list(compare_files(before, after, told))
    counts = add_counts(unit.counts for unit in units)
    total = sum(one.added + one.changed + one.removed for kind, one in counts.items() if wanted(kind))
    entries = compare_entries(memory, snapshots, before.entries, after.entries)
    return Comparison(
        memory=memory,
        from_=entries.from_,
        to=entries.to,
        added=entries.added,
        removed=entries.removed,
        changed=entries.changed,
        counts=counts,
        records=described.records,
        files=files[:MOST_TOLD],
        more=total - len(described.records) + max(0, len(files) - MOST_TOLD),
        problems=[unit.problem for unit in units if unit.problem],
    )


@dataclass(slots=True)
class Described:
    """Records that differ, as many as there is room for."""

    records: list[RecordChange] = field(default_factory=list)
    room: int = MOST_TEXT

    def take(self, changes: Iterable[ChangedRecord]) -> None:
        for change in changes:
            size = len(change.record.text) + len(change.source) + sum(map(len, change.diff))
            if len(self.records) >= MOST_TOLD or size > self.room:
                return
            self.room -= size
            self.records.append(make_change(change))
