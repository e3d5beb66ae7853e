"""The verbs that make a head of what was one: fork and rollback."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from typing import NoReturn

from sidecar.errors import NotReviewed, UsageError
from sidecar.ids import MemoryKeys, check_new_memory_id, make_snapshot_id
from sidecar.models import answers
from sidecar.models.answers import Forked
from sidecar.policy.review import DECLINED, PENDING, Review
from sidecar.store.manifest import Head, Manifest, check_sizes
from sidecar.store.marks import hold_packs
from sidecar.store.repository import HeadState, Repository
from sidecar.store.reviews import ACCEPTED, Reviews, read_reviews
from sidecar.store.selectors import resolve_snapshot

MOST_FOLLOWED = 2000
NONE = Review()


async def fork(repository: Repository, memory: str, new: str, wanted: str = "latest", review: Review = NONE) -> Forked:
    """Start a new memory with a copy of a snapshot. The two memories share no objects afterwards. Where the new memory is
    under ``review``, only with what was the head of the other, as no check and no person has seen anything else. Raise
    ``UsageError`` if the new memory exists already."""
    check_new_memory_id(new)
    source = await repository.manifest(memory, await resolve_snapshot(repository, memory, wanted))
    await _check_reviewed(
        repository, source, await repository.head(memory), only_heads=new if review.covers(new) else ""
    )
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


async def rollback(repository: Repository, memory: str, wanted: str, review: Review = NONE) -> answers.Head:
    """Make an earlier, diverged or rejected snapshot the head; not one that waits for a review or was declined, or grew out
    of one. Where the memory is under ``review``, only what was the head. Nothing is removed."""
    manifest = await repository.manifest(memory, await resolve_snapshot(repository, memory, wanted))
    check_sizes(manifest, (await repository.survey(memory)).sizes)
    await repository.store.prepare()
    await hold_packs(repository.store, manifest)
    state = await repository.head(memory)
    await _check_reviewed(repository, manifest, state, only_heads=memory if review.covers(memory) else "")
    head = await repository.move_head(state, manifest)
    return answers.Head(memory=memory, head=head.snapshot, previous=state.snapshot or None)


async def _check_reviewed(
    repository: Repository, manifest: Manifest, state: HeadState, *, only_heads: str = ""
) -> None:
    """Raise ``NotReviewed`` for a snapshot that waits for a review or was declined, or that grew out of one, unless it was
    the head or was accepted. ``only_heads`` is the memory under review that it is to be the head of, if there is one:
    then for all others that were not the head too."""
    head = state.head or await repository.rebuild_head(manifest.memory)
    if head is not None and head.was_head(manifest.snapshot):
        return
    reviews, _ = await read_reviews(repository.store, manifest.memory)
    if manifest.snapshot in reviews.accepted:
        return
    if reviews.is_unaccepted(manifest):
        _refuse(manifest, reviews, f"{manifest.snapshot} of {manifest.memory}")
    found = await _find_unaccepted(repository, manifest, reviews, head)
    if found is not None:
        _refuse(found, reviews, f"{manifest.snapshot} of {manifest.memory} grew out of {found.snapshot}, which")
    if only_heads:
        under = "which" if only_heads == manifest.memory else only_heads
        raise NotReviewed(
            f"{manifest.snapshot} never was the head of {manifest.memory}, and {under} is under review.",
            hint=f"`memory-sidecar accept {manifest.memory} {manifest.snapshot}` makes it the head.",
        )


async def _find_unaccepted(
    repository: Repository, manifest: Manifest, reviews: Reviews, head: Head | None
) -> Manifest | None:
    """Return the snapshot that waits or was declined, and that another grew out of since it left the line of heads; ``None``
    if there is none, as far as manifests are known."""
    seen: set[str] = set()
    while (parent := manifest.parent) and parent not in seen and len(seen) < MOST_FOLLOWED:
        if (head is not None and head.was_head(parent)) or reviews.get_decision(parent) == ACCEPTED:
            return None
        seen.add(parent)
        if reviews.get_decision(parent):  # its manifest may be gone
            return replace(manifest, snapshot=parent)
        found = (await repository.manifests(manifest.memory, [parent])).get(parent)
        if not isinstance(found, Manifest):
            return None
        if reviews.is_unaccepted(found):
            return found
        manifest = found
    return None


def _refuse(manifest: Manifest, reviews: Reviews, what: str) -> NoReturn:
    decided = reviews.get_decision(manifest.snapshot) or PENDING
    how = {DECLINED: "was declined", ACCEPTED: "was accepted as a part of a later one"}.get(
        decided, "waits for a review"
    )
    hint = "" if decided == PENDING else "Name a snapshot that was the head."
    raise NotReviewed(f"{what} {how}.", hint=hint)
