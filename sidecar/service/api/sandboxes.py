"""Sandboxes that the service creates and ends, and moves between them, over HTTP.

Only administrators may: what is created is paid for by whoever owns the account at the provider.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from sidecar.engine import RestoreRequest
from sidecar.ids import check_memory_id
from sidecar.models.answers import Attached, Moved
from sidecar.models.requests import MoveBody, StartBody
from sidecar.service.access.grants import Verb
from sidecar.service.api.access import get_caller, needs
from sidecar.service.api.attachments import TROUBLE, Which, get_keeper
from sidecar.service.api.paths import MemoryId
from sidecar.service.api.verbs import IdempotencyKey, build_care, get_sidecar
from sidecar.service.moves import MoveRequest, Moves
from sidecar.service.starts import StartRequest, Starts

router = APIRouter(prefix="/v1/memories/{memory}/sandboxes", tags=["sandboxes"])
moves = APIRouter(prefix="/v1/memories/{memory}/moves", tags=["sandboxes"])


def _get_starts(request: Request) -> Starts:
    starts = get_sidecar(request).starts
    assert starts is not None
    return starts


@router.post("", responses=TROUBLE)
@needs(Verb.ADMIN)
async def start_sandbox(request: Request, memory: MemoryId, body: StartBody, key: IdempotencyKey = "") -> Attached:
    """Create a sandbox, restore the memory into it and look after it until it is stopped or detached. ``attachment.sandbox`` is
    its reference. If the memory cannot be restored, the sandbox is ended again."""
    provider, _, template = body.on.partition(":")
    wanted = StartRequest(
        provider=provider,
        template=template,
        metadata=body.metadata,
        timeout=body.timeout,
        restore=RestoreRequest(
            memory=memory,
            snapshot=body.snapshot,
            projects=None if body.projects is None else tuple(body.projects),
            conversation=body.conversation,
            must_exist=body.must_exist,
            announce=True,
        ),
        care=build_care(body, get_caller(request), lasting=True),
    )
    return await _get_starts(request).start(wanted, key)


@router.delete("", responses=TROUBLE)
@needs(Verb.ADMIN)
async def stop_sandbox(
    request: Request,
    memory: MemoryId,
    which: Which = "",
    discard: Annotated[bool, Query(description="End it also if its memory cannot be saved.")] = False,
) -> Attached:
    """Export an attached sandbox a last time, then end it. One whose memory was not saved is not ended (`not-ended`)."""
    return await _get_starts(request).stop(check_memory_id(memory), which, discard=discard)


@moves.post("", responses=TROUBLE)
@needs(Verb.ADMIN)
async def move_memory(request: Request, memory: MemoryId, body: MoveBody, key: IdempotencyKey = "") -> Moved:
    """Export the memory's sandbox, create one elsewhere and restore it there. Once the new one has it, the old one is ended. If
    anything fails, the old one is as it was and looked after, and the new one is ended."""
    provider, _, template = body.to.partition(":")
    wanted = MoveRequest(
        memory=check_memory_id(memory),
        provider=provider,
        template=template,
        sandbox=body.sandbox,
        keep_old=body.keep_old,
        metadata=body.metadata,
        timeout=body.timeout,
        user=body.user,
    )
    starts, sidecar = _get_starts(request), get_sidecar(request)
    return await Moves(starts, get_keeper(request), sidecar).move(wanted, key)
