"""Resolve which snapshot is meant: an id or part of it, a time, or the latest."""

from __future__ import annotations

from datetime import UTC, datetime

from sidecar.errors import BadReference, MemoryNotFound, SnapshotDamaged, SnapshotNotFound
from sidecar.store.manifest import Manifest
from sidecar.store.repository import Repository


async def resolve_snapshot(repository: Repository, memory: str, wanted: str) -> str:
    """Return the snapshot meant by an id (or an unambiguous part of one), ``latest`` or ``@TIME``.

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
