"""The steps of an export, in order: ask the sandbox, fetch and check its bundle, decide whether the head may move, store
the snapshot, move the head, and clear up."""

from __future__ import annotations

import time
from dataclasses import replace

from sidecar.engine.core import CountedSandbox, Engine, gather
from sidecar.engine.exports.arrival import CheckedExport, delete_unused, fetch_and_check
from sidecar.engine.exports.commit import (
    StoredSnapshot,
    advance_head,
    build_manifest,
    find_learned,
    keep_replaced,
    settle_head,
    store_snapshot,
)
from sidecar.engine.exports.decision import (
    Verdict,
    check_owner,
    check_reasons,
    decide,
    decide_again,
    explain_credentials,
    explain_divergence,
    find_replaced_head,
    note_recovery,
    note_refusal,
)
from sidecar.engine.exports.gate import examine, find_hold, note_pending
from sidecar.engine.exports.run import ExportRequest, ExportRun, describe_moved_projects
from sidecar.engine.limits import compute_room_left, describe_near_limits, encode_limits
from sidecar.engine.sandbox.identity import describe_new_store
from sidecar.engine.sandbox.presence import connect
from sidecar.errors import (
    BaseCollected,
    LimitExceeded,
    ObjectRefused,
    SidecarError,
    SnapshotDamaged,
    SnapshotNotFound,
)
from sidecar.format.protocol import ExportQuestion, RootHint
from sidecar.host.files import open_spool
from sidecar.ids import MemoryKeys, build_memory_key
from sidecar.layouts import choose_layouts
from sidecar.policy.review import PENDING
from sidecar.ports import Sandbox
from sidecar.receipts import ExportOutcome, ExportReceipt, Reason
from sidecar.store.manifest import Manifest
from sidecar.store.marks import hold_packs
from sidecar.store.repository import HeadState, Repository, Survey
from sidecar.store.reviews import read_reviews_or_none

MOST_KNOWN = 100
COLLECT_EVERY = 20
OVER = (
    "This memory needs {over:,} bytes more in the store than retention.memory_bytes allows ({most:,}): its head alone, and"
    " what is pinned or labelled to stay, are too much."
)
ASKED_SINCE = "It waits for a review: one is asked for since it was stored."
FINISHED = "This call was sent before; the service ended before it could answer, and what it had stored counts."


async def export(engine: Engine, sandbox: Sandbox, request: ExportRequest) -> ExportReceipt:
    """Export the memory in ``sandbox`` and return the receipt. Raise a ``SidecarError`` on failure; the head is then
    unchanged.

    The head moves only for a sandbox whose memory is based on it, and only to a snapshot that no guard objects to.
    """
    check_reasons(request.allow)
    engine = engine.narrow_to(request.memory)
    counted, started = CountedSandbox(sandbox, engine.progress, engine.may_use_folder), time.monotonic()
    try:
        return await _run_export(await begin_run(engine, counted, request, started, []))
    except BaseCollected as problem:
        # A garbage collection removed packs of the base meanwhile. One new attempt reads the store as it is now; if the
        # same happens again, something is wrong, and the error is raised.
        engine.repository.recall.forget(request.memory)
        warnings = [f"It was begun anew: {problem.message}"]
        return await _run_export(await begin_run(engine, counted, request, started, warnings))


async def _run_export(run: ExportRun) -> ExportReceipt:
    """Run one export to its receipt. A size limit that is exceeded ends it as rejected, not as an error."""
    async with open_spool() as run.scratch, delete_unused(run.engine.repository.store) as run.unused:
        try:
            checked = await fetch_and_check(run, build_question(run))
            run.answer = checked.answer
            check_owner(run, checked.answer)
            if checked.answer.status == "refused":
                return run.receipt(ExportOutcome.REJECTED, reason=explain_credentials(checked.answer))
            if checked.answer.part:
                from sidecar.engine.exports.completion import complete_part  # late: most exports are of all of it

                checked = await complete_part(run, checked)
            if checked.arrived is None:
                return await _finish_unchanged(run, checked)
            head = await find_replaced_head(run, checked.base)
            manifest = build_manifest(run, checked, head)
            if head is not None and head.tree == manifest.tree:
                return await _finish_equal(run, checked, head)
            run.warnings += describe_moved_projects(run, manifest, head)
            verdict = await examine(run, checked, manifest, await decide(run, checked, manifest, head))
            manifest = replace(manifest, changes=await _count_changes(run, checked, manifest))
            stored = await store_snapshot(run, checked, manifest, verdict)
        except LimitExceeded as limit:
            return run.receipt(ExportOutcome.REJECTED, reason=Reason(code=limit.code, message=limit.message))
    return await _finish_stored(run, checked, verdict, stored)


