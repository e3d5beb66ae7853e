"""What paths and listings take. A memory id may contain a ``/``, written as ``%2F``, which must not split the path."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import unquote

from fastapi import Path, Query
from pydantic import AfterValidator
from starlette.types import ASGIApp, Receive, Scope, Send

from sidecar.errors import BadMemoryId
from sidecar.service.api.problems import build_answer, build_problem

SLASH = "\ue000"
"""Stands for a slash within a segment until the route decodes it: a private-use character, refused if a caller sends
it."""


def decode_segment(text: str) -> str:
    """Return a segment of a path as the caller meant it."""
    return text.replace(SLASH, "/")


class WholeSegments:
    """Middleware that decodes each segment of a path on its own, so that an encoded slash stays within its segment."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope.get("raw_path"):
            raw = scope["raw_path"].partition(b"?")[0].decode("latin-1")
            segments = [unquote(segment, errors="surrogateescape") for segment in raw.split("/")]
            if any(SLASH in segment for segment in segments):
                problem = BadMemoryId("A path may not hold the private character U+E000.")
                await build_answer(build_problem(problem))(scope, receive, send)
                return
            scope = {**scope, "path": "/".join(segment.replace("/", SLASH) for segment in segments)}
        await self._app(scope, receive, send)


PAGE = 1000
Limit = Annotated[int, Query(ge=1, le=PAGE, description="How many a page has at most.")]
After = Annotated[str, Query(max_length=3000, description="The `next` of the page before.")]
MemoryId = Annotated[
    str,
    Path(description="The memory's id; a '/' in it is written %2F.", examples=["conductor", "acme%2Fagent-7"]),
    AfterValidator(decode_segment),
]
