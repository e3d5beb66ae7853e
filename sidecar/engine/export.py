"""Export: a sandbox's memory becomes a snapshot."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from sidecar.engine.asking import ExportAnswer, ask
from sidecar.engine.attending import kept_alive, reach, tidied
from sidecar.engine.committing import Grown, advance, commit, head_of, judged, manifest_of
from sidecar.engine.direct import cleared
from sidecar.engine.parts import CountedSandbox, Engine, together
from sidecar.engine.receiving import check, receive
from sidecar.engine.tidying import tidy_store
from sidecar.engine.without_python import read_tarball
from sidecar.errors import BadAnswer, BaseCollected, LimitExceeded, SnapshotDamaged, SnapshotNotFound
from sidecar.ids import Keys, check_memory_id, memory_key, new_snapshot_id
from sidecar.inside.index import Entry
from sidecar.layouts import choose
from sidecar.ports import Presence, Sandbox
from sidecar.receipts import ExportOutcome, ExportReceipt, Reason, Skip
from sidecar.repository import HeadState, Survey
from sidecar.retries import retrying
from sidecar.shell import export_script
from sidecar.snapshots.fetch import check_sizes, fetch_entries
from sidecar.snapshots.manifest import Manifest
from sidecar.snapshots.marks import hold
from sidecar.spool import Spool, spool

MOST_KNOWN = 100
MOST_AHEAD = 8 << 20
"""So many bytes of indexes are read before it is known whether they are needed."""
Snapshot = tuple[Manifest, dict[str, Entry]]


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
    """The sandbox is not an agent's but ours (an import): it counts as grown from the head."""
    snapshot: str = ""
    """The id for the new snapshot, when somebody has to know it beforehand."""


async def export(engine: Engine, sandbox: Sandbox, request: ExportRequest) -> ExportReceipt:
    """Export the memory in ``sandbox``. Raise a ``SidecarError`` when it could not be; the head is then as it was.

    The head moves only for a sandbox that started from it, and only to a snapshot no guard objects to.
    """
    counted, started = CountedSandbox(sandbox, engine.progress), time.monotonic()
    try:
        return await _export(await _begin(engine, counted, request, started, []))
    except BaseCollected as problem:
        # From what is in the store now; a second time it is better to say that something is wrong.
        warnings = [f"It was begun anew: {problem.message}"]
        return await _export(await _begin(engine, counted, request, started, warnings))


async def _export(run: _Run) -> ExportReceipt:
    engine, request = run.engine, run.request
    async with spool() as scratch, cleared(engine.repository.store) as run.unclaimed:
        try:
            async with (
                kept_alive(engine, run.sandbox, run.presence, run.warnings),
                tidied(engine, run.sandbox, request.memory, run.snapshot),
                _reading_ahead(run, scratch),
            ):
                answer, grown = await _collect(run, scratch)
        except LimitExceeded as limit:
            return run.receipt(ExportOutcome.REJECTED, run.state, reason=Reason(code=limit.code, message=limit.message))
        if grown.arrived is None:
            return await _unchanged(run, answer, grown.unchanged)
        manifest = manifest_of(grown, answer, run.snapshot, run.sandbox.ref, run.parent(answer), request)
        head = await head_of(engine, run.state, run.survey, grown)
        if head is not None and head.tree == manifest.tree:
            return run.receipt(ExportOutcome.UNCHANGED, run.state, answer, head)
        reason = None if request.force else await judged(engine, manifest, grown, head, scratch)
        manifest, added = await _commit(run, manifest, grown, reason, scratch)
    outcome, state = ExportOutcome.REJECTED, run.state
    if reason is None:
        outcome, state = await advance(engine, manifest, run.state, moves=await run.continues(answer))
    if outcome is ExportOutcome.DIVERGED:
        reason = _diverged(state)
    receipt = run.receipt(outcome, state, answer, manifest, reason, added)
    return replace(receipt, warnings=[*receipt.warnings, *await tidy_store(engine, request.memory, state)])


async def _commit(
    run: _Run, manifest: Manifest, grown: Grown, reason: Reason | None, scratch: Spool
) -> tuple[Manifest, int]:
    """Make it a snapshot. From now on it may name a pack that is in the store already, so that one has to stay, whatever
    happens; unless it was folded."""
    pack = grown.brought.pack
    key = Keys.of(manifest.memory).pack(pack.stored, pack.codec)
    run.unclaimed.discard(key)
    try:
        manifest, added = await commit(run.engine, manifest, grown, reason, scratch)
    except BaseCollected:
        run.unclaimed |= {key} if pack.stored else set()
        raise
    if pack.stored and pack.stored not in {named.id for named in manifest.packs}:
        run.unclaimed.add(key)
    return manifest, added


