"""Attachments over HTTP."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated
from urllib.parse import quote, unquote

import msgspec
from fastapi import APIRouter, Query, Request

from sidecar.engine import RestoreRequest
from sidecar.errors import RestoreIncomplete
from sidecar.ids import check_memory_id
from sidecar.models.answers import Attached, NoticedSandbox, Overview
from sidecar.models.requests import AttachBody
from sidecar.receipts import ExportReceipt, RestoreOutcome, RestoreReceipt
from sidecar.service.access.grants import Caller, Verb
from sidecar.service.access.visibility import veil_attachment, veil_export
from sidecar.service.api.access import Scope, get_caller, needs
from sidecar.service.api.paths import PAGE, After, Limit, MemoryId
from sidecar.service.api.problems import document_problems
from sidecar.service.api.verbs import IdempotencyKey, build_care, get_sidecar
from sidecar.service.attachments.attachment import Attachment
from sidecar.service.attachments.checkpoints import DETACHED, build_export_request
from sidecar.service.attachments.keeper import Keeper
from sidecar.service.idempotency import KeyedCall
from sidecar.service.sandboxes import SandboxTarget

router = APIRouter(prefix="/v1/memories/{memory}/attachment", tags=["attachments"])
all_of_them = APIRouter(prefix="/v1", tags=["attachments"])
TROUBLE = document_problems(400, 404, 409, 410, 413, 422, 424, 429, 503, 507)
Which = Annotated[str, Query(alias="sandbox", max_length=1000, description="Which one, where there are several.")]


def get_keeper(request: Request) -> Keeper:
    """Return the keeper of the application."""
    keeper: Keeper = request.app.state.keeper
    return keeper


@router.put("", responses=TROUBLE)
@needs(Verb.EXPORT)
async def attach_sandbox(request: Request, memory: MemoryId, body: AttachBody) -> Attached:
    """Look after a sandbox until it is detached, beside others of the memory: export it now and then, before its provider ends
    it, and when the service stops."""
    sidecar, restored, caller = get_sidecar(request), None, get_caller(request)
    if body.restore:
        caller.require(Verb.RESTORE, memory)
    sidecar.admission.check_sandbox(caller, body.sandbox)
    await sidecar.engine.repository.check_new_memory(memory)
    target = SandboxTarget(body.sandbox, body.wake, body.user)
    async with sidecar.sandboxes.use(target) as sandbox:
        await sandbox.connect()
        ref = sandbox.ref
    if body.restore:
        projects = None if body.projects is None else tuple(body.projects)
        wanted = RestoreRequest(memory=memory, projects=projects, conversation=body.conversation)
        receipt = await (await sidecar.start_restore(wanted, target, caller=caller)).result()
        assert isinstance(receipt, RestoreReceipt)
        restored = receipt
        if receipt.outcome is RestoreOutcome.INCOMPLETE:
            raise RestoreIncomplete(receipt.reason.message if receipt.reason else "The restore is incomplete.")
    care = build_care(body, caller, lasting=True)
    attachment = await get_keeper(request).look_after((memory, ref), care, restored)
    return Attached(attachment=attachment, restored=restored)


@router.get("", responses=document_problems(400, 404, 409, 422, 503))
@needs(Verb.READ, Verb.EXPORT, Verb.RESTORE)
async def get_attachment(request: Request, memory: MemoryId, which: Which = "") -> Attached:
    """How the memory's sandbox stands; of several, the one that is named."""
    found = await get_keeper(request).find(check_memory_id(memory), which)
    return Attached(attachment=veil_attachment(get_caller(request), found))


def _may_see(caller: Caller, one: NoticedSandbox) -> bool:
    """Whether a caller may know of a sandbox that names a memory; one that names none it may have has no memory."""
    return caller.covers(one.memory) if one.memory else not caller.restricted


@all_of_them.get("/attachments", responses=document_problems(409, 422, 503))
@needs(Verb.READ, Verb.EXPORT, Verb.RESTORE, scope=Scope.SEEN)
async def list_attachments(request: Request, limit: Limit = PAGE, after: After = "") -> Overview:
    """Every sandbox that is looked after, by this service or another on the same store, and for a while what became of those
    that are not any more, a page at a time."""
    keeper, sidecar, caller = get_keeper(request), get_sidecar(request), get_caller(request)
    memory, _, sandbox = after.partition(" ")
    passed = unquote(memory), sandbox
    found = [one for one in await keeper.find_all() if caller.covers(one.memory) and (not after or one.place > passed)]
    page = found[:limit]
    return Overview(
        attachments=[veil_attachment(caller, one) for one in page],
        next=f"{quote(page[-1].memory, safe='')} {page[-1].sandbox}" if len(page) < len(found) else None,
        store=sidecar.engine.repository.store.url,
        service=keeper.lease.instance,
        missing=[one for one in sidecar.wanted.missing if caller.covers(one.memory)] if sidecar.wanted else [],
        noticed=[one for one in sidecar.watcher.noticed if _may_see(caller, one)] if sidecar.watcher else [],
    )


@router.delete("", responses=TROUBLE)
@needs(Verb.EXPORT)
async def detach_sandbox(
    request: Request,
    memory: MemoryId,
    which: Which = "",
    export: Annotated[bool, Query(description="Export it a last time first.")] = False,
    key: IdempotencyKey = "",
) -> Attached:
    """Stop looking after it."""
    keeper, remembered, caller = get_keeper(request), get_sidecar(request).remembered_calls, get_caller(request)
    check_memory_id(memory)
    body = {"export": export, **({"sandbox": which} if which else {})}
    asked = KeyedCall(key, memory, "detach", body, caller) if key else None
    call = await remembered.find(asked) if asked else None
    if call is not None and call.receipt is not None:
        before = msgspec.convert(call.receipt, Attached)
        await keeper.detach(before.attachment)
        return before
    attachment = await keeper.find(memory, which)
    if asked is not None and call is None:
        call, _ = await remembered.begin(asked)
    exported = await _export_last(request, attachment) if export else None
    detached = veil_attachment(caller, await keeper.find(memory, attachment.sandbox))
    answer = Attached(attachment=detached, exported=exported)
    if call is not None:
        await remembered.end(call, asdict(answer))
    await keeper.detach(answer.attachment)
    return answer


async def _export_last(request: Request, attachment: Attachment) -> ExportReceipt:
    """Export a sandbox before it is detached."""
    wanted, target = build_export_request(attachment, DETACHED), SandboxTarget(attachment.sandbox, user=attachment.user)
    caller = get_caller(request)
    receipt = await (await get_sidecar(request).start_export(wanted, target, caller=caller)).result()
    assert isinstance(receipt, ExportReceipt)
    return veil_export(caller, receipt)
