"""``forget``, ``pin`` and ``unpin``: which snapshots are kept."""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from typing import Any

from sidecar.cli.result import Result, Table, format_size
from sidecar.engine import Engine
from sidecar.engine.queries import list_existing_ids
from sidecar.errors import UsageError
from sidecar.host.text import format_count, parse_duration
from sidecar.models.answers import Forgotten, Pinned
from sidecar.policy.retention import Retention, RetentionRules
from sidecar.policy.validation import check_retention
from sidecar.store.pins import pin, unpin
from sidecar.store.retention import forget, forget_all


async def run_forget(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``forget``: apply the retention rules to one memory or to all."""
    retention = choose_retention(engine.retention, args)
    over = 0
    if args.memory:
        await list_existing_ids(engine.repository, args.memory)
        rows = [await forget(engine.repository, args.memory, retention, dry_run=args.dry_run)]
    else:
        rows, over = await forget_all(engine.repository, retention, dry_run=args.dry_run)
    words: list[str | Table] = []
    for row in rows:
        words += _describe_forgotten(row, args.dry_run)
    if over:
        words.append(f"What has to stay is {format_size(over)} more than store_bytes allows.")
    document = {"dry_run": args.dry_run, "memories": [_build_document(row) for row in rows], "store_over_bytes": over}
    return Result(document, words or [f"There are no memories in {engine.repository.store.url}."])


def choose_retention(configured: Retention, args: argparse.Namespace) -> Retention:
    """Return the rules of the command line, which replace all configured ones, or else the configured ones.

    Raise ``UsageError`` or ``BadConfig`` for invalid values.
    """
    given = {
        rule.name: getattr(args, rule.name)
        for rule in fields(RetentionRules)
        if getattr(args, rule.name, None) is not None
    }
    retention = configured
    if given:
        apart = {name: getattr(configured, name) for name in ("store_bytes", "grace", "every", "keep_calls")}
        retention = Retention(**given, **apart)
        if any(isinstance(value, int) and value < 0 for value in given.values()):
            raise UsageError("A rule must not be negative.")
        check_retention(retention, {"": set(given)}, 0.0)
    return retention if args.grace is None else replace(retention, grace=_parse_grace(args.grace))


def _parse_grace(text: str) -> str:
    """Parse a number of seconds, or a duration."""
    try:
        plain = text.replace(".", "", 1)
        seconds = (
            float(text)
            if plain.isascii() and plain.isdecimal() and len(plain) < 16
            else parse_duration(text).total_seconds()
        )
    except ValueError as problem:
        raise UsageError(f"--grace {text} is no duration.", hint=f"{str(problem).capitalize()}.") from None
    return f"{seconds:.3f}s"


def _build_document(row: Forgotten) -> dict[str, Any]:
    document = asdict(row)
    del document["dry_run"]
    return {**document, **document.pop("collected"), "problem": row.problem or row.collected.problem}


def _describe_forgotten(row: Forgotten, dry_run: bool) -> list[str | Table]:
    now = datetime.now(UTC)
    table = Table(
        ("SNAPSHOT", "AGE", "SIZE", "LABEL", "DECISION"),
        [
            (
                fate.snapshot,
                _format_age((now - datetime.fromisoformat(fate.created)).total_seconds()),
                format_size(fate.bytes),
                fate.label,
                f"KEEP by {fate.reason}" if fate.keep else f"GO because {fate.reason}",
            )
            for fate in row.snapshots
        ],
    )
    gone, left = "would go" if dry_run else "removed", row.collected
    told = f"{row.memory}: {format_count(row.forgotten, 'snapshot')} {gone}, {row.kept:,} kept"
    told += f"; {format_count(left.objects, 'leftover')} {gone}, {format_size(left.bytes)}"
    told += (
        f"; {format_count(left.waiting, 'pack')} of {format_size(left.waiting_bytes)} in the grace period."
        if left.waiting
        else "."
    )
    words: list[str | Table] = [told, *([table] if dry_run or row.forgotten else [])]
    if row.over_bytes:
        words.append(f"{row.memory}: what has to stay is {format_size(row.over_bytes)} more than memory_bytes allows.")
    return words + ([f"{row.memory}: {row.problem}"] if row.problem else [])


def _format_age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


async def run_pin(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``pin``."""
    snapshot = await pin(engine.repository, args.memory, args.snapshot)
    words = f"{args.memory}: {snapshot} is pinned. It stays until `memory-sidecar unpin {args.memory} {snapshot}`."
    return Result(asdict(Pinned(memory=args.memory, snapshot=snapshot, pinned=True)), [words])


async def run_unpin(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``unpin``."""
    snapshot = await unpin(engine.repository, args.memory, args.snapshot)
    words = f"{args.memory}: {snapshot} is not pinned; the rules decide how long it stays."
    return Result(asdict(Pinned(memory=args.memory, snapshot=snapshot, pinned=False)), [words])
