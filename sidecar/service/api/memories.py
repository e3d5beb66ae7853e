"""Memories and snapshots over HTTP: read the store, and change it without a sandbox."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from sidecar.engine import ExportRequest, queries
from sidecar.engine.archives.tarballs import download
from sidecar.engine.limits import build_bounds
from sidecar.engine.reviews import Word
from sidecar.host.files import CHUNK, open_spool
from sidecar.ids import check_memory_id
from sidecar.models.answers import (
    Acceptance,
    Declined,
    Deleted,
    Forked,
    Head,
    Memories,
    Memory,
    SnapshotContents,
    Snapshots,
)
from sidecar.models.requests import AcceptBody, DeclineBody, ForkBody, RollbackBody
from sidecar.receipts import ExportReceipt
from sidecar.service.access.grants import Verb
from sidecar.service.access.visibility import veil_reason, veil_row
from sidecar.service.api.access import Scope, get_caller, needs
from sidecar.service.api.paths import PAGE, After, Limit, MemoryId
from sidecar.service.api.problems import document_problems
from sidecar.service.api.uploads import MEDIA_TYPES, Uploads, check_media_type
from sidecar.service.api.verbs import ACCEPTED, Wait, build_result_answer, get_sidecar
from sidecar.service.calls import note_subject

router = APIRouter(prefix="/v1", tags=["memories"])
READING = document_problems(400, 404, 409, 422, 503)
CHANGING = document_problems(400, 404, 409, 413, 422, 503, 507)
ADOPTING = document_problems(400, 408, 409, 413, 415, 422, 424, 429, 503, 507)
NEWEST = AcceptBody()
MOST_RANKED = 50
Order = Annotated[
    Literal["name", "oldest", "largest"],
    Query(description="By name, or the worst first: at most 50, without a `next`."),
]
WAITING = DeclineBody()
Wanted = Annotated[str, Query(max_length=1000, description="A snapshot's id, `latest` or `@TIME`.")]


@router.get("/memories", responses=document_problems(400, 422, 503))
@needs(Verb.READ, scope=Scope.SEEN)
async def list_memories(request: Request, limit: Limit = PAGE, after: After = "", order: Order = "name") -> Memories:
    """The memories of the store that the token may see, a page at a time. In another order than by name, only the first
    few: those whose head was written longest ago, or that need most in the store, as this service last saw them."""
    caller, sidecar = get_caller(request), get_sidecar(request)
    view, repository = caller if caller.restricted else None, sidecar.engine.repository
    if order == "name":
        found = await queries.list_memories(repository, view, limit=limit, after=after)
    else:
        worst = sidecar.metrics.rank(order)
        found = await queries.describe_folders(repository, worst, view, limit=min(limit, MOST_RANKED))
    return replace(found, may_change=caller.has_any([Verb.CHANGE]))


@router.get("/memories/{memory}", responses=READING)
@needs(Verb.READ)
async def get_memory(request: Request, memory: MemoryId) -> Memory:
    """One memory: its head and how many snapshots it has."""
    return await queries.describe_memory(get_sidecar(request).engine.repository, memory)


@router.get("/memories/{memory}/snapshots", responses=READING)
@needs(Verb.READ)
async def list_snapshots(request: Request, memory: MemoryId, limit: Limit = PAGE, after: After = "") -> Snapshots:
    """A memory's snapshots, newest first, a page at a time."""
    repository = get_sidecar(request).engine.repository
    found = await queries.list_snapshots(repository, memory, limit=limit, after=after)
    return replace(found, snapshots=[veil_row(get_caller(request), row) for row in found.snapshots])


@router.get("/memories/{memory}/snapshots/{snapshot}", responses=READING)
@needs(Verb.READ)
async def get_snapshot(request: Request, memory: MemoryId, snapshot: str) -> SnapshotContents:
    """A snapshot and every file in it."""
    found = await queries.read_contents(get_sidecar(request).engine.repository, memory, snapshot)
    note_subject(snapshot=found.row.snapshot)
    row = veil_row(get_caller(request), found.row)
    return SnapshotContents(**{**asdict(row), "changes": row.changes}, memory=memory, entries=found.entries)


