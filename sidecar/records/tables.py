"""Read tables of a SQLite database from a sandbox: read-only, with whatever columns it has, and safe against hostile
files."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Sequence
from urllib.parse import quote

from sidecar.layouts.sources import RecordSpec, SessionLookup
from sidecar.records.columns import list_columns, make_row_item
from sidecar.records.files import MemoryFile, Unreadable
from sidecar.records.record import Item

READ_SECONDS = 600.0
LARGEST_ROW = 256 << 20
LARGEST_VALUE = 4 << 20
"""How much of a value is read."""
STEPS = 200_000
"""How many of SQLite's virtual machine steps pass between two checks of the time limit."""
MOST_SESSIONS = 100_000


def read_table(file: MemoryFile, spec: RecordSpec) -> Iterator[Item]:
    """Yield the rows of a table; none if there is no such table. Raise ``Unreadable``, possibly after some rows."""
    with open_tables(file.place) as tables:
        columns = list_columns(spec)
        projects = tables.read_projects(spec.sessions) if spec.sessions else {}
        for row in tables.rows(spec.table, columns):
            if projects and not any(row[column] for column in spec.project):
                session = next(filter(None, (row[column] for column in spec.session)), "")
                row.update(dict.fromkeys(spec.project[:1], projects.get(session, "")))
            yield make_row_item(spec, file, row.__getitem__)


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

    def rows(self, table: str, wanted: Sequence[str]) -> Iterator[dict[str, str]]:
        """Yield each row as texts, in the order of its rows: for ``name|other``, the first of these columns that the
        table has; ``""`` if it has none of them.

        No rows if there is no such table. Raise ``Unreadable``, possibly after some rows.
        """
        with translate_sqlite_errors():
            columns = self._list_columns(table)
            chosen = {name: next((one for one in name.split("|") if one in columns), "") for name in wanted}
            found = {name: column for name, column in chosen.items() if column}
            if not found:
                return
            # Read as bytes: text in a database may be invalid, contain NULs, or be extremely long.
            values = ", ".join(
                f"substr(CAST({_quote_name(column)} AS BLOB), 1, {LARGEST_VALUE})" for column in found.values()
            )
            missing = dict.fromkeys(set(wanted) - found.keys(), "")
            for row in self._connection.execute(f"SELECT {values} FROM {_quote_name(table)}"):
                texts = [value.decode("utf-8", "replace") if value else "" for value in row]
                yield {**missing, **dict(zip(found, texts, strict=True))}

    def read_projects(self, lookup: SessionLookup) -> dict[str, str]:
        """Return the project of each session."""
        projects: dict[str, str] = {}
        for row in self.rows(lookup.table, (lookup.session, lookup.project)):
            if len(projects) >= MOST_SESSIONS:
                break
            if row[lookup.session]:
                projects[row[lookup.session]] = row[lookup.project]
        return projects

    def _list_columns(self, table: str) -> set[str]:
        """Return a plain table's columns. Views and virtual tables are skipped: what they return can be anything."""
        kind = self._connection.execute(
            "SELECT sql FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)
        ).fetchone()
        if kind is None or "VIRTUAL" in str(kind[0]).upper().partition("(")[0]:
            return set()
        return {str(row[1]) for row in self._connection.execute(f"PRAGMA table_info({_quote_name(table)})")}


def _quote_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
