"""Read tables of a SQLite database from a sandbox: read-only, with whatever columns it has, and safe against hostile
files."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from urllib.parse import quote

from sidecar.layouts.sources import RecordSpec, SessionLookup
from sidecar.records.columns import build_row_record, join_identity, list_columns
from sidecar.records.files import MemoryFile, Unreadable
from sidecar.records.record import Item, digest_contents, parse_time

READ_SECONDS = 600.0
LARGEST_ROW = 256 << 20
LARGEST_VALUE = 4 << 20
"""How much of a value is read."""
LONGEST_TIME = 64
STEPS = 200_000
"""How many of SQLite's virtual machine steps pass between two checks of the time limit."""
ROWIDS = ("rowid", "_rowid_", "oid")
"""SQLite's names for the number of a row. Where a column has one of them, that is the column's."""
MOST_SESSIONS = 100_000
MOST_DIFFERING = 100_000


def read_table(file: MemoryFile, spec: RecordSpec, only: Sequence[int] | None = None) -> Iterator[Item]:
    """Yield the rows of a table, or ``only`` those with these rowids; none if there is no such table. Raise
    ``Unreadable``, possibly after some rows."""
    with open_tables(file.place) as tables:
        columns = list_columns(spec)
        where = {column: number for number, column in enumerate(columns)}
        contents = [where[column] for column in spec.contents]
        keys = [[where[column] for column in key] for key in spec.key]
        projects = tables.read_projects(spec.sessions) if spec.sessions else {}
        for row in tables.rows(spec.table, columns, only):
            digest = digest_contents(b"\0".join([row[number] or b"" for number in contents]))
            pick = partial(_pick, spec, where, projects, row)
            yield Item(spec.kind, _identify(keys, row), digest, partial(build_row_record, spec, file, pick))


def read_rows(file: MemoryFile, spec: RecordSpec, rowids: Iterable[int]) -> dict[int, Item] | None:
    """Return those of these rows that a table has, to compare them: their projects are not looked up. ``None`` if they
    have none of the columns. Raise ``Unreadable``."""
    with open_tables(file.place) as tables:
        there = tables.pick_rowids(spec.table, rowids)
    items = list(read_table(file, replace(spec, sessions=None), there))
    return dict(zip(there, items, strict=True)) if len(items) == len(there) else None


def list_newest(file: MemoryFile, spec: RecordSpec, window: int) -> list[int]:
    """Return the rowids of a table's newest rows by their time, the newest first: of those that were written last, so
    many as ``window`` says. Raise ``Unreadable``."""
    with open_tables(file.place) as tables:
        rows = tables.read_last(spec.table, spec.at, window)
    return [rowid for _, rowid in sorted(rows, key=lambda row: (row[0], row[1]), reverse=True)]


def _identify(keys: Sequence[Sequence[int]], row: Sequence[bytes | None]) -> str:
    """Return what identifies a row, as ``columns.identify`` does, without making texts of all its columns."""
    for columns in keys:
        values = [row[number] for number in columns]
        if all(values):
            return join_identity([value.decode("utf-8", "replace") for value in values if value])
    return ""


def _pick(
    spec: RecordSpec, where: Mapping[str, int], projects: Mapping[str, str], row: Sequence[bytes | None], column: str
) -> str:
    """Return the text of a column; the project of a row that has none is that of its session."""
    value = row[where[column]]
    if not value and projects and column in spec.project:
        sessions = (_pick(spec, where, {}, row, one) for one in spec.session)
        return projects.get(next(filter(None, sessions), ""), "")
    return value.decode("utf-8", "replace") if value else ""


@contextlib.contextmanager
def open_tables(place: str) -> Iterator[TableReader]:
    """Open a database. Raise ``Unreadable``."""
    try:
        # Immutable: it is a private copy without a WAL beside it, whatever its header says.
        connection = sqlite3.connect(f"file:{quote(place)}?mode=ro&immutable=1", uri=True, check_same_thread=False)
    except sqlite3.Error as problem:
        raise Unreadable(str(problem)) from None
    try:
        with translate_sqlite_errors():
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_ROW)
            connection.execute("PRAGMA trusted_schema=OFF")
            connection.execute("PRAGMA cell_size_check=ON")
            deadline = time.monotonic() + READ_SECONDS
            connection.set_progress_handler(lambda: time.monotonic() > deadline, STEPS)
        yield TableReader(connection)
    finally:
        connection.close()


