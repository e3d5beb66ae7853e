"""Export: a sandbox's memory becomes a snapshot."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

from sidecar import program
from sidecar.engine.acceptance import keep_replaced, note_recovery, note_refusal, origin_of, settle, weigh
from sidecar.engine.asking import ExportAnswer, ask
from sidecar.engine.attending import kept_alive, reach, tidied
from sidecar.engine.basing import base_of, reading_ahead
from sidecar.engine.committing import Grown, commit, head_of, judged, manifest_of, placed
from sidecar.engine.coverage import learned
from sidecar.engine.direct import cleared
from sidecar.engine.exporting import ExportRequest, Run
from sidecar.engine.guards import check_reasons, moved
from sidecar.engine.identity import begun, identified_head
from sidecar.engine.limiting import for_sandbox, narrowed, near
from sidecar.engine.notes import as_noted
from sidecar.engine.parts import CountedSandbox, Engine, together
from sidecar.engine.privacy import privacy_of, refusal, shown
from sidecar.engine.receiving import check, receive
from sidecar.engine.room import Fits, room_left
from sidecar.engine.tidying import tidy_store
from sidecar.engine.without_python import read_tarball
from sidecar.errors import (
    BaseCollected,
    LimitExceeded,
    ObjectRefused,
    SnapshotDamaged,
    SnapshotNotFound,
    UntrustedSandbox,
)
from sidecar.ids import Keys, memory_key
from sidecar.layouts import choose, elsewhere
from sidecar.ports import Sandbox
from sidecar.receipts import Accepted, ExportOutcome, ExportReceipt, Reason
from sidecar.repository import HeadState
from sidecar.retries import retrying
from sidecar.shell import export_script
from sidecar.snapshots.fetch import fetch_entries
from sidecar.snapshots.manifest import Manifest
from sidecar.snapshots.marks import hold
from sidecar.spool import Spool, spool
from sidecar.threads import run_long

MOST_KNOWN = 100
READ_ONLY = "This sandbox was restored to be read (read-only): what it exports is stored beside the head."


async def export(engine: Engine, sandbox: Sandbox, request: ExportRequest) -> ExportReceipt:
    """Export the memory in ``sandbox``. Raise a ``SidecarError`` when it could not be; the head is then as it was.

    The head moves only for a sandbox that started from it, and only to a snapshot no guard objects to.
    """
    check_reasons(request.allow)
    engine = narrowed(engine, request.memory)
    counted, started = CountedSandbox(sandbox, engine.progress), time.monotonic()
    try:
        return await _export(await _begin(engine, counted, request, started, []))
    except BaseCollected as problem:
        # From what is in the store now; a second time it is better to say that something is wrong.
        warnings = [f"It was begun anew: {problem.message}"]
        return await _export(await _begin(engine, counted, request, started, warnings))


async def _export(run: Run) -> ExportReceipt:
    engine, request, answer = run.engine, run.request, None
    async with spool() as scratch, cleared(engine.repository.store) as run.unclaimed:
        try:
            async with (
                kept_alive(engine, run.sandbox, run.presence, run.warnings),
                tidied(engine, run.sandbox, request.memory, run.snapshot),
                reading_ahead(run, scratch),
            ):
                answer, grown = await _collect(run, scratch)
            if answer.status == "refused":
                return run.receipt(ExportOutcome.REJECTED, run.state, answer, reason=refusal(answer))
            if grown.arrived is None:
                return await _unchanged(run, answer, grown.unchanged, scratch)
            entries = grown.brought.entries
            head = await head_of(engine, run.state, run.survey, grown)
            parent, policy = run.parent(answer), privacy_of(run).for_sandbox([], engine.layouts)["policy"]
            earlier = head if head is not None and head.snapshot == parent else None
            manifest = manifest_of(
                engine, grown, answer, run.snapshot, run.sandbox.ref, parent, request, policy, earlier
            )
            if head is not None and head.tree == manifest.tree:
                await note_recovery(run, answer)
                return run.receipt(ExportOutcome.UNCHANGED, run.state, answer, head)
            if head is not None:
                run.warnings += moved(manifest, head, engine.layouts, named=request.projects is not None)
            mixed_up = run.mix_up(answer)
            reasons = [mixed_up] if mixed_up else []
            if not reasons and not request.force:
                reasons = await judged(engine, manifest, entries, grown, head, scratch, request.allow, answer.trimmed)
            origin = origin_of(run, answer, straight=parent == run.state.snapshot)
            verdict = await weigh(run, answer, reasons, origin)
            reason, accepted = verdict.reason, verdict.accepted
            if reason is not None:
                manifest = replace(manifest, rejected=f"{reason.code}: {reason.message}")
            moves = reason is None and await run.continues(answer)
            if moves and run.state.head is not None:
                manifest = replace(manifest, generation=run.state.head.generation + 1)
            manifest, added, room, accepted = await _commit(run, manifest, grown, moves, scratch, accepted)
        except LimitExceeded as limit:
            over = Reason(code=limit.code, message=limit.message)
            return run.receipt(ExportOutcome.REJECTED, run.state, answer, reason=over)
    run.warnings += near(engine.limits, manifest, entries, answer.bundle.bytes if answer.bundle else 0, room.used)
    outcome, state = ExportOutcome.REJECTED, run.state
    if reason is None:
        outcome, state, accepted = await settle(run, manifest, accepted, moves=moves)
    else:
        run.warnings += await note_refusal(run, answer, origin, manifest.snapshot, [one.code for one in reasons])
    if outcome is ExportOutcome.DIVERGED:
        reason = _diverged(state, answer)
    receipt = run.receipt(outcome, state, answer, manifest, reason, added, accepted)
    if new := learned(grown.base, grown.base_entries, entries):
        new = replace(new, paths=[shown(path) for path in new.paths])
        receipt = replace(receipt, learned=new, warnings=[new.words, *receipt.warnings])
    return replace(receipt, warnings=[*receipt.warnings, *await tidy_store(engine, request.memory, state, room)])


async def _commit(
    run: Run, manifest: Manifest, grown: Grown, moves: bool, scratch: Spool, accepted: Accepted | None
) -> tuple[Manifest, int, Fits, Accepted | None]:
    """Make it a snapshot, if there is room for it; return it, what it added, how there is room, and what was accepted.

    From now on it may name a pack that is in the store already, so that one has to stay, whatever
    happens; unless it was folded."""
    run.state = await run.engine.repository.begin(run.state)
    pack = grown.brought.pack
    key = Keys.of(manifest.memory).pack(pack.stored, pack.codec)
    grew = not (run.request.force or run.request.adopt)
    manifest, packs, room = await placed(
        run.engine, manifest, grown, run.state, run.survey, scratch, moves=moves, grew=grew
    )
    if accepted is not None:  # before it is a snapshot: whoever finds it later may make it the head at once
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
    """The snapshot a delta builds on cannot be read; a full export can still be had."""

    retryable = True


async def _begin(
    engine: Engine, counted: CountedSandbox, request: ExportRequest, started: float, warnings: list[str]
) -> Run:
    await engine.repository.admit(request.memory)
    choose(request.layouts, engine.layouts)  # before anything is written
    engine.progress.step("reaching the sandbox")
    prepared = asyncio.get_running_loop().run_in_executor(None, program.prepare, "export")
    presence, (state, head), survey = await together(
        reach(counted), _head(engine, request.memory), engine.repository.survey(request.memory)
    )
    await prepared
    warnings = [*warnings, *await begun(engine.repository, request.memory, state, survey)]
    if not request.adopt:
        # The sandbox is to note the id, so there has to be one before it is asked; it stays if nothing comes of this.
        state = await engine.repository.begin(state)
    known = [*filter(None, [state.snapshot]), *survey.snapshots[:MOST_KNOWN]]
    fresh, refused = await engine.repository.next_id(request.memory, state, survey.snapshots)
    snapshot = request.snapshot or fresh
    if engine.reached is not None:
        await engine.reached(snapshot)
    engine.progress.about(snapshot)
    warnings = [*warnings, *filter(None, [state.notice]), *(f"Ignored: {problem}" for problem in refused)]
    return Run(engine, counted, request, started, state, survey, known, snapshot, presence, warnings, replaces=head)


async def _head(engine: Engine, memory: str) -> tuple[HeadState, Manifest | None]:
    """The head, and its manifest, where that can be read: it says where the memory's roots were."""
    state = await identified_head(engine.repository, memory)
    try:
        return state, await engine.repository.manifest(memory, state.snapshot) if state.snapshot else None
    except (SnapshotDamaged, SnapshotNotFound, ObjectRefused):
        return state, None  # whoever needs it comes to that by himself


