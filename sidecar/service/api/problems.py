"""Errors over HTTP: ``application/problem+json`` with the error's code, whether a retry can help, and a hint."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from sidecar import errors
from sidecar.audit.sinks import AuditUnwritable
from sidecar.engine.archives.unpack import NotAnArchive
from sidecar.errors import NotEnded, NotMoved, SidecarError
from sidecar.host.files import SpoolFull
from sidecar.models.answers import Problem
from sidecar.service.access.callers import NoValidToken
from sidecar.service.api.uploads import UnsupportedMediaType, UploadCut, UploadTimeout
from sidecar.service.attachments.attachment import NotAttached
from sidecar.service.attachments.leases import LeaseLost
from sidecar.service.calls import note_outcome
from sidecar.service.idempotency import KeyReused
from sidecar.service.operations import Stopping, TooBusy

RETRY_SECONDS = 5
MEDIA_TYPE = "application/problem+json"
HTTP_CODES, OTHER_HTTP = (
    {401: "unauthorized", 404: "not-found", 405: "method-not-allowed", 413: "too-large"},
    "http-error",
)
"""What an error of HTTP itself is called."""
IN_JSON = {
    "unexpected_keyword_argument": "Extra inputs are not permitted",
    "dataclass_type": "Input should be a valid object",
}
"""Messages for people who send JSON in the place of messages about Python."""

# The first match counts. A failure of a sandbox or its provider is a failed dependency (424), not a failure of the
# service.
STATUS: tuple[tuple[type[SidecarError], int], ...] = (
    (KeyReused, 422),
    (NotEnded, 409),
    (NotMoved, 409),
    (UnsupportedMediaType, 415),
    (UploadTimeout, 408),
    (UploadCut, 400),
    (TooBusy, 429),
    (AuditUnwritable, 503),
    (Stopping, 503),
    (errors.MemoryNotFound, 404),
    (errors.SnapshotNotFound, 404),
    (errors.SandboxNotFound, 404),
    (NotAttached, 404),
    (LeaseLost, 409),
    (errors.SandboxGone, 410),
    (errors.SandboxNotAllowed, 403),
    (errors.SandboxAsleep, 409),
    (errors.SwapLost, 409),
    (errors.SnapshotError, 409),
    (NoValidToken, 401),
    (errors.TokenExpired, 401),
    (errors.AccessDenied, 403),
    (errors.RateLimited, 429),
    (errors.QuotaBytes, 507),
    (errors.QuotaMemories, 507),
    (errors.LimitExceeded, 413),
    (errors.NoIndex, 409),
    (errors.NothingToAccept, 409),
    (errors.AlreadyDecided, 409),
    (errors.NotReviewed, 409),
    (errors.SearchError, 503),
    (NotAnArchive, 422),
    (SpoolFull, 507),
    (errors.UsageError, 400),
    (errors.SandboxError, 424),
    (errors.UntrustedSandbox, 424),
    (errors.StoreFull, 507),
    (errors.StoreError, 503),
)


def status_of(kind: type[SidecarError]) -> int:
    """Return the HTTP status for errors of this kind."""
    return next((status for known, status in STATUS if issubclass(kind, known)), 500)


def build_problem(error: SidecarError) -> Problem:
    """Return the problem for an error."""
    return Problem(
        status=status_of(type(error)),
        title=error.code.replace("-", " ").capitalize(),
        detail=error.message,
        code=error.code,
        hint=error.hint,
        retryable=error.retryable,
    )


def build_answer(problem: Problem, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return the HTTP response for a problem."""
    note_outcome(problem.code)
    waits = {"Retry-After": str(RETRY_SECONDS)} if problem.status in (429, 503) and problem.retryable else {}
    return JSONResponse(asdict(problem), problem.status, {**waits, **(headers or {})}, media_type=MEDIA_TYPE)


async def on_sidecar_error(request: Request, error: Exception) -> JSONResponse:
    """Answer a ``SidecarError`` as a problem."""
    assert isinstance(error, SidecarError)
    headers = {"Retry-After": str(math.ceil(error.seconds))} if isinstance(error, errors.RateLimited) else None
    return build_answer(build_problem(error), headers)


async def on_bad_request(request: Request, error: Exception) -> JSONResponse:
    """Answer a request that does not match its model."""
    assert isinstance(error, RequestValidationError)
    told = "; ".join(
        f"{'.'.join(str(part) for part in row['loc'] if part != 'body')}: {IN_JSON.get(row['type'], row['msg'])}"
        for row in error.errors()[:5]
    )
    hint = "See /openapi.json for what may be sent."
    return build_answer(Problem(status=422, title="Bad request", detail=told[:2000], code="bad-request", hint=hint))


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Answer an error of HTTP itself, such as an unknown path."""
    assert isinstance(error, HTTPException)
    code = HTTP_CODES.get(error.status_code, OTHER_HTTP)
    title = code.replace("-", " ").capitalize()
    problem = Problem(status=error.status_code, title=title, detail=str(error.detail), code=code)
    return build_answer(problem, dict(error.headers or {}))


async def on_caller_gone(request: Request, error: Exception) -> JSONResponse:
    """Answer a request that was cut short because the caller hung up. Nothing is logged as an error, and the answer is
    not read."""
    return build_answer(
        Problem(status=400, title="Bad request", detail="The request was cut short.", code="bad-request")
    )


def document_problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What a route may answer besides success, for the OpenAPI document."""
    reasons = {
        400: "What was asked for makes no sense",
        401: "No valid bearer token",
        403: "The token may not do that, the sandbox may not be one here, or the request comes from a page of another origin",
        404: "There is no such thing",
        408: "The body did not arrive in time",
        409: "It cannot be done as things are",
        410: "The sandbox is gone",
        413: "More than the limits allow",
        415: "Another kind of content is expected",
        421: "The service may not be called by that name",
        422: "The request is not valid",
        424: "The sandbox or its provider failed",
        429: "Too much is under way, or the token calls too often; see Retry-After",
        503: "The store cannot be reached, or the service is about to end; see Retry-After",
        507: "The store is full, or the token has as much as it may have",
    }
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": reasons[status], "content": content} for status in (401, 403, 421, 429, *statuses)}
