"""The verbs that make a head of what was one: fork and rollback."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime

from sidecar.errors import NotReviewed, UsageError
from sidecar.ids import MemoryKeys, check_new_memory_id, make_snapshot_id
from sidecar.models import answers
from sidecar.models.answers import Forked
from sidecar.policy.review import DECLINED, PENDING
from sidecar.store.manifest import Manifest, check_sizes
from sidecar.store.marks import hold_packs
from sidecar.store.repository import HeadState, Repository
from sidecar.store.reviews import ACCEPTED, read_reviews
from sidecar.store.selectors import resolve_snapshot


async def fork(repository: Repository, memory: str, new: str, wanted: str = "latest") -> Forked:
    """Start a new memory with a copy of a snapshot. The two memories share no objects afterwards. Raise ``UsageError``
    if the new memory exists already."""
    check_new_memory_id(new)
    source = await repository.manifest(memory, await resolve_snapshot(repository, memory, wanted))
    await _check_reviewed(repository, source, await repository.head(memory))
    if await repository.exists(new):
        raise UsageError(f"There is a memory {new!r} already.", hint="Choose another name, or delete that one first.")
    await repository.store.prepare()
    ours, theirs = MemoryKeys.of(memory), MemoryKeys.of(new)
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
        snapshot=make_snapshot_id(now),
        created=now.isoformat(timespec="milliseconds"),
        parent="",
        origin=f"fork of {memory} at {source.snapshot}",
        rejected="",
        pending="",
        generation=0,
        changes=None,
    )
    await repository.commit(manifest)
    await repository.move_head(HeadState(), manifest)
    return Forked(memory=new, snapshot=manifest.snapshot, origin=manifest.origin)


async def rollback(repository: Repository, memory: str, wanted: str) -> answers.Head:
    """Make an earlier, diverged or rejected snapshot the head; not one that waits for a review or was declined. Nothing
    is removed."""
    manifest = await repository.manifest(memory, await resolve_snapshot(repository, memory, wanted))
    check_sizes(manifest, (await repository.survey(memory)).sizes)
    await repository.store.prepare()
    await hold_packs(repository.store, manifest)
    state = await repository.head(memory)
    await _check_reviewed(repository, manifest, state)
    head = await repository.move_head(state, manifest)
    return answers.Head(memory=memory, head=head.snapshot, previous=state.snapshot or None)


async def _check_reviewed(repository: Repository, manifest: Manifest, state: HeadState) -> None:
    """Raise ``NotReviewed`` for a snapshot that waits for a review or was declined, unless it was the head."""
    if state.head is not None and state.head.was_head(manifest.snapshot):
        return
    reviews, _ = await read_reviews(repository.store, manifest.memory)
    if not reviews.is_unaccepted(manifest):
        return
    decided = reviews.get_decision(manifest.snapshot) or PENDING
    how = {DECLINED: "was declined", ACCEPTED: "was accepted as a part of a later one"}.get(
        decided, "waits for a review"
    )
    hint = "" if decided == PENDING else "Name a snapshot that was the head."
    raise NotReviewed(f"{manifest.snapshot} of {manifest.memory} {how}.", hint=hint)
