"""``doctor``: is everything ready, and if not, what to do."""

from __future__ import annotations

import argparse
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

from sidecar.cli.layouts import seen, seen_document
from sidecar.cli.result import Result, Table, plural, size
from sidecar.engine import Engine
from sidecar.engine.identity import SHOULD_IT
from sidecar.engine.inspecting import SeenRoot, look, nearly_too_much
from sidecar.errors import SidecarError
from sidecar.wiring import open_sandbox

LOOK = 'echo "home $HOME"; echo "user $(id -un)"; command -v python3 || echo "no python3"'


async def run_doctor(engine: Engine, args: argparse.Namespace) -> Result:
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
        return f"{folder}, {size(shutil.disk_usage(folder).free)} free"

    async def writable() -> str:
        await engine.repository.store.prepare()
        warnings.extend(await engine.repository.store.warnings())
        return f"{engine.repository.store.url} can be written, and honours conditional writes"

    async def readable() -> str:
        count = len(await engine.repository.memories())
        if count == 0:
            return f"none: an export begins a new store at {engine.repository.store.url}. {SHOULD_IT}"
        return "1 memory" if count == 1 else f"{count} memories"

    async def searched() -> str:
        assert engine.index is not None
        behind = await engine.index.behind()
        return f"Postgres answers; behind: {', '.join(behind)}" if behind else "Postgres answers, and is up to date"

    async def sandbox() -> str:
        box = open_sandbox(args.sandbox, local=engine.local)
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
        box = open_sandbox(args.sandbox, local=engine.local)
        try:
            roots.extend(await look(engine, box, args.layout, args.project))
        finally:
            await box.close()
        files, bytes = (sum(getattr(root.total, name) for root in roots) for name in ("files", "bytes"))
        return f"{plural(files, 'file')}, {size(bytes)}, in {', '.join(root.name for root in roots) or 'no layout'}"

    await check("python", python)
    await check("temporary folder", spool)
    await check("store", writable)
    await check("memories", readable)
    if engine.index is not None:
        await check("search", searched)
    if args.sandbox:
        await check("sandbox", sandbox)
        if checks[-1]["ok"]:
            await check("memory there", memory)
    ok = all(row["ok"] for row in checks)
    table = Table(("", "CHECK", "FOUND"), [("ok" if row["ok"] else "!!", row["name"], row["detail"]) for row in checks])
    hints = [row["hint"] for row in checks if row["hint"]]
    near = nearly_too_much(roots, engine.limits)
    document = {
        "ok": ok,
        "store": engine.repository.store.url,
        "checks": checks,
        "warnings": warnings,
        "roots": seen_document(roots),
        "near_limits": near,
    }
    hints += [f"Warning: {warning}" for warning in warnings]
    return Result(document, [table, *hints, *(["", *seen(roots), *near] if args.sandbox else [])], 0 if ok else 1)
