"""Fork and rollback: the verbs that move heads without a sandbox."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime

from sidecar.errors import UsageError
from sidecar.ids import Keys, check_new_memory_id, new_snapshot_id
from sidecar.repository import HeadState, Repository
from sidecar.snapshots.fetch import check_sizes
from sidecar.snapshots.manifest import Head, Manifest
from sidecar.snapshots.marks import hold
from sidecar.snapshots.resolving import resolve


async def fork(repository: Repository, memory: str, new: str, wanted: str = "latest") -> Manifest:
    """Begin a new memory with a copy of a snapshot. The two share nothing afterwards."""
    check_new_memory_id(new)
    source = await repository.manifest(memory, await resolve(repository, memory, wanted))
    if await repository.exists(new):
        raise UsageError(f"There is a memory {new!r} already.", hint="Choose another name, or delete that one first.")
    await repository.store.prepare()
    ours, theirs = Keys.of(memory), Keys.of(new)
    check_sizes(source, (await repository.survey(memory)).sizes)
    for pack in source.packs:
        await asyncio.gather(
            repository.store.copy(ours.pack(pack.id, pack.codec), theirs.pack(pack.id, pack.codec)),
            repository.store.copy(ours.index(pack.id), theirs.index(pack.id)),
        )
    now = datetime.now(UTC)
    manifest = replace(
        source,
        memory=new,
        snapshot=new_snapshot_id(now),
        created=now.isoformat(timespec="milliseconds"),
        parent="",
        origin=f"fork of {memory} at {source.snapshot}",
        rejected="",
        generation=0,
    )
    await repository.commit(manifest)
    await repository.move_head(HeadState(), manifest)
    return manifest


async def rollback(repository: Repository, memory: str, wanted: str) -> tuple[Head, str]:
    """Make an earlier (or a diverged, or rejected) snapshot the head; nothing is removed. Return the new head and the old."""
    manifest = await repository.manifest(memory, await resolve(repository, memory, wanted))
    check_sizes(manifest, (await repository.survey(memory)).sizes)
    await repository.store.prepare()
    await hold(repository.store, manifest)
    state = await repository.head(memory)
    return await repository.move_head(state, manifest), state.snapshot