async def begin_run(
    engine: Engine, counted: CountedSandbox, request: ExportRequest, started: float, warnings: list[str]
) -> ExportRun:
    """Read the head and the listing, connect to the sandbox, and choose the id of the new snapshot. Raise a
    ``SidecarError``."""
    await engine.repository.check_new_memory(request.memory)
    if request.layouts:
        choose_layouts(request.layouts, engine.layouts)  # raises for unknown names before anything is written
    engine.progress.step("reaching the sandbox")
    presence, (state, head, survey, gone) = await gather(connect(counted), _open_memory(engine, request.memory))
    if not survey.snapshots:
        warnings = [*warnings, *await describe_new_store(engine, request.memory, state)]
    if not request.adopt and not request.trial:
        # The sandbox records the store's id in its notes, so the store needs one before the request. The id stays in
        # the store even if this export fails.
        state = await engine.repository.begin(state)
    fresh, refused = await engine.repository.make_next_id(request.memory, state, survey.snapshots)
    snapshot = request.snapshot or fresh
    if engine.reached is not None:
        await engine.reached(snapshot)
    engine.progress.about(snapshot)
    return ExportRun(
        engine=engine,
        sandbox=counted,
        request=request,
        started=started,
        state=state,
        survey=survey,
        known=[*filter(None, [state.snapshot]), *survey.snapshots[:MOST_KNOWN]],
        gone=gone,
        snapshot=snapshot,
        presence=presence,
        warnings=[*warnings, *filter(None, [state.notice]), *(f"Ignored: {problem}" for problem in refused)],
        replaces=head,
    )


async def _open_memory(engine: Engine, memory: str) -> tuple[HeadState, Manifest | None, Survey, list[str]]:
    """Return the head, its manifest, which says where the memory's roots were, what the memory has, and the snapshots that
    were declined and are gone. The manifest is ``None`` if it cannot be read; a later step that needs it raises the error
    then."""
    repository = engine.repository
    state, survey = await repository.open(memory)
    if engine.limits.memory_bytes and not survey.complete:
        survey = await repository.survey(memory)  # all of it counts
    state = await repository.add_store_id(state)
    gone: list[str] = []
    if MemoryKeys.of(memory).reviews in survey.sizes:
        reviews = await read_reviews_or_none(repository.store, memory)
        gone = sorted(reviews.declined.difference(survey.snapshots), reverse=True)[:MOST_KNOWN]
    try:
        head = await repository.manifest(memory, state.snapshot, survey) if state.snapshot else None
    except (SnapshotDamaged, SnapshotNotFound, ObjectRefused):
        head = None  # a later step that needs it raises
    return state, head, survey, gone


async def _count_changes(
    run: ExportRun, checked: CheckedExport, manifest: Manifest
) -> dict[str, tuple[int, int, int]] | None:
    from sidecar.engine.exports.counts import count_changes  # an export that stores nothing need not load it

    return await count_changes(run, checked, manifest)


def build_question(run: ExportRun) -> ExportQuestion:
    """Build the question for the in-sandbox program."""
    engine, request, head = run.engine, run.request, run.replaces
    layouts = [layout.name for layout in choose_layouts(request.layouts, engine.layouts)]
    return ExportQuestion(
        memory=request.memory,
        snapshot=run.snapshot,
        key=build_memory_key(request.memory),
        known=[*run.known, *run.gone],
        unusable=sorted({*run.survey.damaged, *run.gone}),
        identity=run.identity,
        layouts=layouts,
        limits=encode_limits(engine.limits, layouts, compute_room_left(engine, run.survey.sizes)),
        privacy=run.privacy.for_sandbox(layouts, engine.layouts),
        inline_bytes=engine.inline_bytes,
        database_wait=engine.timing.database_wait,
        worker_wait=engine.timing.worker_wait,
        turn_wait=engine.timing.turn_wait,
        projects=None if request.projects is None else list(request.projects),
        roots=[RootHint(root.name, root.hint) for root in head.roots] if head else [],
        project_hints=head.projects if head else [],
        trial=request.trial,
    )


