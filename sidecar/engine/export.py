"""Export: a sandbox's memory becomes a snapshot."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from sidecar.engine.asking import ExportAnswer, ask
from sidecar.engine.guards import judge
from sidecar.engine.parts import CountedSandbox, Engine
from sidecar.engine.receiving import Arrived, checked, count, receive
from sidecar.engine.storing import store_packs
from sidecar.engine.without_python import read_tarball
from sidecar.errors import HeadMoved, LimitExceeded, SidecarError, SnapshotDamaged, SnapshotNotFound
from sidecar.ids import check_memory_id, memory_key, new_snapshot_id
from sidecar.inside.index import Entry
from sidecar.layouts import choose
from sidecar.ports import Sandbox
from sidecar.receipts import ExportOutcome, ExportReceipt, Reason, Skip
from sidecar.repository import HeadState
from sidecar.retries import retrying
from sidecar.shell import export_script
from sidecar.snapshots.collect import collect
from sidecar.snapshots.fetch import fetch_entries
from sidecar.snapshots.manifest import Database, Manifest, Root, tree_digest
from sidecar.spool import Spool, spool

MOST_KNOWN = 100
COLLECT_EVERY = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    memory: str
    layouts: tuple[str, ...] = ()
    projects: tuple[str, ...] | None = None
    conversation: str = ""
    label: str = ""
    force: bool = False
    origin: str = "export"
    adopt: bool = False
    """The sandbox is not an agent's but ours (an import): it counts as restored from the head."""


@dataclass(frozen=True, slots=True)
class _Base:
    """The snapshot an export's delta is over; none for a full one."""

    manifest: Manifest | None = None
    entries: dict[str, Entry] | None = None


async def export(engine: Engine, sandbox: Sandbox, request: ExportRequest) -> ExportReceipt:
    """Export the memory in ``sandbox``. Raise a ``SidecarError`` when it could not be; the head is then as it was.

    The head moves only for a sandbox that started from it, and only to a snapshot no guard objects to.
    """
    started = time.monotonic()
    counted = CountedSandbox(sandbox, engine.progress)
    check_memory_id(request.memory)
    state = await engine.repository.head(request.memory)
    known = (await engine.repository.snapshot_ids(request.memory))[:MOST_KNOWN]
    snapshot = new_snapshot_id(datetime.now(UTC), state.snapshot)
    async with spool() as scratch:
        try:
            answer, arrived, base = await _collect(engine, counted, request, snapshot, known, scratch)
        except LimitExceeded as limit:
            return _receipt(started, counted, request, state, ExportOutcome.REJECTED, reason=_reason(limit))
        if arrived is None:
            return await _unchanged(engine, started, counted, request, state, answer)
        manifest = _manifest(request, snapshot, answer, arrived, base, state, counted.ref)
        head = await _head_manifest(engine, request.memory, state)
        if head is not None and head.tree == manifest.tree and not manifest.rejected:
            return _receipt(started, counted, request, state, ExportOutcome.UNCHANGED, answer, head)
        reason = await _judge(engine, manifest, arrived, head, request.force, scratch)
        await engine.repository.store.prepare()
        packs, added = await store_packs(engine, request.memory, base.manifest, arrived.pack, scratch)
        manifest = replace(manifest, packs=packs, rejected=f"{reason.code}: {reason.message}" if reason else "")
        await engine.repository.commit(manifest)
        outcome, state = await _advance(engine, manifest, state, answer, request, reason)
    if outcome is ExportOutcome.COMMITTED and state.head and state.head.generation % COLLECT_EVERY == 0:
        await collect(engine.repository, request.memory)
    if outcome is ExportOutcome.DIVERGED:
        reason = Reason(
            code="diverged",
            message=f"This sandbox did not start from the head, {state.snapshot or 'which is damaged'}.",
        )
    packed = added + len(manifest.encode())
    return _receipt(started, counted, request, state, outcome, answer, manifest, reason, packed)


