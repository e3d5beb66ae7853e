"""The core of the service, without HTTP: it accepts exports and restores, queues them, and keeps track of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sidecar.audit.lines import build_own_call
from sidecar.audit.trail import Trail
from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine.archives.tarballs import adopt
from sidecar.engine.briefs import forget_briefs
from sidecar.engine.core import Reached, gather
from sidecar.engine.exports.decision import check_reasons
from sidecar.engine.heads import fork, rollback
from sidecar.engine.queries import build_not_found_error, list_existing_ids
from sidecar.engine.reviews import Word, accept, decline
from sidecar.errors import SandboxError, SandboxGone, SandboxNotFound, SnapshotError
from sidecar.host.values import dataclass
from sidecar.ids import ROOT, check_memory_id, parse_snapshot_time
from sidecar.models.answers import Acceptance, Declined, Forgotten, Forked, Head
from sidecar.policy.review import PENDING
from sidecar.ports import Sandbox
from sidecar.receipts import ExportOutcome, ExportReceipt, RestoreOutcome, RestoreReceipt
from sidecar.service.access.admission import Admission
from sidecar.service.access.grants import ITSELF, Caller
from sidecar.service.access.usage import Usage
from sidecar.service.attachments.attachment import CareOptions
from sidecar.service.calls import REPEATED, note_outcome, note_subject
from sidecar.service.event_types import DELETED, REVIEW_ACCEPTED, REVIEW_DECLINED
from sidecar.service.events import Events, publish_accepted
from sidecar.service.idempotency import KeyedCall, RememberedCall, RememberedCalls
from sidecar.service.metrics import Metrics, Standing
from sidecar.service.operations import Operation, Operations, Receipt
from sidecar.service.sandboxes import Sandboxes, SandboxTarget
from sidecar.service.settings import Service, narrow_local_policy
from sidecar.store.manifest import Manifest
from sidecar.store.retention import forget
from sidecar.store.selectors import resolve_snapshot

if TYPE_CHECKING:
    from sidecar.engine.restores.source import SnapshotSource
    from sidecar.service.attachments.keeper import Keeper
    from sidecar.service.jobs.wanted_sandboxes import WantedJob
    from sidecar.service.starts import Starts
    from sidecar.service.watch.watch import Watcher

T = TypeVar("T")
CLOCKS_DIFFER = 60.0
"""By how many seconds the clocks of two services may differ."""
LATER_OPTIONS = frozenset(
    {
        *("beside", "discard", "read_only", "must_exist", "in_use", "withhold_projects", "announce"),
        *("label", "only", "brief", "brief_path"),
    }
)


@dataclass(frozen=True, slots=True)
class Group:
    """What the restores of one call into several sandboxes share. They run side by side."""

    source: SnapshotSource
    reached: Reached
    """Called like that of the engine, before that of each restore."""


class _AlreadyBegun(Exception):
    """The call is already recorded in the store: another service runs it, or ran it when it died."""


class Sidecar:
    """One service: its engine, operations, open sandboxes, events and metrics."""

    def __init__(self, engine: Engine, settings: Service, trail: Trail | None = None) -> None:
        self.engine = replace(engine, forgot=self._on_forgot)
        self.settings = settings
        self.events = Events()
        self.metrics = Metrics()
        self.events.subscribe(self.metrics.count, repetitions=True)
        self.trail = trail or Trail()
        """Where the audit is written."""
        self.operations = Operations(self.events, self.trail, concurrency=settings.concurrency, queue=settings.queue)
        self.sandboxes = Sandboxes(partial(engine.open_sandbox, local=narrow_local_policy(engine.local, settings)))
        self.remembered_calls = RememberedCalls(engine)
        self.keeper: Keeper | None = None
        """Is notified of callers' restores and exports, and exports the sandboxes of conversations in between."""
        self.find_named: Callable[[str], Caller | None] = lambda name: None
        """Returns the caller with a named token, if it is still good."""
        self.admission = Admission(
            Usage(engine.repository.store),
            self.sandboxes.name_of,
            lambda sandbox: self.keeper.list_memories(sandbox) if self.keeper else (),
        )
        self.events.subscribe(self.admission.usage.count, repetitions=True)
        self.starts: Starts | None = None
        """Creates sandboxes and ends them."""
        self.wanted: WantedJob | None = None
        """Creates a sandbox for memories that are to have one."""
        self.watcher: Watcher | None = None
        """Notices sandboxes that name their memory."""
        self._by_key: dict[tuple[str, str], tuple[KeyedCall, Operation]] = {}
        """Calls with an idempotency key that wait or run."""
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start_export(
        self, request: ExportRequest, target: SandboxTarget, *, key: str = "", caller: Caller = ITSELF
    ) -> Operation:
        """Start an export and return its operation. For an idempotency ``key`` that was used before, return that
        operation."""
        self.admission.check_sandbox(caller, target.ref)
        await self.engine.repository.check_new_memory(request.memory)
        check_reasons(request.allow)

        async def work(operation: Operation, call: RememberedCall | None, reached: Reached | None) -> Receipt:
            ours = request
            if call is not None:
                await operation.intend(call.snapshot)
                if (stored := await self.remembered_calls.finish(call, target.ref)) is not None:
                    return await self._close_unreported(stored)
                ours = replace(request, snapshot=call.snapshot)
            engine = self._build_engine(operation, reached)
            try:
                async with self.sandboxes.use(target) as box:
                    return await self._export_for_caller(engine, box, ours)
            except (SandboxGone, SandboxNotFound) as problem:
                if self.keeper is not None:
                    await self.keeper.report_gone(request.memory, target.ref, problem)
                raise

        operation = Operation("export", request.memory, target.ref, request.conversation, caller=caller)
        return await self._start_once(operation, work, key, _encode_call(request, target))

    def _build_engine(self, operation: Operation, reached: Reached | None = None) -> Engine:
        """Return the engine for an operation: it works within what the caller may see and store."""
        engine = replace(self.engine, progress=operation, reached=_announce(operation, reached))
        return self.admission.narrow_engine(engine, operation.caller)

    async def _export_for_caller(self, engine: Engine, box: Sandbox, request: ExportRequest) -> ExportReceipt:
        """Export for a caller and close the conversation of the sandbox."""
        if self.keeper is None:
            return await self.export_from(box, request, engine)
        receipt, row = await gather(
            self.export_from(box, request, engine), self.keeper.find_stored(request.memory, box.ref)
        )
        await self.keeper.close_conversation(receipt, row)
        return receipt

    async def export_from(self, box: Sandbox, request: ExportRequest, engine: Engine) -> ExportReceipt:
        """Export a sandbox. If another service exported the same sandbox at the same time, for a caller or a
        checkpoint, an outcome of ``DIVERGED`` only means that the other one was faster: a second export decides which
        of the two read later."""
        began = time.time()
        receipt = await export(engine, box, request)
        if receipt.outcome is ExportOutcome.DIVERGED and await self._is_overtaken(receipt, began):
            return await export(engine, box, replace(request, snapshot=""))
        return receipt

    async def _is_overtaken(self, receipt: ExportReceipt, began: float) -> bool:
        """Whether the head is a snapshot of the same sandbox that was made since ``began``."""
        if receipt.head is None or parse_snapshot_time(receipt.head).timestamp() < began - CLOCKS_DIFFER:
            return False
        try:
            head = await self.engine.repository.manifest(receipt.memory, receipt.head)
        except SnapshotError:
            return False
        return head.sandbox == receipt.sandbox

    async def _close_unreported(self, receipt: ExportReceipt) -> ExportReceipt:
        """Return the receipt of an export that a service made before it died, and close the conversation of that
        export; not one that was opened since."""
        if self.keeper is not None:
            receipt = replace(receipt, sandbox=self.sandboxes.name_of(receipt.sandbox))
            row = await self.keeper.find_stored(receipt.memory, receipt.sandbox)
            if row is not None and row.attachment.conversation == receipt.conversation:
                await self.keeper.close_conversation(receipt, row)
        return receipt

    async def start_restore(
        self,
        request: RestoreRequest,
        target: SandboxTarget,
        *,
        key: str = "",
        care: CareOptions | None = None,
        caller: Caller = ITSELF,
        group: Group | None = None,
    ) -> Operation:
        """Start a restore and return its operation. For an idempotency ``key`` that was used before, return that
        operation. With ``care`` it opens a conversation."""
        self.admission.check_sandbox(caller, target.ref)
        await self.engine.repository.check_new_memory(request.memory)

        async def work(operation: Operation, call: RememberedCall | None, reached: Reached | None) -> Receipt:
            ours = replace(request, in_use=self.sandboxes.is_open(target.ref))
            source = None
            if group is not None:
                source, reached = group.source, _chain(group.reached, reached)
            async with self.sandboxes.use(target) as box:
                receipt = await restore(self._build_engine(operation, reached), box, ours, source)
                if care is None or self.keeper is None:
                    return receipt
                return await self.keeper.open_conversation(request, receipt, care, await _find_end(box, receipt))

        operation = Operation("restore", request.memory, target.ref, request.conversation, caller=caller)
        operation.side_by_side = group is not None
        return await self._start_once(operation, work, key, _encode_call(request, target))

    def start_import(self, archive: Path, request: ExportRequest, *, caller: Caller = ITSELF) -> Operation:
        """Start to adopt a tarball, as if it were exported from a sandbox, and return the operation. The file must
        exist until the operation has ended."""
        check_reasons(request.allow)

        async def work(operation: Operation) -> Receipt:
            return await adopt(self._build_engine(operation), archive, request)

        return self.operations.start(Operation("export", request.memory, f"import:{archive.name}", caller=caller), work)

    def keep_running(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start work that goes on whoever waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _start_once(
        self,
        operation: Operation,
        work: Callable[[Operation, RememberedCall | None, Reached | None], Awaitable[Receipt]],
        key: str,
        body: dict[str, Any],
    ) -> Operation:
        """Start an operation, or return the one that runs or has ended under the same idempotency key. Raise
        ``KeyReused``."""
        if not key:
            await self._check_quotas(operation)
            return self.operations.start(operation, lambda started: work(started, None, None))
        asked = KeyedCall(key, operation.memory, operation.kind, body, operation.caller)
        running = self._by_key.get(asked.place)
        call = await self.remembered_calls.find(asked)
        if running is None and call is None:
            await self._check_quotas(operation)
        # There is no ``await`` from here to the start, so two repetitions of a call cannot both start. It is looked up
        # twice: before the ``await`` on the store, since the operation may end meanwhile, and after it, since one may
        # have started.
        running = running or self._by_key.get(asked.place)
        if running is not None:
            before, under_way = running
            asked.check_same(before)
            note_outcome(REPEATED)
            return under_way
        if call is not None and (answered := self.remembered_calls.read_receipt(call)) is not None:
            note_outcome(REPEATED)
            note_subject(snapshot=answered.snapshot or "")
            return self.operations.repeat(operation, answered)

        async def once(started: Operation) -> Receipt:
            try:
                return await self._run_once(started, work, asked, call)
            finally:
                self._by_key.pop(asked.place, None)

        started = self.operations.start(operation, once)
        self._by_key[asked.place] = asked, started
        return started

    async def _check_quotas(self, operation: Operation) -> None:
        """Raise a ``LimitExceeded`` if the caller has as much as it may have. A restore stores nothing new."""
        if operation.kind == "export":
            await self.admission.check_quotas(operation.caller, operation.memory)

    async def _run_once(
        self,
        operation: Operation,
        work: Callable[[Operation, RememberedCall | None, Reached | None], Awaitable[Receipt]],
        asked: KeyedCall,
        call: RememberedCall | None,
    ) -> Receipt:
        """Run a call under an idempotency key, unless it was done before, and record its answer.

        The key is recorded once the sandbox was reached: a call that fails before that leaves no trace. A call that
        fails later stays recorded: its repetition finds what it may have stored and finishes it.
        """

        async def reached(snapshot: str) -> None:
            nonlocal call
            if call is not None:  # a second attempt of the same export
                return
            call, before = await self.remembered_calls.begin(asked, snapshot)
            if before:
                raise _AlreadyBegun

        try:
            receipt = await work(operation, call, None if call else reached)
        except _AlreadyBegun:  # by another service, since ``find``
            assert call is not None
            if (answered := self.remembered_calls.read_receipt(call)) is not None:
                return answered
            receipt = await work(operation, call, None)
        if call is not None:
            # Without the brief: what a memory says stands in its packs alone, encrypted where those are.
            told = replace(receipt, brief=None) if isinstance(receipt, RestoreReceipt) else receipt
            await self.remembered_calls.end(call, told.as_dict())
        return receipt

    # Changes without a sandbox: each is published once it is done

    async def fork(self, memory: str, new: str, snapshot: str, *, caller: Caller = ITSELF) -> Forked:
        """Begin a new memory with a copy of a snapshot."""
        repository = self.engine.repository
        if caller.id:
            source = await resolve_snapshot(repository, check_memory_id(memory), snapshot)
            added = self._estimate_copy(await repository.manifest(memory, source))
            await self.admission.check_quotas(caller, new, added)
        done = await fork(repository, check_memory_id(memory), new, snapshot, self.engine.review)
        self.admission.usage.add(new, self._estimate_copy(await repository.manifest(new, done.snapshot)))
        note_subject(also=new, snapshot=done.snapshot)
        self.events.publish("memory.forked", memory=new, snapshot=done.snapshot, origin=done.origin)
        return done

    def _estimate_copy(self, manifest: Manifest) -> int:
        """Return how many bytes a copy of a snapshot takes at most: a head is smaller than a manifest."""
        return manifest.packed_bytes + 2 * self.engine.repository.store.room(len(manifest.encode()))

    async def rollback(self, memory: str, snapshot: str) -> Head:
        """Make another snapshot the head."""
        done = await rollback(self.engine.repository, check_memory_id(memory), snapshot, self.engine.review)
        note_subject(snapshot=done.head)
        self.events.publish("memory.rolled-back", memory=memory, snapshot=done.head, replaced=done.previous)
        return done

    async def accept(self, memory: str, snapshot: str, word: Word) -> Acceptance:
        """Make a snapshot the head that waits for a review, that guards rejected, or that has diverged."""
        done = await accept(self.engine.repository, check_memory_id(memory), snapshot, word)
        note_subject(snapshot=done.head)
        if done.standing == PENDING:
            self.events.publish(
                REVIEW_ACCEPTED,
                memory=memory,
                snapshot=done.head,
                replaced=done.previous,
                pinned=done.pinned,
                by=done.by,
                because=done.because,
                included=done.included,
            )
            return done
        publish_accepted(
            self.events,
            memory=memory,
            by="person",
            snapshot=done.head,
            reasons=[done.reason.code],
            replaced=done.previous,
            pinned=done.pinned,
        )
        return done

    async def decline(self, memory: str, snapshot: str, word: Word) -> Declined:
        """Keep a snapshot from ever becoming the head."""
        done = await decline(self.engine.repository, check_memory_id(memory), snapshot, word)
        note_subject(snapshot=done.snapshot)
        self.events.publish(REVIEW_DECLINED, memory=memory, snapshot=done.snapshot, by=done.by, because=done.because)
        return done

    async def forget(self, memory: str, *, dry_run: bool) -> Forgotten:
        """Apply the retention rules to a memory. Raise ``MemoryNotFound``."""
        await list_existing_ids(self.engine.repository, memory)
        done = await forget(self.engine.repository, memory, self.engine.retention, dry_run=dry_run)
        if not dry_run:
            self.publish_forgot(done)
        return done

    async def delete(self, memory: str) -> int:
        """Delete a memory and its attachments. Return the number of objects. Raise ``MemoryNotFound``."""
        repository = self.engine.repository
        if not await repository.exists(check_memory_id(memory)):
            raise build_not_found_error(repository, memory)
        if self.keeper is not None:
            await self.keeper.forget_memory(memory)
        removed = await repository.delete_memory(memory)
        forget_briefs(memory)
        self.events.publish(DELETED, memory=memory, objects=removed)
        return removed

    async def look_at_heads(self) -> int:
        """Update the metrics on all memories from one listing of the store, whichever service wrote them. Return how many
        objects there are."""
        written: dict[str, float] = {}
        sizes: Counter[str] = Counter()
        count = 0
        async for info in self.engine.repository.store.list(ROOT):
            folder, _, rest = info.key[len(ROOT) :].partition("/")
            sizes[folder] += info.size
            count += 1
            if rest == "head.json":
                written[folder] = info.modified
        self.metrics.update({folder: Standing(moment, sizes[folder]) for folder, moment in written.items()})
        return count

    def publish_forgot(self, done: Forgotten) -> None:
        """Publish what the retention rules removed from a memory, if anything."""
        if done.forgotten or done.collected.objects:
            self._publish_forgot(done.memory, done.forgotten, done.collected.objects, done.collected.bytes)

    def _on_forgot(self, memory: str, forgotten: int) -> None:
        """Tell what the rules removed after an export."""
        self.trail.add(build_own_call("retention", memory=memory), f"forgot {forgotten}")
        self._publish_forgot(memory, forgotten)

    def _publish_forgot(self, memory: str, forgotten: int, objects: int = 0, size: int = 0) -> None:
        self.events.publish("retention.forgot", memory=memory, snapshots=forgotten, objects=objects, bytes=size)

    async def close(self) -> None:
        await self.sandboxes.close()


def _announce(operation: Operation, reached: Reached | None) -> Reached:
    """Return what the engine calls before it stores or changes anything."""
    return operation.intend if reached is None else _chain(reached, operation.intend)


def _chain(first: Reached, then: Reached | None) -> Reached:
    """Return what calls the first and then the other, if there is one."""

    async def call_both(snapshot: str) -> None:
        await first(snapshot)
        if then is not None:
            await then(snapshot)

    return call_both


async def _find_end(box: Sandbox, receipt: RestoreReceipt) -> float | None:
    """Return when a sandbox that was just restored into will end; ``None`` if it is not known."""
    if receipt.outcome is RestoreOutcome.INCOMPLETE:
        return None
    try:
        return (await box.connect()).ends_at
    except SandboxError:
        return None


def _encode_call(request: ExportRequest | RestoreRequest, target: SandboxTarget) -> dict[str, Any]:
    """Return a call as it is compared with others under the same key."""
    user = {"user": target.user} if target.user else {}
    return {"sandbox": target.ref, "wake": target.wake, **user, **encode_request(request)}


def encode_request(request: ExportRequest | RestoreRequest) -> dict[str, Any]:
    """Return the fields of a request, to compare calls under one key. Options that were added in later versions are
    left out if they are not used, so that a call that an earlier version recorded is still the same call."""
    fields = {name: getattr(request, name) for name in request.__dataclass_fields__}
    if isinstance(request, RestoreRequest):
        del fields["conversation"]  # never part of what distinguishes two restores
    return {name: value for name, value in fields.items() if value or name not in LATER_OPTIONS}