async def _finish_stored(
    run: ExportRun, checked: CheckedExport, verdict: Verdict, stored: StoredSnapshot
) -> ExportReceipt:
    """Finish an export whose snapshot was stored: move the head to it, or count that it was refused; then clear up."""
    answer, manifest = checked.answer, stored.manifest
    packed = answer.bundle.bytes if answer.bundle else 0
    run.warnings += describe_near_limits(run.engine.limits, manifest, checked.entries, packed, stored.room.used)
    outcome, reason = ExportOutcome.REJECTED, verdict.reason
    if reason is None:
        outcome = await settle_head(run, manifest, moves=verdict.moves, guarded=stored.guarded)
    elif verdict.is_pending:
        outcome = ExportOutcome.PENDING
    else:
        run.warnings += await note_refusal(run, answer, verdict, manifest.snapshot)
    if outcome is ExportOutcome.DIVERGED:
        reason = explain_divergence(run, answer)
    accepted = stored.accepted if outcome is ExportOutcome.COMMITTED else None
    receipt = run.receipt(outcome, manifest, reason, stored.added, accepted)
    if new := find_learned(checked):
        receipt = replace(receipt, learned=new, warnings=[new.words, *receipt.warnings])
    return replace(receipt, warnings=[*receipt.warnings, *await _tidy_store(run, stored)])


async def _finish_equal(run: ExportRun, checked: CheckedExport, head: Manifest) -> ExportReceipt:
    """Finish an export of the same contents as the head already has: nothing is stored."""
    await note_recovery(run, checked.answer)
    return run.receipt(ExportOutcome.UNCHANGED, head)


async def _finish_unchanged(run: ExportRun, checked: CheckedExport) -> ExportReceipt:
    """Finish an export in which nothing changed since its base. If the base is not and never was the head, an earlier
    export stored it without moving the head: decide again whether it becomes the head, or report the same reason again.
    """
    answer, base, state = checked.answer, checked.unchanged, run.state
    used = {"memory_bytes": sum(run.survey.sizes.values())}
    run.warnings += describe_near_limits(run.engine.limits, base, {}, 0, used)
    if base.snapshot == state.snapshot:
        return await _finish_equal(run, checked, base)
    verdict = await examine(run, checked, base, await decide_again(run, checked, base))
    if verdict.moves:
        accepted = verdict.accepted
        if accepted is not None:
            accepted = await keep_replaced(run, base, accepted, ())
        await hold_packs(run.engine.repository.store, base)
        outcome = await settle_head(run, base, moves=True)
        return run.receipt(outcome, base, accepted=accepted if outcome is ExportOutcome.COMMITTED else None)
    if state.head and state.head.was_head(base.snapshot):
        receipt = run.receipt(ExportOutcome.UNCHANGED, base)
        earlier = f"The head is {state.snapshot}; this sandbox holds an earlier one."
        return replace(receipt, warnings=[*receipt.warnings, earlier])
    if verdict.reason is not None and verdict.is_pending:
        await run.engine.repository.raise_head(base.memory)
        await note_pending(run.engine.repository, base, run.survey, "" if base.pending else verdict.reason.message)
        return run.receipt(ExportOutcome.PENDING, base, verdict.reason)
    if verdict.reason is not None:
        run.warnings += await note_refusal(run, answer, verdict, base.snapshot)
        return run.receipt(ExportOutcome.REJECTED, base, verdict.reason)
    return run.receipt(ExportOutcome.DIVERGED, base, explain_divergence(run, answer))


def _describe_stored(run: ExportRun, stored: StoredSnapshot) -> tuple[HeadState, Survey] | None:
    """Return the head, and what the memory has now that a snapshot was stored; ``None`` if not all of it was listed."""
    if not run.survey.complete:
        return None
    manifest, keys = stored.manifest, MemoryKeys.of(run.request.memory)
    new = manifest.packs[-1]
    sizes = dict(zip((keys.pack(new.id, new.codec), keys.index(new.id)), new.in_store, strict=True))
    sizes[keys.snapshot(manifest.snapshot)] = len(manifest.encode())
    snapshots = sorted({manifest.snapshot, *run.survey.snapshots}, reverse=True)
    return run.state, replace(run.survey, snapshots=snapshots, sizes={**run.survey.sizes, **sizes})


