"""Full-text search over the embedded index: the language of ``websearch_to_tsquery`` in Postgres, as FTS5 has it.

How rare a word is in the whole store does not count: who may read few memories would learn from it what others hold.
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import field
from datetime import UTC, datetime
from functools import cache

from adapters.search.sqlite_schema import name_kind, name_memory
from adapters.search.sqlite_snippet import compile_phrases, make_snippet
from sidecar.host.values import dataclass
from sidecar.models.answers import RECORD_KINDS, Hit
from sidecar.records.record import clean_text
from sidecar.search.port import Query, SearchHits

HALF_LIFE_DAYS = 180
"""After this time, a record has to match twice as well."""
CANDIDATES = 20_000
"""Of more records than this, those written last are weighed. It bounds what the commonest word costs."""
MOST_NAMED = 500
"""Memories that are named within the full-text query; of more, each record found is looked at."""
_SEPARATORS = str.maketrans(dict.fromkeys("!&|()", " "))
_PIECE = re.compile(r'(-(?:[\s-]*-)?\s*)?(?:"([^"]*)"?|([^\s"]+))')
_OR = re.compile(r'or(?![-_\w])(?=\s*\S|")', re.IGNORECASE)


@dataclass(slots=True)
class Alternative:
    """Phrases that all must occur, and those that must not."""

    wanted: list[str] = field(default_factory=list)
    unwanted: list[str] = field(default_factory=list)


def parse_words(words: str) -> list[Alternative]:
    """Return the alternatives of a query; a phrase is words with blanks between them."""
    text = words.translate(_SEPARATORS)
    found = [Alternative()]
    place, after_operand = 0, False
    while match := _PIECE.search(text, place):
        start = match.start()
        if after_operand and not match[1] and match[3] is not None and (or_ := _OR.match(text, start)):
            found.append(Alternative())
            place, after_operand = or_.end(), False
            continue
        place, after_operand = match.end(), True
        phrase = " ".join(_split_phrase(match[2] if match[2] is not None else match[3]))
        if phrase:
            negated = (match[1] or "").count("-") % 2
            (found[-1].unwanted if negated else found[-1].wanted).append(phrase)
    return [one for one in found if one.wanted or one.unwanted]


def _split_phrase(text: str) -> list[str]:
    return "".join(one if _is_letter(one) else " " for one in text).split()


@cache
def _is_letter(one: str) -> bool:
    category = unicodedata.category(one)
    return category[0] in "LNM" or category == "Co"


def build_expression(alternatives: Iterable[Alternative], columns: str = "title text") -> str:
    """Return the alternatives as an expression of FTS5. Whatever was typed is within quotes, and has no quotes in it."""
    parts = []
    for one in alternatives:
        part = f"{{{columns}}} : ({_join(one.wanted, ' AND ')})" if one.wanted else _express_all()
        if one.unwanted:
            part = f"({part}) NOT ({{title text}} : ({_join(one.unwanted, ' OR ')}))"
        parts.append(f"({part})")
    return " OR ".join(parts)


def _join(phrases: Iterable[str], word: str) -> str:
    return word.join(f'"{phrase}"' for phrase in dict.fromkeys(phrases))


def _express_all() -> str:
    return f"place : ({_join(map(name_kind, RECORD_KINDS), ' OR ')})"


SEARCH = f"""
WITH found AS (
    SELECT r.id, r.at, r.weight FROM words JOIN records r ON r.id = words.rowid
    WHERE words MATCH :words{{conditions}} ORDER BY words.rowid DESC LIMIT {CANDIDATES}
),
titled AS (
    SELECT rowid AS id FROM words WHERE words MATCH :titles ORDER BY rowid DESC LIMIT {CANDIDATES}
)
SELECT id, weight * CASE WHEN id IN (SELECT id FROM titled) THEN 1.0 ELSE 0.4 END
    / (1 + max(0, :now - coalesce(at, 0)) / 86400 / {HALF_LIFE_DAYS}) AS score
