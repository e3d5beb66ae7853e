"""The steps of a restore, in order: choose the snapshot, ask what the sandbox has, save what is in no snapshot, put it
in place."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from sidecar.engine.core import CountedSandbox, Engine, gather
from sidecar.engine.restores.brief import check_brief, prepare_brief, put_by_shell
from sidecar.engine.restores.choice import LATEST, choose_manifest
from sidecar.engine.restores.placement import SnapshotUpload, ask_first, place_directly, place_through_sidecar
from sidecar.engine.restores.run import RestoreRequest, RestoreRun
from sidecar.engine.restores.sign import announce_first_start
from sidecar.engine.restores.source import SnapshotSource, open_source
from sidecar.engine.restores.unsaved import SaveFirst
from sidecar.engine.sandbox.identity import build_absence_error, describe_absence
from sidecar.engine.sandbox.links import RELAYED, NotDirect
from sidecar.engine.sandbox.presence import clean_up, connect, is_clean_after, keep_alive
from sidecar.errors import BadAnswer, LimitExceeded, NotSavedFirst, ProgramFailed, SidecarError
from sidecar.format.protocol import RestoreAnswer
from sidecar.ports import Sandbox
from sidecar.receipts import Reason, RestoreOutcome, RestoreReceipt
from sidecar.store.repository import Survey
from sidecar.store.reviews import read_reviews_or_none

INSTEAD = "Restored {snapshot} instead of {wanted}: {problems}"
STILL_HERE = "The store cannot bring back {wanted} ({problems}), but this sandbox still has it: export it."
ASK_FROM = 4 << 20
"""From this size on, a sandbox that was in use is asked first whether it needs the snapshot: the command costs less
than the upload."""
LOST = "The sandbox's answer was lost ({problem}), but asked again it says that everything is in place."


async def restore(
    engine: Engine, sandbox: Sandbox, request: RestoreRequest, source: SnapshotSource | None = None
) -> RestoreReceipt:
    """Restore a memory into ``sandbox``: staged, verified, then swapped in place. Return the receipt. Restores of the same
    request into several sandboxes share a ``source``.

    Files that no snapshot has are exported first. A sandbox that has the latest snapshot, or is ahead of it, is left as
    it is. Raise a ``SidecarError`` if nothing could be tried. The outcome ``incomplete`` means that the sandbox
    refused, or that something there could not be saved; its files are then unchanged.
    """
    check_brief(engine, request)
    await engine.repository.check_new_memory(request.memory)
    if request.only:
        from sidecar.engine.restores.part import check_only  # late: most restores are of all of it

        check_only(request.only, request.mode, engine.layouts)
        request = replace(request, read_only=True)
    counted = CountedSandbox(sandbox, engine.progress, engine.may_use_folder)
    run = RestoreRun(engine=engine, target=sandbox, sandbox=counted, request=request, started=time.monotonic())
    try:
        if engine.direct and source is None and not request.only:
            try:
                return await _restore_from_bucket(run)
            except NotDirect as reason:
                run.warnings = [RELAYED.format(reason=reason)] if str(reason) else []
        if source is not None:
            return await _restore_through_sidecar(run, source)
        async with open_source(engine, request) as own:
            return await _restore_through_sidecar(run, own)
    except (ProgramFailed, LimitExceeded, NotSavedFirst) as problem:
        return run.receipt(RestoreOutcome.INCOMPLETE, reason=Reason(code=problem.code, message=problem.message))


async def _restore_from_bucket(run: RestoreRun) -> RestoreReceipt:
    """Restore with links to the bucket. Raise ``NotDirect`` if it has to go through the sidecar."""
    engine, request = run.engine, run.request
    presence, (manifest, state, survey) = await gather(
        connect(run.sandbox), choose_manifest(engine.repository, request.memory, request.snapshot)
    )
    keep = (manifest.snapshot,) if request.snapshot == LATEST else ()
    await _read_declined(run, survey)
    run.begin(manifest, survey, keep, state.head, state.store_id)
    if engine.reached is not None:
        await engine.reached(manifest.snapshot)
    await prepare_brief(run)
    engine.progress.step("putting it in place")
    async with keep_alive(run, presence):
        answer = await _place_after_saving(run, lambda: place_directly(run))
    return run.receipt(RestoreOutcome.COMPLETE, answer)


async def _restore_through_sidecar(run: RestoreRun, source: SnapshotSource) -> RestoreReceipt:
    """Upload the snapshot that was fetched to this machine to the sandbox."""
    engine, request, run.scratch = run.engine, run.request, source.spool
    presence, supply = await gather(connect(run.sandbox), source.get())
    choice = supply.choice
    if choice is None:
        return await _finish_empty(run)
    run.warnings += choice.warnings
    manifest, run.part = supply.snapshot.fetched.manifest, supply.snapshot.part
    await _read_declined(run, choice.survey)
    run.begin(manifest, choice.survey, choice.keep, choice.head, choice.store)
    if engine.reached is not None:
        await engine.reached(manifest.snapshot)
    await prepare_brief(run, supply.snapshot.fetched)
    parcel = SnapshotUpload(supply.snapshot)
    first = [ask_first] if request.in_use and parcel.size >= ASK_FROM else []

    def placing() -> Awaitable[RestoreAnswer]:
        return first.pop()(run) if first else place_through_sidecar(run, parcel)

    async with keep_alive(run, presence):
        answer = await _place_after_saving(run, placing)
        await put_by_shell(run, answer)
    if choice.problems and answer.status != "kept":
        run.wanted = choice.wanted
        instead = INSTEAD.format(snapshot=manifest.snapshot, wanted=choice.wanted, problems=choice.problems)
        run.warnings.append(instead)
    elif choice.problems:
        run.warnings.append(STILL_HERE.format(wanted=answer.holds, problems=choice.problems))
    return run.receipt(RestoreOutcome.COMPLETE, answer)


async def _read_declined(run: RestoreRun, survey: Survey) -> None:
    """Note which snapshots were declined, if any ever was reviewed."""
    reviews = await read_reviews_or_none(run.engine.repository.store, run.request.memory, survey.sizes)
    run.declined = frozenset(reviews.declined)


async def _place_after_saving(run: RestoreRun, placing: Callable[[], Awaitable[RestoreAnswer]]) -> RestoreAnswer:
    """Have the snapshot put in place; if the sandbox reports unsaved files, save them first and try again."""
    answer = await _await_answer(run, placing())
    if answer.status in ("clear", "no-python"):
        answer = await _await_answer(run, placing())
    if answer.status == "unsaved":
        try:
            run.saved += await SaveFirst(run).save(answer.unsaved)
        except BaseException:
            await clean_up(run)
            raise
        answer = await _await_answer(run, placing())
    if answer.status != "complete" and not (answer.status == "kept" and answer.holds in run.standing.keep):
        raise BadAnswer(f"The sandbox's answer has a status it cannot have now: {answer.status!r}.")
    return answer


async def _await_answer(run: RestoreRun, placing: Awaitable[RestoreAnswer]) -> RestoreAnswer:
    """Wait for the sandbox's answer. If it does not arrive, clean up in the sandbox and ask whether the restore
    completed."""
    try:
        return await placing
    except BaseException as problem:
        if is_clean_after(problem):
            raise
        answer = await clean_up(run, operation=run.operation)
        if answer is None or not isinstance(problem, SidecarError):
            raise
        return replace(answer, warnings=[*answer.warnings, LOST.format(problem=problem.message)])


async def _finish_empty(run: RestoreRun) -> RestoreReceipt:
    """Finish a restore of a memory without snapshots: a first start. Raise ``MemoryNotFound`` if the memory must exist."""
    repository, memory = run.engine.repository, run.request.memory
    beside = await repository.list_snapshot_ids(memory)
    if run.request.must_exist:
        raise await build_absence_error(run.engine, memory, beside)
    run.warnings += await describe_absence(run.engine, memory, beside)
    if run.request.announce:
        await announce_first_start(run)
    return run.receipt(RestoreOutcome.EMPTY)
