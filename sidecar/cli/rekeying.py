"""``rekey``: seal and sign everything for the keys that are set now."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from sidecar.cli.result import Result, Table, format_count, format_size
from sidecar.engine import Engine
from sidecar.engine.looking import list_existing_ids
from sidecar.sealing.rekey import RekeyReport, rekey

READABLE = (
    "These folder names, from before encryption, stay readable in the store: {names}. To hide one, `fork` the memory"
)
OLD_PACKS = "Packs under the old key go once the grace period is over: `memory-sidecar forget` collects them."


async def run_rekey(engine: Engine, args: argparse.Namespace) -> Result:
    if args.memory:
        await list_existing_ids(engine.repository, args.memory)
    report = await rekey(engine.repository, args.memory or "", engine.progress)
    problems = [*report.problems, *(problem for row in report.memories for problem in row.problems)]
    return Result({"ok": not problems, **asdict(report)}, _describe_report(report, problems), 1 if problems else 0)


def _describe_report(report: RekeyReport, problems: list[str]) -> list[str | Table]:
    rows = [
        (row.memory, str(row.snapshots), str(row.packs), format_size(row.bytes), str(row.objects))
        for row in report.memories
    ]
    words: list[str | Table] = [
        Table(("MEMORY", "SNAPSHOTS", "PACKS SEALED", "SIZE", "OTHERS"), rows, "There are no memories in this store."),
        *(f"Not done: {problem}" for problem in problems),
    ]
    if report.readable_names:
        names = ", ".join(report.readable_names)
        words.append(f"{READABLE.format(names=names)} to a new id and `delete` the old one.")
    if any(row.packs for row in report.memories):
        words.append(OLD_PACKS)
    if report.finished:
        words.append("Everything that is needed is sealed and signed with the keys that are set now.")
    elif problems:
        words.append(
            f"{format_count(len(problems), 'thing')} could not be done; what was done stays. Run it again when that is mended."
        )
    return words
