"""Every call over HTTP that reads or changes a memory, in the audit.

What is asked for is known once a route is found: ``begin_record`` is a dependency of all routes. What came of it is
known when the answer begins: ``AuditGate`` holds the answer to a change back until that is kept.
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
NOT_TOLD = frozenset({"/v1/events", "/v1/operations/{id}"})
"""Routes that say what happens, and are no call on a memory."""
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
    """Begin the record of a request; of one that changes something, with its intent. Raise a ``SidecarError`` if that
    cannot be kept."""
    call, route = get_current_call(), request.scope["route"]
    if call is None or route.path in NOT_TOLD:
        return
    sidecar: Sidecar = request.app.state.sidecar
    call.what = f"{request.method} {route.path}"
    memory, snapshot = (request.path_params.get(name, "") for name in ("memory", "snapshot"))
    call.record = sidecar.trail.begin(call.build_call(call.what, memory=memory.replace(SLASH, "/"), snapshot=snapshot))
    if request.method not in READING and not route.path.endswith(BY_OPERATION):
        await call.record.intend()


def _find_caller(scope: Scope) -> Caller:
    """Return who the door found the caller to be; the only one there is, if callers have no names."""
    known = (scope.get("state") or {}).get("caller")
    return ADMIN if known is None else Caller(str(known.name), str(known.kind))


def _choose_id(scope: Scope) -> str:
    """Return the id that the caller gave the request, or a new one."""
    given = dict(scope["headers"]).get(REQUEST_ID.lower().encode(), b"").decode("latin-1")
    return given if _PLAIN_ID.match(given) else secrets.token_hex(8)
