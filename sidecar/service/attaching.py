"""Attachments over HTTP: look after this sandbox until told otherwise."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from pydantic import Field

from sidecar.engine import RestoreRequest
from sidecar.errors import SandboxError
from sidecar.ids import check_memory_id
from sidecar.receipts import ExportReceipt, RestoreOutcome, RestoreReceipt
from sidecar.service.attachments import Attachment
from sidecar.service.bodies import Body, Name
from sidecar.service.keeper import Keeper
from sidecar.service.paths import MemoryId
from sidecar.service.problems import documented
from sidecar.service.repeated import Asked
from sidecar.service.verbs import IdempotencyKey, sidecar_of

router = APIRouter(prefix="/v1/memories/{memory}/attachment", tags=["attachments"])
all_of_them = APIRouter(prefix="/v1", tags=["attachments"])
TROUBLE = documented(400, 404, 409, 410, 413, 422, 424, 429, 503, 507)


class RestoreIncomplete(SandboxError):
    code = "restore-incomplete"
    default_hint = "What the sandbox had is as it was, and it is not looked after. Restore it first, or attach without."


class AttachmentBody(Body):
    """Which sandbox to look after, and how."""

    sandbox: Name = Field(examples=["e2b:i3x9k2"])
    layouts: list[Name] = Field(default=[], max_length=100)
    projects: list[Name] | None = Field(default=None, max_length=100)
    checkpoint_every: float | None = Field(default=None, ge=1, le=86400, description="Seconds between exports.")
    restore: bool = Field(default=False, description="Restore the memory into it first.")
    wake: bool = Field(default=False, description="Start it if it is paused or stopped.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachmentAnswer:
    attachment: Attachment
    restored: RestoreReceipt | None = None
    exported: ExportReceipt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachmentsAnswer:
    attachments: list[Attachment]


def keeper_of(request: Request) -> Keeper:
    keeper: Keeper = request.app.state.keeper
    return keeper


@router.put("", responses=TROUBLE)
async def attach(request: Request, memory: MemoryId, body: AttachmentBody) -> AttachmentAnswer:
    """Look after a sandbox: export it now and then, and before its provider ends it."""
    sidecar = sidecar_of(request)
    await sidecar.engine.repository.admit(memory)
    async with sidecar.sandboxes.use(body.sandbox, wake=body.wake) as sandbox:
        await sandbox.connect()
    restored = None
    if body.restore:
        projects = None if body.projects is None else tuple(body.projects)
        operation = await sidecar.restore(
            RestoreRequest(memory=memory, projects=projects), body.sandbox, wake=body.wake
        )
        receipt = await operation.result()
        assert isinstance(receipt, RestoreReceipt)
        restored = receipt
        if receipt.outcome is RestoreOutcome.INCOMPLETE:
            raise RestoreIncomplete(receipt.reason.message if receipt.reason else "The restore is incomplete.")
    wanted = Attachment(
        memory=memory,
        sandbox=body.sandbox,
        layouts=body.layouts,
        projects=body.projects,
        checkpoint_every=body.checkpoint_every or sidecar.settings.checkpoint_every,
    )
    return AttachmentAnswer(attachment=await keeper_of(request).attach(wanted), restored=restored)


@router.get("", responses=documented(400, 404, 409, 422, 503))
async def look(request: Request, memory: MemoryId) -> AttachmentAnswer:
    """How the attached sandbox stands."""
    return AttachmentAnswer(attachment=await keeper_of(request).find(check_memory_id(memory)))


@all_of_them.get("/attachments", responses=documented(409, 503))
async def look_at_all(request: Request) -> AttachmentsAnswer:
    """Every sandbox that is looked after, by this service or another on the same store."""
    return AttachmentsAnswer(attachments=await keeper_of(request).find_all())


@router.delete("", responses=TROUBLE)
async def detach(
    request: Request,
    memory: MemoryId,
    export: Annotated[bool, Query(description="Export it a last time first.")] = False,
    key: IdempotencyKey = "",
) -> AttachmentAnswer:
    """Stop looking after it."""
    keeper, repeated = keeper_of(request), sidecar_of(request).repeated
    check_memory_id(memory)
    asked = Asked(key, memory, "detach", {"export": export}) if key else None
    call = await repeated.find(asked) if asked else None
    if call is not None and call.receipt is not None:
        before = msgspec.convert(call.receipt, AttachmentAnswer)
        await keeper.detach(before.attachment)
        return before
    await keeper.find(memory)
    if asked is not None and call is None:
        call, _ = await repeated.begin(asked)
    exported = await keeper.save(memory, "detached") if export else None
    assert exported is None or isinstance(exported, ExportReceipt)
    answer = AttachmentAnswer(attachment=await keeper.find(memory), exported=exported)
    if call is not None:
        await repeated.end(call, asdict(answer))
    await keeper.detach(answer.attachment)
    return answer