async def _collect(
    engine: Engine, sandbox: CountedSandbox, request: ExportRequest, snapshot: str, known: list[str], scratch: Spool
) -> tuple[ExportAnswer, Arrived | None, _Base]:
    """Ask the sandbox, fetch what it has and check it all; again from the start when a transfer was cut short."""
    async for attempt in retrying():
        with attempt:
            engine.progress.step("reading the memory")
            question = _question(engine, request, snapshot, known)
            shell = export_script(question, choose(request.layouts, engine.layouts))
            answer, inline = await ask(
                sandbox,
                question,
                ExportAnswer,
                timeout=engine.timing.command,
                inline_bytes=engine.inline_bytes,
                fallback=shell,
            )
            if answer.status == "unchanged":
                return answer, None, _Base()
            if answer.status == "tarball":
                answer, bundle = await read_tarball(engine, sandbox, answer, question, scratch)
            else:
                bundle = await receive(engine, sandbox, answer, inline, scratch)
            base = await _base(engine, request.memory, answer, known, scratch)
            return answer, await checked(engine, answer, bundle, base.entries or {}), base
    raise AssertionError("unreachable")


def _question(engine: Engine, request: ExportRequest, snapshot: str, known: list[str]) -> dict[str, Any]:
    limits = engine.limits
    return {
        "do": "export",
        "memory": request.memory,
        "key": memory_key(request.memory),
        "snapshot": snapshot,
        "known": known,
        "layouts": [layout.for_sandbox() for layout in choose(request.layouts, engine.layouts)],
        "projects": None if request.projects is None else list(request.projects),
        "limits": {
            "bytes": limits.bytes,
            "file_bytes": limits.file_bytes,
            "files": limits.files,
            "depth": limits.depth,
        },
        "inline_bytes": engine.inline_bytes,
        "database_wait": engine.timing.database_wait,
        "turn_wait": engine.timing.turn_wait,
    }


async def _base(engine: Engine, memory: str, answer: ExportAnswer, known: list[str], scratch: Spool) -> _Base:
    if not answer.base:
        return _Base()
    if answer.base not in known:
        raise SnapshotNotFound(f"The sandbox builds on snapshot {answer.base}, which is not in the store.")
    manifest = await engine.repository.manifest(memory, answer.base)
    entries, _, _ = await fetch_entries(engine.repository.store, manifest, scratch)
    return _Base(manifest, entries)


def _manifest(
    request: ExportRequest,
    snapshot: str,
    answer: ExportAnswer,
    arrived: Arrived,
    base: _Base,
    state: HeadState,
    ref: str,
) -> Manifest:
    files, size = count(arrived.entries)
    checks = {row.path: Database(path=row.path, check=row.check, schema=row.schema) for row in answer.databases}
    earlier = {row.path: row for row in base.manifest.databases} if base.manifest else {}
    databases = [path for path, entry in arrived.entries.items() if entry.database]
    return Manifest(
        memory=request.memory,
        snapshot=snapshot,
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        packs=[],
        roots=[Root(name=root.name, layout=root.layout, hint=root.hint) for root in answer.roots],
        files=files,
        bytes=size,
        tree=tree_digest(arrived.entries),
        parent=state.snapshot if request.adopt else (answer.lineage or [""])[0],
        origin=request.origin,
        sandbox=ref,
        conversation=request.conversation,
        label=request.label,
        databases=[
            earlier[path] if path in earlier and checks.get(path) and checks[path].schema == 0 else checks[path]
            for path in databases
            if path in checks
        ],
    )


async def _head_manifest(engine: Engine, memory: str, state: HeadState) -> Manifest | None:
    if not state.head:
        return None
    try:
        return await engine.repository.manifest(memory, state.snapshot)
    except (SnapshotDamaged, SnapshotNotFound):
        return None


