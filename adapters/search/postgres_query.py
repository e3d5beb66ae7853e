"""Full-text search over the rows: the best and newest matches come first."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

from psycopg import AsyncCursor
from psycopg.sql import SQL, Identifier

from sidecar.models.answers import Hit
from sidecar.records.record import clean_text
from sidecar.search.port import Query, SearchHits

HALF_LIFE_DAYS = 180
"""After this time, a record has to match twice as well."""
HEADLINE_CHARACTERS = 50_000
"""How far into a text a snippet is searched."""
HEADLINE = "StartSel=**, StopSel=**, MaxWords=30, MinWords=12, MaxFragments=2, FragmentDelimiter=' … '"
JOINED = "/\\.:@?&=#%~<>"
"""Postgres takes paths, addresses, versions and tags for one word each, or for none. With blanks for these characters,
their parts are words."""
BLANKS = " " * len(JOINED)
_JOINED_WORD = re.compile(rf"(-?)(\S*[{re.escape(JOINED)}]\S*)")

SEARCH = """
WITH wanted AS (SELECT websearch_to_tsquery(%(text_search)s::regconfig, %(words)s) AS words),
found AS (
    SELECT m.memory, r.kind, r.key, r.title, r.body, r.project, r.session, r.at, r.path, m.snapshot, m.indexed,
        r.memory_id, r.first, r.last,
        ts_rank(r.words, wanted.words, 1)
            / (1 + greatest(0, extract(epoch FROM now() - coalesce(r.at, 'epoch'))) / 86400 / %(half_life)s) AS score
    FROM {schema}.records r JOIN {schema}.memories m ON m.id = r.memory_id, wanted
    WHERE r.words @@ wanted.words AND m.store = %(store)s
        AND (%(memories)s::text[] IS NULL OR m.memory = ANY (%(memories)s::text[]))
        AND (%(within)s = '' OR m.memory ~ %(within)s)
        AND (%(kinds)s::text[] IS NULL OR r.kind = ANY (%(kinds)s::text[]))
        AND (%(projects)s::text[] IS NULL OR r.project = ANY (%(projects)s::text[]))
        AND (%(since)s::timestamptz IS NULL OR r.at >= %(since)s::timestamptz)
        AND (%(until)s::timestamptz IS NULL OR r.at < %(until)s::timestamptz)
        AND (%(history)s OR r.last IS NULL)
    ORDER BY score DESC, r.at DESC NULLS LAST, m.memory, r.kind, r.key
    LIMIT %(limit)s OFFSET %(offset)s
)
SELECT memory, kind, key, title,
    CASE WHEN strpos(snippet, '**') > 0 THEN snippet ELSE
        ts_headline(%(text_search)s::regconfig, translate(start, %(joined)s, %(blanks)s), wanted.words, %(headline)s)
    END,
    project, session, at, path, found.snapshot, indexed, score,
    earliest.snapshot, earliest.created, latest.snapshot, after.created
FROM found
    LEFT JOIN LATERAL (SELECT snapshot, created FROM {schema}.snapshots s WHERE s.memory_id = found.memory_id
        AND s.number >= found.first ORDER BY number LIMIT 1) AS earliest ON %(history)s
    LEFT JOIN LATERAL (SELECT snapshot FROM {schema}.snapshots s WHERE s.memory_id = found.memory_id
        AND s.number <= found.last ORDER BY number DESC LIMIT 1) AS latest ON %(history)s
    LEFT JOIN LATERAL (SELECT created FROM {schema}.snapshots s WHERE s.memory_id = found.memory_id
        AND s.number > found.last ORDER BY number LIMIT 1) AS after ON %(history)s,
    wanted, LATERAL left(body, %(characters)s) AS start,
    LATERAL ts_headline(%(text_search)s::regconfig, start, wanted.words, %(headline)s) AS snippet
ORDER BY score DESC, at DESC NULLS LAST, memory, kind, key
"""


async def search(cursor: AsyncCursor[Any], schema: str, text_search: str, query: Query) -> SearchHits:
    """Run a query and return one page of hits."""
    await cursor.execute(
        SQL(SEARCH).format(schema=Identifier(schema)),
        {
            "words": _split_words(clean_text(query.words)),
            "store": query.store,
            "memories": list(map(clean_text, query.memories)) or None,
            "within": clean_text(query.within),
            "kinds": list(query.kinds) or None,
            "projects": list(map(clean_text, query.projects)) or None,
            "since": query.since,
            "until": query.until,
            "history": query.history,
            "limit": query.limit + 1,
            "offset": query.offset,
            "text_search": text_search,
            "half_life": HALF_LIFE_DAYS,
            "characters": HEADLINE_CHARACTERS,
            "headline": HEADLINE,
            "joined": JOINED,
            "blanks": BLANKS,
        },
    )
    hits = [_make_hit(row) for row in await cursor.fetchall()]
    return SearchHits(hits=hits[: query.limit], more=len(hits) > query.limit)


def _split_words(words: str) -> str:
    """Split words into their parts, as in the rows; what was one word is searched ``"in this order"``."""
    parts = words.split('"')
    parts[::2] = [_JOINED_WORD.sub(r'\1"\2"', part) for part in parts[::2]]
    return '"'.join(parts).translate(str.maketrans(JOINED, BLANKS))


def _make_hit(row: tuple[Any, ...]) -> Hit:
    memory, kind, key, title, snippet, project, session, at, path, snapshot, indexed, score, *known = row
    first, since, last, until = known
    return Hit(
        memory=memory,
        kind=kind,
        key=key,
        title=title,
        snippet=" ".join(snippet.split()),
        project=project,
        session=session,
        at=_format_time(at),
        path=path,
        snapshot=snapshot,
        indexed=_format_time(indexed) or "",
        score=round(float(score), 6),
        first=first or "",
        since=since,
        last=last or "",
        until=until,
    )


def _format_time(moment: datetime | None) -> str | None:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds") if moment else None
