"""The gate: identifies the caller of every request before a route is reached, or refuses it.

What the caller may do is checked by ``api/access.py:check_access``, which knows the route.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidecar.errors import AccessDenied, RateLimited
from sidecar.service.access.callers import Callers
from sidecar.service.access.grants import Caller
from sidecar.service.access.rates import Rates
from sidecar.service.access.refusals import Refusals
from sidecar.service.api.problems import build_answer, build_problem

REFUSED = frozenset({401, 403})
USED_UP = frozenset({429, 507})
CLOSE = {"Connection": "close"}
UNKNOWN = Caller(name="", memories=(), verbs=frozenset())
"""Who calls a route that checks by itself who calls."""


class AccessGate:
    """Puts the ``Caller`` into ``scope["state"]["caller"]``. Answers 401 without a valid token and 429 to a token that
    calls too often; counts and slows down what is refused, here or by a route."""

    def __init__(
        self,
        app: ASGIApp,
        callers: Callers,
        refusals: Refusals,
        rates: Rates,
        *,
        open_paths: Collection[str],
        hook_paths: Collection[str] = (),
    ) -> None:
        """``open_paths`` need no token. The routes at ``hook_paths`` check by themselves who calls; what they refuse is
        counted and slowed down as here."""
        self._app = app
        self._callers = callers
        self._refusals = refusals
        self._rates = rates
        self._open_paths = open_paths
        self._hook_paths = hook_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        if scope["path"] in self._hook_paths:
            await self._app(scope, receive, self._slow_down(scope, {"caller": UNKNOWN}, send))
            return
        authorization = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        try:
            caller = self._callers.identify(authorization)
        except AccessDenied as problem:
            waited = await self._refusals.refuse(401, _find_address(scope))
            headers = {"WWW-Authenticate": "Bearer", **({} if waited else CLOSE)}
            await build_answer(build_problem(problem), headers)(scope, receive, send)
            return
        try:
            async with self._rates.count_call(caller):
                state = {**scope.get("state", {}), "caller": caller}
                await self._app({**scope, "state": state}, receive, self._slow_down(scope, state, send))
        except RateLimited as problem:
            self._refusals.count(429)
            headers = {"Retry-After": str(math.ceil(problem.seconds))}
            await build_answer(build_problem(problem), headers)(scope, receive, send)

    def _slow_down(self, scope: Scope, state: dict[str, Any], send: Send) -> Send:
        """Return a ``send`` that counts and delays an answer of 401 or 403, also one of which a part was ``refused``, and
        delays one that says that a quota is used up."""
        caller: Caller = state["caller"]

        async def slowed(message: Message) -> None:
            status = message.get("status") if message["type"] == "http.response.start" else None
            if status in USED_UP:
                await self._rates.hold_back(caller)
            if status in REFUSED or (status is not None and state.get("refused")):
                waited = await self._refusals.refuse(
                    status if status in REFUSED else 403, _find_address(scope), caller.name
                )
                if not waited:
                    headers = [*message.get("headers", ()), (b"connection", b"close")]
                    message = {**message, "headers": headers}
            await send(message)

        return slowed


def _find_address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""
