"""The steps of a restore, in order: choose the snapshot, ask what the sandbox has, save what is in no snapshot, put it
in place."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from sidecar.engine.core import CountedSandbox, Engine, gather
from sidecar.engine.privacy import redact, report_aside, report_databases, report_skipped, report_withheld
from sidecar.engine.restores.choice import LATEST, choose_manifest, choose_snapshot
from sidecar.engine.restores.placement import (
    RestoreRequest,
    SnapshotUpload,
    ask_first,
    place_directly,
    place_through_sidecar,
)
from sidecar.engine.restores.unsaved import SavedFirst, SaveFirst, StoreFacts
from sidecar.engine.sandbox.identity import build_absence_error, describe_absence, describe_other_home
from sidecar.engine.sandbox.links import RELAYED, NotDirect
from sidecar.engine.sandbox.presence import clean_up, connect, is_clean_after, keep_alive
from sidecar.errors import BadAnswer, LimitExceeded, NotSavedFirst, ProgramFailed, SidecarError
from sidecar.format.protocol import RestoreAnswer
from sidecar.host.spool import open_spool
from sidecar.ids import build_memory_key
from sidecar.ports import Sandbox
from sidecar.receipts import Reason, RestoreOutcome, RestoreReceipt, Scrubbed
from sidecar.store.manifest import Head, Manifest, count_scrubbed, describe_trimmed
from sidecar.store.repository import Survey

INSTEAD = "Restored {snapshot} instead of {wanted}: {problems}"
STILL_HERE = "The store cannot bring back {wanted} ({problems}), but this sandbox still has it: export it."
ASK_FROM = 4 << 20
"""From this size on, a sandbox that was in use is asked first whether it needs the snapshot: the command costs less
than the upload."""
MOST_KNOWN = 100
LOST = "The sandbox's answer was lost ({problem}), but asked again it says that everything is in place."


async def restore(engine: Engine, sandbox: Sandbox, request: RestoreRequest) -> RestoreReceipt:
    """Restore a memory into ``sandbox``: staged, verified, then swapped in place. Return the receipt.

    Files that no snapshot has are exported first. A sandbox that has the latest snapshot, or is ahead of it, is left as
    it is. Raise a ``SidecarError`` if nothing could be tried. The outcome ``incomplete`` means that the sandbox
    refused, or that something there could not be saved; its files are then unchanged.
    """
    await engine.repository.check_new_memory(request.memory)
    run = _RestoreRun(engine, sandbox, CountedSandbox(sandbox, engine.progress), request, time.monotonic())
    try:
        if engine.direct:
            try:
                return await _restore_from_bucket(run)
            except NotDirect as reason:
                run.warnings = [RELAYED.format(reason=reason)] if str(reason) else []
        return await _restore_through_sidecar(run)
    except (ProgramFailed, LimitExceeded, NotSavedFirst) as problem:
        return run.receipt(RestoreOutcome.INCOMPLETE, reason=Reason(code=problem.code, message=problem.message))


@dataclass(slots=True)
class _RestoreRun:
    """The state of one restore, from the request to the receipt."""

    engine: Engine
    target: Sandbox
    sandbox: CountedSandbox
    request: RestoreRequest
    started: float
    operation: str = field(default_factory=lambda: secrets.token_hex(8))
    manifest: Manifest | None = None
    wanted: str = ""
    warnings: list[str] = field(default_factory=list)
    standing: StoreFacts = field(default_factory=StoreFacts)
    saved: list[SavedFirst] = field(default_factory=list)

    def begin(self, manifest: Manifest, survey: Survey, keep: tuple[str, ...], head: Head | None, store: str) -> None:
        """Record what is to be restored, and what the sandbox has to know about the store."""
        self.manifest = manifest
        self.engine.progress.about(manifest.snapshot)
        known = list(dict.fromkeys([*keep, manifest.snapshot, *survey.snapshots[:MOST_KNOWN]]))
        self.standing.stored.setdefault(build_memory_key(manifest.memory), known)
        self.standing.heads = [one for one in known if one in keep or (head is not None and head.was_head(one))]
        self.standing.unusable = sorted(survey.damaged)
        self.standing.keep = [] if self.request.discard or self.request.mode == "seed" else list(keep)
        self.standing.store = store

    def receipt(
        self, outcome: RestoreOutcome, answer: RestoreAnswer | None = None, reason: Reason | None = None
    ) -> RestoreReceipt:
        """Build the receipt. Texts that come from the sandbox are redacted."""
        kept = answer is not None and answer.status == "kept"
        withheld = report_withheld(answer.withheld) if answer else []
        scrubbed = count_scrubbed(self.manifest) if self.manifest and not kept else Scrubbed()
        missing = [describe_trimmed(self.manifest), scrubbed.words] if self.manifest and not kept else []
        snapshot = self.manifest.snapshot if self.manifest else None
        first = next((saved for saved in self.saved if saved.memory == self.request.memory), None)
        first = first or next(iter(self.saved), None)
        return RestoreReceipt(
            outcome=outcome,
            memory=self.request.memory,
            snapshot=answer.holds if answer and kept else snapshot,
            parent=(self.manifest.parent or None) if self.manifest and not (answer and answer.holds) else None,
            sandbox=self.sandbox.ref,
            home=redact(answer.home) if answer else "",
            user=redact(answer.user) if answer else "",
            mode=self.request.mode,
            wanted=self.wanted,
            files=answer.files if answer else 0,
            bytes=answer.bytes if answer else 0,
            packed_bytes=sum(saved.packed_bytes for saved in self.saved),
            transferred_bytes=self.sandbox.transferred_bytes,
            round_trips=sum(self.sandbox.trips.values()),
            trips=self.sandbox.trips,
            duration_ms=round((time.monotonic() - self.started) * 1000),
            databases=report_databases(answer.databases) if answer else [],
            skipped=report_skipped(answer.skipped) if answer else [],
            warnings=[
                *(describe_other_home(self.sandbox, answer, self.manifest) if answer else []),
                *self.warnings,
                *(saved.words for saved in self.saved),
                *(row.words for row in withheld),
                *(map(redact, answer.warnings) if answer else []),
                *filter(None, missing),
            ],
            reason=reason,
            scrubbed=scrubbed,
            kept=kept,
            saved_first=first.snapshot if first else None,
            saved_first_memory=first.memory if first and first.memory != self.request.memory else "",
            set_aside=report_aside(answer.set_aside) if answer and answer.set_aside else None,
            read_only=self.request.read_only and outcome is RestoreOutcome.COMPLETE,
            withheld=withheld,
        )


async def _restore_from_bucket(run: _RestoreRun) -> RestoreReceipt:
    """Restore with links to the bucket. Raise ``NotDirect`` if it has to go through the sidecar."""
    engine, request = run.engine, run.request
    presence, (manifest, state), survey = await gather(
        connect(run.sandbox),
        choose_manifest(engine.repository, request.memory, request.snapshot),
        engine.repository.survey(request.memory),
    )
    keep = (manifest.snapshot,) if request.snapshot == LATEST else ()
    run.begin(manifest, survey, keep, state.head, state.store_id)
    if engine.reached is not None:
        await engine.reached(manifest.snapshot)
    engine.progress.step("putting it in place")

    def placing() -> Awaitable[RestoreAnswer]:
        return place_directly(engine, run.sandbox, request, manifest, run.standing, run.operation)

    async with keep_alive(engine, run.sandbox, presence, run.warnings):
        answer = await _place_after_saving(run, manifest, [], placing)
    return run.receipt(RestoreOutcome.COMPLETE, answer)


async def _restore_through_sidecar(run: _RestoreRun) -> RestoreReceipt:
    """Fetch the snapshot to this machine and upload it to the sandbox."""
    engine, request = run.engine, run.request
    async with open_spool() as scratch:
        engine.progress.step("fetching the snapshot")
        presence, choice, survey = await gather(
            connect(run.sandbox),
            choose_snapshot(engine.repository, request.memory, request.snapshot, scratch),
            engine.repository.survey(request.memory),
        )
        if choice is None:
            return await _finish_empty(run)
        run.warnings += choice.warnings
        manifest = choice.fetched.manifest
        run.begin(manifest, survey, choice.keep, choice.head, choice.store)
        if engine.reached is not None:
            await engine.reached(manifest.snapshot)
        parcel = SnapshotUpload(choice.fetched, scratch)
        first = [ask_first] if request.in_use and parcel.size >= ASK_FROM else []

        def placing() -> Awaitable[RestoreAnswer]:
            step = first.pop() if first else place_through_sidecar
            return step(engine, run.sandbox, request, parcel, run.standing, run.operation)

        async with keep_alive(engine, run.sandbox, presence, run.warnings):
            answer = await _place_after_saving(run, manifest, parcel.uploads, placing)
    if choice.problems and answer.status != "kept":
        run.wanted = choice.wanted
        instead = INSTEAD.format(snapshot=manifest.snapshot, wanted=choice.wanted, problems=choice.problems)
        run.warnings.append(instead)
    elif choice.problems:
        run.warnings.append(STILL_HERE.format(wanted=answer.holds, problems=choice.problems))
    return run.receipt(RestoreOutcome.COMPLETE, answer)


async def _place_after_saving(
    run: _RestoreRun, manifest: Manifest, uploads: list[str], placing: Callable[[], Awaitable[RestoreAnswer]]
) -> RestoreAnswer:
    """Have the snapshot put in place; if the sandbox reports unsaved files, save them first and try again."""
    answer = await _await_answer(run, manifest, uploads, placing())
    if answer.status in ("clear", "no-python"):
        answer = await _await_answer(run, manifest, uploads, placing())
    if answer.status == "unsaved":
        saving = SaveFirst(run.engine, run.target, run.sandbox, manifest, run.request.projects, run.standing)
        try:
            run.saved += await saving.save(answer.unsaved)
        except BaseException:
            await clean_up(run.engine, run.sandbox, manifest.memory, manifest.snapshot, uploads)
            raise
        answer = await _await_answer(run, manifest, uploads, placing())
    if answer.status != "complete" and not (answer.status == "kept" and answer.holds in run.standing.keep):
        raise BadAnswer(f"The sandbox's answer has a status it cannot have now: {answer.status!r}.")
    return answer


async def _await_answer(
    run: _RestoreRun, manifest: Manifest, uploads: list[str], placing: Awaitable[RestoreAnswer]
) -> RestoreAnswer:
    """Wait for the sandbox's answer. If it does not arrive, clean up in the sandbox and ask whether the restore
    completed."""
    try:
        return await placing
    except BaseException as problem:
        if is_clean_after(problem):
            raise
        answer = await clean_up(run.engine, run.sandbox, manifest.memory, manifest.snapshot, uploads, run.operation)
        if answer is None or not isinstance(problem, SidecarError):
            raise
        return replace(answer, warnings=[*answer.warnings, LOST.format(problem=problem.message)])


async def _finish_empty(run: _RestoreRun) -> RestoreReceipt:
    """Finish a restore of a memory without snapshots: a first start. Raise ``MemoryNotFound`` if the memory must exist."""
    repository, memory = run.engine.repository, run.request.memory
    beside = await repository.list_snapshot_ids(memory)
    if run.request.must_exist:
        raise await build_absence_error(repository, memory, beside)
    run.warnings += await describe_absence(repository, memory, beside)
    return run.receipt(RestoreOutcome.EMPTY)
