"""Full-text indexes, FTS3 to FTS5: which a database has, and whether one still contains words of deleted rows.

An index contains words, not texts, so there is no tag in it. When a row is deleted its words stay in the index, marked
as deleted, until SQLite merges that part of the index. But the tags were words too: ``private``, or what a tokenizer
makes of it, twice in one row. Once is any other text about a private key or a private method.

The structure of an FTS5 index is described in https://www.sqlite.org/fts5.html, section 9, and in ``fts5_index.c``.
"""

from __future__ import annotations

import re
import sqlite3
from typing import Iterator, List, NamedTuple, Set, Tuple

from sidecar.program.sqlite.pages import read_varint

TABLES = {"fts3": ("_segments", "_segdir"), "fts4": ("_segments", "_segdir"), "fts5": ("_data", "_idx")}
"""The tables in which an index keeps its words."""
WORDS = (b"0private", b"0privat", b"0pri")
"""The word as FTS5 stores it: whole, without its ending, and its first three letters; the 0 means that it is not a
prefix index."""
# Ids in the %_data table (section 9.2.1): 16 bits for the segment, shifted left by 37, so they end below 2^53; the lowest
# 31 bits are the page number.
SEGMENT, LAST = 1 << 37, 1 << 53
LEAVES = 1 << 31
_TOKEN = re.compile(
    r"--[^\n]*|/\*.*?(?:\*/|$)|\s+|(\"(?:[^\"]|\"\")*\"|'(?:[^']|'')*'|`(?:[^`]|``)*`|\[[^\]]*\]|[\w$]+|.)", re.DOTALL
)


class FullTextIndex(NamedTuple):
    """One full-text index of a database."""

    name: str
    module: str
    content: str | None
    """The table that contains its texts; "": no texts are kept; ``None``: a table of its own."""
    detail: str = "full"
    """What an FTS5 index knows of a word's position: "full", "column" or "none"."""


def list_indexes(connection: sqlite3.Connection) -> List[FullTextIndex]:
    """Return the full-text indexes of a database."""
    found = []
    for name, sql in connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL"):
        # CREATE VIRTUAL TABLE name USING module(…): every part may be quoted, with comments in between.
        words = [token for token in _TOKEN.findall(sql) if token]
        module = _unquote(words[5]).lower() if len(words) > 5 and words[1].lower() == "virtual" else ""
        if module in ("fts3", "fts4", "fts5"):
            found.append(
                FullTextIndex(
                    name, module, _read_option(words, "content"), (_read_option(words, "detail") or "full").lower()
                )
            )
    return found


def _read_option(words: List[str], name: str) -> str | None:
    """Return the value of an option, or ``None``. FTS5 accepts the beginning of an option's name for it."""
    for at, word in enumerate(words[7:-1], 7):
        if words[at - 1] in "(," and words[at + 1] == "=" and name.startswith(word.lower()):
            value = words[at + 2] if at + 2 < len(words) else ""
            return "" if value in (",", ")") else _unquote(value)
    return None


def _unquote(word: str) -> str:
    """Return a name without its SQL quotes."""
    if word[0] not in "\"'`[":
        return word
    return word[1:-1].replace(word[0] * 2, word[0])


def quote_name(name: str) -> str:
    """Return a name in SQL quotes."""
    return '"%s"' % name.replace('"', '""')


def may_contain_tags(connection: sqlite3.Connection, index: FullTextIndex) -> bool:
    """Return whether some row in this index has the word of a tag, or if that cannot be determined."""
    name = quote_name(index.name)
    try:
        query = "SELECT rowid FROM %s WHERE %s MATCH '\"private\"' LIMIT 1" % (name, name)
        return connection.execute(query).fetchone() is not None
    except sqlite3.Error:
        return True


def may_remember_tags(connection: sqlite3.Connection, index: FullTextIndex) -> bool:
    """Return whether an FTS5 index has the words of tags for a row that was deleted or changed; False for older
    indexes, where that cannot be determined."""
    if index.module != "fts5":
        return False
    try:
        segments = list(_iterate_segments(connection, index.name))
        return any(_has_tagged_and_gone(connection, index, segments, word) for word in WORDS)
    except IndexError:
        return True