@router.get(
    "/memories/{memory}/snapshots/{snapshot}/archive",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"application/gzip": {}, "application/zstd": {}}, "description": "A tarball of a home"},
        **READING,
    },
)
@needs(Verb.READ)
async def download_snapshot(
    request: Request, memory: MemoryId, snapshot: str, codec: Literal["gz", "zst"] = "gz"
) -> StreamingResponse:
    """A snapshot as an ordinary tarball."""
    # A file without a name, so that nothing is left of it even if the process dies. It is closed once it was sent.
    file = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        manifest = await download(get_sidecar(request).engine, check_memory_id(memory), snapshot, file, codec)
    except BaseException:
        file.close()
        raise

    note_subject(snapshot=manifest.snapshot)

    async def chunks() -> AsyncIterator[bytes]:
        with file:
            file.seek(0)
            while chunk := await asyncio.to_thread(file.read, CHUNK):
                yield chunk

    kind = {"gz": "application/gzip", "zst": "application/zstd"}[codec]
    headers = {
        "Content-Length": str(file.seek(0, os.SEEK_END)),
        "Content-Disposition": f'attachment; filename="{manifest.snapshot}.tar.{codec}"',
    }
    return StreamingResponse(chunks(), media_type=kind, headers=headers)


@router.post(
    "/memories/{memory}/archives",
    response_model=ExportReceipt,
    responses={**ACCEPTED, **ADOPTING},
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in MEDIA_TYPES},
        }
    },
)
@needs(Verb.EXPORT)
async def adopt_archive(
    request: Request,
    memory: MemoryId,
    label: Annotated[str, Query(max_length=1000)] = "",
    allow: Annotated[list[str] | None, Query(max_length=10, description="Guards that are not to object.")] = None,
    wait: Wait = True,
) -> Any:
    """Adopt an ordinary tarball of a home (.tar, .tar.gz, .tar.zst) as a new snapshot. It counts as an export."""
    sidecar, caller = get_sidecar(request), get_caller(request)
    if allow:
        caller.require(Verb.CHANGE, memory, "override a guard")
    await sidecar.engine.repository.check_new_memory(memory)
    check_media_type(request.headers)
    sidecar.operations.check_intake(caller)
    await sidecar.admission.check_quotas(caller, memory)
    engine, wanted = sidecar.engine, ExportRequest(memory=memory, label=label, allow=tuple(allow or ()))
    async with AsyncExitStack() as held:
        scratch = await held.enter_async_context(open_spool())
        within = build_bounds(engine.limits.of(memory))
        uploads: Uploads = request.app.state.uploads
        taken = await uploads.take(request, scratch, within, engine.timing.unpack, caller)
        archive = taken.path.rename(scratch.folder / "upload")  # the name in the receipt
        operation = sidecar.start_import(archive, wanted, caller=caller)
        operation.held = held.pop_all()  # the operation needs the file until it has ended
    return await build_result_answer(request, operation, wait=wait)


@router.post("/memories/{memory}/forks", status_code=201, responses=CHANGING)
@needs(Verb.READ)
async def fork_memory(request: Request, memory: MemoryId, body: ForkBody) -> Forked:
    """Begin a new memory with a copy of a snapshot."""
    caller = get_caller(request)
    caller.require(Verb.EXPORT, check_memory_id(body.memory), "begin a memory")
    if get_sidecar(request).engine.review.covers(body.memory):  # its first head would be one that nobody accepted
        caller.require(Verb.CHANGE, body.memory, "begin a memory that is under review with a copy")
    return await get_sidecar(request).fork(memory, body.memory, body.snapshot, caller=caller)


@router.put("/memories/{memory}/head", responses=CHANGING)
@needs(Verb.CHANGE)
async def rollback_memory(request: Request, memory: MemoryId, body: RollbackBody) -> Head:
    """Make another snapshot the head; nothing is removed."""
    return await get_sidecar(request).rollback(memory, body.snapshot)


@router.post("/memories/{memory}/acceptances", responses=CHANGING)
@needs(Verb.CHANGE)
async def accept_snapshot(request: Request, memory: MemoryId, body: AcceptBody = NEWEST) -> Acceptance:
    """Make a snapshot the head that waits for a review, was rejected or has diverged. Nothing is removed."""
    caller = get_caller(request)
    word = Word(by=caller.name, because=body.because)
    done = await get_sidecar(request).accept(memory, body.snapshot, word)
    return replace(done, reason=veil_reason(caller, done.reason))


@router.post("/memories/{memory}/declines", responses=CHANGING)
@needs(Verb.CHANGE)
async def decline_snapshot(request: Request, memory: MemoryId, body: DeclineBody = WAITING) -> Declined:
    """Keep a snapshot from ever becoming the head, and what grows out of it until it is accepted by itself."""
    word = Word(by=get_caller(request).name, because=body.because)
    return await get_sidecar(request).decline(memory, body.snapshot, word)


@router.delete("/memories/{memory}", responses=CHANGING)
@needs(Verb.DELETE)
async def delete_memory(request: Request, memory: MemoryId) -> Deleted:
    """Remove every byte of a memory."""
    return Deleted(memory=memory, removed=await get_sidecar(request).delete(memory))
