"""Collect what no snapshot refers to: packs of exports that died half way, and unfinished writes.

A grace period keeps away from exports that are still running: they store their packs first and their manifest after.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from sidecar.errors import SnapshotDamaged
from sidecar.ids import Keys
from sidecar.repository import Repository

GRACE_SECONDS = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Collected:
    objects: int
    bytes: int
    unfinished: int


async def collect(
    repository: Repository, memory: str, *, grace: float = GRACE_SECONDS, dry_run: bool = False
) -> Collected:
    """Remove a memory's leftovers that are older than ``grace`` seconds.

    While a manifest cannot be read nothing is collected: it may refer to any pack.
    """
    keys, before = Keys.of(memory), time.time() - grace
    # Listed before the manifests are read: a pack whose manifest comes later is younger than this list.
    packs = [info async for info in repository.store.list(keys.packs)]
    manifests = await repository.manifests(memory, await repository.snapshot_ids(memory))
    if any(isinstance(manifest, SnapshotDamaged) for manifest in manifests.values()):
        return Collected(0, 0, 0)
    needed = set()
    for manifest in manifests.values():
        if not isinstance(manifest, SnapshotDamaged):
            for pack in manifest.packs:
                needed |= {keys.pack(pack.id, pack.codec), keys.index(pack.id)}
    leftovers = [info for info in packs if info.key not in needed and info.modified < before]
    if dry_run:
        return Collected(len(leftovers), sum(info.size for info in leftovers), 0)
    await repository.store.delete(info.key for info in leftovers)
    unfinished = await repository.store.sweep(keys.prefix, older_than=before)
    return Collected(len(leftovers), sum(info.size for info in leftovers), unfinished)
