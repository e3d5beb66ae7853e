"""What a sandbox has that is not saved yet: an export that is checked like any other, compared, and not stored."""

from __future__ import annotations

import time
from dataclasses import replace

from sidecar.engine.comparison import describe, read_manifest
from sidecar.engine.core import CountedSandbox, Engine
from sidecar.engine.exports.arrival import delete_unused, fetch_and_check
from sidecar.engine.exports.candidate import read_candidate
from sidecar.engine.exports.commit import build_manifest
from sidecar.engine.exports.completion import complete_part
from sidecar.engine.exports.run import ExportRequest
from sidecar.engine.exports.steps import begin_run, build_question
from sidecar.errors import UsageError
from sidecar.host.files import open_spool
from sidecar.host.work import run_in_thread
from sidecar.models.records import Comparison
from sidecar.ports import Sandbox

UNSAVED = "unsaved"
"""Stands for the snapshot that was not made."""


async def compare_sandbox(
    engine: Engine, sandbox: Sandbox, request: ExportRequest, old: str = "", *, messages: bool = False
) -> Comparison:
    """Return what differs from a snapshot, or the head, to what is in the sandbox now. No snapshot is made.

    Raise a ``SidecarError``.
    """
    engine = replace(engine.narrow_to(request.memory), direct=False, reached=None)
    counted = CountedSandbox(sandbox, engine.progress, engine.may_use_folder)
    run = await begin_run(engine, counted, replace(request, trial=True), time.monotonic(), [])
    async with open_spool() as run.scratch, delete_unused(engine.repository.store) as run.unused:
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
        manifest = checked.unchanged if checked.arrived is None else build_manifest(run, checked, None)
        candidate = await read_candidate(run, checked, manifest, earlier)
        before, after = await candidate.stage(candidate.list_compared())
        name = earlier.snapshot if earlier else ""
        return await run_in_thread(describe, request.memory, (name, UNSAVED), before, after, messages)
