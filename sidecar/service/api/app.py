"""The HTTP application."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidecar import __version__
from sidecar.errors import SidecarError
from sidecar.models.answers import Problem
from sidecar.service.access.callers import Callers
from sidecar.service.access.rates import Rates
from sidecar.service.access.refusals import Refusals
from sidecar.service.access.visibility import EventVeil
from sidecar.service.api import attachments, hooks, memories, page, records, retention, sandboxes, search, system, verbs
from sidecar.service.api.access import check_access
from sidecar.service.api.audit import AuditGate, announce_change, begin_record
from sidecar.service.api.openapi import build_openapi, name_operation
from sidecar.service.api.paths import WholeSegments
from sidecar.service.api.problems import (
    build_answer,
    on_bad_request,
    on_caller_gone,
    on_http_error,
    on_sidecar_error,
)
from sidecar.service.api.uploads import Uploads
from sidecar.service.attachments.keeper import Keeper
from sidecar.service.core import Sidecar
from sidecar.service.door.door import Hosts, RequestGuard, SafeHeaders
from sidecar.service.door.gate import AccessGate
from sidecar.service.warmup import warm_up

OPEN_TO_ALL = frozenset({*page.FILES, "/healthz", "/readyz", "/openapi.json"})
"""Paths that need no token: probes have none, the page asks for one, and the OpenAPI document tells nothing of a memory."""
ARCHIVES = "/archives"


class PlainJSON(JSONResponse):
    """JSON in ASCII: file names that are not valid text are kept as escapes, so that they survive encoding and
    decoding."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")


def make_app(sidecar: Sidecar, keeper: Keeper, callers: Callers, hosts: Hosts) -> Any:
    """Build the ASGI application of a service."""
    api = make_api()
    api.state.sidecar = sidecar
    api.state.keeper = keeper
    api.state.callers = callers
    api.state.event_veil = EventVeil()
    api.state.uploads = Uploads(sidecar.settings.uploads)
    gate = AccessGate(
        BodyLimit(AuditGate(api), sidecar.settings.body_bytes),
        callers,
        Refusals(sidecar.events, sidecar.metrics.count_refusal),
        Rates(sidecar.settings.connections),
        open_paths=OPEN_TO_ALL,
        hook_paths=hooks.PATHS,
    )
    return SafeHeaders(WholeSegments(RequestGuard(gate, hosts)))


def make_api() -> FastAPI:
    """Build the routes. They find the service in the application's ``state``."""
    api = FastAPI(
        default_response_class=PlainJSON,
        title="memory-sidecar",
        version=__version__,
        summary="Makes an agent's memory outlive its sandbox.",
        lifespan=_warm_up_and_close,
        docs_url=None,
        redoc_url=None,
        # A redirect would go to whatever host the caller named, and cannot name ids that are no text.
        redirect_slashes=False,
        dependencies=[Depends(begin_record), Depends(check_access), Depends(announce_change)],
        generate_unique_id_function=name_operation,
    )
    api.include_router(verbs.router)
    api.include_router(attachments.router)
    api.include_router(attachments.all_of_them)
    api.include_router(sandboxes.router)
    api.include_router(sandboxes.moves)
    api.include_router(sandboxes.standings)
    api.include_router(hooks.router)
    api.include_router(memories.router)
    api.include_router(records.router)
    api.include_router(retention.router)
    api.include_router(search.router)
    api.include_router(system.router)
    api.include_router(page.router)
    api.add_exception_handler(SidecarError, on_sidecar_error)
    api.add_exception_handler(RequestValidationError, on_bad_request)
    api.add_exception_handler(HTTPException, on_http_error)
    api.add_exception_handler(ClientDisconnect, on_caller_gone)
    api.openapi = lambda: build_openapi(api)  # type: ignore[method-assign]
    return api


@asynccontextmanager
async def _warm_up_and_close(api: FastAPI) -> AsyncIterator[None]:
    await warm_up(api)
    yield
    await api.state.sidecar.close()


class BodyLimit:
    """Refuses bodies that are too large."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].endswith(ARCHIVES):
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._most:
            await self._refuse_too_large(scope, receive, send)
            return
        await self._app(scope, self._limit_body(receive), send)

    async def _refuse_too_large(self, scope: Scope, receive: Receive, send: Send) -> None:
        detail = f"A request may have {self._most} bytes."
        await build_answer(Problem(status=413, title="Too large", detail=detail, code="too-large"))(
            scope, receive, send
        )

    def _limit_body(self, receive: Receive) -> Receive:
        """Enforce the limit also for bodies that do not declare their length."""
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._most:
                raise HTTPException(413, f"A request may have {self._most} bytes.")
            return message

        return counted
