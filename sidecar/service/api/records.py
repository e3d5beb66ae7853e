"""What memories say, over HTTP: records, files, differences, histories."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import AfterValidator

from sidecar.engine import Engine, histories, queries
from sidecar.engine.briefs import make_brief
from sidecar.engine.comparison import compare_records
from sidecar.errors import UsageError
from sidecar.host.files import CHUNK
from sidecar.ids import check_memory_id
from sidecar.layouts.sources import MESSAGE
from sidecar.models.records import Blame, Brief, Comparison, History, Records
from sidecar.records.briefs.page import LEAST_TOKENS, MOST_TOKENS, TOKENS
from sidecar.service.access.grants import Verb
from sidecar.service.access.turns import FairTurns
from sidecar.service.api.access import get_caller, needs
from sidecar.service.api.paths import SLASH, MemoryId
from sidecar.service.api.problems import document_problems
from sidecar.service.api.verbs import get_sidecar
from sidecar.service.calls import note_subject

router = APIRouter(prefix="/v1", tags=["records"])
READING = document_problems(400, 404, 409, 422, 503)
MOST_READERS = 4
"""How many requests read packs at the same time; the others wait."""

SELECTOR = "A snapshot's id, `latest`, `latest~2`, `@TIME`, `conversation:ID` or `label:NAME`."
Wanted = Annotated[str, Query(max_length=1000, description=SELECTOR)]
Kinds = Annotated[list[str] | None, Query(max_length=100, description="Only records of these kinds.")]
Limit = Annotated[int, Query(ge=1, le=1000, description="How many records a page has at most.")]
After = Annotated[str, Query(max_length=20, pattern=r"^\d*$", description="The `next` of the page before.")]
FilePath = Annotated[
    str,
    Path(description="As in a snapshot's entries.", examples=["project/MEMORY.md"]),
    AfterValidator(lambda text: text.replace(SLASH, "/")),
]


@asynccontextmanager
async def _take_turn(request: Request) -> AsyncIterator[Engine]:
    """Yield the engine when it is this request's turn to read packs. One named token does not have all turns."""
    state, owner = request.app.state, get_caller(request).id
    if not hasattr(state, "readers"):
        state.readers = FairTurns(MOST_READERS)
    async with state.readers.held(owner, MOST_READERS - 1 if owner else 0):
        yield get_sidecar(request).engine


@router.get("/memories/{memory}/diff", responses=READING)
@needs(Verb.READ)
async def compare_snapshots(
    request: Request,
    memory: MemoryId,
    from_: Annotated[str, Query(alias="from", max_length=1000, description="Default: the parent of `to`.")] = "",
    to: Wanted = "latest",
    other: Annotated[str, Query(alias="with", max_length=1000, description="The memory of `to`, if another.")] = "",
    files: Annotated[bool, Query(description="Only compare files, which needs no pack.")] = False,
    kind: Kinds = None,
    limit: Limit = 1000,
    after: After = "",
) -> Comparison:
    """What differs between two snapshots: records, then files that hold none. Messages are counted, and described only if
    their kind is named."""
    if other:
        get_caller(request).require(Verb.READ, check_memory_id(other))
    if files and not other:
        found = await queries.compare_snapshots(get_sidecar(request).engine.repository, memory, from_, to)
        note_subject(snapshot=found.to)
        return Comparison(
            memory=memory,
            from_=found.from_,
            to=found.to,
            added=found.added,
            removed=found.removed,
            changed=found.changed,
        )
    async with _take_turn(request) as engine:
        whole = await compare_records(engine, memory, from_, to, other=other, messages=MESSAGE in (kind or ()))
    note_subject(snapshot=whole.to, also=other)
    rows = [row for row in whole.records if not kind or row.kind in kind]
    start = int(after or 0)
    more = str(start + limit) if len(rows) > start + limit else None
    return replace(whole, records=rows[start : start + limit], next=more)