async def _judge(
    engine: Engine, manifest: Manifest, arrived: Arrived, head: Manifest | None, force: bool, scratch: Spool
) -> Reason | None:
    if force:
        return None
    head_entries: dict[str, Entry] = {}
    if head is not None:
        try:
            head_entries, _, _ = await fetch_entries(engine.repository.store, head, scratch)
        except SnapshotDamaged:
            head = None
    return judge(manifest, arrived.entries, head, head_entries, engine.layouts, engine.guards)


async def _advance(
    engine: Engine,
    manifest: Manifest,
    state: HeadState,
    answer: ExportAnswer,
    request: ExportRequest,
    reason: Reason | None,
) -> tuple[ExportOutcome, HeadState]:
    """Move the head, if this snapshot may have it."""
    if reason is not None:
        return ExportOutcome.REJECTED, state
    if not (request.force or request.adopt or _continues(state, answer)):
        return ExportOutcome.DIVERGED, state
    try:
        return ExportOutcome.COMMITTED, HeadState(await engine.repository.move_head(state, manifest))
    except HeadMoved:
        return ExportOutcome.DIVERGED, await engine.repository.head(manifest.memory)


def _continues(state: HeadState, answer: ExportAnswer) -> bool:
    """Whether the sandbox's memory grew out of the present head.

    It did when it was last restored from or exported to it, and also when its last export lost a race against another
    export of the same sandbox: then that one is the head, and the last one never was.
    """
    if state.head is None:
        return not state.problem
    origin = answer.lineage[0] if answer.lineage else ""
    return origin == state.snapshot or (state.snapshot in answer.lineage and not state.head.was(origin))


async def _unchanged(
    engine: Engine,
    started: float,
    sandbox: CountedSandbox,
    request: ExportRequest,
    state: HeadState,
    answer: ExportAnswer,
) -> ExportReceipt:
    """Nothing new in the sandbox since ``answer.base``; with force, that snapshot becomes the head."""
    if answer.base == state.snapshot:
        files, size, parent = answer.files, answer.bytes, ""
        receipt = _receipt(started, sandbox, request, state, ExportOutcome.UNCHANGED, answer)
        return replace(receipt, snapshot=answer.base, files=files, bytes=size, parent=parent or None)
    manifest = await engine.repository.manifest(request.memory, answer.base)
    if request.force:
        await engine.repository.store.prepare()
        state = HeadState(await engine.repository.move_head(state, manifest))
        return _receipt(started, sandbox, request, state, ExportOutcome.COMMITTED, answer, manifest)
    receipt = _receipt(started, sandbox, request, state, ExportOutcome.UNCHANGED, answer, manifest)
    warning = f"The head is {state.snapshot}, but this sandbox still holds {answer.base}."
    return replace(receipt, warnings=[*receipt.warnings, warning])


def _reason(problem: SidecarError) -> Reason:
    return Reason(code=problem.code, message=problem.message)


def _receipt(
    started: float,
    sandbox: CountedSandbox,
    request: ExportRequest,
    state: HeadState,
    outcome: ExportOutcome,
    answer: ExportAnswer | None = None,
    manifest: Manifest | None = None,
    reason: Reason | None = None,
    packed: int = 0,
) -> ExportReceipt:
    skipped = list(answer.skipped) if answer else []
    if answer and answer.skipped_more:
        skipped.append(Skip(path="…", reason=f"{answer.skipped_more} more"))
    return ExportReceipt(
        outcome=outcome,
        memory=request.memory,
        snapshot=manifest.snapshot if manifest else None,
        parent=(manifest.parent or None) if manifest else None,
        head=state.snapshot or None,
        sandbox=sandbox.ref,
        kind=answer.kind if answer and packed else "",
        files=manifest.files if manifest else 0,
        bytes=manifest.bytes if manifest else 0,
        packed_bytes=packed,
        transferred_bytes=sandbox.transferred_bytes,
        round_trips=sandbox.round_trips,
        duration_ms=round((time.monotonic() - started) * 1000),
        databases=[row.report() for row in answer.databases] if answer else [],
        skipped=skipped,
        warnings=list(answer.warnings) if answer else [],
        reason=reason,
        conversation=request.conversation,
        label=request.label,
    )
