"""A limit below what a memory cannot do without refuses every export of it: that is found when a service starts."""

from __future__ import annotations

import asyncio

from sidecar.errors import BadConfig, ObjectRefused
from sidecar.ids import ROOT
from sidecar.inside.rules import compiled
from sidecar.limits import Limits
from sidecar.repository import PARALLEL_READS, Repository
from sidecar.sections import shown
from sidecar.snapshots.sealed import unseal

MOST_HEADS = 2000
"""So many heads are looked at: a start should not take minutes. A limit that is too low for others shows at their export."""


async def check_hot(repository: Repository, limits: Limits) -> None:
    """Compare ``limits.bytes`` of each memory with what its head records as hot. Raise ``BadConfig`` naming the setting."""
    lowest = min([limits.bytes, *(table.get("bytes", limits.bytes) for table in limits.memories.values())])
    if lowest >= Limits().bytes:
        return
    keys: list[str] = []
    async for info in repository.store.list(ROOT):
        if info.key.endswith("/head.json") and len(keys) < MOST_HEADS:
            keys.append(info.key)
    turns = asyncio.Semaphore(PARALLEL_READS)

    async def hot(key: str) -> tuple[str, int]:
        async with turns:
            try:
                stored = await repository.store.get(key)
            except ObjectRefused:
                stored = None
        try:
            head = unseal(stored.data) if stored else {}
        except ValueError:  # a damaged head is somebody else's matter
            head = {}
        return str(head.get("memory", "")), int(head.get("hot_bytes", 0))

    for memory, size in await asyncio.gather(*map(hot, keys)):
        allowed = limits.of(memory).bytes
        if size > allowed:
            at = _setting(limits, memory)
            raise BadConfig(
                f"{shown(at)} is {allowed:,}, below the hot tier of {memory!r}, which has {size:,} bytes and is never left"
                " out: every export of it would be refused.",
                hint=f"Set it to {size} or more, or set another limit in [limits.memories] for this memory.",
                at=at,
            )


def _setting(limits: Limits, memory: str) -> tuple[str, ...]:
    """Where the limit of a memory is set."""
    for pattern, table in limits.memories.items():
        if compiled([pattern]).match(memory):
            return ("limits", "memories", pattern, "bytes") if "bytes" in table else ("limits", "bytes")
    return ("limits", "bytes")
