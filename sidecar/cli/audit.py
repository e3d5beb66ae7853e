"""``audit``: who did what to which memory, and whether anything of that was removed or altered. And each command as a
call in it."""

from __future__ import annotations

import argparse
import asyncio
import os
import pwd
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sidecar.audit.lines import Call, Caller
from sidecar.audit.reader import AuditFound, list_calls, read_file, read_store
from sidecar.audit.retention import cut_audit
from sidecar.audit.settings import Audit
from sidecar.audit.trail import Record, open_trail
from sidecar.audit.verification import Finding
from sidecar.cli.result import Result, Table, format_time, parse_moment
from sidecar.cli.screen import print_error
from sidecar.engine import Engine
from sidecar.errors import Interrupted, SidecarError
from sidecar.host.text import format_count
from sidecar.ids import escape_id
from sidecar.ports import Store

WRONG = "It was altered, or something was removed from it:"
MARGIN = 300.0
"""By how many seconds the clocks of a store and of its writers may differ."""

CHANGING = frozenset(
    {
        *("export", "restore", "import", "fork", "rollback", "accept", "decline", "forget", "pin", "unpin", "rekey"),
        "delete",
    }
)
READING = frozenset(
    {
        "list",
        "log",
        "show",
        "diff",
        "records",
        "cat",
        "history",
        "blame",
        "brief",
        "download",
        "verify",
        "search",
        "index",
    }
)
NOTHING = "Nothing was checked: no audit was kept here ([audit] in the config, or --file), or all of it was removed."
DONE = "ok"
"""The outcome of a command that says no more than that it succeeded."""


async def run_audit(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``audit``: show the calls. With ``--verify``, read and check all of it; exit code 1 if something is wrong, or if
    there is nothing to check."""
    since = parse_moment(args.since, "--since") if args.since else None
    if args.file:
        found = await read_file(Path(args.file))
    else:
        from_time = since.timestamp() - MARGIN if since and not args.verify else 0.0
        found = await read_store(engine.repository.store, since=from_time)
    rows = list_calls(found.lines, memory=args.memory or "", since=since)
    table = Table(
        ("TIME (UTC)", "WHO", "WHAT", "MEMORY", "SNAPSHOT", "FROM", "OUTCOME"),
        [
            (
                format_time(row.at),
                row.who,
                row.what,
                " ".join(map(escape_id, filter(None, (row.memory, row.also)))),
                row.snapshot,
                row.source,
                f"{row.status} {row.outcome}" if row.status else row.outcome,
            )
            for row in rows
        ],
        "The audit tells of no such call.",
    )
    document = {
        "calls": [asdict(row) for row in rows],
        "chains": found.chains,
        "lines": len(found.lines),
        "verified": bool(args.verify),
        "problems": [asdict(finding) for finding in found.findings],
    }
    wrong = [_describe(finding) for finding in found.findings] or ([] if found.chains else [NOTHING])
    if args.verify and wrong:
        document["error"] = {"code": "audit-altered", "message": wrong[0]}
    return Result(document, [table, *_describe_check(found, args.verify)], 1 if args.verify and wrong else 0)


def _describe_check(found: AuditFound, verify: bool) -> list[str]:
    if found.findings and not verify:
        count = format_count(len(found.findings), "problem")
        return [f"Warning: {count} with the audit itself: memory-sidecar audit --verify"]
    if not verify:
        return []
    size = f"{format_count(found.chains, 'chain')}, {format_count(len(found.lines), 'line')}"
    if not found.chains:
        return [f"{size}. {NOTHING}"]
    if not found.findings:
        return [f"{size}: nothing was removed or altered."]
    return [f"{size}. {WRONG}", *map(_describe, found.findings)]


def _describe(finding: Finding) -> str:
    where = f" ({finding.where})" if finding.where else ""
    return f"Chain {finding.chain or 'unknown'}: {finding.problem}{where}"


async def record_command(
    settings: Audit, store: Store, args: argparse.Namespace, work: Callable[[], Awaitable[Result]]
) -> Result:
    """Run a command and record it: one that changes something with its intent, before it does. Raise what it raises,
    and a ``SidecarError`` if the intent cannot be kept."""
    trail = open_trail(settings, store, log=None)
    await trail.open()
    record = trail.begin(_build_call(args))
    outcome = "failed"
    try:
        if args.command in CHANGING:
            await record.intend()
        result = await work()
        if args.command == "forget" and not args.memory and not args.dry_run and settings.store and settings.keep:
            await cut_audit(store, trail, settings.keep_seconds)
        _note_subject(record, result.document)
        outcome = str(result.document.get("outcome") or DONE)
        return result
    except SidecarError as problem:
        outcome = problem.code
        raise
    except (asyncio.CancelledError, KeyboardInterrupt):
        outcome = Interrupted.code
        raise
    finally:
        await record.end(outcome, wait=False)  # the end of the chain is written with it
        if lost := await trail.close():
            print_error(f"warning: The audit does not tell all of this command: {lost.message}")


def _build_call(args: argparse.Namespace) -> Call:
    memory, snapshot, given = (getattr(args, name, None) or "" for name in ("memory", "snapshot", "sandbox"))
    sandbox = given if isinstance(given, str) else " ".join(given)  # a restore may name several
    caller = Caller(find_user_name(), "user")
    return Call(caller=caller, what=args.command, source="cli", memory=memory, snapshot=snapshot, sandbox=sandbox)


def find_user_name() -> str:
    """Return the name of the user that runs this process, by its number: what the environment says can be set."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _note_subject(record: Record, document: dict[str, Any]) -> None:
    """Note which snapshot and which other memory a command turned out to be about."""
    snapshot = document.get("snapshot") or document.get("head") or document.get("to") or ""
    also = document.get("saved_first_memory") or document.get("memory") or ""
    record.note(snapshot=snapshot, also=also if also != record.call.memory else "")
