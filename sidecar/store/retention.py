"""Forget snapshots: apply the retention rules to a memory or a whole store, then collect what is not needed any more.

A snapshot is forgotten by removing its manifest. The head and the pins are read right before and right after: what
became the head or was pinned in between is put back, as ``Repository.keep`` explains. Where one is removed that an
export may be about to make the head, the head is written again in between: that export loses its swap, and looks. Packs
are removed later, see ``sidecar.store.garbage``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from datetime import UTC, datetime

from sidecar.errors import SnapshotDamaged, StoreError
from sidecar.host.values import dataclass
from sidecar.host.work import gather_few
from sidecar.ids import ROOT, MemoryKeys, is_plain_id, parse_snapshot_time
from sidecar.models.answers import Fate, Forgotten
from sidecar.policy.retention import (
    KeepLabelled,
    Plan,
    Retention,
    RetentionPolicy,
    SnapshotFacts,
    count_exclusive_bytes,
    count_needed_bytes,
    plan_memory,
    plan_store,
)
from sidecar.policy.review import PENDING
from sidecar.ports import ObjectInfo
from sidecar.store.folders import read_id
from sidecar.store.garbage import collect
from sidecar.store.manifest import LONGEST_HISTORY, Manifest
from sidecar.store.pins import drop_automatic_pins, list_automatic_pins
from sidecar.store.repository import HeadState, Repository, Survey
from sidecar.store.reviews import Reviews, read_reviews_or_none

LOG = logging.getLogger("sidecar")
AT_ONCE = 4
"""How many memories are read at a time."""
Manifests = Mapping[str, Manifest | SnapshotDamaged]


@dataclass(frozen=True, slots=True)
class _MemoryState:
    """A memory as it was read, and what the rules say about it."""

    manifests: Manifests
    plan: Plan
    problem: str = ""
    bytes: int = 0
    """Size of all its packs and manifests, leftovers included."""
    beside: int = 0
    """Size of everything else it has in the store."""


async def forget(repository: Repository, memory: str, retention: Retention, *, dry_run: bool = False) -> Forgotten:
    """Apply the rules to one memory, and collect."""
    read = await _read_memory(repository, memory, retention.build_policy_for(memory))
    return await _apply_plan(repository, memory, read, read.plan, retention, dry_run)


async def forget_all(
    repository: Repository, retention: Retention, *, dry_run: bool = False
) -> tuple[list[Forgotten], int]:
    """Apply the rules to every memory and the byte limit to all of them together, and collect.

    Return what was done to each, and by how much what has to stay exceeds the limit.
    """
    memories = await repository.memories()
    reads = dict(
        zip(
            memories,
            await gather_few(
                lambda memory: _read_memory(repository, memory, retention.build_policy_for(memory)), memories, AT_ONCE
            ),
            strict=True,
        )
    )
    # If something cannot be read, the packs it needs are not known: the limit then removes nothing there, and all of it
    # counts.
    loose = {memory: read.plan for memory, read in reads.items() if not read.problem}
    plans, over = plan_store(loose, retention.store_bytes, sum(read.bytes for read in reads.values() if read.problem))
    done = [
        await _apply_plan(repository, memory, read, plans.get(memory, read.plan), retention, dry_run)
        for memory, read in reads.items()
    ]
    return done, over


async def forget_due(repository: Repository, retention: Retention) -> tuple[list[Forgotten], int]:
    """Do as ``forget_all`` does, without asking for memories of which one listing of the store shows that nothing of
    them can be due. For a service, which does this again and again."""
    if retention.store_bytes:
        return await forget_all(repository, retention)
    folders: dict[str, list[ObjectInfo]] = {}
    newest = 0.0
    async for info in repository.store.list(ROOT):
        folders.setdefault(info.key[len(ROOT) :].partition("/")[0], []).append(info)
        newest = max(newest, info.modified)
    due = {folder: infos for folder, infos in folders.items() if _may_be_due(folder, infos, newest, retention)}
    if folders:
        await repository.store.sweep(ROOT, older_than=newest - retention.grace_seconds)

    async def forget_one(folder: str) -> Forgotten | None:
        told = [info.key for info in due[folder] if info.key.endswith("/head.json") or "/snapshots/" in info.key]
        memory, problem = await read_id(repository.store, folder, told)
        if problem:
            LOG.warning(problem)
        return await forget(repository, memory, retention) if memory else None

    done = await gather_few(forget_one, due, AT_ONCE)
    return [one for one in done if one is not None], 0


def _may_be_due(folder: str, infos: Sequence[ObjectInfo], now: float, retention: Retention) -> bool:
    """Whether something of a memory may have to go, by its objects alone.

    Every export stores one pack. Where there are no more packs than snapshots, and no rules, each is needed.
    """
    keys = MemoryKeys(f"{ROOT}{folder}/")
    snapshots = {
        info.key[len(keys.snapshots) :].removesuffix(".json") for info in infos if info.key.startswith(keys.snapshots)
    }
    packs = {keys.parse_pack_id(info.key) for info in infos if info.key.startswith(keys.packs)}
    policy = retention.build_policy_for(folder) if is_plain_id(folder) else None
    ruled = (policy is None and bool(retention.memories)) or bool((policy or retention.policy()).rules)
    ruled = ruled or bool((policy or retention.policy()).most_bytes)
    if (ruled and len(snapshots) > 1) or len(packs) > len(snapshots):
        return True
    for info in infos:
        if info.key.startswith((keys.pins, keys.damaged)) and info.key.rpartition("/")[2] not in snapshots:
            return True
        if info.key.startswith(keys.calls) and now - info.modified >= retention.calls_seconds:
            return True
        if info.key.startswith(keys.marks) or info.key == keys.clock:
            return True
    return False


async def forget_lightly(
    repository: Repository, memory: str, policy: RetentionPolicy, known: tuple[HeadState, Survey] | None = None
) -> tuple[int, int]:
    """Apply the rules to one memory, reading only the manifests of what may be removed, and collect nothing. ``known``:
    the head and a complete listing, as they were a moment ago, which may show that nothing is to go.

    Return how many were removed, and by how many bytes what stays exceeds the policy's limit.
    """
    state, survey = known or (await repository.head(memory), await repository.survey(memory))
    if state.head is None:
        return 0, 0
    keys, now = MemoryKeys.of(memory), datetime.now(UTC)
    reviews = await read_reviews_or_none(repository.store, memory, survey.sizes)
    over = policy.most_bytes and _count_stored_bytes(survey, keys) > policy.most_bytes
    wanted = {snapshot for snapshot in survey.snapshots if over or _needs_manifest(snapshot, state)}
    manifests = await repository.manifests(memory, wanted)
    if not over:
        # A label or a rejection can only help a snapshot to stay, so only the manifests of those that would be removed
        # are read.
        first = plan_memory(
            _build_rows(memory, survey, state, manifests, reviews),
            RetentionPolicy(policy.rules, pending=policy.pending),
            now,
        )
        more = {row.id for row in first.forgotten} - wanted
        manifests |= await repository.manifests(memory, more)
        wanted |= more
    rows = [
        row
        for row in _build_rows(memory, survey, state, manifests, reviews)
        if row.id in manifests or row.id not in wanted
    ]
    decided = plan_memory(rows, policy if over else replace(policy, most_bytes=0), now)
    if known is not None and decided.forgotten:
        # What others removed since may be among what the rules counted as kept: read all of it again before any goes.
        return await forget_lightly(repository, memory, policy)
    return await _remove(repository, memory, [row.id for row in decided.forgotten], manifests), decided.over_bytes


@dataclass(frozen=True, slots=True)
class RoomPlan:
    """What a memory would need without some of its snapshots; none of them has been removed yet."""

    memory: str
    bytes: int
    going: tuple[str, ...] = ()
    manifests: Manifests = field(default_factory=dict)
    unpinned: tuple[str, ...] = ()
    """Those among them that are pinned automatically."""

    async def make(self, repository: Repository) -> int:
        """Remove them, except the head and what is pinned now. Return how many were removed.

        Their packs are removed when the grace period is over.
        """
        await drop_automatic_pins(repository, self.memory, list(self.unpinned))
        return await _remove(repository, self.memory, self.going, self.manifests)


async def plan_room(
    repository: Repository, memory: str, coming: SnapshotFacts, most: int, keep: Collection[str], labelled: KeepLabelled
) -> RoomPlan:
    """Plan which of the oldest snapshots of a memory to remove, so that with the one that is ``coming`` it needs at
    most ``most`` bytes.

    What is pinned, or labelled to stay, those to ``keep`` and the head stay (the head not if ``coming`` replaces it). A
    snapshot that is stored beside the head never displaces an ordinary one.
    """
    read = await _read_memory(repository, memory, RetentionPolicy())
    if read.problem:
        return RoomPlan(memory, read.bytes + read.beside + count_needed_bytes([coming]))
    most = max(1, most - read.beside)
    rows = [decision.snapshot for decision in read.plan.decisions]
    kept, going = _choose_to_go(rows, coming, most, keep, labelled)
    unpinned: set[str] = set()
    if count_needed_bytes(kept) > most and any(row.pinned for row in rows):
        # Better to lose these than to be unable to save anything any more.
        unpinned = set(await list_automatic_pins(repository, memory))
        rows = [replace(row, pinned=row.pinned and row.id not in unpinned) for row in rows]
        kept, going = _choose_to_go(rows, coming, most, keep, labelled)
    return RoomPlan(
        memory,
        count_needed_bytes(kept) + read.beside,
        tuple(going),
        read.manifests,
        tuple(unpinned.intersection(going)),
    )


def _choose_to_go(
    rows: Sequence[SnapshotFacts], coming: SnapshotFacts, most: int, keep: Collection[str], labelled: KeepLabelled
) -> tuple[list[SnapshotFacts], list[str]]:
    """Return what would stay beside ``coming``, and the ids of what would be removed."""
    rows = [
        replace(
            row,
            pinned=row.pinned or row.id in keep or (coming.beside and not row.beside),
            is_head=row.is_head and not coming.is_head,
        )
        for row in rows
    ]
    decided = plan_memory([replace(coming, pinned=True), *rows], RetentionPolicy((), labelled, most), datetime.now(UTC))
    kept, going = decided.kept, []
    for row in decided.forgotten:  # newest first: removing older ones may have made room for this one
        if count_needed_bytes([*kept, row]) <= most:
            kept.append(row)
        else:
            going.append(row.id)
    return kept, going


async def _read_memory(repository: Repository, memory: str, policy: RetentionPolicy) -> _MemoryState:
    """Read a memory and plan what the rules remove."""
    keys, state = MemoryKeys.of(memory), await repository.head(memory)
    survey = await repository.survey(memory)
    manifests = await repository.manifests(memory, survey.snapshots)
    reviews = await read_reviews_or_none(repository.store, memory, survey.sizes)
    rows = [row for row in _build_rows(memory, survey, state, manifests, reviews) if row.id in manifests]
    problem = "A manifest cannot be read, so no pack is collected." if any(row.problem for row in rows) else ""
    if state.problem:
        policy, problem = RetentionPolicy(), f"Nothing is forgotten while the head cannot be read: {state.problem}"
    stored = _count_stored_bytes(survey, keys)
    beside = sum(survey.sizes.values()) - stored
    return _MemoryState(manifests, plan_memory(rows, policy, datetime.now(UTC)), problem, stored, beside)


def _count_stored_bytes(survey: Survey, keys: MemoryKeys) -> int:
    return sum(size for key, size in survey.sizes.items() if key.startswith((keys.packs, keys.snapshots)))


def _build_rows(
    memory: str, survey: Survey, state: HeadState, manifests: Manifests, reviews: Reviews
) -> list[SnapshotFacts]:
    """Return the facts that the rules use; for a manifest that was not read, only what the listing and the head say."""
    rows, keys, accepted = [], MemoryKeys.of(memory), reviews.accepted
    for snapshot in survey.snapshots:
        manifest = manifests.get(snapshot)
        whole = manifest if isinstance(manifest, Manifest) else None
        ordinary = (state.head is not None and state.head.was_head(snapshot)) or (
            _is_beyond_history(snapshot, state) and (not whole or whole.is_eligible or snapshot in accepted)
        )
        rows.append(
            SnapshotFacts(
                id=snapshot,
                time=whole.time if whole else parse_snapshot_time(snapshot),
                label=whole.label if whole else "",
                pinned=snapshot in survey.pinned,
                is_head=snapshot == state.snapshot,
                beside=not ordinary or snapshot in survey.damaged or isinstance(manifest, SnapshotDamaged),
                problem=manifest.message if isinstance(manifest, SnapshotDamaged) else "",
                pending=not ordinary and _waits(snapshot, whole, reviews),
                bytes=survey.sizes.get(keys.snapshot(snapshot), 0),
                packs={pack.id: sum(pack.in_store) for pack in whole.packs} if whole else {},
            )
        )
    return rows


def _waits(snapshot: str, manifest: Manifest | None, reviews: Reviews) -> bool:
    """Return whether a snapshot waits for a review, or was accepted and waits to become the head: whoever accepted it was
    killed."""
    pending = reviews.is_pending(manifest) if manifest else reviews.get_decision(snapshot) == PENDING
    return pending or snapshot in reviews.accepted


def _is_beyond_history(snapshot: str, state: HeadState) -> bool:
    """Return whether a snapshot is older than everything in the head's bounded history."""
    return (
        state.head is not None and len(state.head.history) >= LONGEST_HISTORY and snapshot < state.head.history[-1][0]
    )


