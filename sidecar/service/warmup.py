"""Do at start what would otherwise delay the first request."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from starlette.types import ASGIApp, Message

from sidecar.engine.sandbox.delivery import build_program
from sidecar.service.access.grants import ITSELF

FIRST = (("GET", "/healthz"), ("POST", "/v1/memories/m/exports"), ("POST", "/v1/memories/m/restores"))


async def warm_up(app: ASGIApp) -> None:
    """Pack the in-sandbox program, and make the framework build its routes by requests that change nothing: the last
    two lack a body."""
    await asyncio.to_thread(build_program)
    for method, path in FIRST:
        await app(_build_scope(method, path), _receive_nothing, _ignore)
    # What is allocated by now is kept for good: the garbage collector need not scan it again and again.
    gc.collect()
    gc.freeze()


def _build_scope(method: str, path: str) -> dict[str, Any]:
    """Build a minimal ASGI scope for a request."""
    return {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "state": {"caller": ITSELF},
    }


async def _receive_nothing() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _ignore(message: Message) -> None:
    return None
