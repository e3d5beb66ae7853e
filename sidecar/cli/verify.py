"""``verify``: check that every snapshot is intact or, with ``--drill``, can be restored."""

from __future__ import annotations

import argparse
import random
from dataclasses import asdict

from sidecar.cli.result import Result, Table, format_size
from sidecar.engine import Engine
from sidecar.engine.drills import choose_drills, run_drill
from sidecar.engine.queries import list_existing_ids
from sidecar.errors import UsageError
from sidecar.host.text import format_count
from sidecar.store.encryption.check import check_keys, check_memory, check_store
from sidecar.store.verification import MemoryReport, verify_memory


async def run_verify(engine: Engine, args: argparse.Namespace) -> Result:
    """Read everything and compare hashes; with ``--drill``, restore some snapshots into a scratch folder instead."""
    if args.memory and (await engine.repository.head(args.memory)).version is None:
        await list_existing_ids(engine.repository, args.memory)
    if args.drill:
        return await _run_drills(engine, args)
    memories = [args.memory] if args.memory else await engine.repository.memories()
    reports = [await verify_memory(engine.repository, memory, engine.progress) for memory in memories]
    beside = {report.memory: await check_memory(engine.repository, report.memory) for report in reports}
    problems = await check_keys(engine.repository)
    problems += await check_store(engine.repository) if not args.memory else []
    ok = all(report.ok and not beside[report.memory] for report in reports) and not problems
    words: list[str | Table] = []
    for report in reports:
        bad = [row for row in report.snapshots if not row.ok]
        words.append(
            f"{report.memory}: {format_count(len(report.snapshots), 'snapshot')}, {format_count(report.objects, 'object')}, "
            f"{format_size(report.bytes)}: {_describe_verdict(report, beside[report.memory])}"
        )
        words += [f"  Head: {report.head_problem}"] if report.head_problem else []
        words += [f"  Cure: {report.cure}"] if report.cure else []
        words += [f"  {row.snapshot}: {row.problem}" for row in bad]
        words += [f"  {problem}" for problem in beside[report.memory]]
    words = [*(words or [f"There are no memories in {engine.repository.store.url}."]), *problems]
    rows = [
        {**asdict(report), "ok": report.ok and not beside[report.memory], "problems": beside[report.memory]}
        for report in reports
    ]
    return Result({"ok": ok, "memories": rows, "problems": problems}, words, 0 if ok else 1)


def _describe_verdict(report: MemoryReport, beside: list[str]) -> str:
    if report.ok:
        return f"snapshots whole, {format_count(len(beside), 'other problem')}" if beside else "all whole"
    return f"{report.damaged:,} damaged" if report.damaged else "snapshots whole, a problem with the head"


async def _run_drills(engine: Engine, args: argparse.Namespace) -> Result:
    if args.count < 1:
        raise UsageError("--count must be 1 or more.")
    chosen = await choose_drills(engine, args.memory or "", args.count, random.SystemRandom())
    done = [await run_drill(engine, memory, snapshot) for memory, snapshot in chosen]
    ok = all(one.ok for one in done)
    rows = [
        (
            "ok" if one.ok else "!!",
            one.memory,
            one.snapshot,
            f"{one.files:,}",
            format_size(one.bytes),
            one.problem or f"{format_count(one.databases, 'database')} checked, {one.duration_ms} ms",
        )
        for one in done
    ]
    table = Table(("", "MEMORY", "SNAPSHOT", "FILES", "SIZE", "CAME BACK"), rows, "There is no snapshot to bring back.")
    return Result({"ok": ok, "drills": [asdict(one) for one in done]}, [table], 0 if ok else 1)
