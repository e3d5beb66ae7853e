"""The commands that show what memories say: ``diff``, ``records``, ``cat``, ``history``, ``blame`` and ``brief``."""

from __future__ import annotations

import argparse
import base64
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from sidecar.cli.result import Line, Result, Table, check_kinds, format_size, format_time
from sidecar.engine.comparison import compare_records
from sidecar.engine.histories import (
    PageWanted,
    blame,
    list_records,
    open_file,
    trace_file,
    trace_record,
)
from sidecar.errors import RecordNotFound, UsageError
from sidecar.host.text import make_printable
from sidecar.ids import check_memory_id
from sidecar.layouts.sources import MESSAGE
from sidecar.models.answers import Difference
from sidecar.models.counts import describe_counts, write_kind
from sidecar.models.records import Comparison, HistoryEntry, Origin, RecordChange
from sidecar.store.selectors import resolve_snapshot

if TYPE_CHECKING:
    from sidecar.engine.core import Engine

Words = list[str | Table]

SIGNS = {"added": "+", "changed": "~", "removed": "-"}
COLOURS = {"added": "green", "changed": "yellow", "removed": "red"}
MOST_LISTED = 100_000
"""More records are listed only if somebody asks for so many."""
LARGEST_SHOWN = 64 << 20
TITLE = 80
MOST_LINES = 5
NOWHERE = Origin(snapshot="")


