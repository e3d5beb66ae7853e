"""The web page for people: memories, attachments and events. It uses the public API."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter, Response

from sidecar.service.api.access import Scope, needs

router = APIRouter(include_in_schema=False)
FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
HEADERS = {
    # Everything is loaded from this service, and no text that comes from a sandbox can run as a script.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def _add_page(path: str, name: str, kind: str) -> None:
    data = resources.files("sidecar.service.api").joinpath("web", name).read_bytes()

    @router.get(path)
    @needs(scope=Scope.OPEN)
    async def file() -> Response:
        return Response(data, media_type=f"{kind}; charset=utf-8", headers=HEADERS)


for path, (name, kind) in FILES.items():
    _add_page(path, name, kind)
