"""Choose the snapshot to restore: the requested one or, if the head cannot be read, the newest one that can."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from sidecar.engine.sandbox.links import NotDirect
from sidecar.errors import SnapshotDamaged, SnapshotError, StoreError
from sidecar.host.files import Spool
from sidecar.host.values import dataclass
from sidecar.store.fetch import FetchedSnapshot, fetch
from sidecar.store.manifest import Head, Manifest
from sidecar.store.repository import HeadState, Repository, Survey
from sidecar.store.reviews import read_reviews_or_none
from sidecar.store.selectors import parse_time, resolve_snapshot

LATEST = "latest"


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen snapshot, fetched. ``wanted`` and ``problems`` are set if it is not the requested one."""

    fetched: FetchedSnapshot
    survey: Survey
    """What the memory has."""
    warnings: list[str]
    wanted: str = ""
    problems: str = ""
    """What is wrong with the requested snapshot."""
    keep: tuple[str, ...] = ()
    """A sandbox that has one of these needs no restore: the latest snapshot, and the one chosen instead if that cannot
    be read."""
    head: Head | None = None
    """The memory's head, if ``latest`` or a time was requested and it can be read."""
    store: str = ""
    """The store's id, if it has one."""


async def choose_snapshot(repository: Repository, memory: str, wanted: str, scratch: Spool) -> Choice | None:
    """Fetch the requested snapshot completely to this machine; if the head cannot be read, the newest one that can.

    Return ``None`` if the memory has no snapshot yet. Raise a ``SnapshotError`` if none can be read, ``BadReference``
    if the requested time is not a time.
    """
    if wanted.startswith("@"):
        parse_time(wanted[1:])  # an invalid time is an error even if there is no snapshot yet
    state, survey = await repository.open(memory)
    if wanted != LATEST and not wanted.startswith("@"):
        manifest = await repository.manifest(memory, await resolve_snapshot(repository, memory, wanted))
        identity = await repository.add_store_id(HeadState())
        fetched = await fetch(repository.store, manifest, scratch, repository.recall_by(survey))
        return Choice(fetched, survey, [], store=identity.store_id)
    state = await repository.add_store_id(state)
    if (
        state.head is None
        and not state.problem
        and not await repository.has_eligible(memory, await repository.list_snapshot_ids(memory))
    ):
        return None
    first = await resolve_snapshot(repository, memory, wanted) if wanted != LATEST else state.snapshot
    past = [name for name, _ in state.head.history] if state.head else []
    accepted = {} if state.head else (await read_reviews_or_none(repository.store, memory, survey.sizes)).accepted
    problems = [] if state.head else [state.problem or "The head is missing."]
    async for snapshot in _iterate_candidates(repository, memory, first):
        try:
            manifest = await repository.manifest(memory, snapshot, survey)
            if not manifest.is_eligible and snapshot not in (first, *past, *accepted):
                continue
            fetched = await fetch(repository.store, manifest, scratch, repository.recall_by(survey))
        except SnapshotError as damage:
            problems.append(damage.message)
            await _mark_damaged(repository, memory, snapshot, damage)
            continue
        noticed = [state.notice] if state.notice else []
        keep = tuple(filter(None, [state.snapshot, snapshot])) if wanted == LATEST else ()
        if not problems:
            return Choice(fetched, survey, noticed, keep=keep, head=state.head, store=state.store_id)
        told = " ".join(dict.fromkeys(problems))
        return Choice(fetched, survey, noticed, first or "head", told, keep, state.head, state.store_id)
    raise SnapshotDamaged(f"No snapshot of {memory} can be read: {' '.join(dict.fromkeys(problems))}")


async def _iterate_candidates(repository: Repository, memory: str, first: str) -> AsyncIterator[str]:
    """Yield what to restore, the ``first`` first. The others are only looked for when it cannot be read."""
    if first:
        yield first
    others = [snapshot async for snapshot in repository.iterate_candidates(memory)]
    start = others.index(first) if first in others else 0
    for snapshot in others[start:] + others[:start]:
        if snapshot != first:
            yield snapshot


async def _mark_damaged(repository: Repository, memory: str, snapshot: str, damage: SnapshotError) -> None:
    """Record the damage for later exports. Errors are ignored: a read-only store must not prevent a restore."""
    with contextlib.suppress(StoreError):
        await repository.mark_damaged(memory, snapshot, damage)


async def choose_manifest(repository: Repository, memory: str, wanted: str) -> tuple[Manifest, HeadState, Survey]:
    """Return the manifest of the requested snapshot, the head, if it was read, with the store's id, and what the memory
    has. Raise ``NotDirect`` if anything is unusual, so that the restore goes through the sidecar, which handles such
    cases."""
    try:
        state, survey = await repository.open(memory)
        if wanted != LATEST:
            manifest = await repository.manifest(memory, await resolve_snapshot(repository, memory, wanted))
            return manifest, await repository.add_store_id(HeadState()), survey
        state = await repository.add_store_id(state)
        if state.head is None or state.notice:
            raise NotDirect
        return await repository.manifest(memory, state.snapshot, survey), state, survey
    except SnapshotError:
        raise NotDirect from None
