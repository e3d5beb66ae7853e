"""Every call over HTTP that reads or changes a memory, in the audit.

What is asked for is known once a route is found: ``begin_record`` and ``announce_change`` are dependencies of all
routes, the first and the last. What came of it is known when the answer begins: ``AuditGate`` holds the answer to a
change back until that is kept.
"""

from __future__ import annotations

import re
import secrets

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidecar.audit.lines import ADMIN, Caller
from sidecar.service.api.paths import SLASH
from sidecar.service.calls import CurrentCall, get_current_call, set_current_call
from sidecar.service.core import Sidecar

REQUEST_ID = "X-Request-Id"
READING = frozenset({"GET", "HEAD"})
NOT_TOLD = frozenset({"/v1/events", "/v1/operations/{id}", "/v1/sandboxes/{ref}", "/v1/hooks/{provider}"})
"""Routes that say what happens, or are told what does, and are no call on a memory."""
BY_OPERATION = ("/exports", "/restores", "/archives")
"""Routes that start an operation, which records itself: it goes on when the caller is gone."""
_PLAIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}\Z")


class AuditGate:
    """Names each request, and records what came of it before it is answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        call = CurrentCall(_find_caller(scope), client[0] if client else "", _choose_id(scope))
        set_current_call(call)

        async def recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                await call.end(message["status"])
                headers = [*message.get("headers", ()), (REQUEST_ID.lower().encode(), call.request.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, recorded)
        finally:
            await call.end(500)  # if there was no answer


async def begin_record(request: Request) -> None:
    """Begin the record of a request. Raise ``AuditUnwritable`` if it could not be told."""
    call, route = get_current_call(), request.scope["route"]
    if call is None or route.path in NOT_TOLD:
        return
    sidecar: Sidecar = request.app.state.sidecar
    call.what = f"{request.method} {route.path}"
    memory, snapshot = (request.path_params.get(name, "") for name in ("memory", "snapshot"))
    call.record = sidecar.trail.begin(call.build_call(call.what, memory=memory.replace(SLASH, "/"), snapshot=snapshot))


async def announce_change(request: Request) -> None:
    """Record the intent of a request that changes something and may do so. Raise a ``SidecarError`` if that cannot be
    kept."""
    call = get_current_call()
    by_operation = request.scope["route"].path.endswith(BY_OPERATION)
    if call is not None and call.record is not None and request.method not in READING and not by_operation:
        await call.record.intend()


def _find_caller(scope: Scope) -> Caller:
    """Return who the caller was found to be: a named token, which has an id, or one that may do everything."""
    known = (scope.get("state") or {}).get("caller")
    if known is None:
        return ADMIN
    return Caller(known.name, "token" if known.id else "admin")


def _choose_id(scope: Scope) -> str:
    """Return the id that the caller gave the request, or a new one."""
    given = dict(scope["headers"]).get(REQUEST_ID.lower().encode(), b"").decode("latin-1")
    return given if _PLAIN_ID.match(given) else secrets.token_hex(8)
