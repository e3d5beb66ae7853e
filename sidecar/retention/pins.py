"""Pins: a tiny object in the store for each snapshot that no rule and no limit may take."""

from __future__ import annotations

from datetime import UTC, datetime

from sidecar.ids import Keys, check_memory_id
from sidecar.repository import Repository
from sidecar.snapshots.manifest import Manifest
from sidecar.snapshots.resolving import resolve


async def pin(repository: Repository, memory: str, wanted: str) -> str:
    """Keep a snapshot until it is unpinned; return its id. Raise ``MemoryNotFound`` or ``SnapshotNotFound``.

    One that cannot be read can be pinned too: it stays in any case, and the pin is there when it has been mended.
    """
    snapshot = await resolve(repository, check_memory_id(memory), wanted)
    manifest = (await repository.manifests(memory, [snapshot])).get(snapshot)
    await repository.store.prepare()
    since = datetime.now(UTC).isoformat(timespec="seconds")
    await repository.store.put(Keys.of(memory).pin(snapshot), since.encode())
    if isinstance(manifest, Manifest):
        await repository.keep(manifest)
    return snapshot


async def unpin(repository: Repository, memory: str, wanted: str) -> str:
    """Leave a snapshot to the rules again; return its id. One that is not pinned is fine."""
    snapshot = await resolve(repository, check_memory_id(memory), wanted)
    await repository.store.delete([Keys.of(memory).pin(snapshot)])
    return snapshot
