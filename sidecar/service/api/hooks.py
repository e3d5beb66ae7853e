"""Webhooks of providers about their sandboxes (``[[watch]]``).

They need no bearer token: each is checked by the secret that its provider was given. They are only a reason to look at
a sandbox.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Request
from starlette.exceptions import HTTPException

from sidecar.models.answers import HookAnswer
from sidecar.service.api.access import Scope, needs
from sidecar.service.api.problems import document_problems
from sidecar.service.api.verbs import get_sidecar
from sidecar.service.watch.notifications import MOST_BYTES, NotFromProvider

router = APIRouter(prefix="/v1/hooks", tags=["sandboxes"])
PATHS = frozenset({"/v1/hooks/e2b", "/v1/hooks/daytona"})
"""The paths that need no bearer token."""
BODY = {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}


@router.post(
    "/{provider}",
    status_code=202,
    responses=document_problems(400, 401, 413, 422),
    openapi_extra={"security": [], "requestBody": BODY},
)
@needs(scope=Scope.OPEN)
async def receive_hook(
    request: Request, provider: Annotated[Literal["e2b", "daytona"], Path(description="Who sends it.")]
) -> HookAnswer:
    """What a provider tells of its sandboxes. E2B signs it; Daytona is to send the secret as a bearer token."""
    sidecar = get_sidecar(request)
    hooks = sidecar.watcher.find_hooks(provider) if sidecar.watcher is not None else None
    try:
        if hooks is None:
            raise NotFromProvider(f"No webhooks of {provider} are expected: there is no secret for them.")
        ref = hooks.read(await _read_body(request), request.headers)
    except NotFromProvider:
        sidecar.metrics.count_hook("refused")
        raise
    sidecar.metrics.count_hook("ignored" if ref is None else "accepted")
    if ref is not None and sidecar.watcher is not None:
        sidecar.watcher.look_soon(ref)
    return HookAnswer(accepted=ref is not None)


async def _read_body(request: Request) -> bytes:
    """Return the body. Raise ``HTTPException`` as soon as it is too large."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise HTTPException(413, f"A webhook may have {MOST_BYTES} bytes.")
    return body
