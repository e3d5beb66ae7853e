"""Resolve which snapshot is meant: an id or part of it, a time, a conversation, a label, or the latest."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from sidecar.errors import BadReference, MemoryNotFound, SnapshotDamaged, SnapshotNotFound
from sidecar.store.manifest import Manifest
from sidecar.store.repository import Repository


async def resolve_snapshot(repository: Repository, memory: str, wanted: str) -> str:
    """Return the snapshot meant by an id (or an unambiguous part of one), ``latest``, ``latest~2``, ``@TIME``,
    ``conversation:ID`` or ``label:NAME``.

    Raise ``MemoryNotFound`` or ``SnapshotNotFound``, and ``BadReference`` if a time is not valid.
    """
    moment = parse_time(wanted[1:]) if wanted.startswith("@") else None
    ids = await repository.list_snapshot_ids(memory)
    if not ids:
        raise MemoryNotFound(f"There is no memory {memory!r} in {repository.store.url}.")
    if wanted in ids:
        return wanted
    if wanted in ("", "latest"):
        state = await repository.head(memory)
        if state.problem:
            raise SnapshotDamaged(state.problem)
        if not state.head:
            raise SnapshotNotFound(f"No snapshot of {memory} ever became its head.")
        return state.head.snapshot
    if back := _BACK.match(wanted):
        return await _step_back(repository, memory, int(back[1]), ids)
    for name in ("conversation", "label"):
        if wanted.startswith(f"{name}:"):
            return await _resolve_named(repository, memory, name, wanted.partition(":")[2], ids)
    if moment is not None:
        return await _resolve_time(repository, memory, moment, ids)
    found = [snapshot for snapshot in ids if snapshot.startswith(wanted) or snapshot.endswith(wanted)]
    if len(found) != 1 or len(wanted) < 4:
        many = (
            f"{len(found)} snapshots of {memory} match {wanted!r}."
            if found
            else f"{memory} has no snapshot {wanted!r}."
        )
        raise SnapshotNotFound(many)
    return found[0]


_BACK = re.compile(r"latest~(\d{1,6})\Z")


async def _step_back(repository: Repository, memory: str, steps: int, ids: list[str]) -> str:
    """Return what was the head so many heads ago, of those that are still there."""
    state = await repository.head(memory)
    if state.problem:
        raise SnapshotDamaged(state.problem)
    past = [snapshot for snapshot, _ in state.head.history] if state.head else []
    there = [snapshot for snapshot in dict.fromkeys(past) if snapshot in set(ids)]
    if steps >= len(there):
        raise SnapshotNotFound(
            f"{memory} has {len(there)} snapshots that were its head; latest~{steps} is none of them."
        )
    return there[steps]


async def _resolve_named(repository: Repository, memory: str, name: str, value: str, ids: list[str]) -> str:
    """Return the newest snapshot of a conversation or with a label that was the head; if none was, the newest."""
    manifests = await repository.manifests(memory, ids)
    found = [
        snapshot
        for snapshot in ids
        if isinstance(one := manifests.get(snapshot), Manifest) and value and getattr(one, name) == value
    ]
    if not found:
        raise SnapshotNotFound(f"{memory} has no snapshot with the {name} {value!r}.")
    head = (await repository.head(memory)).head or await repository.rebuild_head(memory)
    return next((snapshot for snapshot in found if head and head.was_head(snapshot)), found[0])


async def _resolve_time(repository: Repository, memory: str, moment: datetime, ids: list[str]) -> str:
    """Return what was the head at that time; without a readable head, the newest snapshot made by then."""
    head = (await repository.head(memory)).head
    past = [(datetime.fromisoformat(since), snapshot) for snapshot, since in head.history] if head else []
    if not head:
        manifests = (await repository.manifests(memory, ids)).items()
        past = [(found.time, snapshot) for snapshot, found in manifests if isinstance(found, Manifest)]
    for since, snapshot in past:
        if since <= moment and snapshot in ids:
            return snapshot
    raise SnapshotNotFound(f"{memory} has no snapshot from {moment.isoformat()} or before.")


def parse_time(text: str) -> datetime:
    """Parse an ISO time; without a zone it is UTC. Raise ``BadReference`` if it is not valid."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise BadReference(f"{text!r} is not a time.", hint="Write it like @2026-11-16T10:00Z.") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
