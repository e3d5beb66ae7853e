"""Count what an export taught, by kind of record, for the manifest of its snapshot.

Numbers only, so that ``log`` can tell what changed without opening a pack. Records in databases are counted by the
program in the sandbox, which has the database at hand and remembers its rows (``program/sqlite/sketches.py``): what it
says is checked for what it may be about. Of other files that changed, what they were is unpacked from the parent's packs.
That has a budget: an export is not to wait for its own description. Beyond the budget those are counted as files if the
databases were told, and else, or if something cannot be read, the counts are not known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from sidecar.engine.comparison import Side, add_counts, list_needed, make_side
from sidecar.engine.exports.arrival import CheckedExport
from sidecar.engine.exports.run import ExportRun
from sidecar.errors import BadAnswer, SnapshotError, StoreError, UntrustedSandbox
from sidecar.format.index import Entry
from sidecar.host.files import SpoolFull
from sidecar.host.work import Deadline, run_in_thread
from sidecar.models.answers import Counts
from sidecar.records.comparison import Version, compare_units, list_differing
from sidecar.records.matching import MOST_COMPARED
from sidecar.records.workspace import Workspace
from sidecar.store.manifest import Manifest, Pack

MOST_FETCHED = 16 << 20
"""If the parent's packs that are needed have more bytes than this, they are not fetched."""
MOST_READ = 64 << 20
"""If the files to compare have more bytes than this, they are not read."""
MOST_SECONDS = 10.0
MOST_KINDS = 64
FILE_KIND = "file"

Changes = dict[str, tuple[int, int, int]]


async def count_changes(run: ExportRun, checked: CheckedExport, manifest: Manifest) -> Changes | None:
    """Return how many records were added, changed and removed since the parent, by kind; ``None`` if that cannot be told
    within the budget. It never fails an export."""
    try:
        async with asyncio.timeout(MOST_SECONDS):
            counts = await _count(run, checked, manifest)
    except (SnapshotError, StoreError, UntrustedSandbox, SpoolFull, TimeoutError):
        return None
    if counts is None or len(counts) > MOST_KINDS:
        return None
    return {kind: (one.added, one.changed, one.removed) for kind, one in counts.items()}


async def _count(run: ExportRun, checked: CheckedExport, manifest: Manifest) -> dict[str, Counts] | None:
    engine, needed = run.engine, set[str]()
    store, holds = engine.repository.store, needed.__contains__
    space = Workspace(store, manifest.memory, run.scratch, holds, check=False, recalled=run.recalled)
    parent = await _find_parent(run, checked, manifest)
    old_entries: Mapping[str, Entry] = {}
    if parent is not None and checked.base is not None and parent.snapshot == checked.base.snapshot:
        old_entries = checked.base_entries
        space.add_indexes(parent, checked.base_indexes)
    elif parent is not None:
        old_entries = await space.read_entries(parent)
    new = make_side(manifest, checked.entries, engine.layouts)
    told = _take_told(checked, new)
    old = _leave_out(make_side(parent or manifest, old_entries, engine.layouts), told)
    new = _leave_out(new, told)
    needed |= list_needed(old, new, texts=False)
    packs = space.choose_packs(parent.packs, old_entries) if parent is not None else []
    if not _is_affordable(packs, old, new, needed):
        if not told:
            return None
        needed.clear()  # what the databases say is known: the others are counted as files
        old, new = replace(old, units={}), replace(new, units={})
    files = {}
    if parent is not None and needed & old_entries.keys():
        files = await space.advance(parent)
    if checked.received_pack.pack.index.kind == "full":
        space = Workspace(store, manifest.memory, run.scratch, holds, check=False)
    later = await space.apply_pack(manifest, checked.entries, checked.received_pack.pack) if needed else {}
    versions = Version(old_entries, old.units, files), Version(checked.entries, new.units, later)
    return await run_in_thread(_compare, *versions, told, seconds=MOST_SECONDS)


def _take_told(checked: CheckedExport, new: Side) -> dict[str, dict[str, Counts]]:
    """Return what the sandbox counted, by database, if it counted from the parent on.

    Raise ``BadAnswer`` if it is about a file that cannot be counted like that, or a kind that is not in it.
    """
    answer = checked.answer
    if not answer.counted or answer.base != new.manifest.parent:
        return {}
    told: dict[str, dict[str, Counts]] = {}
    for path, kinds in answer.counted.items():
        unit = new.units.get(path)
        if unit is None or any(spec.reader != "table" or spec.shared for _, spec in unit.sources):
            raise BadAnswer(f"The sandbox counted records in {path[:80]!r}, which has no tables to count.")
        if not kinds.keys() <= unit.kinds or any(max(counted) > MOST_COMPARED for counted in kinds.values()):
            raise BadAnswer(f"The sandbox counted records in {path[:80]!r} that cannot be there.")
        told[path] = {
            kind: Counts(added=added, changed=changed, removed=removed)
            for kind, (added, changed, removed) in kinds.items()
            if added or changed or removed
        }
    return told


def _leave_out(side: Side, told: Collection[str]) -> Side:
    """Return a side without the databases of which is known what differs."""
    return replace(side, units={name: unit for name, unit in side.units.items() if name not in told})


async def _find_parent(run: ExportRun, checked: CheckedExport, manifest: Manifest) -> Manifest | None:
    """Return the manifest of the parent; ``None`` if there is none. Raise a ``SnapshotError`` if it cannot be read."""
    for known in (checked.base, run.replaces):
        if known is not None and known.snapshot == manifest.parent:
            return known
    return await run.engine.repository.manifest(manifest.memory, manifest.parent) if manifest.parent else None


def _is_affordable(packs: Iterable[Pack], old: Side, new: Side, needed: set[str]) -> bool:
    fetched = sum(pack.bytes for pack in packs)
    read = sum(side.entries[path].size for side in (old, new) for path in needed & side.entries.keys())
    return fetched <= MOST_FETCHED and read <= MOST_READ


def _compare(
    old: Version, new: Version, told: Mapping[str, dict[str, Counts]], deadline: Deadline
) -> dict[str, Counts] | None:
    """Count the differences; ``None`` if a file that holds records cannot be read."""
    units = list(compare_units(old, new, deadline.check))
    if any(unit.problem for unit in units):
        return None
    known = {path for unit in units if unit.counts for path in unit.paths} | {path for path in told if told[path]}
    counts = add_counts([*(unit.counts for unit in units), *told.values()])
    files = list_differing(old.entries, new.entries) - known
    if files:
        added = sum(path not in old.entries for path in files)
        removed = sum(path not in new.entries for path in files)
        counts[FILE_KIND] = Counts(added=added, changed=len(files) - added - removed, removed=removed)
    return counts