async def run_diff(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``diff``: what differs between two snapshots, or what a sandbox has that is not saved yet."""
    old, new = (args.old, args.new or "latest") if args.sandbox else await _choose_sides(engine, args)
    if args.files and not args.other and not args.sandbox:
        from sidecar.engine.queries import compare_snapshots

        return _show_files(await compare_snapshots(engine.repository, args.memory, old, new))
    messages = MESSAGE in args.kind
    if args.sandbox:
        if args.other or new != "latest":
            raise UsageError("A sandbox is compared with one snapshot.", hint="diff MEMORY [A] --sandbox REF")
        from sidecar.engine import ExportRequest
        from sidecar.engine.exports.preview import compare_sandbox

        sandbox = engine.open_sandbox(args.sandbox, local=engine.local)
        try:
            projects = None if args.project is None else tuple(args.project)
            request = ExportRequest(memory=args.memory, projects=projects)
            found = await compare_sandbox(engine, sandbox, request, args.old, messages=messages)
        finally:
            await sandbox.close()
        return _show_comparison(args, found)
    found = await compare_records(engine, args.memory, old, new, other=args.other, messages=messages)
    return _show_comparison(args, found)


async def _choose_sides(engine: Engine, args: argparse.Namespace) -> tuple[str, str]:
    """Return what is compared with what. A snapshot that is named alone and stands beside the head, where it never was, is
    what would come: it is compared with the head, and not the head with it."""
    if args.old and not args.new and not args.other:
        named = await resolve_snapshot(engine.repository, check_memory_id(args.memory), args.old)
        head = (await engine.repository.head(args.memory)).head
        if head is not None and not head.was_head(named):
            return head.snapshot, named
    return args.old, args.new or "latest"


def _show_comparison(args: argparse.Namespace, found: Comparison) -> Result:
    if args.files:
        return _show_files(found)
    records = [row for row in found.records if not args.kind or row.kind in args.kind]
    document = replace(found, records=records).as_dict()
    del document["next"]
    return Result(document, _write_markdown(found, records) if args.markdown else _write_words(found, records))


def _show_files(found: Difference) -> Result:
    rows = (
        [("+", format_size(row.size), row.path) for row in found.added]
        + [("-", format_size(row.size), row.path) for row in found.removed]
        + [("~", f"{format_size(row.old_size)} → {format_size(row.new_size)}", row.path) for row in found.changed]
    )
    table = Table(("", "SIZE", "PATH"), rows, "No difference.")
    names = ("memory", "from", "to", "added", "removed", "changed")
    document = {name: value for name, value in found.as_dict().items() if name in names}
    return Result(document, [f"{found.from_} → {found.to}", table])


def _write_words(found: Comparison, records: list[RecordChange]) -> Words:
    words: Words = [Line(f"{found.from_} → {found.to}", "bold"), f"  {describe_counts(found.counts)}"]
    if not found.counts and not found.files:
        return [words[0], "No difference."]
    for kind in dict.fromkeys(row.kind for row in records):
        words += ["", Line(write_kind(kind, 2).upper(), "bold")]
        for row in records:
            if row.kind == kind:
                words += _write_record(row)
    if found.files:
        words += ["", Line("FILES", "bold")]
        for file in found.files:
            size = f"{format_size(file.old_size)} → {format_size(file.new_size)}"
            words.append(Line(f"{SIGNS[file.change]} {file.path}  ({size})", COLOURS[file.change]))
            words += _write_lines(file.diff)
    return [*words, *_write_notes(found)]


def _write_record(row: RecordChange) -> Words:
    when = format_time(row.at) if row.at and row.kind != "section" else row.path
    return [
        Line(f"{SIGNS[row.change]} {row.title}  [{row.id[:8]}, {when}]", COLOURS[row.change]),
        *_write_lines(row.diff if row.change == "changed" else _quote_beginning(row)),
    ]


def _quote_beginning(row: RecordChange) -> list[str]:
    """Return the first lines of what was added."""
    lines = [line for line in row.text.splitlines() if line.strip()] if row.change == "added" else []
    lines = lines[1:] if lines and lines[0] == row.title else lines
    return [f"+{line}" for line in lines[:MOST_LINES]] + (["…"] if len(lines) > MOST_LINES else [])


def _write_lines(lines: Iterable[str]) -> Words:
    colours = {"+": "green", "-": "red"}
    return [Line(f"    {line}", colours.get(line[:1], "dim")) for line in lines]


def _write_notes(found: Comparison) -> Words:
    more = [f"{found.more:,} more are counted above and not shown."] if found.more else []
    return [*more, *(f"Warning: {problem}" for problem in found.problems)]


def _write_markdown(found: Comparison, records: list[RecordChange]) -> Words:
    """Return a comparison as Markdown, in which nothing that a memory says can be more than text."""
    words: Words = [f"### `{found.from_}` → `{found.to}`", "", describe_counts(found.counts)]
    changes: list[tuple[str, str, list[str]]] = [
        (
            f"{row.change} {row.kind}",
            row.title,
            row.diff or [f"{SIGNS[row.change]}{one}" for one in row.text.split("\n")],
        )
        for row in records
    ]
    changes += [(f"{file.change} file", file.path, file.diff) for file in found.files]
    for what, title, lines in changes:
        words += ["", f"**{what}** {_quote_code(title)}"]
        if lines:
            runs = [len(run) for line in lines for run in re.findall("`+", line)]
            fence = "`" * max(3, 1 + max(runs, default=0))
            words += ["", f"{fence}diff", *lines, fence]
    return [*words, *(["", *notes] if (notes := _write_notes(found)) else [])]


def _quote_code(text: str) -> str:
    return f"`{make_printable(text).replace('`', chr(39))}`"


async def run_records(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``records``: what a snapshot says."""
    check_kinds(args.kind)
    limit = args.limit or MOST_LISTED
    page = await list_records(
        engine, args.memory, args.snapshot, kinds=args.kind, page=PageWanted(limit=limit, text=args.json)
    )
    rows, problems = page.records, page.problems
    if page.next is not None and len(rows) != args.limit:
        problems = [*problems, f"There are more than these {len(rows):,}: choose some with --kind."]
    table = Table(
        ("RECORD", "KIND", "WHEN (UTC)", "TITLE", "FILE"),
        [(row.id[:8], row.kind, format_time(row.at) if row.at else "", _shorten(row.title), row.path) for row in rows],
        "It holds no records.",
    )
    document = {"memory": args.memory, "snapshot": page.snapshot, "records": [asdict(row) for row in rows]}
    return Result({**document, "problems": problems}, [table, *(f"Warning: {problem}" for problem in problems)])


def _shorten(text: str) -> str:
    return text if len(text) <= TITLE else f"{text[: TITLE - 1]}…"


async def run_cat(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``cat``: print a file of a snapshot, exactly, unless stdout is a terminal."""
    async with open_file(engine.repository, args.memory, args.snapshot, args.path) as (entry, place):
        output = getattr(sys.stdout, "buffer", None)
        if not args.json and output is not None and not sys.stdout.isatty():
            with place.open("rb") as file:
                while chunk := file.read(1 << 20):
                    output.write(chunk)
            return Result({})
        if entry.size > LARGEST_SHOWN:
            raise UsageError(
                f"{args.path} has {entry.size:,} bytes.", hint="Send it to a file: memory-sidecar cat … > FILE"
            )
        data = place.read_bytes()
    document: dict[str, object] = {"memory": args.memory, "path": args.path, "size": entry.size, "sha256": entry.digest}
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return Result(
            {**document, "base64": base64.b64encode(data).decode()},
            [f"{args.path} is not text ({format_size(entry.size)}). Send it to a file: memory-sidecar cat … > FILE"],
        )
    return Result({**document, "text": text}, [line.expandtabs(4) for line in text.splitlines()])


async def run_history(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``history``: every version of a file or a record."""
    try:
        versions = await trace_file(engine.repository, args.memory, args.snapshot, args.what)
    except RecordNotFound:
        versions = await trace_record(engine, args.memory, args.snapshot, args.what)
    document = {"memory": args.memory, "what": args.what, "versions": [asdict(version) for version in versions]}
    table = Table(
        ("SNAPSHOT", "CREATED (UTC)", "CONVERSATION", "SANDBOX", "CHANGE", "WHAT"),
        [(*_write_origin(one.origin), one.change, _write_version(one)) for one in versions],
    )
    return Result(document, [table])


def _write_version(version: HistoryEntry) -> str:
    return _shorten(version.record.title) if version.record else format_size(version.size)


def _write_origin(origin: Origin) -> tuple[str, str, str, str]:
    when = format_time(origin.created) if origin.created else ""
    name = f"before {origin.snapshot}" if origin.before else origin.snapshot
    return name, when, origin.conversation, origin.sandbox


async def run_blame(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``blame``: which conversation and sandbox taught what a snapshot says."""
    found = await blame(engine, args.memory, args.snapshot, path=args.path, kinds=args.kind)
    # One dict for each snapshot, not two for each record.
    origins = {one.origin.snapshot: asdict(one.origin) for one in found.records}
    origins |= {one.first.snapshot: asdict(one.first) for one in found.records}
    rows = [
        {
            **asdict(replace(one, origin=NOWHERE, first=NOWHERE)),
            "origin": origins[one.origin.snapshot],
            "first": origins[one.first.snapshot],
        }
        for one in found.records
    ]
    document = {"memory": found.memory, "snapshot": found.snapshot, "records": rows, "problems": found.problems}
    table = Table(
        ("SNAPSHOT", "CREATED (UTC)", "CONVERSATION", "SANDBOX", "KIND", "RECORD", "TITLE"),
        [(*_write_origin(one.origin), one.kind, one.id[:8], _shorten(one.title)) for one in found.records],
        "It holds no records.",
    )
    return Result(document, [table, *(f"Warning: {problem}" for problem in found.problems)])


async def run_brief(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``brief``: what to read first, within a budget of tokens."""
    from sidecar.engine.briefs import make_brief
    from sidecar.records.briefs.page import MARKDOWN, TEXT

    style = MARKDOWN if args.markdown or args.json else TEXT
    found = await make_brief(engine, args.memory, args.snapshot, args.tokens, style=style)
    problems = [f"Warning: {problem}" for problem in found.problems]
    return Result(asdict(found), [*found.text.rstrip("\n").split("\n"), *problems])
