"""Where restores get their snapshot from: chosen and fetched once, and made ready once, for any number of sandboxes."""

from __future__ import annotations

import asyncio
import gzip
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import field
from typing import TYPE_CHECKING, TypeVar

from sidecar.engine.core import Engine
from sidecar.engine.restores.choice import Choice, choose_snapshot
from sidecar.engine.restores.run import RestoreRequest
from sidecar.format.compression import decompress
from sidecar.host.files import Spool, SpooledFile, open_spool
from sidecar.host.values import dataclass
from sidecar.host.work import run_in_thread
from sidecar.store.fetch import FetchedSnapshot

if TYPE_CHECKING:
    from sidecar.engine.without_python import PlainTarball

MOST_AT_ONCE = 8
"""Into how many sandboxes one call restores at the same time."""
T = TypeVar("T")


@dataclass(slots=True)
class ReadySnapshot:
    """A fetched snapshot, and the other forms of it that some sandboxes need. Each is made once, for whoever needs it."""

    fetched: FetchedSnapshot
    spool: Spool
    part: list[str] = field(default_factory=list)
    """The patterns of its paths, if it is only a part of the snapshot; empty: all of it."""
    _gzipped: list[SpooledFile] | None = None
    _tarball: PlainTarball | None = None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def recompress(self) -> list[SpooledFile]:
        """Return the packs without zstd, for a sandbox that cannot read that."""
        async with self._turn:
            if self._gzipped is None:
                pairs = zip(self.fetched.packs, self.fetched.manifest.packs, strict=True)
                self._gzipped = [
                    await run_in_thread(_recompress, file, self.spool) if pack.codec == "zst" else file
                    for file, pack in pairs
                ]
        return self._gzipped

    async def write_tarball(self) -> PlainTarball:
        """Return the files as a plain tarball, for a sandbox without Python. Raise ``ProgramFailed``."""
        from sidecar.engine.without_python import write_tarball  # late: most sandboxes have Python

        async with self._turn:
            if self._tarball is None:
                self._tarball = await write_tarball(self.fetched, self.part, self.spool)
        return self._tarball


@dataclass(frozen=True, slots=True)
class Supply:
    """What a source has: the snapshot that was chosen, ready for sandboxes."""

    choice: Choice | None
    """``None``: the memory has no snapshot yet."""
    ready: ReadySnapshot | None

    @property
    def snapshot(self) -> ReadySnapshot:
        """The snapshot. Only valid if there is one."""
        assert self.ready is not None
        return self.ready


class SnapshotSource:
    """Chooses and fetches a snapshot when the first restore asks for it; all others get the same."""

    def __init__(self, fetch: Callable[[], Awaitable[Supply]], spool: Spool) -> None:
        self._fetch = fetch
        self.spool = spool
        self._fetching: asyncio.Future[Supply] | None = None

    async def get(self) -> Supply:
        """Return what there is. Raise a ``SnapshotError`` if no snapshot can be read, ``BadReference`` for a time that is
        none."""
        if self._fetching is None:
            self._fetching = asyncio.ensure_future(self._fetch())
        # Shielded: who is cancelled while it waits leaves the others what they wait for.
        return await asyncio.shield(self._fetching)

    async def close(self) -> None:
        """Stop fetching, if that still goes on."""
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)


@asynccontextmanager
async def open_source(engine: Engine, request: RestoreRequest) -> AsyncIterator[SnapshotSource]:
    """Open the source of the snapshot that a request names. What it fetched is removed at the end."""

    async def fetch() -> Supply:
        engine.progress.step("fetching the snapshot")
        choice = await choose_snapshot(engine.repository, request.memory, request.snapshot, spool)
        if choice is None:
            return Supply(None, None)
        if not request.only:
            return Supply(choice, ReadySnapshot(choice.fetched, spool))
        from sidecar.engine.restores.part import cut_part  # late: most restores are of all of it

        fetched, part = await run_in_thread(cut_part, choice.fetched, request.only, engine.layouts, spool)
        return Supply(choice, ReadySnapshot(fetched, spool, part))

    async with open_spool() as spool:
        source = SnapshotSource(fetch, spool)
        try:
            yield source
        finally:
            await source.close()


def _recompress(pack: SpooledFile, spool: Spool) -> SpooledFile:
    """Recompress a zstd pack with gzip."""
    path = spool.new()
    with (
        pack.path.open("rb") as source,
        decompress(source, "zst") as plain,
        gzip.open(path, "wb", compresslevel=1) as target,
    ):
        shutil.copyfileobj(plain, target, 1 << 20)
    return SpooledFile(path, path.stat().st_size, "")
