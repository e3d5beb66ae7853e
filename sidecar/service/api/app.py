"""The HTTP application."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidecar import __version__
from sidecar.errors import SidecarError
from sidecar.service.api import attachments, memories, page, retention, search, system, verbs
from sidecar.service.api.examples import add_examples
from sidecar.service.api.paths import WholeSegments
from sidecar.service.api.problems import (
    Problem,
    build_answer,
    document_problems,
    on_bad_request,
    on_caller_gone,
    on_http_error,
    on_sidecar_error,
)
from sidecar.service.api.uploads import Uploads
from sidecar.service.attachments.keeper import Keeper
from sidecar.service.core import Sidecar
from sidecar.service.door.door import Hosts, RequestGuard, SafeHeaders
from sidecar.service.door.tokens import Tokens
from sidecar.service.warmup import warm_up

OPEN_TO_ALL = frozenset({*page.FILES, "/healthz", "/readyz"})
"""Paths that need no token: probes have none, and the page asks for one."""
ARCHIVES = "/archives"


class PlainJSON(JSONResponse):
    """JSON in ASCII: file names that are not valid text are kept as escapes, so that they survive encoding and
    decoding."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")


def make_app(sidecar: Sidecar, keeper: Keeper, tokens: Tokens, hosts: Hosts) -> Any:
    """Build the ASGI application of a service."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await warm_up(app)
        yield
        await sidecar.close()

    app = FastAPI(
        default_response_class=PlainJSON,
        title="memory-sidecar",
        version=__version__,
        summary="Makes an agent's memory outlive its sandbox.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        # A redirect would go to whatever host the caller named, and cannot name ids that are no text.
        redirect_slashes=False,
    )
    app.state.sidecar = sidecar
    app.state.keeper = keeper
    app.state.uploads = Uploads(sidecar.settings.uploads)
    app.include_router(verbs.router)
    app.include_router(attachments.router)
    app.include_router(attachments.all_of_them)
    app.include_router(memories.router)
    app.include_router(retention.router)
    app.include_router(search.router)
    app.include_router(system.router)
    app.include_router(page.router)
    app.add_exception_handler(SidecarError, on_sidecar_error)
    app.add_exception_handler(RequestValidationError, on_bad_request)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientDisconnect, on_caller_gone)
    app.openapi = lambda: _build_openapi(app)  # type: ignore[method-assign]
    return SafeHeaders(WholeSegments(RequestGuard(TokenGate(app, tokens, sidecar.settings.body_bytes), hosts)))


class TokenGate:
    """Refuses requests without a valid token, and bodies that are too large."""

    def __init__(self, app: ASGIApp, tokens: Tokens, most: int) -> None:
        self._app = app
        self._tokens = tokens
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        authorization = headers.get(b"authorization", b"").decode("latin-1")
        if self._tokens and scope["path"] not in OPEN_TO_ALL and not self._tokens.accept(authorization):
            hint = "Send the header Authorization: Bearer <token>; `memory-sidecar serve` prints where its token is."
            problem = Problem(
                status=401, title="Unauthorized", detail="No valid token.", code="unauthorized", hint=hint
            )
            await build_answer(problem, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        if scope["path"].endswith(ARCHIVES):
            await self._app(scope, receive, send)
            return
        length = headers.get(b"content-length", b"0")
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


def _build_openapi(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, with examples, problems and the token scheme added. It is built once."""
    if app.openapi_schema:
        return app.openapi_schema
    document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas["Problem"] = TypeAdapter(Problem).json_schema()
    add_examples(schemas)
    for operations in document["paths"].values():
        for operation in operations.values():
            if "application/json" in operation.get("requestBody", {}).get("content", {}):
                operation["responses"].update({"415": document_problems(415)[415]})
    document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"token": []}]
    app.openapi_schema = document
    return document
