"""The steps of an export, in order: ask the sandbox, fetch and check its bundle, apply the guards, commit, move the
head."""

from __future__ import annotations

import time
from dataclasses import replace

from sidecar.engine.archives.notes import apply_notes
from sidecar.engine.core import CountedSandbox, Engine, gather
from sidecar.engine.exports.acceptance import (
    build_origin,
    decide_on_guards,
    keep_replaced,
    note_recovery,
    note_refusal,
    settle_head,
)
from sidecar.engine.exports.arrival import check_bundle, receive_bundle
from sidecar.engine.exports.base import find_base, read_ahead
from sidecar.engine.exports.commit import (
    CheckedExport,
    build_manifest,
    commit,
    find_replaced_head,
    judge_export,
    plan_packs,
)
from sidecar.engine.exports.coverage import find_learned
from sidecar.engine.exports.run import ExportRequest, ExportRun
from sidecar.engine.guards import check_reasons, describe_moved_projects
from sidecar.engine.limits import describe_near_limits, encode_limits, narrow_engine
from sidecar.engine.privacy import choose_privacy, explain_refusal, redact
from sidecar.engine.quota import RoomFound, compute_room_left
from sidecar.engine.retention import tidy_store
from sidecar.engine.sandbox.dialogue import Asking, ask
from sidecar.engine.sandbox.identity import describe_new_store, read_identified_head
from sidecar.engine.sandbox.links import delete_unclaimed
from sidecar.engine.sandbox.package import build_rules
from sidecar.engine.sandbox.presence import clean_up_on_failure, connect, keep_alive
from sidecar.engine.shell.scripts import build_export_script
from sidecar.engine.without_python import read_tarball
from sidecar.errors import (
    BaseCollected,
    LimitExceeded,
    ObjectRefused,
    SnapshotDamaged,
    SnapshotNotFound,
    UntrustedSandbox,
)
from sidecar.format.protocol import ExportAnswer, ExportQuestion, RootHint
from sidecar.host.retries import retry_safely
from sidecar.host.spool import Spool, open_spool
from sidecar.host.threads import run_in_thread
from sidecar.ids import MemoryKeys, build_memory_key
from sidecar.layouts import choose_layouts
from sidecar.ports import Sandbox
from sidecar.receipts import Accepted, ExportOutcome, ExportReceipt, Reason
from sidecar.store.fetch import fetch_entries
from sidecar.store.manifest import Manifest
from sidecar.store.marks import hold_packs
from sidecar.store.repository import HeadState

MOST_KNOWN = 100
READ_ONLY = "This sandbox was restored to be read (read-only): what it exports is stored beside the head."


async def export(engine: Engine, sandbox: Sandbox, request: ExportRequest) -> ExportReceipt:
    """Export the memory in ``sandbox`` and return the receipt. Raise a ``SidecarError`` on failure; the head is then
    unchanged.

    The head moves only for a sandbox whose memory is based on it, and only to a snapshot that no guard objects to.
    """
    check_reasons(request.allow)
    engine = narrow_engine(engine, request.memory)
    counted, started = CountedSandbox(sandbox, engine.progress), time.monotonic()
    try:
        return await _run_export(await _begin_run(engine, counted, request, started, []))
    except BaseCollected as problem:
        # A garbage collection removed packs of the base meanwhile. One new attempt reads the store as it is now; if the
        # same happens again, something is wrong, and the error is raised.
        warnings = [f"It was begun anew: {problem.message}"]
        return await _run_export(await _begin_run(engine, counted, request, started, warnings))


