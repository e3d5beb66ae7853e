"""The base of an export: the snapshot that the sandbox compared its files with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sidecar.engine.exports.run import Base, ExportRun
from sidecar.errors import BadAnswer
from sidecar.format.index import Entry, Index
from sidecar.format.protocol import ExportAnswer
from sidecar.host.spool import Spool
from sidecar.store.fetch import check_sizes, fetch_entries
from sidecar.store.manifest import Manifest

MOST_AHEAD = 8 << 20
"""How many bytes of indexes are read ahead at most, before it is known whether they are needed."""


@asynccontextmanager
async def read_ahead(run: ExportRun, scratch: Spool) -> AsyncIterator[None]:
    """Read the head in a background task while the sandbox works, since the head is the usual base. Cancel the task at
    the end."""
    head = run.state.snapshot
    sizes = [size for key, size in run.survey.sizes.items() if key.endswith(".index.gz")]
    if head and head not in run.survey.damaged and sum(sizes) <= MOST_AHEAD:
        run.ahead = asyncio.create_task(_read_base(run, head, scratch))
    try:
        yield
    finally:
        if run.ahead is not None:
            run.ahead.cancel()
            # An error in it matters only to ``find_base``, which awaits the task itself.
            await asyncio.gather(run.ahead, return_exceptions=True)


async def _read_base(run: ExportRun, snapshot: str, scratch: Spool) -> Base:
    """Read a snapshot's manifest, entries and indexes. Raise ``SnapshotDamaged`` if parts of it are missing in the
    store."""
    manifest = run.replaces
    if manifest is None or manifest.snapshot != snapshot:
        manifest = await run.engine.repository.manifest(run.request.memory, snapshot)
    check_sizes(manifest, run.survey.sizes)
    entries, indexes, _ = await fetch_entries(run.engine.repository.store, manifest, scratch)
    return manifest, entries, indexes


async def find_base(
    run: ExportRun, answer: ExportAnswer, scratch: Spool
) -> tuple[Manifest | None, dict[str, Entry], list[Index]]:
    """Return the base that the sandbox named, with its entries and indexes if they are needed; nothing for a full
    export.

    Raise ``SnapshotDamaged`` if parts of it are missing in the store, ``SnapshotNotFound`` if it was forgotten.
    """
    if not answer.base:
        return None, {}, []
    if answer.base not in run.known:
        raise BadAnswer(f"The sandbox builds on a snapshot it was not asked about: {answer.base[:80]!r}.")
    if run.ahead is not None and answer.base == run.state.snapshot:
        return await run.ahead
    if answer.status == "unchanged":
        manifest = await run.engine.repository.manifest(run.request.memory, answer.base)
        check_sizes(manifest, run.survey.sizes)
        return manifest, {}, []
    return await _read_base(run, answer.base, scratch)