@router.get("/memories/{memory}/snapshots/{snapshot}/records", responses=READING)
@needs(Verb.READ)
async def list_records(
    request: Request,
    memory: MemoryId,
    snapshot: str,
    kind: Kinds = None,
    limit: Limit = 1000,
    after: After = "",
) -> Records:
    """What a snapshot says, a page at a time. Messages are left out unless their kind is named."""
    async with _take_turn(request) as engine:
        page = await histories.list_records(
            engine, check_memory_id(memory), snapshot, kinds=kind or (), limit=limit, after=after
        )
    note_subject(snapshot=page.snapshot)
    return page


@router.get("/memories/{memory}/snapshots/{snapshot}/brief", responses=READING)
@needs(Verb.READ)
async def get_brief(
    request: Request,
    memory: MemoryId,
    snapshot: str,
    tokens: Annotated[
        int, Query(ge=LEAST_TOKENS, le=MOST_TOKENS, description="How many tokens the whole text has at most.")
    ] = TOKENS,
) -> Brief:
    """What an agent should read first of a snapshot, within a budget of tokens: reference, not instructions."""
    async with _take_turn(request) as engine:
        found = await make_brief(engine, check_memory_id(memory), snapshot, tokens)
    note_subject(snapshot=found.snapshot)
    return found


@router.get(
    "/memories/{memory}/snapshots/{snapshot}/files/{path:path}",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/octet-stream": {}}, "description": "The file, exactly"}, **READING},
)
@needs(Verb.READ)
async def get_file(request: Request, memory: MemoryId, snapshot: str, path: FilePath) -> StreamingResponse:
    """A file of a snapshot."""
    # A file without a name, so that nothing is left of it even if the process dies. It is closed once it was sent.
    file = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        async with (
            _take_turn(request) as engine,
            histories.open_file(engine.repository, memory, snapshot, path) as (_, place),
        ):
            with place.open("rb") as contents:
                await asyncio.to_thread(shutil.copyfileobj, contents, file, CHUNK)
    except BaseException:
        file.close()
        raise

    async def chunks() -> AsyncIterator[bytes]:
        with file:
            file.seek(0)
            while chunk := await asyncio.to_thread(file.read, CHUNK):
                yield chunk

    # Never shown by a browser as what it says it is: it was written in a sandbox.
    headers = {
        "Content-Length": str(file.seek(0, os.SEEK_END)),
        "Content-Disposition": "attachment",
        "X-Content-Type-Options": "nosniff",
    }
    return StreamingResponse(chunks(), media_type="application/octet-stream", headers=headers)


@router.get("/memories/{memory}/history", responses=READING)
@needs(Verb.READ)
async def trace_history(
    request: Request,
    memory: MemoryId,
    path: Annotated[str, Query(max_length=4000, description="A file.")] = "",
    record: Annotated[
        str, Query(max_length=1000, description="A record: its id, the beginning of it, or its key.")
    ] = "",
    snapshot: Wanted = "latest",
) -> History:
    """Every version of a file or of a record, the oldest first, with its conversation."""
    if bool(path) == bool(record):
        raise UsageError("Name a path or a record.", hint="…/history?path=project/MEMORY.md")
    check_memory_id(memory)
    async with _take_turn(request) as engine:
        if path:
            versions = await histories.trace_file(engine.repository, memory, snapshot, path)
        else:
            versions = await histories.trace_record(engine, memory, snapshot, record)
    return History(memory=memory, what=path or record, versions=versions)


@router.get("/memories/{memory}/blame", responses=READING)
@needs(Verb.READ)
async def blame_records(
    request: Request,
    memory: MemoryId,
    path: Annotated[str, Query(max_length=4000, description="Only records of this file.")] = "",
    snapshot: Wanted = "latest",
    kind: Kinds = None,
    limit: Limit = 1000,
    after: After = "",
) -> Blame:
    """Which conversation and sandbox taught each record of a snapshot."""
    async with _take_turn(request) as engine:
        found = await histories.blame(engine, check_memory_id(memory), snapshot, path=path, kinds=kind or ())
    note_subject(snapshot=found.snapshot)
    start = int(after or 0)
    more = str(start + limit) if len(found.records) > start + limit else None
    return replace(found, records=found.records[start : start + limit], next=more)
