"""``verify``: is everything still whole, and does it come back?"""

from __future__ import annotations

import argparse
import random
from dataclasses import asdict

from sidecar.cli.result import Result, Table, plural, size
from sidecar.engine import Engine
from sidecar.engine.drilling import choose_drills, drill
from sidecar.engine.looking import existing_snapshots
from sidecar.errors import UsageError
from sidecar.snapshots.verify import verify


async def run_verify(engine: Engine, args: argparse.Namespace) -> Result:
    """Read everything and compare; with ``--drill``, bring some snapshots back instead."""
    if args.memory:
        await existing_snapshots(engine.repository, args.memory)
    if args.drill:
        return await _drilled(engine, args)
    memories = [args.memory] if args.memory else await engine.repository.memories()
    reports = [await verify(engine.repository, memory, engine.progress) for memory in memories]
    ok = all(report.ok for report in reports)
    words: list[str | Table] = []
    for report in reports:
        bad = [row for row in report.snapshots if not row.ok]
        words.append(
            f"{report.memory}: {plural(len(report.snapshots), 'snapshot')}, {plural(report.objects, 'object')}, "
            f"{size(report.bytes)}: {'all whole' if report.ok else f'{len(bad)} damaged'}"
        )
        words += [f"  Head: {report.head_problem}"] if report.head_problem else []
        words += [f"  {row.snapshot}: {row.problem}" for row in bad]
    document = {"ok": ok, "memories": [asdict(report) for report in reports]}
    return Result(document, words or [f"There are no memories in {engine.repository.store.url}."], 0 if ok else 1)


async def _drilled(engine: Engine, args: argparse.Namespace) -> Result:
    if args.count < 1:
        raise UsageError("--count must be 1 or more.")
    chosen = await choose_drills(engine, args.memory or "", args.count, random.SystemRandom())
    done = [await drill(engine, memory, snapshot) for memory, snapshot in chosen]
    ok = all(one.ok for one in done)
    rows = [
        (
            "ok" if one.ok else "!!",
            one.memory,
            one.snapshot,
            f"{one.files:,}",
            size(one.bytes),
            one.problem or f"{plural(one.databases, 'database')} checked, {one.duration_ms} ms",
        )
        for one in done
    ]
    table = Table(("", "MEMORY", "SNAPSHOT", "FILES", "SIZE", "CAME BACK"), rows, "There is no snapshot to bring back.")
    return Result({"ok": ok, "drills": [asdict(one) for one in done]}, [table], 0 if ok else 1)