async def _run_export(run: ExportRun) -> ExportReceipt:
    """Run one export to its receipt. A size limit that is exceeded ends it as rejected, not as an error."""
    engine, request, answer = run.engine, run.request, None
    async with open_spool() as scratch, delete_unclaimed(engine.repository.store) as run.unclaimed:
        try:
            async with (
                keep_alive(engine, run.sandbox, run.presence, run.warnings),
                clean_up_on_failure(engine, run.sandbox, request.memory, run.snapshot),
                read_ahead(run, scratch),
            ):
                answer, grown = await _fetch_and_check(run, scratch)
            if answer.status == "refused":
                return run.receipt(ExportOutcome.REJECTED, run.state, answer, reason=explain_refusal(answer))
            if grown.arrived is None:
                return await _finish_unchanged(run, answer, grown.unchanged, scratch)
            entries = grown.received_pack.entries
            head = await find_replaced_head(engine, run.state, run.survey, grown)
            parent, policy = run.parent(answer), choose_privacy(run).for_sandbox([], engine.layouts).policy
            earlier = head if head is not None and head.snapshot == parent else None
            manifest = build_manifest(
                engine, grown, answer, run.snapshot, run.sandbox.ref, parent, request, policy, earlier
            )
            # The same contents as the head already has: nothing is stored.
            if head is not None and head.tree == manifest.tree:
                await note_recovery(run, answer)
                return run.receipt(ExportOutcome.UNCHANGED, run.state, answer, head)
            if head is not None:
                run.warnings += describe_moved_projects(
                    manifest, head, engine.layouts, named=request.projects is not None
                )
            mixed_up = run.find_mix_up(answer)
            reasons = [mixed_up] if mixed_up else []
            if not reasons and not request.force:
                reasons = await judge_export(
                    engine, manifest, entries, grown, head, scratch, request.allow, answer.trimmed
                )
            origin = build_origin(run, answer, straight=parent == run.state.snapshot)
            verdict = await decide_on_guards(run, answer, reasons, origin)
            reason, accepted = verdict.reason, verdict.accepted
            if reason is not None:
                manifest = replace(manifest, rejected=f"{reason.code}: {reason.message}")
            # A rejected or diverged snapshot is stored too, beside the head; it just does not move the head.
            moves = reason is None and await run.continues_head(answer)
            if moves and run.state.head is not None:
                manifest = replace(manifest, generation=run.state.head.generation + 1)
            manifest, added, room, accepted = await _commit_export(run, manifest, grown, moves, scratch, accepted)
        except LimitExceeded as limit:
            over = Reason(code=limit.code, message=limit.message)
            return run.receipt(ExportOutcome.REJECTED, run.state, answer, reason=over)
    run.warnings += describe_near_limits(
        engine.limits, manifest, entries, answer.bundle.bytes if answer.bundle else 0, room.used
    )
    outcome, state = ExportOutcome.REJECTED, run.state
    if reason is None:
        outcome, state, accepted = await settle_head(run, manifest, accepted, moves=moves)
    else:
        run.warnings += await note_refusal(run, answer, origin, manifest.snapshot, [one.code for one in reasons])
    if outcome is ExportOutcome.DIVERGED:
        reason = _explain_divergence(state, answer)
    receipt = run.receipt(outcome, state, answer, manifest, reason, added, accepted)
    if new := find_learned(grown.base, grown.base_entries, entries):
        new = replace(new, paths=[redact(path) for path in new.paths])
        receipt = replace(receipt, learned=new, warnings=[new.words, *receipt.warnings])
    return replace(receipt, warnings=[*receipt.warnings, *await tidy_store(engine, request.memory, state, room)])


async def _commit_export(
    run: ExportRun, manifest: Manifest, grown: CheckedExport, moves: bool, scratch: Spool, accepted: Accepted | None
) -> tuple[Manifest, int, RoomFound, Accepted | None]:
    """Commit the snapshot if there is room for it. Return its manifest, the bytes added, the room and what was
    accepted.

    A pack that the sandbox wrote directly to the store is removed from ``run.unclaimed`` before the commit: from then
    on a manifest may name it, so it must stay whatever happens, unless it was folded into another pack.
    """
    run.state = await run.engine.repository.begin(run.state)
    pack = grown.received_pack.pack
    key = MemoryKeys.of(manifest.memory).pack(pack.stored, pack.codec)
    grew = not (run.request.force or run.request.adopt)
    manifest, packs, room = await plan_packs(
        run.engine, manifest, grown, run.state, run.survey, scratch, moves=moves, grew=grew
    )
    if accepted is not None:  # pinned before the commit: from then on the head may move to it
        accepted = await keep_replaced(run, manifest, accepted, room.going)
    run.unclaimed.discard(key)
    try:
        manifest, added = await commit(run.engine, manifest, packs, grown)
    except BaseCollected:
        run.unclaimed |= {key} if pack.stored else set()
        raise
    if pack.stored and pack.stored not in {named.id for named in manifest.packs}:
        run.unclaimed.add(key)
    return manifest, added, room, accepted


class BaseDamaged(SnapshotDamaged):
    """The base of a delta cannot be read. Retryable, because a full export needs no base."""

    retryable = True


