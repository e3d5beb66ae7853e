"""An export of a part of a memory is completed here: what it brings takes its place in the snapshot that the part came
from.

A delta does that by itself. Where the sandbox sends all that it has (it lost its index, or has no Python), the part is
compared with that snapshot on this side, and becomes a delta too. So whoever accepts what a worker learned keeps the rest.
"""

from __future__ import annotations

import time
from dataclasses import replace

from sidecar.engine.exports.arrival import CheckedExport, ReceivedPack, read_base
from sidecar.engine.exports.run import ExportRun
from sidecar.engine.limits import loosen_limits
from sidecar.errors import SnapshotDamaged, SnapshotNotFound
from sidecar.format.index import DIR, Change, Entry, Index
from sidecar.format.patterns import PathSet
from sidecar.format.roots import get_root
from sidecar.host.work import Deadline, run_in_thread
from sidecar.layouts import choose_layouts
from sidecar.store.fold import PackFile, fold_deltas
from sidecar.store.intake import check_entries


async def complete_part(run: ExportRun, checked: CheckedExport) -> CheckedExport:
    """Return an export with all of the memory, if the sandbox has sent a part of it; else the export as it is. If the
    snapshot that the part came from cannot be read, the part stays alone."""
    answer = checked.answer
    if not answer.part or checked.base is not None or checked.arrived is None:
        return checked
    origin = next((snapshot for snapshot in answer.lineage if snapshot in run.known), "")
    if not origin:
        return checked
    read = time.monotonic()
    try:
        base, entries, indexes = await read_base(run, origin)
    except (SnapshotDamaged, SnapshotNotFound):
        return checked
    asked = {layout.name for layout in choose_layouts(run.request.layouts, run.engine.layouts)}
    roots = {root.name for root in base.roots if root.layout in asked}
    # The patterns come from the sandbox: however many and long they are, this ends.
    index = await run_in_thread(
        _compare, entries, checked.entries, PathSet(answer.part), roots, seconds=run.engine.timing.unpack
    )
    checked = replace(checked, base=base, base_entries=entries, base_indexes=indexes, read=read)
    if not index.changes and not index.gone:
        return replace(checked, arrived=None)
    new = checked.received_pack.pack
    delta = PackFile(new.path, new.codec, index)
    folded = await run_in_thread(fold_deltas, indexes, [delta], run.scratch.new(), run.scratch.new())
    merged = {path: entry for path, entry in entries.items() if path not in set(index.gone)}
    merged.update((change.entry.path, change.entry) for change in index.changes)
    layout_of = {**{root.name: root.layout for root in base.roots}, **{one.name: one.layout for one in answer.roots}}
    check_entries(merged, layout_of, loosen_limits(run.engine.limits), entries)
    return replace(checked, arrived=ReceivedPack(folded, merged))


def _compare(
    before: dict[str, Entry], now: dict[str, Entry], part: PathSet, roots: set[str], deadline: Deadline
) -> Index:
    """Return how a part of a snapshot differs from what came back of it. Raise ``UnpackTimeout``."""
    changes = [Change(entry) for path, entry in now.items() if before.get(path) != entry]
    gone = []
    for path, entry in before.items():
        deadline.check()
        if path not in now and entry.type != DIR and get_root(path) in roots and part.has(path):
            gone.append(path)
    return Index("delta", changes, sorted(gone))
