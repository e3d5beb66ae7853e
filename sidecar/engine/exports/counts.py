"""Count what an export taught, by kind of record, for the manifest of its snapshot.

Numbers only, so that ``log`` can tell what changed without opening a pack. Records in databases are counted by the
program in the sandbox, which has the database at hand and remembers its rows (``program/sqlite/sketches.py``): what it
says is checked for what it may be about. A file that is one record as a whole need not be read, and of JSON lines to which
some were appended only those are. Of other files that changed, what they were is unpacked from the parent's packs. That has
a budget: an export is not to wait for its own description. Beyond the budget those are counted as files if the databases
were told, and else, or if something cannot be read, the counts are not known.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from sidecar.engine.exports.arrival import MOST_COUNTED, CheckedExport
from sidecar.engine.exports.run import ExportRun
from sidecar.errors import BadAnswer, SnapshotError, StoreError, UntrustedSandbox
from sidecar.format.compression import decompress
from sidecar.format.digests import digest_bytes, hash_block
from sidecar.format.index import FILE, Change, Entry, Index
from sidecar.format.packs import describe_member
from sidecar.format.roots import get_root
from sidecar.format.tarballs import Tarball
from sidecar.host.files import SpoolFull
from sidecar.host.work import Deadline, run_in_thread
from sidecar.models.answers import Counts
from sidecar.records import matches
from sidecar.records.comparison import (
    Layouts,
    Side,
    Version,
    add_counts,
    compare_units,
    list_differing,
    list_needed,
    make_side,
)
from sidecar.records.documents import count_lines
from sidecar.records.files import Unreadable
from sidecar.records.units import Files, Unit
from sidecar.store.fetch import fetch_entries
from sidecar.store.fold import PackFile
from sidecar.store.manifest import Manifest, Pack

MOST_FETCHED = 16 << 20
"""If the parent's packs that are needed have more bytes than this, they are not fetched."""
MOST_APPENDED = 16 << 20
"""More than this is not taken for what was appended to a file."""
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
    layouts, parent = run.engine.layouts, await _find_parent(run, checked, manifest)
    old_entries, indexes = await _read_parent(run, checked, parent)
    relevant = _list_relevant(old_entries, checked.entries, (manifest, parent or manifest), layouts)
    new = make_side(manifest, _pick(checked.entries, relevant), layouts)
    old = make_side(parent or manifest, _pick(old_entries, relevant), layouts)
    by_sandbox = _take_told(checked, new)
    told = {**by_sandbox, **_count_wholes(old, new)}
    if old_entries is checked.base_entries and old_entries:
        told |= await run_in_thread(_count_appended, old, new, checked.received_pack.pack, seconds=MOST_SECONDS)
    old, new = _leave_out(old, told), _leave_out(new, told)
    files: tuple[Files, Files] | None = ({}, {})
    if needed := list_needed(old, new, texts=False):
        files = await _stage_files(run, checked, (old, new), needed, indexes if parent is not None else None)
    if files is None:
        if not by_sandbox:
            return None
        # What the databases say is known: the others are counted as files.
        files, old, new = ({}, {}), replace(old, units={}), replace(new, units={})
    versions = Version(old.entries, old.units, files[0]), Version(new.entries, new.units, files[1])
    return await run_in_thread(_compare, *versions, told, seconds=MOST_SECONDS)


async def _read_parent(
    run: ExportRun, checked: CheckedExport, parent: Manifest | None
) -> tuple[Mapping[str, Entry], list[Index]]:
    """Return what the parent has, and the indexes of its packs. Raise a ``SnapshotError``."""
    if parent is None:
        return {}, []
    if checked.base is not None and parent.snapshot == checked.base.snapshot:
        return checked.base_entries, checked.base_indexes
    entries, indexes, _ = await fetch_entries(run.engine.repository.store, parent, run.scratch)
    return entries, indexes


async def _stage_files(
    run: ExportRun, checked: CheckedExport, sides: tuple[Side, Side], needed: set[str], indexes: list[Index] | None
) -> tuple[Files, Files] | None:
    """Put the files that are needed of both sides on this machine; ``None`` if that is beyond the budget. ``indexes``: of
    the packs of the earlier side; ``None`` if there is no such snapshot."""
    from sidecar.records.workspace import Workspace  # late: mostly it is known without reading what differs

    (old, new), arrived = sides, checked.received_pack
    store, memory, holds = run.engine.repository.store, new.manifest.memory, needed.__contains__
    space = Workspace(store, memory, run.scratch, holds, check=False, recalled=run.recalled)
    packs = []
    if indexes is not None:
        space.add_indexes(old.manifest, indexes)
        packs = space.choose_packs(old.manifest.packs, old.entries)
    if not _is_affordable(packs, old, new, needed):
        return None
    files = await space.advance(old.manifest) if needed & old.entries.keys() else {}
    if not needed & new.entries.keys():
        return files, {}
    if arrived.kept is not None and needed & new.entries.keys() <= arrived.kept.wanted:
        return files, arrived.kept.read(new.manifest, checked.entries)
    if arrived.pack.index.kind == "full":
        space = Workspace(store, memory, run.scratch, holds, check=False)
    return files, await space.apply_pack(new.manifest, checked.entries, arrived.pack)