FROM found ORDER BY score DESC, at DESC, id DESC LIMIT :limit OFFSET :offset
"""


def search(connection: sqlite3.Connection, query: Query) -> SearchHits:
    """Run a query and return one page of hits. Raise ``sqlite3.Error``."""
    alternatives = parse_words(clean_text(query.words))
    memories = _list_memories(connection, query)
    if not alternatives or not memories:
        return SearchHits()
    places, conditions, values = _build_filters(connection, query, memories)
    expression = f"({build_expression(alternatives)}){places}"
    page = connection.execute(
        SEARCH.format(conditions=conditions),
        {
            **values,
            "words": expression,
            "titles": f"({build_expression(alternatives, 'title')}){places}",
            "now": time.time(),
            "limit": query.limit + 1,
            "offset": query.offset,
        },
    ).fetchall()
    phrases = compile_phrases([phrase for one in alternatives for phrase in one.wanted])
    hits = [_make_hit(connection, id, score, phrases, query, memories) for id, score in page[: query.limit]]
    return SearchHits(hits=hits, more=len(page) > query.limit)


@dataclass(frozen=True, slots=True)
class _Memory:
    name: str
    snapshot: str
    indexed: float


def _list_memories(connection: sqlite3.Connection, query: Query) -> dict[int, _Memory]:
    """Return the memories that may be searched, by their numbers."""
    within = re.compile(query.within) if query.within else None
    wanted = set(query.memories)
    return {
        id: _Memory(memory, snapshot, indexed)
        for id, memory, snapshot, indexed in connection.execute("SELECT id, memory, snapshot, indexed FROM memories")
        if (not wanted or memory in wanted) and (within is None or within.search(memory))
    }


def _build_filters(
    connection: sqlite3.Connection, query: Query, memories: Mapping[int, _Memory]
) -> tuple[str, str, dict[str, object]]:
    """Return what narrows the full-text query, the conditions on records, and their values."""
    places, conditions, values = "", "", dict[str, object]()
    if query.kinds:
        places += f" AND (place : ({_join(map(name_kind, query.kinds), ' OR ')}))"
    (count,) = connection.execute("SELECT count(*) FROM memories").fetchone()
    if len(memories) < count:
        if len(memories) <= MOST_NAMED:
            places += f" AND (place : ({_join(map(name_memory, memories), ' OR ')}))"
        else:
            conditions += f" AND r.memory_id IN ({','.join(map(str, memories))})"
    if not query.history:
        conditions += " AND r.last IS NULL"
    if query.projects:
        conditions += " AND r.project IN (SELECT value FROM json_each(:projects))"
        values["projects"] = json.dumps(list(map(clean_text, query.projects)))
    for name, moment, sign in (("since", query.since, ">="), ("until", query.until, "<")):
        if moment is not None:
            conditions += f" AND r.at {sign} :{name}"
            values[name] = moment.timestamp()
    return places, conditions, values


HIT = """
SELECT r.memory_id, r.kind, r.key, w.title, w.text, r.project, r.session, r.at, r.path, r.first, r.last
FROM records r JOIN words w ON w.rowid = r.id WHERE r.id = ?
"""
FIRST = "SELECT snapshot, created FROM snapshots WHERE memory_id = ? AND number >= ? ORDER BY number LIMIT 1"
LAST = """
SELECT snapshot, (SELECT created FROM snapshots n WHERE n.memory_id = s.memory_id AND n.number > ?2 ORDER BY number LIMIT 1)
FROM snapshots s WHERE memory_id = ?1 AND number <= ?2 ORDER BY number DESC LIMIT 1
"""


def _make_hit(
    connection: sqlite3.Connection,
    id: int,
    score: float,
    phrases: re.Pattern[str] | None,
    query: Query,
    memories: Mapping[int, _Memory],
) -> Hit:
    row = connection.execute(HIT, (id,)).fetchone()
    memory_id, kind, key, title, text, project, session, at, path, first, last = row
    known: tuple[str, str | None] = ("", None)
    gone: tuple[str, str | None] = ("", None)
    if query.history:
        known = connection.execute(FIRST, (memory_id, first)).fetchone() or known
        gone = connection.execute(LAST, (memory_id, last)).fetchone() or gone if last is not None else gone
    return Hit(
        memory=memories[memory_id].name,
        kind=kind,
        key=key,
        title=title,
        snippet=make_snippet(text, phrases),
        project=project,
        session=session,
        at=_format_time(at),
        path=path,
        snapshot=memories[memory_id].snapshot,
        indexed=_format_time(memories[memory_id].indexed) or "",
        score=round(score, 6),
        first=known[0],
        since=known[1],
        last=gone[0],
        until=gone[1],
    )


def _format_time(moment: float | None) -> str | None:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds") if moment is not None else None