class BaseDamaged(SnapshotDamaged):
    """The snapshot a delta builds on cannot be read; a full export can still be had."""

    retryable = True


@dataclass(slots=True)
class _Run:
    """One export: what was known when it began."""

    engine: Engine
    sandbox: CountedSandbox
    request: ExportRequest
    started: float
    state: HeadState
    survey: Survey
    known: list[str]
    snapshot: str
    presence: Presence
    warnings: list[str] = field(default_factory=list)
    ahead: asyncio.Task[Snapshot] | None = None
    """The head, being read while the sandbox works."""
    unclaimed: set[str] = field(default_factory=set)
    """Keys of objects that are in the store already, and that no snapshot names."""

    def parent(self, answer: ExportAnswer) -> str:
        return self.state.snapshot if self.request.adopt else (answer.lineage or [""])[0]

    async def continues(self, answer: ExportAnswer) -> bool:
        """Whether the sandbox's memory grew out of the present head, or is to count as if it had.

        It did when it was last restored from or exported to it, and also when its last export never became the head but
        the one before did: it was cut short, or lost a race against another export of the same sandbox.
        """
        if self.request.force or self.request.adopt:
            return True
        origin, head = self.parent(answer), self.state.snapshot
        if self.state.head is None and not self.state.problem:
            return bool(origin) or not await self.engine.repository.any_good(self.request.memory, self.survey.snapshots)
        if self.state.head is None:
            return False
        if origin == head or (head in answer.lineage and not self.state.head.was(origin)):
            return True
        # A damaged head cannot be restored, so nobody can start from it: what an earlier one grew into takes its place.
        return head in self.survey.damaged and self.state.head.was(origin)

    def receipt(
        self,
        outcome: ExportOutcome,
        state: HeadState,
        answer: ExportAnswer | None = None,
        manifest: Manifest | None = None,
        reason: Reason | None = None,
        added: int = 0,
    ) -> ExportReceipt:
        skipped = list(answer.skipped) if answer else []
        if answer and answer.skipped_more:
            skipped.append(Skip(path="…", reason=f"{answer.skipped_more} more"))
        return ExportReceipt(
            outcome=outcome,
            memory=self.request.memory,
            snapshot=manifest.snapshot if manifest else None,
            parent=(manifest.parent or None) if manifest else None,
            head=state.snapshot or None,
            sandbox=self.sandbox.ref,
            kind=answer.kind if answer and added else "",
            files=manifest.files if manifest else 0,
            bytes=manifest.bytes if manifest else 0,
            packed_bytes=added,
            transferred_bytes=self.sandbox.transferred_bytes,
            round_trips=sum(self.sandbox.trips.values()),
            trips=self.sandbox.trips,
            duration_ms=round((time.monotonic() - self.started) * 1000),
            databases=[row.report() for row in answer.databases] if answer else [],
            skipped=skipped,
            warnings=[*self.warnings, *(answer.warnings if answer else [])],
            reason=reason,
            conversation=self.request.conversation,
            label=self.request.label,
        )


async def _begin(
    engine: Engine, counted: CountedSandbox, request: ExportRequest, started: float, warnings: list[str]
) -> _Run:
    check_memory_id(request.memory)
    engine.progress.step("reaching the sandbox")
    presence, state, survey = await together(
        reach(counted), engine.repository.head(request.memory), engine.repository.survey(request.memory)
    )
    known = [*filter(None, [state.snapshot]), *survey.snapshots[:MOST_KNOWN]]
    snapshot = request.snapshot or new_snapshot_id(datetime.now(UTC), max(known, default=""))
    engine.progress.about(snapshot)
    return _Run(engine, counted, request, started, state, survey, known, snapshot, presence, warnings)


async def _collect(run: _Run, scratch: Spool) -> tuple[ExportAnswer, Grown]:
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
                run.sandbox, question, ExportAnswer, timeout=timeout, inline_bytes=inline_bytes, fallback=shell
            )
            read = time.monotonic()
            try:
                base, entries = await _base(run, answer, scratch)
            except (SnapshotDamaged, SnapshotNotFound) as damage:
                if isinstance(damage, SnapshotDamaged):
                    await engine.repository.mark_damaged(run.request.memory, answer.base, damage.message)
                run.survey.damaged.add(answer.base)
                question["unusable"] = sorted(run.survey.damaged)
                raise BaseDamaged(damage.message) from None
            if answer.status == "unchanged":
                return answer, Grown(base, entries)
            stored = ""
            if answer.status == "tarball":
                answer, bundle = await read_tarball(engine, run.sandbox, answer, question, scratch)
            else:
                bundle, stored = await receive(
                    engine, run.sandbox, answer, inline, question, scratch, run.warnings, run.unclaimed
                )
            roots = [root.name for root in base.roots] if base else []
            arrived = await asyncio.to_thread(check, engine, answer, bundle, entries, roots, stored)
            return answer, Grown(base, entries, arrived, read)
    raise AssertionError("unreachable")


