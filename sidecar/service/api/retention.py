"""Retention over HTTP: pin a snapshot, and apply the rules to a memory."""

from __future__ import annotations

from fastapi import APIRouter, Request

from sidecar.models.answers import Forgotten, Pinned
from sidecar.models.requests import ForgetBody
from sidecar.service.access.grants import Verb
from sidecar.service.api.access import needs
from sidecar.service.api.paths import MemoryId
from sidecar.service.api.problems import document_problems
from sidecar.service.api.verbs import get_sidecar
from sidecar.service.calls import note_subject
from sidecar.store.pins import pin, unpin

router = APIRouter(prefix="/v1/memories/{memory}", tags=["retention"])
TROUBLE = document_problems(400, 404, 409, 413, 422, 503, 507)


@router.put("/snapshots/{snapshot}/pin", responses=TROUBLE)
@needs(Verb.CHANGE)
async def pin_snapshot(request: Request, memory: MemoryId, snapshot: str) -> Pinned:
    """Keep a snapshot whatever the rules say."""
    pinned = await pin(get_sidecar(request).engine.repository, memory, snapshot)
    note_subject(snapshot=pinned)
    return Pinned(memory=memory, snapshot=pinned, pinned=True)


@router.delete("/snapshots/{snapshot}/pin", responses=TROUBLE)
@needs(Verb.CHANGE)
async def unpin_snapshot(request: Request, memory: MemoryId, snapshot: str) -> Pinned:
    """Leave a snapshot to the rules again; one that is not pinned is fine."""
    unpinned = await unpin(get_sidecar(request).engine.repository, memory, snapshot)
    note_subject(snapshot=unpinned)
    return Pinned(memory=memory, snapshot=unpinned, pinned=False)


@router.post("/forget", responses=TROUBLE)
@needs(Verb.DELETE)
async def forget_snapshots(request: Request, memory: MemoryId, body: ForgetBody) -> Forgotten:
    """Let go the snapshots that no rule keeps, and collect what nothing needs; with ``dry_run``, only say what would go."""
    return await get_sidecar(request).forget(memory, dry_run=body.dry_run)
