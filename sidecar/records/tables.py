"""Read tables of a SQLite database from a sandbox: read-only, with whatever columns it has, and safe against hostile
files."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import quote

from sidecar.records.record import TEXT_BYTES

READ_SECONDS = 600.0
LARGEST_ROW = 256 << 20
STEPS = 200_000
"""How many of SQLite's virtual machine steps pass between two checks of the time limit."""


class Unreadable(Exception):
    """Part of a snapshot that cannot be read as records; the message says why."""


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

    def rows(self, table: str, wanted: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
        """Yield each row as texts: for each name, the first of its columns that the table has; ``""`` if it has none of
        them.

        No rows if there is no such table. Raise ``Unreadable``, possibly after some rows.
        """
        with translate_sqlite_errors():
            columns = self._list_columns(table)
            chosen = {name: next((one for one in names if one in columns), "") for name, names in wanted.items()}
            found = {name: column for name, column in chosen.items() if column}
            if not found:
                return
            # Read as bytes: text in a database may be invalid, contain NULs, or be extremely long.
            values = ", ".join(
                f"substr(CAST({_quote_name(column)} AS BLOB), 1, {TEXT_BYTES})" for column in found.values()
            )
            missing = dict.fromkeys(wanted.keys() - found.keys(), "")
            for row in self._connection.execute(f"SELECT {values} FROM {_quote_name(table)}"):
                texts = [value.decode("utf-8", "replace") if value else "" for value in row]
                yield {**missing, **dict(zip(found, texts, strict=True))}

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
