"""The commands that look into a store, or change it without a sandbox."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from sidecar.cli.result import Result, Table, plural, size, when
from sidecar.engine import Engine
from sidecar.engine.heads import fork, rollback
from sidecar.errors import MemoryNotFound, SnapshotDamaged, UsageError
from sidecar.ids import check_memory_id
from sidecar.inside.index import Entry
from sidecar.repository import HeadState
from sidecar.snapshots.collect import GRACE_SECONDS, collect
from sidecar.snapshots.fetch import fetch_entries
from sidecar.snapshots.manifest import Manifest
from sidecar.snapshots.verify import verify
from sidecar.spool import spool


async def run_list(engine: Engine, args: argparse.Namespace) -> Result:
    rows: list[dict[str, Any]] = []
    for memory in await engine.repository.memories():
        state = await engine.repository.head(memory)
        row: dict[str, Any] = {
            "memory": memory,
            "head": state.snapshot or None,
            "snapshots": 0,
            "created": None,
            "files": 0,
            "bytes": 0,
        }
        row["snapshots"] = len(await engine.repository.snapshot_ids(memory))
        if state.head:
            row.update(created=state.head.created, files=state.head.files, bytes=state.head.bytes)
        if state.problem:
            row["problem"] = state.problem
        rows.append(row)
    table = Table(
        ("MEMORY", "HEAD", "CREATED (UTC)", "SNAPSHOTS", "FILES", "SIZE"),
        [
            (
                row["memory"],
                row["head"] or ("damaged" if "problem" in row else "none"),
                when(row["created"]) if row["created"] else "",
                str(row["snapshots"]),
                f"{row['files']:,}",
                size(row["bytes"]),
            )
            for row in rows
        ],
        f"There are no memories in {engine.repository.store.url}.",
    )
    return Result({"store": engine.repository.store.url, "memories": rows}, [table])


async def run_log(engine: Engine, args: argparse.Namespace) -> Result:
    repository = engine.repository
    ids = await _ids(engine, args.memory)
    state = await repository.head(args.memory)
    manifests = await repository.manifests(args.memory, ids)
    rows = [_log_row(snapshot, manifests[snapshot], state) for snapshot in ids if snapshot in manifests]
    table = Table(
        ("SNAPSHOT", "CREATED (UTC)", "STANDING", "FILES", "SIZE", "PACKS", "LABEL"),
        [
            (
                row["snapshot"],
                when(row["created"]) if row["created"] else "",
                row["standing"],
                f"{row['files']:,}",
                size(row["bytes"]),
                str(row["packs"]),
                row["label"] or row["problem"] or row["rejected"],
            )
            for row in rows
        ],
    )
    words: list[str | Table] = [f"The head cannot be read: {state.problem}"] if state.problem else []
    return Result({"memory": args.memory, "head": state.snapshot or None, "snapshots": rows}, [*words, table])


def _log_row(snapshot: str, manifest: Manifest | SnapshotDamaged, state: HeadState) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(
        ("created", "parent", "label", "conversation", "sandbox", "origin", "rejected", "problem"), ""
    )
    row = {
        "snapshot": snapshot,
        "standing": standing(snapshot, manifest, state),
        "files": 0,
        "bytes": 0,
        "packs": 0,
        **row,
    }
    if isinstance(manifest, SnapshotDamaged):
        row["problem"] = manifest.message
        return row
    for name in ("created", "parent", "label", "conversation", "sandbox", "origin", "rejected", "files", "bytes"):
        row[name] = getattr(manifest, name)
    row["packs"] = len(manifest.packs)
    return row


def standing(snapshot: str, manifest: Manifest | SnapshotDamaged, state: HeadState) -> str:
    """How a snapshot relates to the head: it is it, was it, or stands beside it."""
    if isinstance(manifest, SnapshotDamaged):
        return "damaged"
    if snapshot == state.snapshot:
        return "head"
    if state.head and state.head.was(snapshot):
        return "earlier head"
    return "rejected" if manifest.rejected else "diverged"


async def run_show(engine: Engine, args: argparse.Namespace) -> Result:
    manifest, entries = await _entries(engine, args.memory, args.snapshot)
    state = await engine.repository.head(args.memory)
    files = [_entry_row(entries[path]) for path in sorted(entries)]
    place = standing(manifest.snapshot, manifest, state)
    words: list[str | Table] = [
        f"{manifest.memory} {manifest.snapshot} ({place})",
        f"Made {when(manifest.created)} UTC from {manifest.sandbox or manifest.origin}",
        f"{plural(manifest.files, 'file')}, {size(manifest.bytes)}",
        f"{plural(len(manifest.packs), 'pack')}, {size(manifest.packed_bytes)}",
        *(
            f"{name}: {value}"
            for name, value in (("Label", manifest.label), ("Conversation", manifest.conversation))
            if value
        ),
        *([f"Rejected: {manifest.rejected}"] if manifest.rejected else []),
        Table(
            ("MODE", "SIZE", "PATH"),
            [
                (f"{row['mode']:o}" if row["type"] != "link" else "link", size(row["size"]), _shown(row))
                for row in files
            ],
        ),
    ]
    return Result({**asdict(manifest), "standing": place, "entries": files}, words)


def _entry_row(entry: Entry) -> dict[str, Any]:
    row = entry._asdict()
    del row["sums"]
    return row


def _shown(row: dict[str, Any]) -> str:
    suffix = {"dir": "/", "link": f" -> {row['target']}"}.get(row["type"], "")
    return f"{row['path']}{suffix}"


async def run_diff(engine: Engine, args: argparse.Namespace) -> Result:
    new, new_entries = await _entries(engine, args.memory, args.new)
    if not args.old and not new.parent:
        raise UsageError(
            f"{new.snapshot} has no parent to compare it with.", hint="Name two snapshots: diff MEMORY A B."
        )
    old, old_entries = await _entries(engine, args.memory, args.old or new.parent)
    added = [path for path in sorted(new_entries) if path not in old_entries]
    removed = [path for path in sorted(old_entries) if path not in new_entries]
    changed = [
        path
        for path in sorted(new_entries)
        if path in old_entries and _contents(new_entries[path]) != _contents(old_entries[path])
    ]
    document = {
        "memory": args.memory,
        "from": old.snapshot,
        "to": new.snapshot,
        "added": [{"path": path, "size": new_entries[path].size} for path in added],
        "removed": [{"path": path, "size": old_entries[path].size} for path in removed],
        "changed": [
            {"path": path, "old_size": old_entries[path].size, "new_size": new_entries[path].size} for path in changed
        ],
    }
    rows = (
        [("+", size(new_entries[path].size), path) for path in added]
        + [("-", size(old_entries[path].size), path) for path in removed]
        + [("~", f"{size(old_entries[path].size)} → {size(new_entries[path].size)}", path) for path in changed]
    )
    return Result(document, [f"{old.snapshot} → {new.snapshot}", Table(("", "SIZE", "PATH"), rows, "No difference.")])


def _contents(entry: Entry) -> tuple[object, ...]:
    return entry.type, entry.mode, entry.size, entry.digest, entry.target


async def run_fork(engine: Engine, args: argparse.Namespace) -> Result:
    manifest = await fork(engine.repository, args.memory, args.new, args.snapshot)
    document = {"memory": args.new, "snapshot": manifest.snapshot, "from": args.memory, "origin": manifest.origin}
    return Result(document, [f"{args.new}: {manifest.snapshot}, a {manifest.origin}."])


async def run_rollback(engine: Engine, args: argparse.Namespace) -> Result:
    head, before = await rollback(engine.repository, args.memory, args.snapshot)
    document = {"memory": args.memory, "head": head.snapshot, "previous": before or None}
    return Result(
        document,
        [f"{args.memory}: the head is {head.snapshot} now; it was {before or 'unreadable'}. Nothing was removed."],
    )


async def run_verify(engine: Engine, args: argparse.Namespace) -> Result:
    if args.memory:
        await _ids(engine, args.memory)
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


async def run_forget(engine: Engine, args: argparse.Namespace) -> Result:
    if args.memory:
        await _ids(engine, args.memory)
    memories = [args.memory] if args.memory else await engine.repository.memories()
    grace = GRACE_SECONDS if args.grace is None else args.grace
    rows = []
    for memory in memories:
        collected = await collect(engine.repository, memory, grace=grace, dry_run=args.dry_run)
        rows.append({"memory": memory, **asdict(collected)})
    verb = "would go" if args.dry_run else "removed"
    words: list[str | Table] = [
        f"{row['memory']}: {plural(row['objects'], 'leftover')} {verb}, {size(row['bytes'])}." for row in rows
    ]
    return Result({"dry_run": args.dry_run, "memories": rows}, words)


async def run_delete(engine: Engine, args: argparse.Namespace) -> Result:
    check_memory_id(args.memory)
    if not args.yes:
        raise UsageError(
            f"This removes every snapshot of {args.memory} for good.", hint="Say --yes if that is what you want."
        )
    if not await engine.repository.exists(args.memory):
        raise MemoryNotFound(f"There is no memory {args.memory!r} in {engine.repository.store.url}.")
    removed = await engine.repository.delete_memory(args.memory)
    return Result(
        {"memory": args.memory, "removed": removed},
        [f"{args.memory}: every byte removed ({plural(removed, 'object')})."],
    )


async def _ids(engine: Engine, memory: str) -> list[str]:
    ids = await engine.repository.snapshot_ids(check_memory_id(memory))
    if not ids:
        raise MemoryNotFound(f"There is no memory {memory!r} in {engine.repository.store.url}.")
    return ids


async def _entries(engine: Engine, memory: str, wanted: str) -> tuple[Manifest, dict[str, Entry]]:
    repository = engine.repository
    manifest = await repository.manifest(memory, await repository.resolve(check_memory_id(memory), wanted))
    async with spool() as scratch:
        entries, _, _ = await fetch_entries(repository.store, manifest, scratch)
    return manifest, entries
