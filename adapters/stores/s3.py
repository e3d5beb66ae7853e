"""A store in a bucket: AWS S3 and compatible servers."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from adapters.stores.s3_client import CONNECTIONS, S3Config, S3Connection
from adapters.stores.s3_conditions import MARKER, RaceResult, prove_conditions, swap
from adapters.stores.s3_errors import Unsupported
from adapters.stores.s3_links import sign_get, sign_put
from adapters.stores.s3_objects import S3Objects
from adapters.stores.s3_single_writer import SingleWriter
from sidecar.errors import ObjectMissing
from sidecar.ports import Glance, Link, ObjectInfo, StoredObject

__all__ = ["S3Config", "S3Store"]
T = TypeVar("T")
PIECE = 800
"""A little less than what one request lists: names that have come since fit in."""


class S3Store:
    """Objects under one prefix of one bucket. Nothing is imported or connected before the first call."""

    def __init__(self, config: S3Config, *, url: str) -> None:
        self.url = url
        self._connection = S3Connection(config)
        self._objects = S3Objects(self._connection)
        self._alone = SingleWriter(self._objects) if config.single_writer else None
        self._raced: RaceResult | None = None
        self._splits: dict[str, Sequence[str]] = {}
        """By prefix, where the names that follow it were when they were listed last, one of every ``PIECE``."""
        self._threads = _make_threads()
        """For requests; the threads of asyncio are too few for many memories."""

    seal = ""  # what the server encrypts for itself, it decrypts for everyone it admits

    def room(self, size: int) -> int:
        return size

    async def prepare(self) -> None:
        # Reading comes first either way: SeaweedFS creates a missing bucket on the first write, unasked.
        if self._alone is not None:
            await self.get(MARKER)
            await self._run(self._alone.begin)
        elif self._raced is None:  # proved once for all writes of this process
            self._raced = await self._run(prove_conditions, self._objects)

    async def get(self, key: str) -> StoredObject | None:
        return await self._run(self._objects.read, key)

    async def put(self, key: str, source: bytes | Path) -> int:
        if isinstance(source, bytes):
            await self._run(self._objects.write, key, source)
            return len(source)
        return await self._run(self._objects.upload, key, source)

    async def swap(self, key: str, data: bytes, *, expected: str | None) -> str:
        if self._alone is not None:
            return await self._run(self._alone.swap, key, data, expected)
        return await self._run(swap, self._objects, key, data, expected)

    async def stream(self, key: str) -> AsyncIterator[bytes]:
        body = await self._run(self._objects.open, key)
        try:
            while chunk := await self._run(self._objects.read_chunk, body):
                yield chunk
        finally:
            body.close()

    async def link_to_get(self, key: str, *, seconds: int) -> Link | None:
        # In a thread though nothing is sent: creating the client and finding credentials may take a while.
        return await self._run(sign_get, self._connection, key, seconds)

    async def link_to_put(self, key: str, *, size: int, sha256: str, seconds: int) -> Link | None:
        return await self._run(sign_put, self._connection, key, size, sha256, seconds)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        for info in await self._run(self._list_sorted, prefix):
            yield info

    async def glance(self, prefix: str, *, after: str = "", level: bool = False) -> Glance:
        return await self._run(self._objects.glance, prefix, after, level)

    async def folders(self, prefix: str, *, most: int) -> Sequence[str]:
        # Where there were many a moment ago, they are listed in pieces, at once.
        splits = self._splits.get(prefix, ()) if most > PIECE else ()
        parts = await asyncio.gather(
            *(
                self._run(self._objects.folders, prefix, most, after, until)
                for after, until in pairwise(["", *splits, ""])
            )
        )
        found = sorted(set().union(*parts))
        if most > PIECE:
            self._splits[prefix] = found[PIECE::PIECE]
        return found[:most]

    async def copy(self, source: str, target: str) -> None:
        await self._run(self._objects.copy, source, target)

    async def delete(self, keys: Iterable[str]) -> None:
        await self._run(self._objects.remove, keys)

    async def sweep(self, prefix: str, *, older_than: float) -> int:
        return await self._run(self._abort_uploads, prefix, older_than)

    async def purge(self, prefix: str) -> int:
        return await self._run(self._purge, prefix)

    async def warnings(self) -> Sequence[str]:
        return []

    async def safety(self) -> str:
        if self._alone is not None:
            return "for one writer at a time (single-writer): another one that is noticed stops"
        raced = self._raced or await self._run(prove_conditions, self._objects)
        return f"honours conditional writes ({raced})"

    async def close(self) -> None:
        if self._alone is not None:
            await self._run(self._alone.end)
        await self._run(self._connection.close)
        done, self._threads = self._threads, _make_threads()
        done.shutdown(wait=False)

    async def _run(self, work: Callable[..., T], *args: object) -> T:
        """Run a request in a thread and return its result."""
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: context.run(work, *args))

    def _list_sorted(self, prefix: str) -> Iterable[ObjectInfo]:
        # All pages before the first answer: SeaweedFS lists 'a/x' before 'a-b', folder by folder, not in key order.
        found = sorted(self._objects.entries(prefix), key=lambda info: info.key)
        if prefix.endswith("/") and len(found) > PIECE:
            names = sorted({info.key[len(prefix) :].partition("/")[0] for info in found})
            self._splits[prefix] = names[PIECE::PIECE]
        return found

    def _abort_uploads(self, prefix: str, older_than: float = float("inf")) -> int:
        """Abort unfinished multipart uploads; return how many."""
        aborted = 0
        with suppress(Unsupported, ObjectMissing):  # rclone answers NoSuchUpload for a bucket without any
            for upload in [*self._objects.unfinished(prefix)]:
                if upload["Initiated"].timestamp() < older_than:
                    with suppress(ObjectMissing):  # completed or aborted in the meantime
                        self._objects.abort(upload)
                        aborted += 1
        return aborted

    def _purge(self, prefix: str) -> int:
        """Delete everything under a prefix: unfinished uploads, versions and objects."""
        purged = self._abort_uploads(prefix)
        with suppress(Unsupported):  # a server without versions has none to remove
            purged += self._objects.remove([*self._objects.versions(prefix)])
        # What a server without versions still lists.
        return purged + self._objects.remove([info.key for info in self._objects.entries(prefix)])


def _make_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="s3")
