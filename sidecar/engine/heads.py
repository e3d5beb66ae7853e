"""The verbs that move heads without a sandbox: fork, rollback and accept."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime

from sidecar.errors import MemoryNotFound, NothingToAccept, SnapshotDamaged, SwapLost, UsageError
from sidecar.ids import MemoryKeys, check_memory_id, check_new_memory_id, make_snapshot_id
from sidecar.models import answers
from sidecar.models.answers import Acceptance, Forked
from sidecar.receipts import Reason
from sidecar.store.manifest import Head, Manifest, check_sizes
from sidecar.store.marks import hold_packs
from sidecar.store.pins import drop_automatic_pins, pin_automatically
from sidecar.store.repository import HeadState, Repository
from sidecar.store.selectors import resolve_snapshot


async def fork(repository: Repository, memory: str, new: str, wanted: str = "latest") -> Forked:
    """Start a new memory with a copy of a snapshot. The two memories share no objects afterwards. Raise ``UsageError``
    if the new memory exists already."""
    check_new_memory_id(new)
    source = await repository.manifest(memory, await resolve_snapshot(repository, memory, wanted))
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
        generation=0,
        changes=None,
    )
    await repository.commit(manifest)
    await repository.move_head(HeadState(), manifest)
    return Forked(memory=new, snapshot=manifest.snapshot, origin=manifest.origin)


async def rollback(repository: Repository, memory: str, wanted: str) -> answers.Head:
    """Make an earlier, diverged or rejected snapshot the head. Nothing is removed."""
    manifest = await repository.manifest(memory, await resolve_snapshot(repository, memory, wanted))
    check_sizes(manifest, (await repository.survey(memory)).sizes)
    await repository.store.prepare()
    await hold_packs(repository.store, manifest)
    state = await repository.head(memory)
    head = await repository.move_head(state, manifest)
    return answers.Head(memory=memory, head=head.snapshot, previous=state.snapshot or None)


async def accept(repository: Repository, memory: str, wanted: str = "") -> Acceptance:
    """Make a rejected or diverged snapshot the head; by default, the newest one that was rejected since the head was
    made.

    The head that it replaces is pinned, and nothing is removed. Raise ``NothingToAccept`` for a snapshot that is or was
    the head, and ``SwapLost`` if another writer moved the head in the meantime.
    """
    snapshot = await resolve_snapshot(repository, check_memory_id(memory), wanted) if wanted else ""
    state = await repository.head(memory)
    head = state.head or await repository.rebuild_head(memory)
    manifest = await repository.manifest(memory, snapshot or await _find_newest_rejected(repository, memory, head))
    if manifest.snapshot == state.snapshot:
        raise NothingToAccept(f"{manifest.snapshot} is the head of {memory} already.")
    if head is not None and head.was_head(manifest.snapshot):
        raise NothingToAccept(
            f"{manifest.snapshot} was the head of {memory} before, and does not stand beside it.",
            hint=f"`memory-sidecar rollback {memory} {manifest.snapshot}` goes back to it.",
        )
    survey = await repository.survey(memory)
    check_sizes(manifest, survey.sizes)
    if manifest.snapshot in survey.damaged:
        raise SnapshotDamaged(f"{manifest.snapshot} was found damaged; the head of {memory} did not move.")
    await repository.store.prepare()
    await hold_packs(repository.store, manifest)
    reason = _explain_refusal(manifest, state)
    before, pinned = state.snapshot, False
    if before:
        pinned = await pin_automatically(
            repository, memory, before, manifest.snapshot, f"{reason.code} (accepted by a person)"
        )
    try:
        # Compare-and-swap: it fails if another writer changed the head since ``state`` was read. The pin that was just
        # made would then protect a snapshot that was not replaced, so it is removed.
        await repository.move_head(state, manifest)
    except SwapLost:
        if pinned:
            await drop_automatic_pins(repository, memory, [before])
        raise
    await drop_automatic_pins(repository, memory)
    return Acceptance(
        memory=memory,
        head=manifest.snapshot,
        previous=before or None,
        standing="rejected" if manifest.rejected else "diverged",
        reason=reason,
        pinned=pinned or before in await repository.pinned(memory),
    )


def _explain_refusal(manifest: Manifest, state: HeadState) -> Reason:
    """Return why a snapshot is not the head, from its manifest."""
    code, _, message = manifest.rejected.partition(": ")
    if code:
        return Reason(code=code, message=message)
    return Reason(code="diverged", message=f"It did not grow out of the head ({state.snapshot or 'there is none'}).")


async def _find_newest_rejected(repository: Repository, memory: str, head: Head | None) -> str:
    """Return the newest snapshot that was rejected since the head was made. Older rejected ones are not offered by
    default: what they contain may be long out of date."""
    ids = await repository.list_snapshot_ids(memory)
    if not ids:
        raise MemoryNotFound(f"There is no memory {memory!r} in {repository.store.url}.")
    newest = head.newest if head is not None else ""
    manifests = await repository.manifests(memory, [snapshot for snapshot in ids if snapshot > newest])
    for snapshot, manifest in manifests.items():
        if isinstance(manifest, Manifest) and manifest.rejected:
            return snapshot
    raise NothingToAccept(f"Nothing was rejected since the head of {memory} was made.")
