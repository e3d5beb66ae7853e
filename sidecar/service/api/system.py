"""Health, metrics and events over HTTP, for monitoring."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from sidecar import __version__
from sidecar.errors import SidecarError
from sidecar.ids import STORE_ID
from sidecar.models.answers import Health
from sidecar.service.access.callers import Callers
from sidecar.service.access.grants import Verb
from sidecar.service.access.visibility import EventVeil
from sidecar.service.api.access import Scope, get_caller, needs
from sidecar.service.api.attachments import get_keeper
from sidecar.service.api.problems import document_problems
from sidecar.service.api.verbs import get_sidecar

router = APIRouter(tags=["system"])
BREATH_SECONDS = 15.0


@router.get("/healthz", openapi_extra={"security": []})
@needs(scope=Scope.OPEN)
async def get_health() -> Health:
    """The process lives."""
    return Health(status="ok", version=__version__, checks={})


@router.get(
    "/readyz",
    response_model=Health,
    responses={503: {"model": Health, "description": "Not ready"}},
    openapi_extra={"security": []},
)
@needs(scope=Scope.OPEN)
async def get_readiness(request: Request) -> Any:
    """It can do its work: the store can be written, and attachments are looked after."""
    sidecar = get_sidecar(request)
    checks = {
        "store": "ok",
        "scheduler": "ok" if get_keeper(request).alive else "not running",
        "intake": "stopping" if sidecar.operations.stopping else "ok",
    }
    try:
        store = sidecar.engine.repository.store
        await store.prepare()  # on S3 this asks only once
        await store.get(STORE_ID)
    except SidecarError as problem:
        checks["store"] = problem.message
    ready = set(checks.values()) == {"ok"}
    if sidecar.wanted is not None and (missing := len(sidecar.wanted.missing)):
        # It is said, but the service is ready: whoever calls it is not served better by another one.
        checks["sandboxes"] = f"{missing} that should be there {'is' if missing == 1 else 'are'} missing"
    if sidecar.watcher is not None and sidecar.watcher.problem:
        checks["watch"] = f"sandboxes cannot be listed: {sidecar.watcher.problem}"
    health = Health(status="ok" if ready else "not ready", version=__version__, checks=checks)
    return JSONResponse(asdict(health), 200 if ready else 503)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "Prometheus text"}, **document_problems()},
)
@needs(Verb.READ, scope=Scope.EVERYTHING)
async def get_metrics(request: Request) -> Response:
    """Exports, restores, outcomes, bytes, durations, the age of each memory's newest snapshot."""
    sidecar = get_sidecar(request)
    keeper = get_keeper(request)
    text = sidecar.metrics.text(
        running=sidecar.operations.running,
        waiting=sidecar.operations.waiting,
        attached=len(keeper.looked_after),
        at_risk=len(keeper.at_risk()),
        pending=sum(one.is_pending for one in keeper.at_risk()),
        missing=len(sidecar.wanted.missing) if sidecar.wanted else 0,
    )
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get(
    "/v1/events",
    response_class=StreamingResponse,
    responses={
        200: {
            "content": {"text/event-stream": {"schema": {"$ref": "#/components/schemas/Event"}}},
            "description": "Server-sent events. The `data` of each is an event as one line of JSON.",
        },
        **document_problems(422),
    },
)
@needs(Verb.READ, scope=Scope.SEEN)
async def stream_events(
    request: Request,
    last: Annotated[int | None, Header(alias="Last-Event-ID", description="Begin after this event.")] = None,
) -> StreamingResponse:
    """What happens, as it happens, to the memories that the token may see."""
    sidecar, caller = get_sidecar(request), get_caller(request)
    callers: Callers = request.app.state.callers
    veil: EventVeil = request.app.state.event_veil
    after = veil.find_number(caller, last, sidecar.events.recent)

    async def lines() -> AsyncIterator[str]:
        stream = sidecar.events.listen(after)
        following = asyncio.ensure_future(anext(stream))
        stopping = asyncio.ensure_future(sidecar.operations.told_to_stop.wait())
        try:
            yield ": listening\n\n"
            while not stopping.done():
                await asyncio.wait({following, stopping}, timeout=BREATH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if (current := callers.find_current(caller)) is None:
                    return  # its token was revoked, or has expired
                if not following.done():
                    yield ": still here\n\n"
                    continue
                event = veil.show(current, following.result())
                following = asyncio.ensure_future(anext(stream))
                if event is None:
                    continue
                yield f"id: {event.number}\nevent: {event.type}\ndata: {json.dumps(asdict(event))}\n\n"
        finally:
            following.cancel()
            stopping.cancel()

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