@contextlib.contextmanager
def translate_sqlite_errors() -> Iterator[None]:
    """Raise ``Unreadable`` for SQLite's errors, including those that surface as other exceptions."""
    try:
        yield
    except (sqlite3.Error, ValueError, OverflowError, MemoryError) as problem:
        raise Unreadable(str(problem)) from None


class TableReader:
    """Reads the tables of one open database."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def rows(
        self, table: str, wanted: Sequence[str], only: Sequence[int] | None = None
    ) -> Iterator[tuple[bytes | None, ...]]:
        """Yield each row as bytes, in the order of its rows: for ``name|other``, the first of these columns that the
        table has; nothing if it has none of them.

        No rows if there is no such table. Raise ``Unreadable``, possibly after some rows.
        """
        with translate_sqlite_errors():
            columns = self._list_columns(table)
            chosen = [next((one for one in name.split("|") if one in columns), "") for name in wanted]
            if not any(chosen):
                return
            # Read as bytes: text in a database may be invalid, contain NULs, or be extremely long.
            values = ", ".join(
                f"substr(CAST({_quote_name(column)} AS BLOB), 1, {LARGEST_VALUE})" if column else "NULL"
                for column in chosen
            )
            select = f"SELECT {values} FROM {_quote_name(table)}"
            if only is None:
                rowid = self._find_rowid(table)
                yield from self._connection.execute(f"{select} ORDER BY {rowid}" if rowid else select)
            elif only:
                one_row = f"{select} WHERE {self._name_rowid(table)} = ?"
                for number in only:
                    yield from self._connection.execute(one_row, (number,))

    def read_last(self, table: str, times: Sequence[str], most: int) -> list[tuple[float, int]]:
        """Return the time, by the first of these columns that is there, and the rowid of the rows with the highest
        rowids. Raise ``Unreadable``."""
        with translate_sqlite_errors():
            columns = self._list_columns(table)
            rowid = self._find_rowid(table) if columns else ""
            if not rowid:
                return []
            column = next((one for name in times for one in name.split("|") if one in columns), "")
            time_of = f"substr(CAST({_quote_name(column)} AS BLOB), 1, {LONGEST_TIME})" if column else "NULL"
            select = f"SELECT {time_of}, {rowid} FROM {_quote_name(table)} ORDER BY {rowid} DESC LIMIT {most}"
            found = []
            for when, number in self._connection.execute(select):
                at = parse_time(when.decode("utf-8", "replace")) if when else None
                found.append((at.timestamp() if at else 0.0, number))
            return found

    def _find_rowid(self, table: str, schema: str = "main") -> str:
        """Return a name for a table's rowid that none of its columns has, for that would be meant then; "" if there is
        none."""
        taken = {
            str(row[1]).lower()
            for row in self._connection.execute(f"PRAGMA {schema}.table_xinfo({_quote_name(table)})")
        }
        rowid = next((one for one in ROWIDS if one not in taken), "")
        try:
            self._connection.execute(f"SELECT {rowid or 'no'} FROM {schema}.{_quote_name(table)} LIMIT 0")
        except sqlite3.OperationalError:
            return ""
        return rowid

    def _name_rowid(self, table: str) -> str:
        """Return that name. Raise ``Unreadable``."""
        rowid = self._find_rowid(table)
        if not rowid:
            raise Unreadable("its rows have no number")
        return rowid

    def read_projects(self, lookup: SessionLookup) -> dict[str, str]:
        """Return the project of each session."""
        projects: dict[str, str] = {}
        for session, project in self.rows(lookup.table, (lookup.session, lookup.project)):
            if len(projects) >= MOST_SESSIONS:
                break
            if session and project:
                projects[session.decode("utf-8", "replace")] = project.decode("utf-8", "replace")
        return projects

    def find_differing(self, earlier: str, spec: RecordSpec) -> tuple[list[int], list[int]] | None:
        """Return the rowids of the rows that an earlier copy of the database has and this one has not, or not so; and
        the other way round. SQLite compares them, which is many times faster than reading both.

        ``None`` if the table is not the same kind of table in both. Raise ``Unreadable``.
        """
        with translate_sqlite_errors():
            self._connection.execute("ATTACH ? AS earlier", (f"file:{quote(earlier)}?mode=ro&immutable=1",))
            names = {one for column in list_columns(spec) for one in column.split("|")}
            both = [self._list_columns(spec.table, schema) & names for schema in ("main", "earlier")]
            if not both[0] or both[0] != both[1]:
                return None
            rowid = self._find_rowid(spec.table)
            if not rowid or rowid != self._find_rowid(spec.table, "earlier"):
                return None
            table = _quote_name(spec.table)
            differs = " OR ".join(f"n.{_quote_name(one)} IS NOT o.{_quote_name(one)}" for one in sorted(both[0]))
            come = self._list_rowids(
                f"SELECT n.{rowid} FROM main.{table} n LEFT JOIN earlier.{table} o ON o.{rowid} = n.{rowid}"
                f" WHERE o.{rowid} IS NULL OR {differs}"
            )
            gone = self._list_rowids(
                f"SELECT o.{rowid} FROM earlier.{table} o WHERE NOT EXISTS"
                f" (SELECT 1 FROM main.{table} n WHERE n.{rowid} = o.{rowid})"
            )
            # Of those that differ, the ones that both have: looked up one by one, not by another pass over all rows.
            look_up = f"SELECT 1 FROM earlier.{table} WHERE {rowid} = ?"
            there = [number for number in come if self._connection.execute(look_up, (number,)).fetchone()]
            return sorted([*gone, *there]), come

    def list_rowids(self, table: str) -> list[int]:
        """Return the rowids of a table in the order in which ``rows`` yields them. Raise ``Unreadable``."""
        with translate_sqlite_errors():
            if not self._list_columns(table):
                return []
            rowid = self._name_rowid(table)
            select = f"SELECT {rowid} FROM {_quote_name(table)} ORDER BY {rowid}"
            return [row[0] for row in self._connection.execute(select)]

    def pick_rowids(self, table: str, rowids: Iterable[int]) -> list[int]:
        """Return those of these rowids that a table has, in order. Raise ``Unreadable``."""
        with translate_sqlite_errors():
            select = f"SELECT 1 FROM {_quote_name(table)} WHERE {self._name_rowid(table)} = ?"
            return [number for number in sorted(rowids) if self._connection.execute(select, (number,)).fetchone()]

    def describe_table(self, table: str) -> tuple[int, str]:
        """Return the root page of a table and the statement that made it; 0 if there is no such table. Raise
        ``Unreadable``."""
        with translate_sqlite_errors():
            if not self._list_columns(table):
                return 0, ""
            found = self._connection.execute(
                "SELECT rootpage, sql FROM main.sqlite_master WHERE type = 'table' AND name = ?", (table,)
            ).fetchone()
            return (found[0], str(found[1])) if isinstance(found[0], int) else (0, "")

    def _list_rowids(self, select: str) -> list[int]:
        found = [row[0] for row in self._connection.execute(f"{select} LIMIT {MOST_DIFFERING + 1}")]
        if len(found) > MOST_DIFFERING:
            raise Unreadable("more rows differ than can be told apart")
        return found

    def _list_columns(self, table: str, schema: str = "main") -> set[str]:
        """Return a plain table's columns. Views and virtual tables are skipped: what they return can be anything."""
        kind = self._connection.execute(
            f"SELECT sql FROM {schema}.sqlite_master WHERE type = 'table' AND name = ?", (table,)
        ).fetchone()
        if kind is None or "VIRTUAL" in str(kind[0]).upper().partition("(")[0]:
            return set()
        rows = self._connection.execute(f"PRAGMA {schema}.table_info({_quote_name(table)})")
        return {str(row[1]) for row in rows}


def _quote_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