async def _collect(run: Run, scratch: Spool) -> tuple[ExportAnswer, Grown]:
    """Ask the sandbox, fetch what it has and check it all; again from the start when a transfer was cut short.

    A delta over a snapshot that is damaged or was forgotten would be lost with it: then a full export is asked for.
    """
    engine, question = run.engine, _question(run)
    shell = export_script(question, choose(run.request.layouts, engine.layouts))
    timeout, inline_bytes = engine.timing.command, engine.inline_bytes
    async for attempt in retrying():
        with attempt:
            engine.progress.step("reading the memory")
            answer, inline = await ask(
                run.sandbox, question, ExportAnswer, timeout=timeout, inline_bytes=inline_bytes, shell=shell
            )
            read = time.monotonic()
            if run.request.noted is not None:
                answer = as_noted(answer, run.request.noted, engine.layouts)
            if answer.status == "refused":
                return answer, Grown(None, {})
            try:
                base, entries, indexes = await base_of(run, answer, scratch)
            except (SnapshotDamaged, SnapshotNotFound) as damage:
                if isinstance(damage, SnapshotDamaged):
                    await engine.repository.mark_damaged(run.request.memory, answer.base, damage)
                run.survey.damaged.add(answer.base)
                question["unusable"] = sorted(run.survey.damaged)
                raise BaseDamaged(damage.message) from None
            if answer.status == "unchanged":
                return answer, Grown(base, entries)
            stored = ""
            if answer.status == "tarball":
                answer, bundle = await read_tarball(engine, run.sandbox, answer, question, scratch)
                if bundle is None:
                    return answer, Grown(None, {})
            else:
                bundle, stored = await receive(
                    engine, run.sandbox, answer, inline, question, scratch, run.warnings, run.unclaimed
                )
            roots = {root.name: root.layout for root in base.roots} if base else {}
            try:
                arrived = await run_long(
                    check, engine, answer, bundle, entries, roots, stored, seconds=engine.timing.unpack
                )
            except UntrustedSandbox as problem:
                _give_up_base(run, question, answer, problem)
                raise
            return answer, Grown(base, entries, indexes, arrived, read)
    raise AssertionError("unreachable")


