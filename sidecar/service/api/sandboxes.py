"""Sandboxes that the service creates and ends, moves between them, and whether the memory of one is in place, over HTTP.

Only administrators may create, end and move: what is created is paid for by whoever owns the account at the provider.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from pydantic import AfterValidator

from sidecar.engine import RestoreRequest
from sidecar.ids import check_memory_id
from sidecar.models.answers import Attached, Moved, SandboxStanding
from sidecar.models.requests import MoveBody, StartBody
from sidecar.service.access.grants import Verb
from sidecar.service.api.access import Scope, get_caller, needs
from sidecar.service.api.attachments import TROUBLE, Which, get_keeper
from sidecar.service.api.paths import MemoryId, decode_segment
from sidecar.service.api.problems import document_problems
from sidecar.service.api.verbs import IdempotencyKey, build_care, get_sidecar
from sidecar.service.moves import MoveRequest, Moves
from sidecar.service.starts import StartRequest, Starts
from sidecar.service.watch.standing import Standings

router = APIRouter(prefix="/v1/memories/{memory}/sandboxes", tags=["sandboxes"])
moves = APIRouter(prefix="/v1/memories/{memory}/moves", tags=["sandboxes"])
standings = APIRouter(prefix="/v1/sandboxes", tags=["sandboxes"])
SandboxRef = Annotated[
    str,
    Path(description="The sandbox; a '/' in it is written %2F.", max_length=1000, examples=["e2b:i3x9k2"]),
    AfterValidator(decode_segment),
]


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


@standings.get("/{ref}", responses=document_problems(400, 409, 422, 424, 503))
@needs(Verb.EXPORT, Verb.RESTORE, scope=Scope.SEEN)
async def get_sandbox(
    request: Request,
    ref: SandboxRef,
    wait: Annotated[float, Query(ge=0, le=600, description="Answer after so many seconds at the latest.")] = 0,
) -> SandboxStanding:
    """Whether the memory of a sandbox is in place, whoever restored it. With `wait`, it is answered as soon as it is."""
    sidecar, caller = get_sidecar(request), get_caller(request)
    sidecar.admission.check_sandbox(caller, ref)
    sidecar.sandboxes.check(ref)
    return await Standings(sidecar, get_keeper(request), caller).wait(sidecar.sandboxes.name_of(ref), wait)
