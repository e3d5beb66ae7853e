"""Sandboxes that the service creates itself, and ends: one call for a sandbox that remembers.

Before a sandbox is created, a record in the store says who creates it, and under which name it will be found at its
provider. The record goes when the sandbox is attached. A service that dies in between leaves the record: a repeated call
goes on with the sandbox, and otherwise the next service that looks ends it. It holds nothing that is not in the store.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
import structlog

from sidecar.audit.lines import build_own_call
from sidecar.engine import RestoreRequest
from sidecar.errors import NotEnded, RestoreIncomplete, SandboxBusy, SidecarError, SwapLost
from sidecar.format.checksums import decode_checksummed, encode_checksummed
from sidecar.ids import STARTS, build_start_key
from sidecar.models.answers import Attached
from sidecar.ports import SandboxPlan, SandboxProvider
from sidecar.receipts import ExportReceipt, RestoreOutcome, RestoreReceipt
from sidecar.service.attachments.attachment import ENDED, Attachment, CareOptions, NotAttached
from sidecar.service.attachments.checkpoints import DETACHED, build_export_request
from sidecar.service.attachments.keeper import Keeper
from sidecar.service.core import Sidecar
from sidecar.service.idempotency import REUSED, KeyedCall, KeyReused
from sidecar.service.jobs.scheduler import Jobs
from sidecar.service.sandboxes import SandboxTarget
from sidecar.service.settings import narrow_local_policy

LOOK_SECONDS = 30.0
LATE_SECONDS = 120.0
"""A sandbox may still appear at its provider so long after the service died that asked for it."""


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
        self._running: dict[str, tuple[str, asyncio.Task[Attached]]] = {}
        self._log = structlog.get_logger("sidecar")
        sidecar.starts = self

    def look_regularly(self, jobs: Jobs) -> None:
        """Clear up after services that died, now and then."""
        jobs.every("unfinished starts", LOOK_SECONDS, self.clear_up, first=1)

    async def start(self, request: StartRequest, key: str = "") -> Attached:
        """Create a sandbox, restore a memory into it and attach it. Under one key it is done once."""
        self._sidecar.operations.check_intake()
        await self._sidecar.engine.repository.check_new_memory(request.memory)
        self._open_provider(request.provider)
        place = build_start_key(request.memory, key or secrets.token_hex(20))
        body = request.as_body()
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        running = self._running.get(place)
        if running is None:
            asked = KeyedCall(key, request.memory, "start", body) if key else None
            task = asyncio.create_task(self._start_once(request, place, digest, asked))
            self._running[place] = running = digest, task
            task.add_done_callback(lambda _: self._running.pop(place, None))
        elif running[0] != digest:
            raise KeyReused(REUSED)
        # Shielded: what has begun goes on when the caller is gone, and whoever repeats the call gets the same answer.
        return await asyncio.shield(running[1])

    async def _start_once(self, request: StartRequest, place: str, digest: str, asked: KeyedCall | None) -> Attached:
        """Start it, unless it was done before."""
        remembered = self._sidecar.remembered_calls
        if asked is not None and (call := await remembered.find(asked)) is not None and call.receipt is not None:
            return msgspec.convert(call.receipt, Attached)
        held, again = await self._claim(request, place, digest)
        try:
            held = await self._create(request, held, again=again)
            answer = await self._restore_and_attach(request, held.record.sandbox)
        except SidecarError as problem:
            if ended := await self._undo(held):
                problem.message += f" The sandbox that was made for it, {ended}, was ended; it held nothing else."
            elif held.record.sandbox:
                problem.message += (
                    f" The sandbox that was made for it, {held.record.sandbox}, still runs; it will be ended."
                )
            raise
        if asked is not None:
            call, _ = await remembered.begin(asked)
            await remembered.end(call, asdict(answer))
        await self._store.delete([place])
        return answer

    async def _claim(self, request: StartRequest, place: str, digest: str) -> tuple[HeldRecord, bool]:
        """Write the record, or take over that of a service that died. Return it, and whether there was one.

        Raise ``StartUnderWay`` if a living service has it, and ``KeyReused`` if it is of another call.
        """
        await self._store.prepare()
        instance, attempt = self._keeper.lease.instance, secrets.token_hex(8)
        ours = StartRecord(request.memory, request.provider, instance, digest, attempt, time.time())
        before = await self._read(place)
        if before is not None:
            if before.record.digest != digest:
                raise KeyReused(REUSED)
            if before.record.instance in await self._list_others():
                raise StartUnderWay(f"A sandbox for {request.memory} is being made under this key.")
            ours = replace(ours, attempt=before.record.attempt, sandbox=before.record.sandbox)
        try:
            return await self._write(ours, place, before.version if before else None), before is not None
        except SwapLost:
            raise StartUnderWay(f"A sandbox for {request.memory} is being made under this key.") from None

    async def _create(self, request: StartRequest, held: HeldRecord, *, again: bool) -> HeldRecord:
        """Create the sandbox, unless a service that died has, and note its reference."""
        provider = self._open_provider(request.provider)
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

    async def _restore_and_attach(self, request: StartRequest, ref: str) -> Attached:
        target = SandboxTarget(ref, user=request.care.user)
        receipt = await (await self._sidecar.start_restore(request.restore, target)).result()
        assert isinstance(receipt, RestoreReceipt)
        if receipt.outcome is RestoreOutcome.INCOMPLETE:
            hint = "`memory-sidecar verify` says whether the snapshot is whole. Then start again."
            why = receipt.reason.message if receipt.reason else "The restore is incomplete."
            raise RestoreIncomplete(why, hint=hint)
        attachment = await self._keeper.look_after((request.memory, receipt.sandbox), request.care, receipt)
        return Attached(attachment=attachment, restored=receipt)

    async def _undo(self, held: HeldRecord) -> str:
        """End what was created, and remove the record. Return the sandbox that was ended, if any.

        Where that cannot be done now, or where the sandbox may still appear, the record stays, for ``clear_up``.
        """
        try:
            stored = await self._read(held.key)
            record = stored.record if stored is not None else held.record
            provider = self._open_provider(record.provider)
            refs = [record.sandbox] if record.sandbox else list(await provider.find(held.name))
            for ref in refs:
                if (attachment := await self._find_attachment(record.memory, ref)) is not None:
                    await self._keeper.detach(attachment)
                await provider.end(ref)
            if refs:
                await self._store.delete([held.key])
            elif stored is not None:
                await self._write(replace(record, instance="", began=time.time()), held.key, stored.version)
            return ", ".join(refs)
        except SidecarError as problem:
            self._log.error("a new sandbox could not be ended yet", memory=held.record.memory, **problem.as_dict())
            return ""

    async def clear_up(self) -> None:
        """End the sandboxes of services that died before they were attached."""
        keys = [info.key async for info in self._store.list(STARTS)]
        others = await self._list_others() if keys else set()
        for key in keys:
            held = await self._read(key)
            if held is None or key in self._running or held.record.instance in others:
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
        provider = self._open_provider(record.provider)
        refs = {*await provider.find(held.name), *([record.sandbox] if record.sandbox else [])}
        attached = [ref for ref in refs if await self._find_attachment(record.memory, ref) is not None]
        for ref in refs if not attached else ():
            await provider.end(ref)
            own = build_own_call("end-unfinished", memory=record.memory, sandbox=ref)
            self._sidecar.trail.add(own, "ended")
            self._log.warning("a sandbox of a start that was not finished was ended", memory=record.memory, sandbox=ref)
        if refs or time.time() - record.began > LATE_SECONDS:
            await self._store.delete([held.key])

    async def _find_attachment(self, memory: str, ref: str) -> Attachment | None:
        """Return the attachment of a sandbox; ``None`` only if there is none for certain."""
        try:
            return await self._keeper.find(memory, ref)
        except NotAttached:
            return None

    async def stop(self, memory: str, sandbox: str = "", *, discard: bool = False) -> Attached:
        """Export an attached sandbox and end it. Raise ``NotEnded`` if its memory was not saved: then it is not ended,
        unless ``discard``."""
        attachment = await self._keeper.find(memory, sandbox)
        provider = self._open_provider(attachment.sandbox.partition(":")[0])
        exported = None
        try:
            exported = await self._export_last(attachment)
        except SidecarError as problem:
            if not discard:
                raise
            self._log.warning("a sandbox is ended unsaved", memory=memory, sandbox=sandbox, **problem.as_dict())
        if exported is not None and not exported.is_saved and not discard:
            why = f": {exported.reason.message}" if exported.reason else "."
            raise NotEnded(f"{attachment.sandbox} was not ended. Its export was {exported.outcome.value}{why}")
        await provider.end(attachment.sandbox)
        await self._keeper.detach(attachment)
        return Attached(attachment=replace(attachment, state=ENDED), exported=exported)

    async def _export_last(self, attachment: Attachment) -> ExportReceipt:
        wanted, target = (
            build_export_request(attachment, DETACHED),
            SandboxTarget(attachment.sandbox, user=attachment.user),
        )
        receipt = await (await self._sidecar.start_export(wanted, target)).result()
        assert isinstance(receipt, ExportReceipt)
        return receipt

    def _open_provider(self, name: str) -> SandboxProvider:
        """Raise ``BadReference`` if there is no such provider."""
        engine = self._sidecar.engine
        assert engine.open_provider is not None
        return engine.open_provider(name, local=narrow_local_policy(engine.local, self._sidecar.settings))

    async def _list_others(self) -> set[str]:
        """Return the other services that live."""
        await self._keeper.lease.keep()
        return await self._keeper.lease.list_living() - {self._keeper.lease.instance}

    async def _read(self, key: str) -> HeldRecord | None:
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