async def _begin_run(
    engine: Engine, counted: CountedSandbox, request: ExportRequest, started: float, warnings: list[str]
) -> ExportRun:
    """Read the head and the listing, connect to the sandbox, and choose the id of the new snapshot. Raise a
    ``SidecarError``."""
    await engine.repository.check_new_memory(request.memory)
    choose_layouts(request.layouts, engine.layouts)  # raises for unknown names before anything is written
    engine.progress.step("reaching the sandbox")
    presence, (state, head), survey = await gather(
        connect(counted), _read_head(engine, request.memory), engine.repository.survey(request.memory)
    )
    warnings = [*warnings, *await describe_new_store(engine.repository, request.memory, state, survey)]
    if not request.adopt:
        # The sandbox records the store's id in its notes, so the store needs one before the request. The id stays in
        # the store even if this export fails.
        state = await engine.repository.begin(state)
    known = [*filter(None, [state.snapshot]), *survey.snapshots[:MOST_KNOWN]]
    fresh, refused = await engine.repository.make_next_id(request.memory, state, survey.snapshots)
    snapshot = request.snapshot or fresh
    if engine.reached is not None:
        await engine.reached(snapshot)
    engine.progress.about(snapshot)
    warnings = [*warnings, *filter(None, [state.notice]), *(f"Ignored: {problem}" for problem in refused)]
    return ExportRun(
        engine, counted, request, started, state, survey, known, snapshot, presence, warnings, replaces=head
    )


async def _read_head(engine: Engine, memory: str) -> tuple[HeadState, Manifest | None]:
    """Return the head and its manifest, which says where the memory's roots were. The manifest is ``None`` if it cannot
    be read; a later step that needs it raises the error then."""
    state = await read_identified_head(engine.repository, memory)
    try:
        return state, await engine.repository.manifest(memory, state.snapshot) if state.snapshot else None
    except (SnapshotDamaged, SnapshotNotFound, ObjectRefused):
        return state, None  # a later step that needs it raises


async def _fetch_and_check(run: ExportRun, scratch: Spool) -> tuple[ExportAnswer, CheckedExport]:
    """Request the export from the sandbox, fetch the bundle and check it; start again if a transfer was cut short.

    A delta on a base that is damaged or forgotten would be lost with it, so a full export is requested then.
    """
    engine, question = run.engine, _build_question(run)
    how = Asking(
        timeout=engine.timing.command,
        rules=build_rules(engine.layouts.values()),
        inline_bytes=engine.inline_bytes,
        shell=lambda: build_export_script(question, choose_layouts(run.request.layouts, engine.layouts)),
    )
    async for attempt in retry_safely():
        with attempt:
            engine.progress.step("reading the memory")
            answer, inline = await ask(run.sandbox, question, ExportAnswer, how)
            read = time.monotonic()
            if run.request.noted is not None:
                answer = apply_notes(answer, run.request.noted, engine.layouts)
            if answer.status == "refused":
                return answer, CheckedExport(None, {})
            try:
                base, entries, indexes = await find_base(run, answer, scratch)
            except (SnapshotDamaged, SnapshotNotFound) as damage:
                if isinstance(damage, SnapshotDamaged):
                    await engine.repository.mark_damaged(run.request.memory, answer.base, damage)
                run.survey.damaged.add(answer.base)
                question.unusable = sorted(run.survey.damaged)
                raise BaseDamaged(damage.message) from None
            if answer.status == "unchanged":
                return answer, CheckedExport(base, entries)
            stored = ""
            if answer.status == "tarball":
                answer, bundle = await read_tarball(engine, run.sandbox, answer, question, scratch)
                if bundle is None:
                    return answer, CheckedExport(None, {})
            else:
                bundle, stored = await receive_bundle(
                    engine, run.sandbox, answer, inline, scratch, run.warnings, run.unclaimed
                )
            roots = {root.name: root.layout for root in base.roots} if base else {}
            try:
                arrived = await run_in_thread(
                    check_bundle, engine, answer, bundle, entries, roots, stored, seconds=engine.timing.unpack
                )
            except UntrustedSandbox as problem:
                _ask_for_full_export(run, question, answer, problem)
                raise
            return answer, CheckedExport(base, entries, indexes, arrived, read)
    raise AssertionError("unreachable")


def _ask_for_full_export(
    run: ExportRun, question: ExportQuestion, answer: ExportAnswer, problem: UntrustedSandbox
) -> None:
    """Make the next attempt request a full export, once, after a delta that makes no sense. The base is recorded in the
    sandbox's notes, which the agent can write; without this, a sandbox with wrong notes could never be exported again.
    """
    if answer.base and answer.base not in question.unusable:
        question.unusable = sorted([*question.unusable, answer.base])
        run.warnings.append(f"What the sandbox noted of {answer.base} is not so; all of the memory was read again.")
        problem.retryable = True


