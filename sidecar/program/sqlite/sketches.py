"""Which rows of a database came, changed and went: digests of its rows are kept, and compared with those that it has later.

An export has a database as it is now and, of what it was, only digests of pages, which do not tell rows apart. So a
restore and an export keep 24 bytes for each row of the tables that a layout reads records from. Only numbers leave the
sandbox.

The sandbox's agent can write these files. They are checked for their sizes, and what they change are numbers that the
sandbox could make up anyway.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import sys
import time
from array import array
from collections import deque
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from sidecar.format.patterns import compile_patterns
from sidecar.format.refusal import Refusal
from sidecar.program import places
from sidecar.program.sqlite import backup, pages

Rows = Dict[int, bytes]
"""Of each row, by its rowid: a digest of what identifies it, and one of its contents."""

Counts = Dict[str, Tuple[int, int, int]]
"""How many came, changed and went, by kind."""


class Sketch(NamedTuple):
    """The rows of each table, with their kind; and a digest of how the tables are declared."""

    tables: List[Tuple[str, Rows]]
    schema: str = ""


PREFIX = "rows-"
VERSION = "2 " + sys.byteorder
MOST_KEPT = 12
MOST_ROWS = 100_000
"""A database with more rows is not sketched: what differs in it is then counted outside, or unknown."""
MOST_SECONDS = 3.0
LARGEST_VALUE = 4 << 20
DIGEST_BYTES = 8
ROW_BYTES = 8 + 2 * DIGEST_BYTES
LONGEST_HEAD = 1 << 16
ROWS_AT_ONCE = 500
STEPS = 100_000
"""How many of SQLite's steps pass between two looks at the clock."""


class Counted(NamedTuple):
    """The rows of a database by these tables, and what differs from those that it had; ``None`` if that is not known."""

    tables: List[Dict[str, Any]]
    sketch: Sketch
    counts: Optional[Counts]

    def keep(self, folder: str, digest: str) -> None:
        """Keep the sketch, as that of the database with this digest."""
        write(folder, digest, self.tables, self.sketch)


def count_rows(
    place: str, tables: List[Dict[str, Any]], old: Optional[Sketch], changed: Optional[List[int]], is_new: bool
) -> Optional[Counted]:
    """Count what differs in a database that nobody writes to: from ``old``, if it is known, or from nothing if it is new.
    ``None`` if it cannot be sketched."""
    new = sketch_database(place, tables, old, changed)
    if new is None:
        return None
    before = Sketch([(kind, {}) for kind, _ in new.tables]) if is_new else old
    return Counted(tables, new, count_changes(before, new) if before is not None else None)


def choose_tables(layout: Dict[str, Any], relative: str) -> List[Dict[str, Any]]:
    """Return the tables of a database from which a layout reads records."""
    return [table for table in layout.get("tables", []) if compile_patterns(table["files"]).match(relative)]


def sketch_database(
    place: str, tables: List[Dict[str, Any]], old: Optional[Sketch] = None, changed: Optional[List[int]] = None
) -> Optional[Sketch]:
    """Return the sketch of a database that nobody writes to; ``None`` if it is damaged or has too many rows.

    Given an ``old`` sketch and the numbers of all pages that changed since, only rows on those are read.
    """
    deadline, left = time.monotonic() + MOST_SECONDS, MOST_ROWS
    sketch: List[Tuple[str, Rows]] = []
    try:
        touched = pages.find_rowids(place, changed) if old is not None and changed is not None else None
        connection = backup.connect_read_only(place)
        try:
            connection.execute("PRAGMA trusted_schema=OFF")
            connection.set_progress_handler(lambda: time.monotonic() > deadline, STEPS)
            declared = [_read_declaration(connection, table["table"]) for table in tables]
            schema = hashlib.sha256("\0".join(declared).encode("utf-8", "replace")).hexdigest()
            same = old is not None and touched is not None and old.schema == schema
            for number, (table, declaration) in enumerate(zip(tables, declared)):
                if not declaration or "VIRTUAL" in declaration.upper().partition("(")[0]:
                    rows: Rows = {}
                elif same and old is not None and touched is not None:
                    rows = _update_rows(connection, table, old.tables[number][1], touched, left)
                else:
                    rows = dict(_read_rows(connection, table, "LIMIT %d" % (left + 1)))
                left -= len(rows)
                if left < 0:
                    return None
                sketch.append((table["kind"], rows))
        finally:
            connection.close()
    except (sqlite3.Error, ValueError, OverflowError, MemoryError):
        return None
    return Sketch(sketch, schema)


