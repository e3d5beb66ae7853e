"""The commands that read a store, or change it without a sandbox."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from sidecar.cli.records import describe_counts
from sidecar.cli.result import Result, Table, format_size, format_time
from sidecar.engine import Engine
from sidecar.engine.heads import accept, fork, rollback
from sidecar.engine.queries import (
    EntryRow,
    SnapshotRow,
    build_not_found_error,
    list_memories,
    list_snapshots,
    read_contents,
)
from sidecar.errors import UsageError
from sidecar.host.text import format_count
from sidecar.ids import check_memory_id, escape_id
from sidecar.store.manifest import count_scrubbed, describe_trimmed


async def run_list(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``list``: the memories of the store."""
    rows = await list_memories(engine.repository)
    table = Table(
        ("MEMORY", "HEAD", "CREATED (UTC)", "SNAPSHOTS", "FILES", "SIZE", "STORED"),
        [
            (
                escape_id(row.memory),
                row.head or ("damaged" if row.problem else "none"),
                format_time(row.created) if row.created else "",
                str(row.snapshots),
                f"{row.files:,}",
                format_size(row.bytes),
                format_size(row.stored_bytes),
            )
            for row in rows
        ],
        f"There are no memories in {engine.repository.store.url}.",
    )
    return Result({"store": engine.repository.store.url, "memories": [asdict(row) for row in rows]}, [table])


async def run_log(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``log``: the snapshots of a memory."""
    state, rows = await list_snapshots(engine.repository, args.memory)
    table = Table(
        (
            *("SNAPSHOT", "CREATED (UTC)", "STANDING", "FILES", "SIZE", "STORED", "PACKS"),
            *("CONVERSATION", "SANDBOX", "WHAT CHANGED", "LABEL"),
        ),
        [
            (
                row.snapshot,
                format_time(row.created) if row.created else "",
                _describe_standing(row, state.snapshot),
                f"{row.files:,}",
                format_size(row.bytes),
                format_size(row.stored_bytes),
                str(row.packs),
                row.conversation,
                row.sandbox,
                describe_counts(row.changes) if row.standing != "damaged" else "",
                " ".join(
                    filter(
                        None,
                        [
                            row.problem or row.label or _describe_objection(row),
                            _describe_pin(row),
                            _describe_scrubbed(row),
                        ],
                    )
                ),
            )
            for row in rows
        ],
    )
    words: list[str | Table] = []
    if state.problem:
        words = [f"{state.problem} `memory-sidecar verify {args.memory}` says what to do."]
    document = {
        "memory": args.memory,
        "head": state.snapshot or None,
        "problem": state.problem,
        "snapshots": [asdict(row) for row in rows],
    }
    return Result(document, [*words, table])


def _describe_standing(row: SnapshotRow, head: str) -> str:
    was = ["head"] if row.standing == "damaged" and row.snapshot == head else []
    return ", ".join([*was, row.standing, *(["pinned"] if row.pinned else [])])


def _describe_pin(row: SnapshotRow) -> str:
    return f"({row.pinned_because})" if row.pinned_because else ""


def _describe_objection(row: SnapshotRow) -> str:
    """Return why a snapshot was rejected; empty for one that became the head anyway."""
    return row.rejected if row.standing == "rejected" else ""


def _describe_scrubbed(row: SnapshotRow) -> str:
    return f"({row.scrubbed:,} private passages or credentials taken out)" if row.scrubbed else ""


async def run_show(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``show``: a snapshot and its entries."""
    contents = await read_contents(engine.repository, args.memory, args.snapshot)
    manifest = contents.manifest
    words: list[str | Table] = [
        f"{manifest.memory} {manifest.snapshot} ({_describe_standing(contents.row, contents.head)})",
        f"Made {format_time(manifest.created)} UTC from {manifest.sandbox or manifest.origin}",
        f"{format_count(manifest.files, 'file')}, {format_size(manifest.bytes)}",
        f"{format_count(len(manifest.packs), 'pack')}, {format_size(manifest.packed_bytes)}",
        *(
            f"{name}: {value}"
            for name, value in (("Label", manifest.label), ("Conversation", manifest.conversation))
            if value
        ),
        *([f"Damaged: {contents.row.problem}"] if contents.row.problem else []),
        *([f"Rejected: {objection}"] if (objection := _describe_objection(contents.row)) else []),
        *([f"Pinned because {contents.row.pinned_because}"] if contents.row.pinned_because else []),
        *([trimmed] if (trimmed := describe_trimmed(manifest)) else []),
        *([scrubbed] if (scrubbed := count_scrubbed(manifest).words) else []),
        Table(
            ("MODE", "SIZE", "PATH"),
            [
                (f"{row.mode:o}" if row.type != "link" else "link", format_size(row.size), _format_path(row))
                for row in contents.entries
            ],
        ),
    ]
    entries = [asdict(row) for row in contents.entries]
    own = ("standing", "problem", "pinned", "pinned_because")
    standing = {name: getattr(contents.row, name) for name in own}
    return Result({**asdict(manifest), **standing, "entries": entries}, words)


def _format_path(row: EntryRow) -> str:
    suffix = {"dir": "/", "link": f" -> {row.target}"}.get(row.type, "")
    return f"{row.path}{suffix}"


async def run_fork(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``fork``."""
    manifest = await fork(engine.repository, args.memory, args.new, args.snapshot)
    document = {"memory": args.new, "snapshot": manifest.snapshot, "from": args.memory, "origin": manifest.origin}
    return Result(document, [f"{args.new}: {manifest.snapshot}, a {manifest.origin}."])


async def run_rollback(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``rollback``."""
    head, before = await rollback(engine.repository, args.memory, args.snapshot)
    document = {"memory": args.memory, "head": head.snapshot, "previous": before or None}
    return Result(
        document,
        [f"{args.memory}: the head is {head.snapshot} now; it was {before or 'unreadable'}. Nothing was removed."],
    )


async def run_accept(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``accept``."""
    done = await accept(engine.repository, args.memory, args.snapshot)
    replaced = f"It replaces {done.previous}" if done.previous else "There was no head that could be read"
    kept = ", which is pinned" if done.pinned else ""
    return Result(
        asdict(done),
        [
            f"{done.memory}: the head is {done.head} now, which was {done.standing}. {replaced}{kept}. Nothing was removed.",
            f"Accepted: {done.reason.message} [{done.reason.code}]",
            *([f"To go back: memory-sidecar rollback {done.memory} {done.previous}"] if done.previous else []),
        ],
    )


async def run_delete(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``delete``. Raise ``UsageError`` without ``--yes``."""
    check_memory_id(args.memory)
    if not args.yes:
        raise UsageError(
            f"This removes every snapshot of {args.memory} for good.", hint="Say --yes if that is what you want."
        )
    if not await engine.repository.exists(args.memory):
        raise build_not_found_error(engine.repository, args.memory)
    from sidecar.service.attachments.attachment import Attachments

    await Attachments(engine.repository.store).remove_all(args.memory)
    removed = await engine.repository.delete_memory(args.memory)
    return Result(
        {"memory": args.memory, "removed": removed},
        [f"{args.memory}: every byte removed ({format_count(removed, 'object')})."],
    )
