"""Retention over HTTP: pin a snapshot, and apply the rules to a memory."""

from __future__ import annotations

from fastapi import APIRouter, Request

from sidecar.engine.queries import list_existing_ids
from sidecar.models.answers import Forgotten, Pinned
from sidecar.models.requests import ForgetBody
from sidecar.service.api.paths import MemoryId
from sidecar.service.api.problems import document_problems
from sidecar.service.api.verbs import get_sidecar
from sidecar.store.pins import pin, unpin
from sidecar.store.retention import forget

router = APIRouter(prefix="/v1/memories/{memory}", tags=["retention"])
TROUBLE = document_problems(400, 404, 409, 413, 422, 503, 507)


@router.put("/snapshots/{snapshot}/pin", responses=TROUBLE)
async def pin_snapshot(request: Request, memory: MemoryId, snapshot: str) -> Pinned:
    """Keep a snapshot whatever the rules say."""
    pinned = await pin(get_sidecar(request).engine.repository, memory, snapshot)
    return Pinned(memory=memory, snapshot=pinned, pinned=True)


@router.delete("/snapshots/{snapshot}/pin", responses=TROUBLE)
async def unpin_snapshot(request: Request, memory: MemoryId, snapshot: str) -> Pinned:
    """Leave a snapshot to the rules again; one that is not pinned is fine."""
    unpinned = await unpin(get_sidecar(request).engine.repository, memory, snapshot)
    return Pinned(memory=memory, snapshot=unpinned, pinned=False)


@router.post("/forget", responses=TROUBLE)
async def forget_snapshots(request: Request, memory: MemoryId, body: ForgetBody) -> Forgotten:
    """Let go the snapshots that no rule keeps, and collect what nothing needs; with ``dry_run``, only say what would go."""
    sidecar = get_sidecar(request)
    await list_existing_ids(sidecar.engine.repository, memory)
    done = await forget(sidecar.engine.repository, memory, sidecar.engine.retention, dry_run=body.dry_run)
    if not body.dry_run:
        sidecar.publish_forgot(done)
    return done
