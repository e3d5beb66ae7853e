"""Uploads of tarballs: accepted content types, and limits on size, time and number."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager

from starlette.requests import ClientDisconnect, Request

from sidecar.engine.limits import Bounds
from sidecar.errors import SidecarError, UsageError
from sidecar.host.files import Spool, SpooledFile
from sidecar.service.access.grants import ITSELF, Caller
from sidecar.service.operations import TooBusy

MEDIA_TYPES = (
    "application/octet-stream",
    "application/x-tar",
    "application/gzip",
    "application/x-gzip",
    "application/zstd",
)
"""The accepted content types. The actual codec is detected by the first bytes."""
LONGEST_NUMBER = 20


class UnsupportedMediaType(UsageError):
    """The body is of a content type that is not taken here."""

    code = "unsupported-media-type"
    default_hint = f"Send the header Content-Type with one of these: {', '.join(MEDIA_TYPES)}."


class UploadTimeout(SidecarError):
    """A tarball took too long to arrive."""

    code = "upload-timeout"
    retryable = True
    default_hint = "Nothing was stored. Send it again over a faster line, or raise [timing] unpack in the config."


class UploadCut(SidecarError):
    """A tarball did not arrive as a whole."""

    code = "upload-cut"
    retryable = True
    default_hint = "Nothing was stored; send it again."


class Uploads:
    """Receives tarballs, a limited number at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[str] = Counter()

    async def take(
        self, request: Request, scratch: Spool, within: Bounds, seconds: float, caller: Caller = ITSELF
    ) -> SpooledFile:
        """Write a request's body to a file. One named token has at most half of the uploads at once.

        Raise ``TooBusy``; ``LimitExceeded`` before more than the limit is on the disk; ``UploadTimeout`` or
        ``UploadCut``.
        """
        _check_length(request.headers, within)
        with self._count_upload(caller.id):
            try:
                async with asyncio.timeout(seconds):
                    taken = await scratch.take(_read_chunks(request, within))
            except TimeoutError:
                raise UploadTimeout(f"The tarball did not arrive within {seconds:g} seconds.") from None
            except ClientDisconnect:
                raise UploadCut("The connection ended before all of the tarball had arrived.") from None
        return taken

    @contextmanager
    def _count_upload(self, owner: str) -> Iterator[None]:
        if self._open.total() >= self._most or (owner and self._open[owner] >= max(1, self._most // 2)):
            raise TooBusy("As many tarballs are on their way in already as may be.")
        self._open[owner] += 1
        try:
            yield
        finally:
            self._open[owner] -= 1
            self._open += Counter()  # leaves out those that have none any more


def check_media_type(headers: Mapping[str, str]) -> None:
    """Raise ``UnsupportedMediaType`` unless the content type is one of a tarball."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in MEDIA_TYPES:
        raise UnsupportedMediaType(f"A tarball is not sent as {kind[:100]!r}." if kind else "The body has no type.")


def _check_length(headers: Mapping[str, str], within: Bounds) -> None:
    """Raise ``LimitExceeded`` if the declared length is too large, before anything is read."""
    length = headers.get("content-length", "")
    if length.isascii() and length.isdecimal() and len(length) <= LONGEST_NUMBER:
        within.check("packed_bytes", int(length), f"The tarball has {int(length):,} bytes")


async def _read_chunks(request: Request, within: Bounds) -> AsyncIterator[bytes]:
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        within.check("packed_bytes", size, f"The tarball has {size:,} bytes or more")
        yield chunk