def _read_declaration(connection: sqlite3.Connection, name: str) -> str:
    """Return the statement that made a table; "" if it is not there."""
    found = connection.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND name = ?", (name,)).fetchone()
    return str(found[0]) if found else ""


def _update_rows(
    connection: sqlite3.Connection, table: Dict[str, Any], old: Rows, touched: Set[int], most: int
) -> Rows:
    """Return the rows of a table: those of ``old`` that are still there, but for the ``touched``, which are read."""
    name = _quote(table["table"])
    rowids = "SELECT %s FROM %s LIMIT %d" % (_choose_rowid(connection, name), name, most + 1)
    there = [row[0] for row in connection.execute(rowids)]
    read = [rowid for rowid in there if rowid in touched or rowid not in old]
    rows = {rowid: old[rowid] for rowid in there if rowid in old}
    for at in range(0, len(read), ROWS_AT_ONCE):
        some = ", ".join(map(str, read[at : at + ROWS_AT_ONCE]))
        rows.update(_read_rows(connection, table, "WHERE {rowid} IN (%s)" % some))
    return rows


def _read_rows(connection: sqlite3.Connection, table: Dict[str, Any], which: str) -> Iterator[Tuple[int, bytes]]:
    """Yield rows of a plain table; ``{rowid}`` in ``which`` stands for its rowid."""
    name = _quote(table["table"])
    rowid = _choose_rowid(connection, name)
    there = {row[1] for row in connection.execute("PRAGMA table_info(%s)" % name)}
    wanted = list(dict.fromkeys(table["contents"] + [column for key in table["key"] for column in key]))
    chosen = [next((one for one in column.split("|") if one in there), "") for column in wanted]
    if not any(chosen):
        return
    values = ["substr(CAST(%s AS BLOB), 1, %d)" % (_quote(one), LARGEST_VALUE) if one else "NULL" for one in chosen]
    contents = [1 + wanted.index(column) for column in table["contents"]]
    keys = [[1 + wanted.index(column) for column in key] for key in table["key"]]
    select = "SELECT %s, %s FROM %s %s" % (rowid, ", ".join(values), name, which.format(rowid=rowid))
    for row in connection.execute(select):
        digest = _digest([row[number] for number in contents])
        identity = next((key for key in keys if all(row[number] for number in key)), None)
        yield row[0], (digest if identity is None else _digest([row[number] for number in identity])) + digest


def _choose_rowid(connection: sqlite3.Connection, name: str) -> str:
    """Return a name for a table's rowid: one that none of its columns has, generated ones included, for that would be
    meant then. Raise ValueError if they have all of them."""
    taken = {row[1].lower() for row in connection.execute("PRAGMA table_xinfo(%s)" % name)}
    for rowid in ("rowid", "_rowid_", "oid"):
        if rowid not in taken:
            return rowid
    raise ValueError("its rows have no number")


def _quote(name: str) -> str:
    return '"%s"' % name.replace('"', '""')


def _digest(values: Sequence[Optional[bytes]]) -> bytes:
    return hashlib.blake2b(b"\0".join([value or b"" for value in values]), digest_size=DIGEST_BYTES).digest()


def count_changes(old: Sketch, new: Sketch) -> Optional[Counts]:
    """Return what differs, by kind; ``None`` if it is not about the same tables.

    A row counts as its contents, wherever they stand now; then as what identifies it. It is what ``match_rows`` of the
    sidecar's records does, which has the last word on what differs.
    """
    if [kind for kind, _ in old.tables] != [kind for kind, _ in new.tables]:
        return None
    went: List[Tuple[str, bytes]] = []
    came: List[Tuple[str, bytes]] = []
    counts: Counts = {}
    for (kind, before), (_, after) in zip(old.tables, new.tables):
        went += [(kind, row) for rowid, row in sorted(before.items()) if after.get(rowid) != row]
        came += [(kind, row) for rowid, row in sorted(after.items()) if before.get(rowid) != row]
    changed: List[str] = []
    for part in (slice(None), slice(DIGEST_BYTES, None), slice(DIGEST_BYTES)):
        went, came, changed = _drop_pairs(went, came, part)
    for number, kinds in enumerate(([kind for kind, _ in came], changed, [kind for kind, _ in went])):
        for kind in kinds:
            known = list(counts.get(kind, (0, 0, 0)))
            known[number] += 1
            counts[kind] = (known[0], known[1], known[2])
    return counts


