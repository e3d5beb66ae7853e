"""Request checks before any route runs: the host name, the origin and the content type; and the security headers of
answers.

A browser lets any page send requests to any address, loopback included, and lets a page read the answers of every
address that its own host name resolves to. So a request is refused if it was sent to a host name that is not the
service's (such as a name that was rebound to this machine), or by a page that is not the service's, whether it has a
token or not. Callers other than browsers are not affected.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidecar.host.loopback import is_loopback
from sidecar.models.answers import Problem
from sidecar.service.api.page import FILES
from sidecar.service.api.problems import build_answer
from sidecar.service.door.authorities import ANY, Authority

HEALTH = frozenset({"/healthz", "/readyz"})
"""Paths for probes, which call by whatever address they have. Their answers contain nothing of any memory."""
ARCHIVES = "/archives"
"""Tarballs are uploaded to paths with this ending; the route itself checks their content type."""
WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS"})
FROM_OUR_PAGE = frozenset({"same-origin", "none"})
"""Values of ``Sec-Fetch-Site`` for a request from the service's own page, or one typed into the address bar."""
LOOKED_AT = frozenset({b"host", b"origin", b"sec-fetch-site", b"content-type", b"content-length", b"transfer-encoding"})
SAFE_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"cache-control": b"no-store",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"x-frame-options": b"DENY",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
}
_LENGTHS = Problem(
    status=400,
    title="Bad request",
    detail="A request may not have both Content-Length and Transfer-Encoding.",
    code="bad-request",
    hint="Send one of them.",
)
"""A proxy in front may go by the other of the two, and take a part of this request for the next one (RFC 9112, section
6.3). What follows it in the connection is not read."""
_JSON = re.compile(r"application/(?:[a-z0-9._-]+\+)?json\s*(?:;.*)?", re.DOTALL)


class SafeHeaders:
    """Adds headers to every answer that keep browsers from sniffing, storing or embedding it, unless the route has set
    them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                said = {name.lower() for name, _ in headers}
                headers += [(name, value) for name, value in SAFE_HEADERS.items() if name not in said]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, marked if scope["type"] == "http" else send)


class Hosts:
    """The host names by which the service may be called."""

    def __init__(self, names: Sequence[str], bound_to: str) -> None:
        """``bound_to`` is the host that the service listens on. On loopback, only ``names`` and loopback names are
        accepted."""
        self._any = ANY in names or (not names and not is_loopback(bound_to))
        self._own = frozenset(found for name in names if (found := Authority.parse(name)))
        self._known = functools.lru_cache(maxsize=256)(self._is_own)

    def allow(self, said: Sequence[str]) -> bool:
        """Whether these values of ``Host`` headers are acceptable: exactly one, and a name of the service."""
        return self._any or (len(said) == 1 and self._known(said[0]))

    def _is_own(self, said: str) -> bool:
        host = Authority.parse(said)
        return host is not None and (is_loopback(host.name) or not self._own.isdisjoint({host, Authority(host.name)}))


class RequestGuard:
    """Refuses requests to another host name or from another site's page, and bodies of the wrong content type."""

    def __init__(self, app: ASGIApp, hosts: Hosts) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (problem := self._find_objection(scope)):
            await build_answer(problem, {"Connection": "close"} if problem is _LENGTHS else None)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _find_objection(self, scope: Scope) -> Problem | None:
        """Return the problem with a request; ``None`` if it may pass."""
        path: str = scope["path"]
        said: dict[bytes, list[str]] = {}
        for name, value in scope["headers"]:
            if name in LOOKED_AT:
                said.setdefault(name, []).append(value.decode("latin-1"))
        if b"transfer-encoding" in said and b"content-length" in said:
            return _LENGTHS
        if path in HEALTH:
            return None
        hosts = said.get(b"host", [])
        if not self._hosts.allow(hosts):
            return _build_host_problem(hosts)
        # The files of the service's own page may be linked to from anywhere: they contain nothing of a memory.
        if path not in FILES and _is_foreign(said, hosts):
            return _build_origin_problem(said)
        if scope["method"] not in WITHOUT_BODY and not path.endswith(ARCHIVES) and not _is_json(said):
            return _build_content_problem(said)
        return None


def _is_foreign(said: dict[bytes, list[str]], hosts: Sequence[str]) -> bool:
    """Whether a browser sent the request on behalf of another site's page."""
    if any(site.strip().lower() not in FROM_OUR_PAGE for site in said.get(b"sec-fetch-site", ())):
        return True
    if origins := said.get(b"origin"):
        host = Authority.parse(hosts[0]) if len(hosts) == 1 else None
        return host is None or not all(host.is_origin(origin) for origin in origins)
    return False


def _is_json(said: dict[bytes, list[str]]) -> bool:
    """Whether there is no body, or its content type is JSON. A page can send other content types without a CORS
    preflight."""
    if b"transfer-encoding" not in said and not any(length.strip("0 ") for length in said.get(b"content-length", ())):
        return True
    kinds = said.get(b"content-type", [])
    return bool(kinds) and all(_JSON.fullmatch(kind.strip().lower()) for kind in kinds)


def _build_host_problem(hosts: Sequence[str]) -> Problem:
    if len(hosts) == 1:
        detail = f"This service may not be called as {hosts[0][:200]!r}."
    else:
        detail = "A request needs one Host header; this one has " + ("several." if hosts else "none.")
    return Problem(
        status=421,
        title="Host not allowed",
        detail=detail,
        code="host-not-allowed",
        hint="Call it by the address it listens on, or add the name to [service] hosts (MEMORY_SIDECAR_SERVICE_HOSTS).",
    )


def _build_origin_problem(said: dict[bytes, list[str]]) -> Problem:
    origin = said.get(b"origin", ["another site"])[0][:200]
    return Problem(
        status=403,
        title="Origin not allowed",
        detail=f"The request comes from a page of {origin}, not from the service's own.",
        code="origin-not-allowed",
        hint="Call it from a program, or use the page at /. A proxy in front must pass the Host header on.",
    )


def _build_content_problem(said: dict[bytes, list[str]]) -> Problem:
    kind = said.get(b"content-type", ["nothing"])[0][:200]
    return Problem(
        status=415,
        title="Unsupported media type",
        detail=f"The body must be JSON; its content type says {kind}.",
        code="unsupported-media-type",
        hint="Send the header Content-Type: application/json.",
    )