def _list_relevant(
    old: Mapping[str, Entry], new: Mapping[str, Entry], manifests: Iterable[Manifest], layouts: Layouts
) -> set[str]:
    """Return the paths that differ, and all those of roots in which a record may be in several files."""
    roots = {root.name: root.layout for manifest in manifests for root in manifest.roots}
    shared = {
        name for name, layout in roots.items() if layout in layouts and any(s.shared for s in layouts[layout].records)
    }
    return list_differing(old, new) | {path for path in {*old, *new} if shared and get_root(path) in shared}


def _pick(entries: Mapping[str, Entry], paths: Collection[str]) -> dict[str, Entry]:
    return {path: entries[path] for path in paths if path in entries}


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
        if not kinds.keys() <= unit.kinds or any(max(counted) > matches.MOST_COMPARED for counted in kinds.values()):
            raise BadAnswer(f"The sandbox counted records in {path[:80]!r} that cannot be there.")
        told[path] = {
            kind: Counts(added=added, changed=changed, removed=removed)
            for kind, (added, changed, removed) in kinds.items()
            if added or changed or removed
        }
    return told


def _count_wholes(old: Side, new: Side) -> dict[str, dict[str, Counts]]:
    """Return what differs in files that are one record as a whole."""
    told = {}
    for path in list_differing(old.entries, new.entries):
        before, after = old.units.get(path), new.units.get(path)
        sources = {unit.lone for unit in (before, after) if unit is not None}
        only = sources.pop() if len(sources) == 1 else None
        if only is not None and only[1].reader == "whole":
            told[path] = {
                only[1].kind: Counts(
                    added=int(before is None),
                    changed=int(before is not None and after is not None),
                    removed=int(after is None),
                )
            }
    return told


def _count_appended(old: Side, new: Side, pack: PackFile, deadline: Deadline) -> dict[str, dict[str, Counts]]:
    """Return how many lines were appended to JSON lines, by file: only of those that begin as they were, to the last byte.

    ``pack`` is what changed from the old side on."""
    told: dict[str, dict[str, Counts]] = {}
    members = {describe_member(change)[0]: change for change in pack.index.changes if _may_be_longer(change, old, new)}
    if not members:
        return told
    with pack.path.open("rb") as file, decompress(file, pack.codec) as plain:
        for member, contents in Tarball(plain, 1 << 62):
            deadline.check()
            change = members.get(member.name)
            if change is None:
                continue
            path = change.entry.path
            more = _cut_appended(change, old.entries[path], contents.read())
            if more is not None:
                told[path] = {new.units[path].sources[0][1].kind: Counts(added=count_lines(io.BytesIO(more)))}
    return told


def _may_be_longer(change: Change, old: Side, new: Side) -> bool:
    """Whether a change is about JSON lines that may have grown at their end."""
    path, unit, before = change.entry.path, new.units.get(change.entry.path), old.entries.get(change.entry.path)
    if unit is None or unit.lone is None or unit.lone[1].reader != "lines" or old.units.get(path) != unit:
        return False
    if before is None or before.type != FILE or not 0 < before.size < change.entry.size:
        return False
    return 0 < describe_member(change)[1] <= MOST_APPENDED


def _cut_appended(change: Change, before: Entry, carried: bytes) -> bytes | None:
    """Return what was appended to a file, given the blocks of it that changed; ``None`` if something else changed too."""
    start, block = 0, before.block
    if change.blocks is not None:
        start = change.blocks[0] * block
        if change.blocks[-1] - change.blocks[0] + 1 != len(change.blocks) or not 0 < before.size - start <= block:
            return None
        if len(carried) != change.entry.size - start:
            return None
    kept = carried[: before.size - start]
    if not kept.endswith(b"\n"):
        return None
    if change.blocks is not None and before.sums:
        same = hash_block(kept) == before.sums[-len(hash_block(b"")) :]
    else:
        same = digest_bytes(kept, block)[0] == before.digest
    return carried[len(kept) :] if same else None


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
    return fetched <= MOST_FETCHED and read <= MOST_COUNTED


def _compare(
    old: Version, new: Version, told: Mapping[str, dict[str, Counts]], deadline: Deadline
) -> dict[str, Counts] | None:
    """Count the differences; ``None`` if a file that holds records cannot be read."""
    fresh = {name: unit for name, unit in new.units.items() if name not in old.units}
    try:
        came = {name: _count_fresh(unit, new, deadline) for name, unit in fresh.items()}
    except (Unreadable, OSError):
        return None
    rest = replace(new, units={name: unit for name, unit in new.units.items() if name not in fresh})
    units = list(compare_units(old, rest, deadline.check))
    if any(unit.problem for unit in units):
        return None
    known = {path for unit in units if unit.counts for path in unit.paths} | {path for path in told if told[path]}
    known |= {path for name, unit in fresh.items() if came[name] for path in unit.paths}
    counts = add_counts([*(unit.counts for unit in units), *came.values(), *told.values()])
    files = list_differing(old.entries, new.entries) - known
    if files:
        added = sum(path not in old.entries for path in files)
        removed = sum(path not in new.entries for path in files)
        counts[FILE_KIND] = Counts(added=added, changed=len(files) - added - removed, removed=removed)
    return counts


def _count_fresh(unit: Unit, version: Version, deadline: Deadline) -> dict[str, Counts]:
    """Count the records of files that were not there before. Raise ``Unreadable`` if there are too many to compare."""
    deadline.check()
    found = unit.count(version.files)
    if found.total() > matches.MOST_COMPARED:
        raise Unreadable(f"it holds more than {matches.MOST_COMPARED:,} records")
    return {kind: Counts(added=count) for kind, count in found.items() if count}
