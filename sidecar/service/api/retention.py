"""Retention over HTTP: pin a snapshot, and apply the rules to a memory."""

from __future__ import annotations

from fastapi import APIRouter, Request

from sidecar.service.api.models import ForgetAnswer, ForgetBody, PinAnswer
from sidecar.service.api.paths import MemoryId
from sidecar.service.api.problems import document_problems
from sidecar.service.api.verbs import get_sidecar
from sidecar.store.pins import pin, unpin

router = APIRouter(prefix="/v1/memories/{memory}", tags=["retention"])
TROUBLE = document_problems(400, 404, 409, 413, 422, 503, 507)


@router.put("/snapshots/{snapshot}/pin", responses=TROUBLE)
async def put_pin(request: Request, memory: MemoryId, snapshot: str) -> PinAnswer:
    """Keep a snapshot whatever the rules say."""
    pinned = await pin(get_sidecar(request).engine.repository, memory, snapshot)
    return PinAnswer(memory=memory, snapshot=pinned, pinned=True)


@router.delete("/snapshots/{snapshot}/pin", responses=TROUBLE)
async def delete_pin(request: Request, memory: MemoryId, snapshot: str) -> PinAnswer:
    """Leave a snapshot to the rules again; one that is not pinned is fine."""
    unpinned = await unpin(get_sidecar(request).engine.repository, memory, snapshot)
    return PinAnswer(memory=memory, snapshot=unpinned, pinned=False)


@router.post("/forget", responses=TROUBLE)
async def post_forget(request: Request, memory: MemoryId, body: ForgetBody) -> ForgetAnswer:
    """Let go the snapshots that no rule keeps, and collect what nothing needs; with ``dry_run``, only say what would go."""
    done = await get_sidecar(request).forget(memory, dry_run=body.dry_run)
    return ForgetAnswer(**{name: getattr(done, name) for name in done.__dataclass_fields__}, dry_run=body.dry_run)