async def _tidy_store(run: ExportRun, stored: StoredSnapshot) -> list[str]:
    """Remove the snapshots that the quota or the retention rules no longer keep; every ``COLLECT_EVERY`` generations,
    also collect garbage, if there may be any. Return warnings.

    The sandbox is not involved. The export is already stored, so any problem here is only a warning.
    """
    engine, memory, head, warnings = run.engine, run.request.memory, run.state.head, []
    policy = engine.retention.build_policy_for(memory)
    try:
        warnings += await stored.room.make(engine)
        if policy.rules or policy.most_bytes:
            from sidecar.store.retention import forget_lightly  # late, as most stores keep everything

            forgotten, over = await forget_lightly(engine.repository, memory, policy, _describe_stored(run, stored))
            if forgotten and engine.forgot is not None:
                engine.forgot(memory, forgotten)
            warnings += [OVER.format(over=over, most=policy.most_bytes)] if over else []
        if head is not None and head.generation % COLLECT_EVERY == 0:
            await _collect(run, ruled=bool(policy.rules or policy.most_bytes))
    except SidecarError as problem:
        warnings.append(f"Old snapshots or left-overs could not be removed: {problem.message}")
    return warnings


async def _collect(run: ExportRun, *, ruled: bool) -> None:
    """Collect garbage, if what was listed shows that there may be any. A memory with so many objects that they were not
    listed is left to a service, or to ``forget``: an export is not to read all its manifests."""
    repository, memory, retention = run.engine.repository, run.request.memory, run.engine.retention
    if not run.survey.complete:
        return
    keys = MemoryKeys.of(memory)
    packs = {keys.parse_pack_id(key) for key in run.survey.sizes if key.startswith(keys.packs)}
    others = (keys.marks, keys.damaged, keys.pins, keys.clock)
    if ruled or len(packs) > len(run.survey.snapshots) or any(key.startswith(others) for key in run.survey.sizes):
        from sidecar.store.garbage import collect

        await collect(repository, memory, grace=retention.grace_seconds, calls=retention.calls_seconds)
    else:
        await repository.store.sweep(keys.prefix, older_than=run.survey.now - retention.grace_seconds)


async def _was_to_move(repository: Repository, manifest: Manifest, state: HeadState) -> bool:
    """Whether a stored snapshot was made to replace this head. Made for the first head of all it has no generation, and
    then it cannot be told from one that diverged, except by what else there is."""
    if manifest.parent != state.snapshot or state.problem:
        return False
    if state.head is not None:
        return bool(manifest.generation)
    first = await repository.rebuild_head(manifest.memory)
    return first is None or first.snapshot == manifest.snapshot


async def finish_export(engine: Engine, memory: str, snapshot: str, sandbox: str) -> ExportReceipt | None:
    """Finish an export that was stored before its process died, and return its receipt; ``None`` if it was not stored.
    Figures that only the original export knew are missing in the receipt.

    If it was stored but the head was not moved yet, the head is moved now, provided that it was meant to: a snapshot
    that was to stand beside the head has no generation, and of one that waits for a review or was declined meanwhile the
    reviews tell. If a review is asked for by now, it waits for one.
    """
    repository = engine.repository
    try:
        manifest = await repository.manifest(memory, snapshot)
    except SnapshotNotFound:
        return None
    state = await repository.head(memory)
    # After the head: whoever declines a snapshot writes the head again afterwards, and this one is not moved then.
    outcome, reason = ExportOutcome.DIVERGED, await find_hold(repository, manifest)
    if reason is not None:
        outcome = ExportOutcome.PENDING if reason.code == PENDING else ExportOutcome.REJECTED
    if state.head is not None and (state.snapshot == snapshot or state.head.was_head(snapshot)):
        outcome, reason = ExportOutcome.COMMITTED, None
    elif reason is None and await _was_to_move(repository, manifest, state):
        asked_since = engine.review.covers(memory)
        try:
            await hold_packs(repository.store, manifest)
            if not asked_since:
                outcome, state = await advance_head(engine, manifest, state, moves=True)
        except BaseCollected:
            # A pack of its base was collected, and the process died before it noticed: it is exported again.
            await repository.store.delete([MemoryKeys.of(memory).snapshot(snapshot)])
            return None
        if asked_since:
            outcome, reason = ExportOutcome.PENDING, Reason(code=PENDING, message=ASKED_SINCE)
            state = await repository.raise_head(memory)
            await note_pending(repository, manifest, reason=reason.message)
    return ExportReceipt(
        outcome=outcome,
        memory=memory,
        snapshot=snapshot,
        parent=manifest.parent or None,
        head=state.snapshot or None,
        sandbox=sandbox,
        files=manifest.files,
        bytes=manifest.bytes,
        conversation=manifest.conversation,
        label=manifest.label,
        reason=reason,
        warnings=[FINISHED],
    )
