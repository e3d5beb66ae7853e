"""Sandboxes that the service creates itself, and ends: one call for a sandbox that remembers.

Before a sandbox is created, a record in the store says who creates it, and under which name it will be found at its
provider. The record goes when the sandbox is attached. A service that dies in between leaves the record: a repeated call
goes on with the sandbox, and otherwise the next service that looks ends it. It holds nothing that is not in the store.

``moves`` uses the same records: there the sandbox that is left behind is named too. ``jobs/wanted_sandboxes`` calls
``start`` for memories that are to have a living sandbox; ``wanted_sandboxes`` is what the store knows about those.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, replace
from typing import Any, TypeVar

import msgspec
import structlog

from sidecar.audit.lines import build_own_call
from sidecar.engine import RestoreRequest
from sidecar.engine.restores.sign import is_unused
from sidecar.errors import NotEnded, RestoreIncomplete, SandboxAsleep, SandboxBusy, SidecarError, SwapLost
from sidecar.format.checksums import decode_checksummed, encode_checksummed
from sidecar.host.values import dataclass
from sidecar.ids import STARTS, build_start_key
from sidecar.models.answers import Attached
from sidecar.ports import SandboxPlan, SandboxProvider
from sidecar.receipts import ExportReceipt, RestoreOutcome, RestoreReceipt
from sidecar.service.attachments.attachment import ENDED, Attachment, CareOptions, NotAttached
from sidecar.service.attachments.checkpoints import DETACHED, build_export_request
from sidecar.service.attachments.keeper import Keeper
from sidecar.service.attachments.schedule import GONE
from sidecar.service.attachments.trouble import find_save_problem
from sidecar.service.core import Sidecar
from sidecar.service.idempotency import REUSED, KeyedCall, KeyReused
from sidecar.service.jobs.scheduler import Jobs
from sidecar.service.operations import Locks
from sidecar.service.sandboxes import SandboxTarget
from sidecar.service.settings import narrow_local_policy
from sidecar.service.wanted_sandboxes import WantedStates

LOOK_SECONDS = 30.0
LATE_SECONDS = 120.0
"""A sandbox may still appear at its provider so long after the service died that asked for it."""
BESIDE = (
    "{memory} is in other sandboxes that are looked after too: {others}. What they export may diverge; `memory-sidecar stop"
    " {memory} --sandbox REF` ends one."
)
Answer = TypeVar("Answer")


class StartUnderWay(SandboxBusy):
    """Another service creates this sandbox right now."""

    code = "start-under-way"
    retryable = True
    default_hint = "Send the same call again, with the same Idempotency-Key: it answers once the sandbox is there."


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """What a caller wants: where, what it is made from, what is restored into it, and how it is looked after."""

    provider: str
    template: str
    metadata: dict[str, str]
    timeout: float | None
    restore: RestoreRequest
    care: CareOptions

    @property
    def memory(self) -> str:
        return self.restore.memory

    def as_body(self) -> dict[str, Any]:
        """Return it as it is compared with other calls under the same key."""
        return json.loads(json.dumps(asdict(self), default=str))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class StartRecord:
    """A creation that has begun, as an object in the store."""

    memory: str
    provider: str
    instance: str
    """The service that does it; empty: none does any more."""
    digest: str
    attempt: str
    began: float
    sandbox: str = ""
    """Its reference, once it is known."""
    moving: str = ""
    """The sandbox that it is to take the place of. As long as that one lives and is attached, the new one is not needed."""
    done: bool = False
    """It is attached. The record stays for a while, since a service that died may have asked for a second one under the
    same name, which may still appear."""


@dataclass(frozen=True, slots=True)
class HeldRecord:
    """A record as it was read or written, with the version that a compare-and-swap expects."""

    record: StartRecord
    key: str
    version: str

    @property
    def name(self) -> str:
        """The name of the sandbox at its provider."""
        return self.key.removeprefix(STARTS)


class Starts:
    """Creates sandboxes and ends them."""

    def __init__(self, sidecar: Sidecar, keeper: Keeper) -> None:
        self._sidecar = sidecar
        self._keeper = keeper
        self._store = sidecar.engine.repository.store
        self.wanted = WantedStates(self._store)
        self._running: dict[str, tuple[str, asyncio.Task[Any]]] = {}
        self._turns = Locks()
        self._log = structlog.get_logger("sidecar")
        sidecar.starts = self

    def look_regularly(self, jobs: Jobs) -> None:
        """Clear up after services that died, now and then."""
        jobs.every("unfinished starts", LOOK_SECONDS, self.clear_up, first=1)

    async def start(self, request: StartRequest, key: str = "") -> Attached:
        """Create a sandbox, restore a memory into it and attach it. Under one key it is done once.

        If the memory is one of those that are to have a living sandbox, and it was stopped, this is its sandbox now.
        """
        answer = await self.create_attached(request, key)
        await self.wanted.note_started(request.memory, answer.attachment.sandbox)
        return answer

    async def create_attached(self, request: StartRequest, key: str) -> Attached:
        """Do what ``start`` does, but for the memories that are to have a living sandbox."""
        await self.check(request.memory, request.provider)
        body = request.as_body()
        asked = KeyedCall(key, request.memory, "start", body) if key else None
        place, digest = build_start_key(request.memory, key or secrets.token_hex(20)), compute_digest(body)
        return await self.run_once(place, digest, lambda: self._start_once(request, place, digest, asked))

    async def check(self, memory: str, provider: str) -> None:
        """Raise a ``SidecarError`` if a sandbox for a memory could not be created there in any case."""
        self._sidecar.operations.check_intake()
        await self._sidecar.engine.repository.check_new_memory(memory)
        self.open_provider(provider)

    async def run_once(self, place: str, digest: str, work: Callable[[], Awaitable[Answer]]) -> Answer:
        """Do something under a record's key, or wait for the same call that this service is at. Raise ``KeyReused``."""

        async def take_turn() -> Answer:
            async with self._turns.held(place):  # what an earlier call left may just be cleared up
                return await work()

        running = self._running.get(place)
        if running is None:
            task: asyncio.Task[Answer] = asyncio.create_task(take_turn())
            self._running[place] = running = digest, task
            task.add_done_callback(lambda _: self._running.pop(place, None))
        elif running[0] != digest:
            raise KeyReused(REUSED)
        # Shielded: what has begun goes on when the caller is gone, and whoever repeats the call gets the same answer.
        answer: Answer = await asyncio.shield(running[1])
        return answer

    async def _start_once(self, request: StartRequest, place: str, digest: str, asked: KeyedCall | None) -> Attached:
        """Start it, unless it was done before."""
        remembered = self._sidecar.remembered_calls
        if asked is not None and (call := await remembered.find(asked)) is not None and call.receipt is not None:
            return msgspec.convert(call.receipt, Attached)
        held, again = await self.claim(request, place, digest)
        try:
            held = await self.create(request, held, again=again)
            answer = await self.restore_and_attach(request, held.record.sandbox)
            self._warn_of_others(answer)
        except SidecarError as problem:
            await self.undo_and_say(held, problem)
            raise
        await self.finish(held, asked, asdict(answer), again=again)
        return answer

    def _warn_of_others(self, answer: Attached) -> None:
        """Add a warning if the memory has other sandboxes, as far as is known without asking the store."""
        memory, sandbox = answer.attachment.place
        known = [one for one in self._keeper.list_known() if one.memory == memory and one.looked_after]
        others = sorted(one.sandbox for one in known if one.sandbox != sandbox)
        if others and answer.restored is not None:
            answer.restored.warnings.append(BESIDE.format(memory=memory, others=", ".join(others)))

    async def finish(self, held: HeldRecord, asked: KeyedCall | None, answer: dict[str, Any], *, again: bool) -> None:
        """Remember the answer, and remove the record. If it was taken over it stays for a while, for ``clear_up``."""
        if asked is not None:
            call, _ = await self._sidecar.remembered_calls.begin(asked)
            await self._sidecar.remembered_calls.end(call, answer)
        if again:
            over = replace(held.record, instance="", done=True, moving="", began=time.time())
            await self._write(over, held.key, held.version)
        else:
            await self._store.delete([held.key])

    async def claim(self, request: StartRequest, place: str, digest: str, moving: str = "") -> tuple[HeldRecord, bool]:
        """Write the record, or take over that of a service that died. Return it, and whether there was one.

        Raise ``StartUnderWay`` if a living service has it, and ``KeyReused`` if it is of another call.
        """
        await self._store.prepare()
        instance, attempt = self._keeper.lease.instance, secrets.token_hex(8)
        ours = StartRecord(request.memory, request.provider, instance, digest, attempt, time.time(), moving=moving)
        before = await self.read(place)
        if before is not None:
            if before.record.digest != digest:
                raise KeyReused(REUSED)
            if before.record.instance in await self.list_others():
                raise StartUnderWay(f"A sandbox for {request.memory} is being made under this key.")
            ours = replace(ours, attempt=before.record.attempt, sandbox=before.record.sandbox)
        try:
            return await self._write(ours, place, before.version if before else None), before is not None
        except SwapLost:
            raise StartUnderWay(f"A sandbox for {request.memory} is being made under this key.") from None

    async def create(self, request: StartRequest, held: HeldRecord, *, again: bool) -> HeldRecord:
        """Create the sandbox, unless a service that died has, and note its reference."""
        provider = self.open_provider(request.provider)
        found = await provider.find(held.name) if again else []
        for extra in found[1:]:
            await provider.end(extra)
        if found:
            ref = found[0]
        else:
            plan = SandboxPlan(
                name=held.name,
                attempt=held.record.attempt,
                template=request.template,
                metadata=request.metadata,
                timeout=request.timeout,
            )
            ref = await provider.create(plan)
        return await self._write(replace(held.record, sandbox=ref), held.key, held.version)

    async def restore_and_attach(self, request: StartRequest, ref: str) -> Attached:
        """Restore the memory into a new sandbox, and look after it. Raise ``RestoreIncomplete``."""
        receipt = await self.restore(request, ref)
        attachment = await self._keeper.look_after((request.memory, receipt.sandbox), request.care, receipt)
        return Attached(attachment=attachment, restored=receipt)

    async def restore(self, request: StartRequest, ref: str) -> RestoreReceipt:
        """Restore the memory into a sandbox. Raise ``RestoreIncomplete``."""
        target = SandboxTarget(ref, user=request.care.user)
        receipt = await (await self._sidecar.start_restore(request.restore, target)).result()
        assert isinstance(receipt, RestoreReceipt)
        if receipt.outcome is RestoreOutcome.INCOMPLETE:
            hint = "`memory-sidecar verify` says whether the snapshot is whole. Then start again."
            why = receipt.reason.message if receipt.reason else "The restore is incomplete."
            raise RestoreIncomplete(why, hint=hint)
        return receipt

    async def undo_and_say(self, held: HeldRecord, problem: SidecarError) -> None:
        """End what was created, and add to the problem what became of it."""
        if ended := await self._undo(held):
            problem.message += f" The sandbox that was made for it, {ended}, was ended; it held nothing else."
        elif held.record.sandbox:
            problem.message += (
                f" The sandbox that was made for it, {held.record.sandbox}, still runs; it will be ended."
            )

    async def _undo(self, held: HeldRecord) -> str:
        """End what was created, and remove the record. Return the sandbox that was ended, if any.

        Where that cannot be done now, or where the sandbox may still appear, the record stays, for ``clear_up``. Where
        another service has taken it over meanwhile, all of it is left to that one.
        """
        try:
            stored = await self.read(held.key)
            record = stored.record if stored is not None else held.record
            if record.instance != self._keeper.lease.instance:
                return ""
            provider = self.open_provider(record.provider)
            refs = [record.sandbox] if record.sandbox else list(await provider.find(held.name))
            await self._end_all(record.memory, refs, provider)
            if refs:
                await self._store.delete([held.key])
            elif stored is not None:
                await self._write(replace(record, instance="", began=time.time()), held.key, stored.version)
            return ", ".join(refs)
        except SidecarError as problem:
            self._log.error("a new sandbox could not be ended yet", memory=held.record.memory, **problem.as_dict())
            return ""

    async def _end_all(self, memory: str, refs: Iterable[str], provider: SandboxProvider) -> None:
        """End sandboxes that are not needed, and look after them no longer."""
        for ref in refs:
            if (attachment := await self.find_attachment(memory, ref)) is not None:
                await self._keeper.detach(attachment)
            await provider.end(ref)

    async def clear_up(self) -> None:
        """End the sandboxes of services that died before they were attached."""
        keys = [info.key async for info in self._store.list(STARTS)]
        others = await self.list_others() if keys else set()
        for key in keys:
            if key in self._running:
                continue
            async with self._turns.held(key):
                held = await self.read(key)
                if held is None or held.record.instance in others:
                    continue
                try:
                    await self._clear_up_one(held)
                except SwapLost:
                    continue  # another service does it
                except SidecarError as problem:
                    about = {"memory": held.record.memory, "provider": held.record.provider}
                    self._log.error("an unfinished start could not be cleared up", **about, **problem.as_dict())

    async def _clear_up_one(self, held: HeldRecord) -> None:
        record = replace(held.record, instance=self._keeper.lease.instance)
        held = await self._write(record, held.key, held.version)
        provider = self.open_provider(record.provider)
        refs = {*await provider.find(held.name), *([record.sandbox] if record.sandbox else [])}
        for ref in refs - await self._list_needed(record, refs):
            await self._end_all(record.memory, [ref], provider)
            own = build_own_call("end-unfinished", memory=record.memory, sandbox=ref)
            self._sidecar.trail.add(own, "ended")
            self._log.warning("a sandbox of a start that was not finished was ended", memory=record.memory, sandbox=ref)
        if (refs and not record.done) or time.time() - record.began > LATE_SECONDS:
            await self._store.delete([held.key])

    async def _list_needed(self, record: StartRecord, refs: set[str]) -> set[str]:
        """Return the sandboxes of a record that stay. Raise a ``SidecarError`` if that cannot be said now."""
        if record.done:
            return {record.sandbox}
        if record.moving and await self.find_living(record.memory, record.moving) is not None:
            return set()
        return {ref for ref in refs if await self.find_attachment(record.memory, ref) is not None}

    async def find_living(self, memory: str, ref: str) -> Attachment | None:
        """Return the attachment of a sandbox that lives and is looked after; one that is paused lives. Raise a
        ``SidecarError`` if its provider does not say."""
        attachment = await self.find_attachment(memory, ref)
        if attachment is None or not attachment.looked_after or await self.is_gone(memory, ref):
            return None
        return attachment

    async def is_gone(self, memory: str, ref: str) -> bool:
        """Whether a sandbox no longer exists; if so, the keeper is told. Raise a ``SidecarError`` if its provider does not
        say. Nothing is woken by it."""
        try:
            async with self._sidecar.sandboxes.open_fresh(ref) as sandbox:
                await sandbox.connect()
        except GONE as problem:
            await self._keeper.report_gone(memory, ref, problem)
            return True
        except SandboxAsleep:
            return False
        return False

    async def find_attachment(self, memory: str, ref: str) -> Attachment | None:
        """Return the attachment of a sandbox; ``None`` only if there is none for certain."""
        try:
            return await self._keeper.find(memory, ref)
        except NotAttached:
            return None

    async def stop(self, memory: str, sandbox: str = "", *, discard: bool = False) -> Attached:
        """Export an attached sandbox and end it. Raise ``NotEnded`` if its memory was not saved: then it is not ended,
        unless ``discard``, or it is the first of a memory and nothing was ever written in it.

        If the memory is one of those that are to have a living sandbox, and this is its last one, none is created until
        it is started again. That holds also where there is none to be ended.
        """
        try:
            attachment = await self._keeper.find(memory, sandbox)
        except NotAttached as problem:
            if not sandbox and await self.wanted.note_stopped(memory):
                problem.message += " From now on none is created for it."
                problem.hint = f"`memory-sidecar start {memory}`, or a change of its [[start]], lets that begin again."
            raise
        provider = self.open_provider(attachment.sandbox.partition(":")[0])
        provider.check_end(attachment.sandbox)
        exported = None
        try:
            exported = await self._export_last(attachment)
        except GONE:
            if not await self._note_stopped(attachment) and not discard:
                raise
        except SidecarError as problem:
            if not discard:
                raise
            self._log.warning("a sandbox is ended unsaved", memory=memory, sandbox=sandbox, **problem.as_dict())
        if exported is not None and not (exported.is_saved or discard or await self._is_unused(attachment, exported)):
            why = f": {exported.reason.headline}" if exported.reason else "."
            raise NotEnded(f"{attachment.sandbox} was not ended. Its export was {exported.outcome.value}{why}")
        # Before it is ended, so that no other one is created in its place.
        await self._note_stopped(attachment)
        await provider.end(attachment.sandbox)
        await self._keeper.detach(attachment)
        return Attached(attachment=replace(attachment, state=ENDED), exported=exported)

    async def _note_stopped(self, attachment: Attachment) -> bool:
        """Note that a memory is to have no sandbox any more, unless it has others. Return whether it was to have one."""
        if await self.wanted.read(attachment.memory) is None:
            return False
        ours = [one for one in await self._keeper.find_all() if one.memory == attachment.memory and one.looked_after]
        if any(one.sandbox != attachment.sandbox for one in ours):
            return True
        return await self.wanted.note_stopped(attachment.memory)

    async def _is_unused(self, attachment: Attachment, exported: ExportReceipt) -> bool:
        """Whether there is no memory and never was, and nothing was written in the sandbox since it was started."""
        if find_save_problem(exported) is not None:
            return False
        async with self._sidecar.sandboxes.use(SandboxTarget(attachment.sandbox, user=attachment.user)) as sandbox:
            return await is_unused(sandbox)

    async def _export_last(self, attachment: Attachment) -> ExportReceipt:
        wanted, target = (
            build_export_request(attachment, DETACHED),
            SandboxTarget(attachment.sandbox, user=attachment.user),
        )
        receipt = await (await self._sidecar.start_export(wanted, target)).result()
        assert isinstance(receipt, ExportReceipt)
        return receipt

    def open_provider(self, name: str) -> SandboxProvider:
        """Raise ``BadReference`` if there is no such provider."""
        engine = self._sidecar.engine
        assert engine.open_provider is not None
        return engine.open_provider(name, local=narrow_local_policy(engine.local, self._sidecar.settings))

    async def list_others(self) -> set[str]:
        """Return the other services that live."""
        await self._keeper.lease.keep()
        return await self._keeper.lease.list_living() - {self._keeper.lease.instance}

    async def read(self, key: str) -> HeldRecord | None:
        """Read a record; ``None`` if there is none. One that is damaged is logged, and left."""
        stored = await self._store.get(key)
        if stored is None:
            return None
        try:
            record = msgspec.convert(decode_checksummed(stored.data), StartRecord)
        except (ValueError, msgspec.ValidationError) as problem:
            self._log.error("the record of a start is damaged", object=key, problem=str(problem))
            return None
        return HeldRecord(record, key, stored.version)

    async def _write(self, record: StartRecord, key: str, version: str | None) -> HeldRecord:
        """Raise ``SwapLost`` if another service wrote it."""
        data = encode_checksummed(asdict(record))
        return HeldRecord(record, key, await self._store.swap(key, data, expected=version))


def compute_digest(body: dict[str, Any]) -> str:
    """Return the digest by which two calls are compared."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