def _build_question(run: ExportRun) -> ExportQuestion:
    """Build the question for the in-sandbox program."""
    engine, request, head = run.engine, run.request, run.replaces
    layouts = [layout.name for layout in choose_layouts(request.layouts, engine.layouts)]
    return ExportQuestion(
        memory=request.memory,
        snapshot=run.snapshot,
        key=build_memory_key(request.memory),
        known=run.known,
        unusable=sorted(run.survey.damaged),
        identity=run.identity,
        layouts=layouts,
        projects=None if request.projects is None else list(request.projects),
        roots=[RootHint(root.name, root.hint) for root in head.roots] if head else [],
        project_hints=head.projects if head else [],
        limits=encode_limits(engine.limits, layouts, compute_room_left(engine, run.survey.sizes)),
        privacy=choose_privacy(run).for_sandbox(layouts, engine.layouts),
        inline_bytes=engine.inline_bytes,
        database_wait=engine.timing.database_wait,
        worker_wait=engine.timing.worker_wait,
        turn_wait=engine.timing.turn_wait,
    )


async def _finish_unchanged(run: ExportRun, answer: ExportAnswer, base: Manifest, scratch: Spool) -> ExportReceipt:
    """Finish an export in which nothing changed since ``base``. If ``base`` is not and never was the head, an earlier
    export stored it without moving the head: decide again whether it becomes the head, or report the same reason again.
    """
    state = run.state
    run.warnings += describe_near_limits(
        run.engine.limits, base, {}, 0, {"memory_bytes": sum(run.survey.sizes.values())}
    )
    if base.snapshot == state.snapshot:
        await note_recovery(run, answer)
        return run.receipt(ExportOutcome.UNCHANGED, state, answer, base)
    origin, mixed_up = build_origin(run, answer, straight=False), run.find_mix_up(answer)
    reasons = [mixed_up] if mixed_up else []
    if not reasons and not run.request.force:
        reasons = await _find_objections(run, base, answer, scratch)
    verdict = await decide_on_guards(run, answer, reasons, origin)
    # A manifest names only the first reason against it; before the snapshot is accepted, all guards are applied again.
    if verdict.accepted is not None:
        verdict = await decide_on_guards(run, answer, await _judge_again(run, base, answer, scratch), origin)
    reason, accepted = verdict.reason, verdict.accepted
    if run.request.force or (reason is None and await run.continues_head(answer)):
        if accepted is not None:
            accepted = await keep_replaced(run, base, accepted, ())
        await hold_packs(run.engine.repository.store, base)
        outcome, state, accepted = await settle_head(run, base, accepted, moves=True)
        return run.receipt(outcome, state, answer, base, accepted=accepted)
    if state.head and state.head.was_head(base.snapshot):
        receipt = run.receipt(ExportOutcome.UNCHANGED, state, answer, base)
        return replace(
            receipt, warnings=[*receipt.warnings, f"The head is {state.snapshot}; this sandbox holds an earlier one."]
        )
    if reason is not None:
        run.warnings += await note_refusal(run, answer, origin, base.snapshot, [reason.code])
        return run.receipt(ExportOutcome.REJECTED, state, answer, base, reason)
    return run.receipt(ExportOutcome.DIVERGED, state, answer, base, _explain_divergence(state, answer))


async def _find_objections(run: ExportRun, kept: Manifest, answer: ExportAnswer, scratch: Spool) -> list[Reason]:
    """Return the reason recorded when a snapshot was rejected. If that reason is allowed by now, apply all guards
    again."""
    code, _, message = kept.rejected.partition(": ")
    if code not in {*run.request.allow, *run.engine.guards.allow}:
        return [Reason(code=code, message=message)] if code else []
    return await _judge_again(run, kept, answer, scratch)


async def _judge_again(run: ExportRun, kept: Manifest, answer: ExportAnswer, scratch: Spool) -> list[Reason]:
    """Apply the guards to a stored snapshot, compared with the present head."""
    nothing = CheckedExport(None, {})
    head = await find_replaced_head(run.engine, run.state, run.survey, nothing)
    entries, _, _ = await fetch_entries(run.engine.repository.store, kept, scratch)
    return await judge_export(run.engine, kept, entries, nothing, head, scratch, run.request.allow, answer.trimmed)


def _explain_divergence(state: HeadState, answer: ExportAnswer) -> Reason:
    """Return the reason for an outcome of ``DIVERGED``."""
    if answer.reader:
        return Reason(code="read-only", message=READ_ONLY)
    head = state.snapshot or state.problem or "which is missing"
    return Reason(code="diverged", message=f"This sandbox did not start from the head ({head}).")
