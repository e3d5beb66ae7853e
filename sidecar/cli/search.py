"""``search`` and ``index``: search the records of memories, and update the search index."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from sidecar.cli.result import Result, Table, format_time
from sidecar.engine import Engine
from sidecar.engine.queries import build_not_found_error
from sidecar.errors import NoIndex, UsageError
from sidecar.host.text import format_count
from sidecar.ids import check_memory_id
from sidecar.models.answers import RECORD_KINDS, Hit
from sidecar.search.port import Query
from sidecar.search.upkeep import IndexResult, SearchIndex

MOST = 1000
SNIPPET = 100
MOST_NAMED = 5


def get_index(engine: Engine) -> SearchIndex:
    """Return the search index. Raise ``NoIndex`` if no search database is configured."""
    if engine.index is None:
        raise NoIndex("Searching needs a Postgres database, and none is set.")
    return engine.index


async def run_search(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``search``. Raise ``NoIndex`` or ``UsageError``."""
    index = get_index(engine)
    words = " ".join(args.words).strip()
    if not words:
        raise UsageError("There is nothing to search for.", hint='memory-sidecar search "some words"')
    if not 1 <= args.limit <= MOST:
        raise UsageError(f"--limit must be from 1 to {MOST}.")
    if unknown := [kind for kind in args.kind if kind not in RECORD_KINDS]:
        raise UsageError(f"There is no kind {unknown[0]!r}.", hint=f"Kinds are {', '.join(RECORD_KINDS)}.")
    memories = [check_memory_id(memory) for memory in args.in_memory]
    answer = await index.search(Query(words=words, memories=memories, kinds=args.kind, limit=args.limit))
    table = Table(
        ("MEMORY", "KIND", "WHEN (UTC)", "TITLE", "WHERE IT SAYS SO"),
        [_build_row(hit) for hit in answer.hits],
        _describe_no_hits(answer.unindexed),
    )
    more = [f"There are more; --limit {args.limit * 2} shows some."] if answer.more else []
    behind = [f"{memory}: {BEHIND}" for memory in answer.behind]
    return Result(asdict(answer), [table, *more, *behind])


def _describe_no_hits(unindexed: Sequence[str]) -> str:
    if not unindexed:
        return "Nothing found."
    more = f" and {len(unindexed) - MOST_NAMED:,} more" if len(unindexed) > MOST_NAMED else ""
    named = ", ".join(unindexed[:MOST_NAMED]) + more
    return f"Nothing found, but {named} could not be searched: not indexed yet. `memory-sidecar index` does that."


BEHIND = "what was found is of an earlier snapshot than the head; `memory-sidecar index` brings it up to date."


def _build_row(hit: Hit) -> tuple[str, ...]:
    # Cut the snippet so that the first match stays visible.
    start = max(0, hit.snippet.find("**") - SNIPPET // 2)
    snippet = f"…{hit.snippet[start:]}" if start else hit.snippet
    return (
        hit.memory,
        hit.kind,
        format_time(hit.at) if hit.at else "",
        _shorten(hit.title, SNIPPET // 2),
        _shorten(snippet, SNIPPET),
    )


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


async def run_index(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``index``: update the search index of one memory or of all."""
    index = get_index(engine)
    memories = [args.memory] if args.memory else None
    done = [one async for one in index.catch_up(memories)]
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
