"""``search`` and ``index``: search the records of memories, and update the search index."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict

from sidecar.cli.result import Result, Table, check_kinds, format_time, parse_moment
from sidecar.cli.screen import print_error
from sidecar.engine import Engine
from sidecar.engine.queries import build_not_found_error, list_existing_ids
from sidecar.errors import UsageError
from sidecar.host.text import format_count
from sidecar.ids import check_memory_id
from sidecar.models.answers import Found, Hit
from sidecar.search.port import Query
from sidecar.search.settings import explain_no_index
from sidecar.search.upkeep import IndexResult, SearchIndex
from sidecar.store.encryption.encrypted_store import find_encryption

MOST = 1000
SNIPPET = 100
MOST_NAMED = 5


PATIENCE_SECONDS = 2.0
"""After so long it is said what a search waits for, and again after each ``PAUSE_SECONDS``."""
PAUSE_SECONDS = 10.0


def get_index(engine: Engine) -> SearchIndex:
    """Return the search index. Raise ``NoIndex`` if there is none."""
    if engine.index is None:
        raise explain_no_index(encrypted=find_encryption(engine.repository.store) is not None)
    return engine.index


async def run_search(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``search``. Raise ``NoIndex`` or ``UsageError``."""
    index = get_index(engine)
    words = " ".join(args.words).strip()
    if not words:
        raise UsageError("There is nothing to search for.", hint='memory-sidecar search "some words"')
    if not 1 <= args.limit <= MOST:
        raise UsageError(f"--limit must be from 1 to {MOST}.")
    check_kinds(args.kind)
    memories = [check_memory_id(memory) for memory in args.in_memory]
    query = Query(
        words=words,
        memories=memories,
        kinds=args.kind,
        projects=args.in_project,
        since=parse_moment(args.since, "--since") if args.since else None,
        until=parse_moment(args.until, "--until") if args.until else None,
        history=args.all,
        limit=args.limit,
    )
    failed = await _catch_up(index, memories, history=args.all) if index.embedded else []
    answer = await index.search(query)
    if index.embedded and answer.unindexed and not failed:  # it was damaged, and is empty now
        failed = await _catch_up(index, memories, history=args.all)
        answer = await index.search(query)
    if not answer.hits:
        for memory in memories:  # a mistyped id is no memory that says nothing
            await list_existing_ids(engine.repository, memory)
    table = Table(
        _list_columns(args), [_build_row(hit, args) for hit in answer.hits], _describe_no_hits(answer, failed)
    )
    more = [f"There are more; --limit {args.limit * 2} shows some."] if answer.more else []
    problems = [f"Warning: {one.memory} is not searched as it is now: {one.problem}" for one in failed]
    behind = [f"{one}: {BEHIND}" for one in answer.behind if one not in {done.memory for done in failed}]
    past = [f"{_name_some(answer.without_past)}: {WITHOUT_PAST}"] if answer.without_past else []
    document = {**asdict(answer), "warnings": [line.removeprefix("Warning: ") for line in problems]}
    return Result(document, [table, *more, *problems, *behind, *past])


async def _catch_up(index: SearchIndex, memories: Sequence[str], *, history: bool) -> list[IndexResult]:
    """Bring an index on this machine up to date for the memories asked for, and return what failed. It is said on
    stderr what is waited for. Interrupted, what was done stays, and the next search goes on from there."""
    wrong = await index.behind(memories, history=history)
    failed: list[IndexResult] = []
    done = 0
    watch = asyncio.create_task(_tell_patience(len(wrong), lambda: done))
    try:
        async for one in index.catch_up(wrong, history=history):
            done += 1
            failed += [one] if one.state == "failed" else []
    except asyncio.CancelledError:
        print_error(
            f"Stopped: {done:,} of {len(wrong):,} memories were read, and stay so; the next search goes on from there."
        )
        raise
    finally:
        watch.cancel()
    return failed


async def _tell_patience(count: int, done: Callable[[], int]) -> None:
    await asyncio.sleep(PATIENCE_SECONDS)
    print_error(
        f"Reading {format_count(count, 'changed memory') if count == 1 else f'{count:,} changed memories'} for the search"
        " index of this machine. Ctrl-C stops it, and the next search goes on from there."
    )
    while True:
        await asyncio.sleep(PAUSE_SECONDS)
        print_error(f"{done():,} of {count:,} read.")


def _list_columns(args: argparse.Namespace) -> tuple[str, ...]:
    known = ("KNOWN (UTC)",) if args.all else ()
    return ("MEMORY", "KIND", "WHEN (UTC)", *known, "TITLE", "WHERE IT SAYS SO")


def _describe_no_hits(answer: Found, failed: Sequence[IndexResult]) -> str:
    unread = [one for one in answer.unindexed if one not in {done.memory for done in failed}]
    if not unread:
        return "Nothing found."
    return f"Nothing found, but {_name_some(unread)} could not be searched: not indexed yet. `memory-sidecar index` does that."


def _name_some(memories: Sequence[str]) -> str:
    more = f" and {len(memories) - MOST_NAMED:,} more" if len(memories) > MOST_NAMED else ""
    return ", ".join(memories[:MOST_NAMED]) + more


BEHIND = "what was found is of an earlier snapshot than the head; `memory-sidecar index` brings it up to date."
WITHOUT_PAST = "only the present could be searched; `memory-sidecar index --all` reads the past too."


def _build_row(hit: Hit, args: argparse.Namespace) -> tuple[str, ...]:
    # Cut the snippet so that the first match stays visible.
    start = max(0, hit.snippet.find("**") - SNIPPET // 2)
    snippet = f"…{hit.snippet[start:]}" if start else hit.snippet
    return (
        hit.memory,
        hit.kind,
        format_time(hit.at) if hit.at else "",
        *([_describe_known(hit)] if args.all else []),
        _shorten(hit.title, SNIPPET // 2),
        _shorten(snippet, SNIPPET),
    )


def _describe_known(hit: Hit) -> str:
    since = format_time(hit.since) if hit.since else ""
    return f"{since} to {format_time(hit.until)}" if hit.until else f"since {since}" if since else ""


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


async def run_index(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``index``: update the search index of one memory or of all."""
    index = get_index(engine)
    memories = [args.memory] if args.memory else None
    done = [one async for one in index.catch_up(memories, history=args.all)]
    if args.memory and done[0].state == "current" and not done[0].snapshot:
        raise build_not_found_error(engine.repository, args.memory)
    ok = all(one.state != "failed" for one in done)
    rows = [(one.memory, one.snapshot, _describe_result(one)) for one in done]
    table = Table(("MEMORY", "SNAPSHOT", "WHAT WAS DONE"), rows, "Everything was up to date.")
    problems = [f"Warning: {one.memory}: {problem}" for one in done for problem in one.problems]
    return Result({"ok": ok, "memories": [asdict(one) for one in done]}, [table, *problems], 0 if ok else 1)


def _describe_result(one: IndexResult) -> str:
    if one.state == "written":
        changes = f"{format_count(one.written, 'record')} written, {one.removed:,} removed"
        return f"{changes}; {format_count(one.records, 'record')} now"
    if one.state == "removed":
        return f"{format_count(one.removed, 'record')} removed: there is no such memory any more"
    return one.problem or "up to date"
