"""Drills: restore snapshots into a scratch folder, to prove that they can be restored.

A restore hashes every file and checks every database before it puts anything in place, so a complete restore proves
that the snapshot is intact.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

from sidecar.engine.core import Engine
from sidecar.engine.restores.run import RestoreRequest
from sidecar.engine.restores.steps import restore
from sidecar.errors import SidecarError
from sidecar.host.files import open_spool
from sidecar.host.text import format_count
from sidecar.host.values import dataclass
from sidecar.receipts import RestoreOutcome, RestoreReceipt
from sidecar.store.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """The result of restoring one snapshot in a drill."""

    memory: str
    snapshot: str
    ok: bool
    files: int = 0
    bytes: int = 0
    databases: int = 0
    duration_ms: int = 0
    problem: str = ""


async def choose_drills(
    engine: Engine, memory: str, count: int, chance: random.Random, *, most_bytes: int | None = None
) -> list[tuple[str, str]]:
    """Choose up to ``count`` random snapshots of one memory, or of all memories if ``memory`` is empty, and return them
    as pairs of memory and snapshot id. With one memory, its head always comes first. Snapshots larger than
    ``most_bytes`` are left out. A head is included even if its manifest is missing: the drill then reports that."""
    repository = engine.repository
    memories = [memory] if memory else await repository.memories()
    heads = {name: (await repository.head(name)).snapshot for name in memories}
    found: list[tuple[str, str]] = []
    for name, head in heads.items():
        ids = await repository.list_snapshot_ids(name)
        found += [(name, snapshot) for snapshot in {*ids, head} - {""}]
    chance.shuffle(found)
    if memory:
        found.sort(key=lambda pair: pair[1] != heads[memory])
    chosen: list[tuple[str, str]] = []
    for name, snapshot in found:
        if len(chosen) == count:
            break
        manifest = (await repository.manifests(name, [snapshot])).get(snapshot)
        small = most_bytes is None or not isinstance(manifest, Manifest) or manifest.bytes <= most_bytes
        # A listed snapshot without a manifest was forgotten since, which is fine; a head without one is a problem to
        # report.
        if small and (manifest is not None or snapshot == (await repository.head(name)).snapshot):
            chosen.append((name, snapshot))
    return chosen


async def run_drill(engine: Engine, memory: str, snapshot: str) -> Drill:
    """Restore a snapshot into a scratch folder and compare the receipt with the manifest. Problems are returned in the
    ``Drill``, never raised."""
    began = time.monotonic()
    try:
        manifest = await engine.repository.manifest(memory, snapshot)
        async with open_spool() as scratch:
            home = scratch.new().resolve()
            home.mkdir()
            receipt = await restore(engine, engine.open_home(home), _build_request(manifest, home))
    except (SidecarError, OSError) as problem:
        return Drill(memory=memory, snapshot=snapshot, ok=False, problem=getattr(problem, "message", str(problem)))
    problem_found = _find_problem(manifest, receipt)
    return Drill(
        memory=memory,
        snapshot=snapshot,
        ok=not problem_found,
        files=receipt.files,
        bytes=receipt.bytes,
        databases=len(receipt.databases),
        duration_ms=round((time.monotonic() - began) * 1000),
        problem=problem_found,
    )


def _build_request(manifest: Manifest, home: Path) -> RestoreRequest:
    """Build a restore request that gives each project its own folder: the original paths may not exist here, or may be
    nested."""
    projects = [home / f"projects/{number}" for number in range(1, len(manifest.roots) + 1)]
    for project in projects:
        project.mkdir(parents=True)
    return RestoreRequest(
        memory=manifest.memory, snapshot=manifest.snapshot, projects=tuple(str(project) for project in projects)
    )


def _find_problem(manifest: Manifest, receipt: RestoreReceipt) -> str:
    """Return how the receipt differs from what the manifest promises, or an empty string."""
    if receipt.outcome is not RestoreOutcome.COMPLETE:
        return receipt.reason.message if receipt.reason else f"The restore is {receipt.outcome}."
    if receipt.wanted or receipt.snapshot != manifest.snapshot:
        return f"Another snapshot came instead: {receipt.snapshot}."
    if (receipt.files, receipt.bytes) != (manifest.files, manifest.bytes):
        return f"{format_count(receipt.files, 'file')} came back of {manifest.files:,}."
    bad = [f"{row.path}: {row.check}" for row in receipt.databases if row.check != "ok"]
    return f"SQLite says of {bad[0]}" if bad else ""