def _give_up_base(run: Run, question: dict[str, Any], answer: ExportAnswer, problem: UntrustedSandbox) -> None:
    """Have a delta that makes no sense asked for again as a full export, once: what it builds on is noted in the sandbox,
    where the agent can write, and whose notes are not true would never be exported again."""
    if answer.base and answer.base not in question["unusable"]:
        question["unusable"] = sorted([*question["unusable"], answer.base])
        run.warnings.append(f"What the sandbox noted of {answer.base} is not so; all of the memory was read again.")
        problem.retryable = True


def _question(run: Run) -> dict[str, Any]:
    request, layouts, head = run.request, choose(run.request.layouts, run.engine.layouts), run.replaces
    room = room_left(run.engine, run.survey.sizes)
    return {
        "do": "export",
        "memory": request.memory,
        "key": memory_key(request.memory),
        "snapshot": run.snapshot,
        "known": run.known,
        "notes": run.notes,
        "unusable": sorted(run.survey.damaged),
        "layouts": [layout.for_sandbox() for layout in layouts],
        "projects": None if request.projects is None else list(request.projects),
        "elsewhere": elsewhere(layouts, run.engine.layouts),
        "roots": [{"name": root.name, "hint": root.hint} for root in head.roots] if head else [],
        "project_hints": head.projects if head else [],
        "limits": for_sandbox(run.engine.limits, [layout.name for layout in layouts], room),
        "privacy": privacy_of(run).for_sandbox([layout.name for layout in layouts], run.engine.layouts),
        "inline_bytes": run.engine.inline_bytes,
        "database_wait": run.engine.timing.database_wait,
        "worker_wait": run.engine.timing.worker_wait,
        "turn_wait": run.engine.timing.turn_wait,
    }


