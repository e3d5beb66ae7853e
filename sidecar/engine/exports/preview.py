"""What a sandbox has that is not saved yet: an export that is checked like any other, compared, and not stored."""

from __future__ import annotations

import time
from dataclasses import replace

from sidecar.engine.comparison import (
    describe,
    list_needed,
    make_side,
    read_manifest,
    stage_versions,
)
from sidecar.engine.core import CountedSandbox, Engine
from sidecar.engine.exports.arrival import CheckedExport, delete_unclaimed, fetch_and_check
from sidecar.engine.exports.commit import build_manifest
from sidecar.engine.exports.completion import complete_part
from sidecar.engine.exports.run import ExportRequest, ExportRun
from sidecar.engine.exports.steps import begin_run, build_question
from sidecar.errors import UsageError
from sidecar.host.files import open_spool
from sidecar.host.work import run_in_thread
from sidecar.models.records import Comparison
from sidecar.ports import Sandbox
from sidecar.records.comparison import Version
from sidecar.records.workspace import Workspace
from sidecar.store.manifest import Manifest

UNSAVED = "unsaved"
"""Stands for the snapshot that was not made."""


async def compare_sandbox(
    engine: Engine, sandbox: Sandbox, request: ExportRequest, old: str = "", *, messages: bool = False
) -> Comparison:
    """Return what differs from a snapshot, or the head, to what is in the sandbox now. No snapshot is made.

    Raise a ``SidecarError``.
    """
    engine = replace(engine.narrow_to(request.memory), direct=False, reached=None)
    counted = CountedSandbox(sandbox, engine.progress)
    run = await begin_run(engine, counted, replace(request, trial=True), time.monotonic(), [])
    async with open_spool() as run.scratch, delete_unclaimed(engine.repository.store) as run.unclaimed:
        checked = await complete_part(run, await fetch_and_check(run, build_question(run)))
        run.answer = checked.answer
        if checked.answer.status == "refused":
            raise UsageError(
                "The sandbox holds credentials that its privacy settings do not let out.",
                hint="`memory-sidecar doctor --sandbox REF` names them.",
            )
        earlier = None
        if old or run.state.snapshot:
            earlier = await read_manifest(engine.repository, request.memory, old or "latest")
        before, after = await _stage(run, checked, earlier)
        name = earlier.snapshot if earlier else ""
        return await run_in_thread(describe, request.memory, (name, UNSAVED), before, after, messages)


async def _stage(run: ExportRun, checked: CheckedExport, earlier: Manifest | None) -> tuple[Version, Version]:
    """Put the files that differ on this machine, as the snapshot has them and as the sandbox has."""
    engine, store = run.engine, run.engine.repository.store
    if checked.arrived is None:
        return await stage_versions(store, earlier or checked.unchanged, checked.unchanged, engine.layouts, run.scratch)
    needed: set[str] = set()
    manifest = build_manifest(run, checked, None)
    spaces = [Workspace(store, manifest.memory, run.scratch, needed.__contains__) for _ in range(2)]
    old = make_side(earlier or manifest, await spaces[0].read_entries(earlier) if earlier else {}, engine.layouts)
    new = make_side(manifest, checked.entries, engine.layouts)
    needed |= list_needed(old, new)
    old_files = await spaces[0].advance(earlier) if earlier is not None else {}
    space = spaces[1]
    if checked.base is not None:
        same = earlier is not None and checked.base.snapshot == earlier.snapshot
        space = spaces[0] if same else spaces[1]
        if not same:
            await space.advance(checked.base)
    new_files = await space.apply_pack(manifest, checked.entries, checked.received_pack.pack)
    return Version(old.entries, old.units, old_files), Version(new.entries, new.units, new_files)
