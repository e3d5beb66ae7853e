"""Restore: a snapshot becomes a sandbox's memory again."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace

from sidecar.engine.asking import Answer
from sidecar.engine.attending import kept_alive, left_clean, reach, tidy
from sidecar.engine.choosing import choose, choose_unread
from sidecar.engine.direct import RELAYED, NotDirect
from sidecar.engine.identity import absent, missing
from sidecar.engine.parts import CountedSandbox, Engine, together
from sidecar.engine.placing import RestoreRequest, place, place_directly
from sidecar.engine.privacy import shown
from sidecar.errors import LimitExceeded, ProgramFailed, SidecarError
from sidecar.ids import check_memory_id
from sidecar.ports import Sandbox
from sidecar.receipts import Reason, RestoreOutcome, RestoreReceipt, Scrubbed
from sidecar.snapshots.manifest import Manifest
from sidecar.snapshots.missing import scrubbed_of, trimmed_words
from sidecar.spool import spool

LOST = "The sandbox's answer was lost ({problem}), but asked again it says that everything is in place."


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
    operation: str = field(default_factory=lambda: secrets.token_hex(8))
    manifest: Manifest | None = None
    wanted: str = ""
    warnings: list[str] = field(default_factory=list)

    def receipt(
        self, outcome: RestoreOutcome, answer: Answer | None = None, reason: Reason | None = None
    ) -> RestoreReceipt:
        trimmed = trimmed_words(self.manifest) if self.manifest else ""
        scrubbed = scrubbed_of(self.manifest) if self.manifest else Scrubbed()
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
            skipped=[replace(row, path=shown(row.path)) for row in answer.skipped] if answer else [],
            warnings=[
                *self.warnings,
                *(map(shown, answer.warnings) if answer else []),
                *filter(None, [trimmed, scrubbed.words]),
            ],
            reason=reason,
            scrubbed=scrubbed,
        )


async def _from_the_bucket(run: _Run) -> RestoreReceipt:
    engine, request = run.engine, run.request
    presence, (manifest, store) = await together(
        reach(run.sandbox), choose_unread(engine.repository, request.memory, request.snapshot)
    )
    run.manifest = manifest
    engine.progress.about(manifest.snapshot)
    engine.progress.step("putting it in place")
    async with kept_alive(engine, run.sandbox, presence, run.warnings):
        answer = await _settled(
            run, manifest, [], place_directly(engine, run.sandbox, request, manifest, run.operation, store)
        )
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
        engine.progress.about(run.manifest.snapshot)
        uploads: list[str] = []
        placing = place(engine, run.sandbox, request, choice.fetched, scratch, uploads, run.operation, choice.store)
        async with kept_alive(engine, run.sandbox, presence, run.warnings):
            answer = await _settled(run, choice.fetched.manifest, uploads, placing)
    return run.receipt(RestoreOutcome.COMPLETE, answer)


async def _settled(run: _Run, manifest: Manifest, uploads: list[str], placing: Awaitable[Answer]) -> Answer:
    """Wait for the sandbox's answer. When it fails to come, leave nothing behind there, and ask whether all is in place."""
    try:
        return await placing
    except BaseException as problem:
        if left_clean(problem):
            raise
        answer = await tidy(run.engine, run.sandbox, manifest.memory, manifest.snapshot, uploads, run.operation)
        if answer is None or not isinstance(problem, SidecarError):
            raise
        return replace(answer, warnings=[*answer.warnings, LOST.format(problem=problem.message)])


async def _nothing(run: _Run) -> RestoreReceipt:
    """There is nothing to restore: a first start, unless the memory has to exist. Raise ``MemoryNotFound`` then."""
    repository, memory = run.engine.repository, run.request.memory
    beside = await repository.snapshot_ids(memory)
    if run.request.must_exist:
        raise await missing(repository, memory, beside)
    run.warnings += await absent(repository, memory, beside)
    return run.receipt(RestoreOutcome.EMPTY)