def _has_tagged_and_gone(
    connection: sqlite3.Connection, index: FullTextIndex, segments: List[int], word: bytes
) -> bool:
    """Return whether a row with the word more than once is also marked as deleted."""
    tagged: Set[int] = set()
    gone: Set[int] = set()
    certain = True
    for segment in segments:
        rows, whole = _read_rows(connection, index.name, segment, word)
        certain = certain and whole  # only the first leaf tells which row it is
        for row, times, deleted in _iterate_entries(rows, index.detail):
            gone.update([row] if deleted else ())
            tagged.update([row] if times > 1 else ())
    return bool(tagged & gone if certain else tagged and gone)


def _iterate_segments(connection: sqlite3.Connection, name: str) -> Iterator[int]:
    """Yield the numbers of an index's segments."""
    query, first = "SELECT min(id) FROM %s WHERE id >= ? AND id < ?" % quote_name(name + "_data"), SEGMENT
    while True:
        (found,) = connection.execute(query, (first, LAST)).fetchone()
        if found is None:
            return
        yield found // SEGMENT
        first = (found // SEGMENT + 1) * SEGMENT


def _read_rows(connection: sqlite3.Connection, name: str, segment: int, word: bytes) -> Tuple[bytes, bool]:
    """Return what a segment says of a word: the rows it is in with its positions, and whether one leaf has all of it.

    Raise IndexError if the leaf is not valid.
    """
    query = "SELECT pgno >> 1 FROM %s WHERE segid = ? AND term <= ? ORDER BY term DESC LIMIT 1" % quote_name(
        name + "_idx"
    )
    (page,) = connection.execute(query, (segment, word)).fetchone() or (1,)
    query = "SELECT block FROM %s WHERE id BETWEEN ? AND ? ORDER BY id" % quote_name(name + "_data")
    rows: bytes | None = None
    whole = True
    for (leaf,) in connection.execute(query, (segment * SEGMENT + page, segment * SEGMENT + LEAVES - 1)):
        # A leaf: two bytes for the first rowid's offset, two for the offset of the footer, which lists where terms
        # begin as varint differences. A term is stored as the length of the prefix it shares with the term before, its
        # size, and the rest.
        end = leaf[2] << 8 | leaf[3]
        starts, at, start = [], end, 0
        while at < len(leaf):
            more, at = read_varint(leaf, at)
            start += more
            starts.append(start)
        if rows is not None:  # the continuation of what did not fit into the leaf before
            more_of_it = leaf[4 : starts[0] if starts else end]
            rows, whole = rows + more_of_it, whole and not more_of_it
            if starts:
                return rows, whole
        term = b""
        for start, following in zip(starts, starts[1:] + [end]):
            kept, at = read_varint(leaf, start) if start != starts[0] else (0, start)
            size, at = read_varint(leaf, at)
            term = term[:kept] + leaf[at : at + size]
            if term == word:
                rows = leaf[at + size : following]
                if following != end:
                    return rows, True
            elif term > word:
                return b"", True
    return rows or b"", whole


def _iterate_entries(rows: bytes, detail: str) -> Iterator[Tuple[int, int, bool]]:
    """Yield each row, how often it has the word (2 if not known), and whether it is marked as deleted. Raise IndexError."""
    at = row = 0
    while at < len(rows):
        more, at = read_varint(rows, at)
        row += more
        if detail == "none":
            deleted = rows[at : at + 1] == b"\0"
            at += 2 if rows[at : at + 2] == b"\0\0" else deleted  # the second zero says that the row exists again
            yield row, 2, deleted
            continue
        size, at = read_varint(rows, at)
        end = at + (size >> 1)
        yield row, _count_places(rows[at:end]) if detail == "full" else 2, bool(size & 1)
        at = end


def _count_places(places: bytes) -> int:
    """Count the positions in a list; a 1 says that a column number follows."""
    at = times = 0
    while at < len(places):
        place, at = read_varint(places, at)
        if place == 1:
            _, at = read_varint(places, at)
        else:
            times += 1
    return times
