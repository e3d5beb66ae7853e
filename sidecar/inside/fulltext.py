"""Full-text indexes, FTS3 to FTS5: which a database has, and whether one still knows what is no longer there.

An index holds words, not texts, so there is no tag in it. When a row goes, its words stay, marked as deleted, until SQLite
happens to merge that part of the index. But the tag was a word as well: ``private``, or what a tokenizer makes of it.
"""

from __future__ import annotations

import re
import sqlite3
from typing import Iterator, List, NamedTuple

from .pages import varint

TABLES = ("_data", "_idx", "_docsize", "_config", "_segments", "_segdir", "_stat")
WORDS = (b"0private", b"0privat", b"0pri")
"""As FTS5 has it: whole, without its ending, and the first three letters; the 0 says that it is no prefix."""
SEGMENT, LAST = 1 << 37, 1 << 53
LEAVES = 1 << 31
_TOKEN = re.compile(
    r"--[^\n]*|/\*.*?(?:\*/|$)|\s+|(\"(?:[^\"]|\"\")*\"|'(?:[^']|'')*'|`(?:[^`]|``)*`|\[[^\]]*\]|\w+|.)", re.DOTALL
)


class Index(NamedTuple):
    name: str
    module: str
    content: str | None
    """The table its texts are in; empty: nowhere; ``None``: in one of its own."""
    positions: bool


def indexes(connection: sqlite3.Connection) -> List[Index]:
    """The full-text indexes of a database."""
    found = []
    for name, sql in connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL"):
        # CREATE VIRTUAL TABLE name USING module(…): all of it may be quoted, and have comments in between.
        words = [token for token in _TOKEN.findall(sql) if token]
        module = _plain(words[5]).lower() if len(words) > 5 and words[1].lower() == "virtual" else ""
        if module in ("fts3", "fts4", "fts5"):
            content, detail = _option(words, "content"), _option(words, "detail")
            found.append(Index(name, module, content, (detail or "full").lower() != "none"))
    return found


def _option(words: List[str], name: str) -> str | None:
    """What an option is set to; FTS5 takes the beginning of its name for it."""
    for at, word in enumerate(words[7:-1], 7):
        if words[at - 1] in "(," and words[at + 1] == "=" and name.startswith(word.lower()):
            value = words[at + 2] if at + 2 < len(words) else ""
            return "" if value in (",", ")") else _plain(value)
    return None


def _plain(word: str) -> str:
    if word[0] not in "\"'`[":
        return word
    return word[1:-1].replace(word[0] * 2, word[0])


def quoted(name: str) -> str:
    return '"%s"' % name.replace('"', '""')


def knows(connection: sqlite3.Connection, index: Index) -> bool:
    """Whether some row in this index has the word of a tag, or nobody can say."""
    name = quoted(index.name)
    try:
        query = "SELECT rowid FROM %s WHERE %s MATCH '\"private\"' LIMIT 1" % (name, name)
        return connection.execute(query).fetchone() is not None
    except sqlite3.Error:
        return True


def remembers(connection: sqlite3.Connection, index: Index) -> bool:
    """Whether an FTS5 index has the word of a tag for a row that is gone or was changed. Of older ones nobody can say."""
    if index.module != "fts5":
        return False
    try:
        return any(
            _gone(_rows(connection, index.name, segment, word), index.positions)
            for segment in _segments(connection, index.name)
            for word in WORDS
        )
    except IndexError:
        return True


def _segments(connection: sqlite3.Connection, name: str) -> Iterator[int]:
    query, first = "SELECT min(id) FROM %s WHERE id >= ? AND id < ?" % quoted(name + "_data"), SEGMENT
    while True:
        (found,) = connection.execute(query, (first, LAST)).fetchone()
        if found is None:
            return
        yield found // SEGMENT
        first = (found // SEGMENT + 1) * SEGMENT


def _rows(connection: sqlite3.Connection, name: str, segment: int, word: bytes) -> bytes:
    """What a part of an index says of a word: the rows it is in, and where in them. Raise IndexError."""
    query = "SELECT pgno >> 1 FROM %s WHERE segid = ? AND term <= ? ORDER BY term DESC LIMIT 1" % quoted(name + "_idx")
    (page,) = connection.execute(query, (segment, word)).fetchone() or (1,)
    query = "SELECT block FROM %s WHERE id BETWEEN ? AND ? ORDER BY id" % quoted(name + "_data")
    rows: bytes | None = None
    for (leaf,) in connection.execute(query, (segment * SEGMENT + page, segment * SEGMENT + LEAVES - 1)):
        end = leaf[2] << 8 | leaf[3]
        starts, at, start = [], end, 0
        while at < len(leaf):
            more, at = varint(leaf, at)
            start += more
            starts.append(start)
        if rows is not None:  # what did not fit into the leaf before
            rows += leaf[4 : starts[0] if starts else end]
            if starts:
                return rows
        term = b""
        for start, following in zip(starts, starts[1:] + [end]):
            kept, at = varint(leaf, start) if start != starts[0] else (0, start)
            size, at = varint(leaf, at)
            term = term[:kept] + leaf[at : at + size]
            if term == word:
                rows = leaf[at + size : following]
                if following != end:
                    return rows
            elif term > word:
                return b""
    return rows or b""


def _gone(rows: bytes, positions: bool) -> bool:
    """Whether one of these rows is marked as deleted. Raise IndexError."""
    at = 0
    while at < len(rows):
        row, at = varint(rows, at)
        if positions:
            size, at = varint(rows, at)
            if size & 1:
                return True
            at += size >> 1
        elif not row and at > 1:
            return True
    return False
