"""``doctor`` and ``verify``: check that everything is ready and every snapshot intact, and say what to do if not."""

from __future__ import annotations

import argparse
import random
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from sidecar.cli.layouts import build_roots_document, describe_roots
from sidecar.cli.result import Result, Table, format_size
from sidecar.engine import Engine
from sidecar.engine.diagnosis import count_unencrypted_snapshots, inspect_heads
from sidecar.engine.queries import list_existing_ids
from sidecar.engine.sandbox.identity import SHOULD_IT
from sidecar.engine.sandbox.inspection import describe_near_totals, inspect_sandbox, sum_tiers
from sidecar.errors import SandboxError, SidecarError, SnapshotDamaged, StoreError, UsageError
from sidecar.format.protocol import SeenRoot
from sidecar.host.text import format_count
from sidecar.store.encryption.check import check_keys, check_memory, check_store
from sidecar.store.encryption.encrypted_store import find_encryption
from sidecar.store.encryption.signed_store import SignedStore
from sidecar.store.verification import MemoryReport, verify_memory

MOST_NAMED = 5
LOOK = 'echo "home $HOME"; echo "user $(id -un)"; command -v python3 || echo "no python3"'


class StoredUnencrypted(StoreError):
    """Keys are set, and some snapshots are still stored unencrypted."""

    code = "stored-in-the-clear"
    default_hint = "`memory-sidecar rekey` encrypts them; the readable packs go once their grace period is over."


class NoMemoryFound(SandboxError):
    """The sandbox holds no memory of any layout."""

    code = "no-memory"
    default_hint = "`memory-sidecar layouts` shows where memory is looked for; --project names a project."


async def run_doctor(engine: Engine, args: argparse.Namespace) -> Result:
    """Run all checks and report them. The exit code is 1 if one failed."""
    checks: list[dict[str, Any]] = []
    roots: list[SeenRoot] = []
    warnings: list[str] = []

    async def check(name: str, look: Callable[[], Awaitable[str]]) -> None:
        try:
            checks.append({"name": name, "ok": True, "detail": await look(), "hint": ""})
        except SidecarError as problem:
            checks.append(
                {"name": name, "ok": False, "detail": problem.message, "hint": problem.hint, "code": problem.code}
            )

    async def python() -> str:
        return f"Python {sys.version.split()[0]}, SQLite {sqlite3.sqlite_version}"

    async def spool() -> str:
        folder = tempfile.gettempdir()
        return f"{folder}, {format_size(shutil.disk_usage(folder).free)} free"

    async def writable() -> str:
        store = engine.repository.store
        await (store.probe() if isinstance(store, SignedStore) else store.prepare())
        warnings.extend(await store.warnings())
        return f"{store.url} can be written, and {await store.safety()}"

    async def readable() -> str:
        count = len(await engine.repository.memories())
        if count == 0:
            return f"none: an export begins a new store at {engine.repository.store.url}. {SHOULD_IT}"
        return "1 memory" if count == 1 else f"{count} memories"

    async def heads() -> str:
        found = await inspect_heads(engine.repository)
        if not (damaged := found.damaged):
            unread = (
                f"; {format_count(found.unread, 'large one')} only listed, which `verify` reads" if found.unread else ""
            )
            return f"every head can be restored{unread}"
        why = "; ".join(f"{one.memory}: {one.why}" for one in damaged[:MOST_NAMED])
        more = f"; and {len(damaged) - MOST_NAMED} more" if len(damaged) > MOST_NAMED else ""
        cures = " ".join(one.cure for one in damaged[:MOST_NAMED])
        raise SnapshotDamaged(f"{format_count(len(damaged), 'head')} cannot be restored. {why}{more}", hint=cures)

    async def encrypted() -> str:
        if not (readable := await count_unencrypted_snapshots(engine.repository)):
            return "every snapshot is encrypted"
        named = ", ".join(f"{format_count(count, 'snapshot')} of {memory}" for memory, count in readable.items())
        raise StoredUnencrypted(
            f"Stored before there was a key, and still readable by whoever reads the store: {named}."
        )

    async def searched() -> str:
        assert engine.index is not None
        behind = await engine.index.behind()
        if engine.index.embedded:
            return f"on this machine; {len(behind):,} of the memories are read by the next search"
        return f"Postgres answers; behind: {', '.join(behind)}" if behind else "Postgres answers, and is up to date"

    async def sandbox() -> str:
        box = engine.open_sandbox(args.sandbox, user=args.user, local=engine.local)
        try:
            presence = await box.connect()
            finished = await box.run(LOOK, timeout=60, output_limit=1 << 16)
            found = finished.output.decode("utf-8", "replace").strip().replace("\n", ", ")
            if presence.ends_at is None:
                return found
            return f"{found}, ends in {max(0, presence.ends_at - time.time()) / 60:.0f} minutes unless prolonged"
        finally:
            await box.close()

    async def memory() -> str:
        box = engine.open_sandbox(args.sandbox, user=args.user, local=engine.local)
        try:
            roots.extend(await inspect_sandbox(engine, box, args.layout, args.project))
        finally:
            await box.close()
        if not any(sum_tiers(root).files for root in roots):
            raise NoMemoryFound(f"{args.sandbox} has no memory of any layout.", hint=_suggest_cure(args))
        files, bytes = (sum(getattr(sum_tiers(root), name) for root in roots) for name in ("files", "bytes"))
        names = ", ".join(root.name for root in roots) or "no layout"
        return f"{format_count(files, 'file')}, {format_size(bytes)}, in {names}"

    await check("python", python)
    await check("temporary folder", spool)
    await check("store", writable)
    if checks[-1]["ok"]:
        await check("memories", readable)
        await check("heads", heads)
        if _has_encryption(engine):
            await check("encryption", encrypted)
    if engine.index is not None and (not engine.index.embedded or (checks[-1]["ok"] and await engine.index.is_begun())):
        await check("search", searched)
    if args.sandbox:
        await check("sandbox", sandbox)
        if checks[-1]["ok"]:
            await check("memory there", memory)
    ok = all(row["ok"] for row in checks)
    table = Table(("", "CHECK", "FOUND"), [("ok" if row["ok"] else "!!", row["name"], row["detail"]) for row in checks])
    hints = [*dict.fromkeys(row["hint"] for row in checks if row["hint"])]
    near = describe_near_totals(roots, engine.limits)
    document = {
        "ok": ok,
        "store": engine.repository.store.url,
        "checks": checks,
        "warnings": warnings,
        "roots": build_roots_document(roots),
        "near_limits": near,
    }
    hints += [f"Warning: {warning}" for warning in warnings]
    return Result(document, [table, *hints, *(["", *describe_roots(roots), *near] if roots else [])], 0 if ok else 1)


def _has_encryption(engine: Engine) -> bool:
    return find_encryption(engine.repository.store) is not None


def _suggest_cure(args: argparse.Namespace) -> str:
    new = f"If it is new, restore into it: memory-sidecar restore MEMORY --sandbox {args.sandbox}"
    if args.project is None:
        return f"If its memory is in a project's folder, name that: --project PATH. {new}"
    return f"Check the folders named with --project. {new}"


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
    from sidecar.engine.drills import choose_drills, run_drill  # late: most of the time only objects are read

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