def _drop_pairs(
    went: List[Tuple[str, bytes]], came: List[Tuple[str, bytes]], part: slice
) -> Tuple[List[Tuple[str, bytes]], List[Tuple[str, bytes]], List[str]]:
    """Return both without those that are equal in this part of their digests, and the kinds of what was dropped."""
    waiting: Dict[Tuple[str, bytes], deque[int]] = {}
    for number, (kind, row) in enumerate(went):
        waiting.setdefault((kind, row[part]), deque()).append(number)
    paired, left, kinds = set(), [], []
    for kind, row in came:
        there = waiting.get((kind, row[part]))
        if there:
            paired.add(there.popleft())
            kinds.append(kind)
        else:
            left.append((kind, row))
    return [one for number, one in enumerate(went) if number not in paired], left, kinds


def write(folder: str, digest: str, tables: List[Dict[str, Any]], sketch: Sketch) -> None:
    """Keep the sketch of a database with this digest, and remove the oldest ones. Nothing is said if that fails: then
    less is known later."""
    body = b"".join(array("q", rows).tobytes() + b"".join(rows.values()) for _, rows in sketch.tables)
    head = {
        "rows": VERSION,
        "tables": [[kind, len(rows)] for kind, rows in sketch.tables],
        "schema": sketch.schema,
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    place = os.path.join(folder, _name(digest, tables))
    try:
        for other in _list_older(folder, os.path.basename(place))[MOST_KEPT - 1 :]:
            places.remove(other)
        places.write_file(place, json.dumps(head).encode("ascii") + b"\n" + body)
    except (OSError, Refusal):
        try:
            places.remove(place + places.UNFINISHED)
        except (OSError, Refusal):
            pass


def _list_older(folder: str, name: str) -> List[str]:
    """Return the other sketches, the newest first."""
    others = [os.path.join(folder, one) for one in os.listdir(folder) if one.startswith(PREFIX) and one != name]
    return sorted(others, key=lambda other: places.read_status(other).st_mtime_ns, reverse=True)


def has(folder: str, digest: str, tables: List[Dict[str, Any]]) -> bool:
    """Return whether a sketch of a database with this digest is kept."""
    return places.exists(os.path.join(folder, _name(digest, tables)))


def load(folder: str, digest: str, tables: List[Dict[str, Any]]) -> Optional[Sketch]:
    """Return the sketch of a database with this digest; ``None`` if there is none that is whole."""
    try:
        data = places.read_file(os.path.join(folder, _name(digest, tables)), MOST_ROWS * ROW_BYTES + LONGEST_HEAD)
        end = data.find(b"\n", 0, LONGEST_HEAD)
        body = data[end + 1 :]
        head = json.loads(data[:end])
        if head["rows"] != VERSION or head["sha256"] != hashlib.sha256(body).hexdigest():
            return None
        sketch = Sketch(list(_split(head["tables"], body)), str(head["schema"]))
        return sketch if len(sketch.tables) == len(tables) else None
    except (OSError, Refusal, ValueError, LookupError, TypeError, RecursionError):
        return None


def _split(tables: Any, body: bytes) -> Iterator[Tuple[str, Rows]]:
    """Yield the tables of a file. Raise ValueError if it is not what was written."""
    if sum(count for _, count in tables) * ROW_BYTES != len(body) or any(count < 0 for _, count in tables):
        raise ValueError("another size")
    at, width = 0, 2 * DIGEST_BYTES
    for kind, count in tables:
        rowids = array("q")
        rowids.frombytes(body[at : at + 8 * count])
        at += 8 * count
        yield str(kind), {rowid: body[at + width * n : at + width * (n + 1)] for n, rowid in enumerate(rowids)}
        at += width * count


def _name(digest: str, tables: List[Dict[str, Any]]) -> str:
    """Return the name of a sketch: of one database, read by one set of rules."""
    told = json.dumps([digest, tables], sort_keys=True).encode("ascii")
    return PREFIX + hashlib.sha256(told).hexdigest()[:32]