def _needs_manifest(snapshot: str, state: HeadState) -> bool:
    """Return whether only its manifest has what the rules need; also for one that stays, as it may take another's place."""
    return _is_beyond_history(snapshot, state) or (state.head is not None and state.head.ahead(snapshot))


async def _apply_plan(
    repository: Repository, memory: str, read: _MemoryState, decided: Plan, retention: Retention, dry_run: bool
) -> Forgotten:
    """Carry out a plan, collect, and describe both."""
    going = [row.id for row in decided.forgotten]
    if not dry_run:
        await _remove(repository, memory, going, read.manifests)
    collected = await collect(
        repository, memory, grace=retention.grace_seconds, calls=retention.calls_seconds, dry_run=dry_run
    )
    sizes = count_exclusive_bytes(decision.snapshot for decision in decided.decisions)
    return Forgotten(
        memory=memory,
        dry_run=dry_run,
        kept=len(decided.kept),
        forgotten=len(going),
        snapshots=[
            Fate(
                snapshot=decision.snapshot.id,
                keep=decision.keep,
                reason=decision.reason,
                created=decision.snapshot.time.isoformat(timespec="milliseconds"),
                label=decision.snapshot.label,
                pinned=decision.snapshot.pinned,
                bytes=sizes[decision.snapshot.id],
            )
            for decision in decided.decisions
        ],
        collected=collected,
        over_bytes=decided.over_bytes,
        problem=read.problem,
    )