def _question(run: _Run) -> dict[str, Any]:
    request, limits = run.request, run.engine.limits
    return {
        "do": "export",
        "memory": request.memory,
        "key": memory_key(request.memory),
        "snapshot": run.snapshot,
        "known": run.known,
        "unusable": sorted(run.survey.damaged),
        "layouts": [layout.for_sandbox() for layout in choose(request.layouts, run.engine.layouts)],
        "projects": None if request.projects is None else list(request.projects),
        "limits": {
            "bytes": limits.bytes,
            "file_bytes": limits.file_bytes,
            "files": limits.files,
            "depth": limits.depth,
        },
        "inline_bytes": run.engine.inline_bytes,
        "database_wait": run.engine.timing.database_wait,
        "worker_wait": run.engine.timing.worker_wait,
        "turn_wait": run.engine.timing.turn_wait,
    }


@asynccontextmanager
async def _reading_ahead(run: _Run, scratch: Spool) -> AsyncIterator[None]:
    """Read the head while the sandbox works: as a rule, that is what it builds on."""
    head = run.state.snapshot
    sizes = [size for key, size in run.survey.sizes.items() if key.endswith(".index.gz")]
    if head and head not in run.survey.damaged and sum(sizes) <= MOST_AHEAD:
        run.ahead = asyncio.create_task(_read(run, head, scratch))
    try:
        yield
    finally:
        if run.ahead is not None:
            run.ahead.cancel()
            # What went wrong with it matters only to who needed it.
            await asyncio.gather(run.ahead, return_exceptions=True)


async def _read(run: _Run, snapshot: str, scratch: Spool) -> Snapshot:
    """Raise ``SnapshotDamaged`` when it is not all in the store any more."""
    manifest = await run.engine.repository.manifest(run.request.memory, snapshot)
    check_sizes(manifest, run.survey.sizes)
    entries, _, _ = await fetch_entries(run.engine.repository.store, manifest, scratch)
    return manifest, entries


async def _base(run: _Run, answer: ExportAnswer, scratch: Spool) -> tuple[Manifest | None, dict[str, Entry]]:
    """The snapshot the sandbox compared itself with, and its entries if they are needed; nothing for a full export.

    Raise ``SnapshotDamaged`` when it is not all in the store any more, ``SnapshotNotFound`` when it was forgotten.
    """
    if not answer.base:
        return None, {}
    if answer.base not in run.known:
        raise BadAnswer(f"The sandbox builds on a snapshot it was not asked about: {answer.base[:80]!r}.")
    if run.ahead is not None and answer.base == run.state.snapshot:
        return await run.ahead
    if answer.status == "unchanged":
        manifest = await run.engine.repository.manifest(run.request.memory, answer.base)
        check_sizes(manifest, run.survey.sizes)
        return manifest, {}
    return await _read(run, answer.base, scratch)


async def _unchanged(run: _Run, answer: ExportAnswer, base: Manifest) -> ExportReceipt:
    """Nothing new in the sandbox since ``base``. Unless that is or was the head, an export before did not get to move it:
    its outcome is settled now, or said again."""
    state = run.state
    if base.snapshot == state.snapshot:
        return run.receipt(ExportOutcome.UNCHANGED, state, answer, base)
    if run.request.force or (not base.rejected and await run.continues(answer)):
        await hold(run.engine.repository.store, base)
        outcome, state = await advance(run.engine, base, state, moves=True)
        return run.receipt(outcome, state, answer, base)
    if state.head and state.head.was(base.snapshot):
        receipt = run.receipt(ExportOutcome.UNCHANGED, state, answer, base)
        return replace(
            receipt, warnings=[*receipt.warnings, f"The head is {state.snapshot}; this sandbox holds an earlier one."]
        )
    if base.rejected:
        code, _, message = base.rejected.partition(": ")
        return run.receipt(ExportOutcome.REJECTED, state, answer, base, Reason(code=code, message=message))
    return run.receipt(ExportOutcome.DIVERGED, state, answer, base, _diverged(state))


def _diverged(state: HeadState) -> Reason:
    head = state.snapshot or state.problem or "which is missing"
    return Reason(code="diverged", message=f"This sandbox did not start from the head ({head}).")
