"""Restore: a snapshot becomes a sandbox's memory again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from sidecar.engine.asking import Answer
from sidecar.engine.attending import kept_alive, reach, tidied
from sidecar.engine.choosing import choose, choose_unread
from sidecar.engine.direct import RELAYED, NotDirect
from sidecar.engine.parts import CountedSandbox, Engine, together
from sidecar.engine.placing import RestoreRequest, place, place_directly
from sidecar.errors import LimitExceeded, ProgramFailed
from sidecar.ids import check_memory_id
from sidecar.ports import Sandbox
from sidecar.receipts import Reason, RestoreOutcome, RestoreReceipt
from sidecar.snapshots.manifest import Manifest
from sidecar.spool import spool


async def restore(engine: Engine, sandbox: Sandbox, request: RestoreRequest) -> RestoreReceipt:
    """Restore a memory into ``sandbox``: staged, verified, then swapped there.

    Raise a ``SidecarError`` when nothing could be tried. Outcome ``incomplete`` says that the sandbox refused; what it had
    is as it was.
    """
    check_memory_id(request.memory)
    run = _Run(engine, CountedSandbox(sandbox, engine.progress), request, time.monotonic())
    try:
        if engine.direct:
            try:
                return await _from_the_bucket(run)
            except NotDirect as reason:
                run.warnings = [RELAYED.format(reason=reason)] if str(reason) else []
        return await _through_the_sidecar(run)
    except (ProgramFailed, LimitExceeded) as problem:
        return run.receipt(RestoreOutcome.INCOMPLETE, reason=Reason(code=problem.code, message=problem.message))


@dataclass(slots=True)
class _Run:
    """One restore: what was asked for, and what is known by now."""

    engine: Engine
    sandbox: CountedSandbox
    request: RestoreRequest
    started: float
    manifest: Manifest | None = None
    wanted: str = ""
    warnings: list[str] = field(default_factory=list)

    def receipt(
        self, outcome: RestoreOutcome, answer: Answer | None = None, reason: Reason | None = None
    ) -> RestoreReceipt:
        return RestoreReceipt(
            outcome=outcome,
            memory=self.request.memory,
            snapshot=self.manifest.snapshot if self.manifest else None,
            parent=(self.manifest.parent or None) if self.manifest else None,
            sandbox=self.sandbox.ref,
            mode=self.request.mode,
            wanted=self.wanted,
            files=answer.files if answer else 0,
            bytes=answer.bytes if answer else 0,
            transferred_bytes=self.sandbox.transferred_bytes,
            round_trips=sum(self.sandbox.trips.values()),
            trips=self.sandbox.trips,
            duration_ms=round((time.monotonic() - self.started) * 1000),
            databases=[row.report() for row in answer.databases] if answer else [],
            skipped=list(answer.skipped) if answer else [],
            warnings=[*self.warnings, *(answer.warnings if answer else [])],
            reason=reason,
        )


async def _from_the_bucket(run: _Run) -> RestoreReceipt:
    engine, request = run.engine, run.request
    presence, manifest = await together(
        reach(run.sandbox), choose_unread(engine.repository, request.memory, request.snapshot)
    )
    run.manifest = manifest
    async with (
        kept_alive(engine, run.sandbox, presence, run.warnings),
        tidied(engine, run.sandbox, request.memory, manifest.snapshot),
    ):
        engine.progress.step("putting it in place")
        answer = await place_directly(engine, run.sandbox, request, manifest)
    return run.receipt(RestoreOutcome.COMPLETE, answer)


async def _through_the_sidecar(run: _Run) -> RestoreReceipt:
    engine, request = run.engine, run.request
    async with spool() as scratch:
        engine.progress.step("fetching the snapshot")
        presence, choice = await together(
            reach(run.sandbox), choose(engine.repository, request.memory, request.snapshot, scratch)
        )
        if choice is None:
            return await _nothing(run)
        run.manifest, run.wanted = choice.fetched.manifest, choice.wanted
        run.warnings += choice.warnings
        async with (
            kept_alive(engine, run.sandbox, presence, run.warnings),
            tidied(engine, run.sandbox, request.memory, run.manifest.snapshot) as uploads,
        ):
            answer = await place(engine, run.sandbox, request, choice.fetched, scratch, uploads)
    return run.receipt(RestoreOutcome.COMPLETE, answer)


async def _nothing(run: _Run) -> RestoreReceipt:
    """There is no head: a first start, which is no error."""
    receipt = run.receipt(RestoreOutcome.EMPTY)
    if beside := await run.engine.repository.snapshot_ids(run.request.memory):
        return replace(receipt, warnings=[f"{len(beside)} snapshots exist, but none of them ever became the head."])
    return receipt