async def _remove(repository: Repository, memory: str, going: Iterable[str], manifests: Manifests) -> int:
    """Remove the manifests of snapshots, except the head and what is pinned now. Return how many were removed."""
    keys = MemoryKeys.of(memory)
    ids = [snapshot for snapshot in going if isinstance(manifests.get(snapshot), Manifest)]
    if not ids:
        return 0
    await repository.store.prepare()
    head, safe = await _list_untouchable(repository, memory)
    ids = [snapshot for snapshot in ids if snapshot not in safe]
    await repository.store.delete(keys.snapshot(snapshot) for snapshot in ids)
    if any(snapshot > head for snapshot in ids):
        await repository.fence(memory)  # no export makes one the head that is older
    _, safe = await _list_untouchable(repository, memory)
    back = safe.intersection(ids)
    for snapshot in back:
        manifest = manifests[snapshot]
        if isinstance(manifest, Manifest):
            await repository.keep(manifest)
    await repository.store.delete(keys.damage(snapshot) for snapshot in ids if snapshot not in back)
    return len(ids) - len(back)


async def _list_untouchable(repository: Repository, memory: str) -> tuple[str, set[str]]:
    """Return the head, and what must stay: it and the pinned snapshots. Raise ``StoreError`` if the head cannot be
    read."""
    state = await repository.head(memory)
    if state.problem:
        raise StoreError(f"Nothing is forgotten while the head of {memory} cannot be read: {state.problem}")
    return state.snapshot, {state.snapshot} | await repository.pinned(memory)
