"""Search over HTTP."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query, Request

from sidecar.engine.queries import list_existing_ids
from sidecar.ids import check_memory_id
from sidecar.models.answers import RECORD_KINDS, Found, RecordKind
from sidecar.search import port
from sidecar.search.settings import explain_no_index
from sidecar.service.access.grants import Verb, express_memories
from sidecar.service.api.access import Scope, get_caller, needs
from sidecar.service.api.problems import document_problems
from sidecar.service.api.verbs import get_sidecar
from sidecar.store.encryption.encrypted_store import find_encryption

router = APIRouter(prefix="/v1", tags=["search"])
MOST_NAMES = 100

Words = Annotated[
    str,
    Query(min_length=1, max_length=1000, description='As for a search engine: `"exact words" or -without`.'),
]
Memories = Annotated[list[str] | None, Query(max_length=MOST_NAMES, description="Only in these memories.")]
Kinds = Annotated[
    list[RecordKind] | None, Query(max_length=len(RECORD_KINDS), description="Only records of these kinds.")
]
Projects = Annotated[list[str] | None, Query(max_length=MOST_NAMES, description="Only of these projects.")]


@router.get("/search", responses=document_problems(400, 404, 409, 422, 503))
@needs(Verb.READ, scope=Scope.SEEN)
async def search_memories(
    request: Request,
    q: Words,
    memory: Memories = None,
    kind: Kinds = None,
    project: Projects = None,
    since: Annotated[datetime | None, Query(description="Only what was written down then or later.")] = None,
    until: Annotated[datetime | None, Query(description="Only what was written down before.")] = None,
    all: Annotated[bool, Query(description="Also what is not known any more: since when, and until when.")] = False,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    offset: Annotated[int, Query(ge=0, le=10_000)] = 0,
) -> Found:
    """Find what memories say, in all of them or in those named. What newer snapshots say than a hit's ``snapshot`` was not
    looked at; ``behind`` names the memories that have one. A memory that is named and does not exist is ``memory-not-found``
    if nothing is found. Where search is off: 409, ``no-index``."""
    index = get_sidecar(request).engine.index
    if index is None:
        raise explain_no_index(encrypted=find_encryption(get_sidecar(request).engine.repository.store) is not None)
    caller = get_caller(request)
    for named in memory or ():
        caller.require(Verb.READ, check_memory_id(named))
    within = express_memories(caller.memories) if caller.restricted else ""
    wanted = port.Query(
        words=q,
        memories=memory or (),
        within=within,
        kinds=kind or (),
        projects=project or (),
        since=make_aware(since),
        until=make_aware(until),
        history=all,
        limit=limit,
        offset=offset,
    )
    found = await index.search(wanted)
    if not found.hits:
        for named in memory or ():
            await list_existing_ids(get_sidecar(request).engine.repository, named)
    return replace(
        found,
        hits=[hit for hit in found.hits if caller.sees(hit.memory)],
        behind=[one for one in found.behind if caller.sees(one)],
        unindexed=[one for one in found.unindexed if caller.sees(one)][:MOST_NAMES],
        without_past=[one for one in found.without_past if caller.sees(one)][:MOST_NAMES],
    )


def make_aware(moment: datetime | None) -> datetime | None:
    """Return a moment; one without a time zone is meant in UTC."""
    return moment.replace(tzinfo=UTC) if moment is not None and moment.tzinfo is None else moment