async def _unchanged(run: Run, answer: ExportAnswer, base: Manifest, scratch: Spool) -> ExportReceipt:
    """Nothing new in the sandbox since ``base``. Unless that is or was the head, an export before did not get to move it:
    its outcome is settled now, or said again."""
    state = run.state
    run.warnings += near(run.engine.limits, base, {}, 0, {"memory_bytes": sum(run.survey.sizes.values())})
    if base.snapshot == state.snapshot:
        await note_recovery(run, answer)
        return run.receipt(ExportOutcome.UNCHANGED, state, answer, base)
    origin, mixed_up = origin_of(run, answer, straight=False), run.mix_up(answer)
    reasons = [mixed_up] if mixed_up else []
    if not reasons and not run.request.force:
        reasons = await _objections(run, base, answer, scratch)
    verdict = await weigh(run, answer, reasons, origin)
    if verdict.accepted is not None:  # of all that was against it, its manifest names only the first
        verdict = await weigh(run, answer, await _judged_again(run, base, answer, scratch), origin)
    reason, accepted = verdict.reason, verdict.accepted
    if run.request.force or (reason is None and await run.continues(answer)):
        if accepted is not None:
            accepted = await keep_replaced(run, base, accepted, ())
        await hold(run.engine.repository.store, base)
        outcome, state, accepted = await settle(run, base, accepted, moves=True)
        return run.receipt(outcome, state, answer, base, accepted=accepted)
    if state.head and state.head.was(base.snapshot):
        receipt = run.receipt(ExportOutcome.UNCHANGED, state, answer, base)
        return replace(
            receipt, warnings=[*receipt.warnings, f"The head is {state.snapshot}; this sandbox holds an earlier one."]
        )
    if reason is not None:
        run.warnings += await note_refusal(run, answer, origin, base.snapshot, [reason.code])
        return run.receipt(ExportOutcome.REJECTED, state, answer, base, reason)
    return run.receipt(ExportOutcome.DIVERGED, state, answer, base, _diverged(state, answer))


async def _objections(run: Run, kept: Manifest, answer: ExportAnswer, scratch: Spool) -> list[Reason]:
    """Why a snapshot was kept from becoming the head; when that is allowed by now, whether there is more against it."""
    code, _, message = kept.rejected.partition(": ")
    if code not in {*run.request.allow, *run.engine.guards.allow}:
        return [Reason(code=code, message=message)] if code else []
    return await _judged_again(run, kept, answer, scratch)


async def _judged_again(run: Run, kept: Manifest, answer: ExportAnswer, scratch: Spool) -> list[Reason]:
    """All that the guards say of a snapshot that was kept, as things are now."""
    nothing = Grown(None, {})
    head = await head_of(run.engine, run.state, run.survey, nothing)
    entries, _, _ = await fetch_entries(run.engine.repository.store, kept, scratch)
    return await judged(run.engine, kept, entries, nothing, head, scratch, run.request.allow, answer.trimmed)


def _diverged(state: HeadState, answer: ExportAnswer) -> Reason:
    if answer.reader:
        return Reason(code="read-only", message=READ_ONLY)
    head = state.snapshot or state.problem or "which is missing"
    return Reason(code="diverged", message=f"This sandbox did not start from the head ({head}).")
