"""Scrub a database: remove what must not leave from the sidecar's own copy of it, value by value.

It is done through SQLite, so that indexes stay consistent. Triggers are dropped for the time being, because what they
would write is not known, and full-text indexes are rebuilt. What was removed is overwritten, also in free pages and
unused bytes. No page moves.
"""

from __future__ import annotations

import os
import re
import sqlite3
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Tuple

from sidecar.program.privacy import screen
from sidecar.program.privacy.scrub import MOST_FINDINGS, PrivacyPolicy, PrivacyReport, scrub_text
from sidecar.program.sqlite import fulltext, pages
from sidecar.program.sqlite.backup import connect_read_only, quick_check
from sidecar.program.sqlite.fulltext import quote_name as _quoted

VIRTUAL = re.compile(r"CREATE\s+VIRTUAL\s+TABLE", re.IGNORECASE)
ROWS = 100
MOST_NUMBERS = 10_000
REFUSED = "SQLite could not clear it of what is private: %s"
DAMAGE = "it could not be cleared of what is private without damage"


class Unscrubbable(Exception):
    """The database contains something that must not leave and cannot be removed; the message says why."""


class _Table(NamedTuple):
    """A table with the columns that identify a row, and its other columns."""

    name: str
    keys: List[str]
    columns: List[str]

    @property
    def where(self) -> str:
        """The condition that selects one row."""
        return " AND ".join("%s IS ?" % key for key in self.keys)


class _Hit(NamedTuple):
    """A value with a finding: the key of its row, and its column."""

    key: Tuple[Any, ...]
    column: str


class _Text(bytes):
    """A value that is text, as opposed to a blob."""


def scrub(
    place: str,
    path: str,
    policy: PrivacyPolicy,
    changed: List[int] | None,
    sound: bool,
    report: PrivacyReport,
    before: bool = False,
    look: Callable[[], bool | None] | None = None,
) -> bool:
    """Remove from a copy of a database what must not leave. Return whether the copy was changed.

    ``changed`` are the pages that changed since it was last examined; ``None``: all. ``before``: something was removed
    from this database earlier. It may be deleted since, while words of it are still in a full-text index, or parts of
    it in unused bytes. ``look`` says whether there is anything on those pages, if something else finds that out, and
    ``None`` if it does not. Raise Unscrubbable.
    """
    if not sound:
        if policy.strict and screen.may_hold(place, policy.without_warnings):
            raise Unscrubbable("damaged, so what is private in it, or may be, could not be taken out")
        return False
    anew = bool(policy.remove and _index_may_remember(place, path, report)) or (before and policy.takes_out)
    if not anew:
        holds = look() if look is not None else None
        if not (pages.may_concern(place, policy.find_traces, changed) if holds is None else holds):
            return False
    try:
        remains = policy.strict and pages.has_remains(place, policy.without_warnings.find_traces)
        cleaning = _Cleaner(place, policy, remains, anew)
        changed_it = remains or anew or cleaning.taken != [0, 0]
        if changed_it:
            pages.clear_unused(place)
    except pages.UnexpectedPage:
        raise Unscrubbable(DAMAGE) from None
    except (sqlite3.Error, sqlite3.Warning, UnicodeError) as problem:
        if not policy.strict:
            return False
        raise Unscrubbable(REFUSED % problem) from None
    if changed_it and quick_check(place) != "ok":
        raise Unscrubbable(DAMAGE)
    for column, row, name, action in cleaning.rows:
        report.add(path, name, action, column=column, row=row)
    report.add_more(cleaning.more)
    report.take(path, cleaning.taken)
    return changed_it


def _index_may_remember(place: str, path: str, report: PrivacyReport) -> bool:
    """Return whether a full-text index that can be rebuilt may contain words of private text that was deleted.

    For an index without texts that cannot be determined, because the word of a tag may come from any other text: this
    is a warning, and no reason to lose a whole database. Raise Unscrubbable.
    """
    connection = connect_read_only(place)
    try:
        found = False
        for index in fulltext.list_indexes(connection):
            gone = fulltext.may_remember_tags(connection, index)
            if index.content == "" and (gone or fulltext.may_contain_tags(connection, index)):
                told = "%s: its full-text index %s has the word private in it, and no texts to tell what was private."
                report.warnings.append(told % (path, index.name))
            found = found or (gone and index.content != "")
        return found
    except sqlite3.Error as problem:
        raise Unscrubbable(REFUSED % problem) from None
    finally:
        connection.close()


def _connect(place: str) -> sqlite3.Connection:
    """Open the copy for writing, so that deleted data is overwritten."""
    connection = sqlite3.connect(place, isolation_level=None)
    for setting in ("locking_mode=EXCLUSIVE", "secure_delete=ON", "synchronous=OFF", "ignore_check_constraints=ON"):
        connection.execute("PRAGMA " + setting).fetchall()
    return connection


class _Cleaner:
    """One database, scrubbed: what was found where, and how much was removed. Raise Unscrubbable or sqlite3.Error."""

    def __init__(self, place: str, policy: PrivacyPolicy, remains: bool, anew: bool) -> None:
        """``remains``: unused bytes contained something private; ``anew``: or may have, so its full-text indexes are
        rebuilt."""
        self._policy = policy
        self._remains = remains
        self._anew = anew
        self._place = place
        self.rows: List[Tuple[str, str, str, str]] = []
        self.more: Dict[str, int] = {}
        self.taken = [0, 0]
        self._numbers: Dict[Tuple[str, str, bytes], int] = {}
        self._connection = connection = _connect(place)
        try:
            self._schema = connection.execute("SELECT type, name, coalesce(sql, '') FROM sqlite_master").fetchall()
            if policy.takes_out and any(policy.may_concern(os.fsencode(sql)) for _, _, sql in self._schema):
                raise Unscrubbable("its schema itself holds what is private")
            self._indexes = fulltext.list_indexes(connection)
            self._utf8 = connection.execute("PRAGMA encoding").fetchone()[0] == "UTF-8"
            tables = [_describe_table(connection, name) for name in self._list_tables()]
            connection.text_factory = _Text
            self._clean([(table, hit) for table in tables for hit in _find_hits(connection, table, policy)])
        finally:
            self._connection.close()

    def _list_tables(self) -> List[str]:
        """Return the tables with values of their own: a full-text index is rebuilt from what it indexes."""
        indexes = {index.name + tail for index in self._indexes for tail in fulltext.TABLES[index.module]}
        return [
            name
            for kind, name, sql in self._schema
            if kind == "table" and not VIRTUAL.match(sql) and name not in indexes
        ]

    def _clean(self, hits: List[Tuple[_Table, _Hit]]) -> None:
        """Scrub the values with findings, in one transaction, and rebuild full-text indexes if anything was removed."""
        connection, writes = self._connection, 0
        triggers = [(name, sql) for kind, name, sql in self._schema if kind == "trigger"]
        connection.execute("BEGIN")
        # A row is selected by its key, so key columns are changed last.
        for table, hit in sorted(hits, key=lambda pair: _quoted(pair[1].column) in pair[0].keys):
            data, clean = self._clean_value(table, hit)
            if clean == data:
                continue
            if not writes:
                for name, _ in triggers:
                    connection.execute("DROP TRIGGER " + _quoted(name))
            writes += 1
            self._write(table, hit, data, clean)
        if writes:
            for _, sql in triggers:
                connection.execute(sql)
        connection.execute("COMMIT")
        if (writes or self._remains) and any(index.content == "" for index in self._indexes):
            raise Unscrubbable("its full-text index cannot be built anew")
        if writes or self._remains or self._anew:
            self._rebuild()

    def _rebuild(self) -> None:
        """Rebuild the full-text indexes that can be: words of deleted rows stay in them for long."""
        indexes = [index for index in self._indexes if index.content != ""]
        for index in indexes:
            if index.content and index.module == "fts5":
                self._connection.execute("INSERT INTO {0}({0}) VALUES ('delete-all')".format(_quoted(index.name)))
        if indexes:
            self._connection.close()
            # The free pages are sorted so that the new index reuses the pages of the old one in order, and few pages
            # change.
            pages.sort_free_list(self._place)
            self._connection = _connect(self._place)
            self._connection.execute("BEGIN")
            for index in indexes:
                self._connection.execute("INSERT INTO {0}({0}) VALUES ('rebuild')".format(_quoted(index.name)))
            self._connection.execute("COMMIT")

    def _clean_value(self, table: _Table, hit: _Hit) -> Tuple[bytes, bytes]:
        """Return one value as it is, and as it may leave."""
        query = "SELECT %s FROM %s WHERE %s" % (_quoted(hit.column), _quoted(table.name), table.where)
        found = self._connection.execute(query, hit.key).fetchone()
        if found is None:
            raise Unscrubbable("%s.%s is part of several keys" % (table.name, hit.column))
        data = found[0]
        binary = not isinstance(data, _Text) and b"\0" in data
        clean, text = scrub_text(data, self._policy, binary)
        if binary and text.taken[0]:
            raise Unscrubbable(
                "%s.%s holds what is private in a form that cannot be cleared" % (table.name, hit.column)
            )
        # A key that is text may itself be what must not leave, so it is not reported.
        row = "" if any(isinstance(key, (bytes, str)) for key in hit.key) else ", ".join(map(str, hit.key))
        for _, what, action in text.rows:
            if len(self.rows) < MOST_FINDINGS:
                self.rows.append(("%s.%s" % (table.name, hit.column), row, what, action))
            else:
                self.more[action] = self.more.get(action, 0) + 1
        for action, count in text.more.items():
            self.more[action] = self.more.get(action, 0) + count
        self.taken = [self.taken[0] + text.taken[0], self.taken[1] + text.taken[1]]
        return data, clean

    def _write(self, table: _Table, hit: _Hit, data: bytes, clean: bytes) -> None:
        """Write the scrubbed value. If the column is unique and the value exists already, its first mark gets a number."""
        name, is_text = _quoted(table.name), isinstance(data, _Text)
        if table.name.startswith("sqlite_stat"):  # SQLite's own statistics, which are optional
            self._connection.execute("DELETE FROM %s WHERE %s" % (name, table.where), hit.key)
            return
        value = "CAST(? AS TEXT)" if is_text and self._utf8 else "?"
        # The schema's own conflict clause might delete the row or keep the old value.
        statement = "UPDATE OR ABORT %s SET %s = %s WHERE %s" % (name, _quoted(hit.column), value, table.where)
        same, new = (table.name, hit.column, clean), clean
        while True:
            try:
                self._connection.execute(
                    statement, (new.decode() if is_text and not self._utf8 else bytes(new), *hit.key)
                )
                return
            except sqlite3.IntegrityError as problem:
                number = self._numbers.get(same, 1) + 1
                if "UNIQUE" not in str(problem) or number > MOST_NUMBERS:
                    raise
            self._numbers[same] = number
            mark = next(at for at, pair in enumerate(zip(data, clean)) if pair[0] != pair[1])
            end = clean.index(b"]", mark)
            new = b"%s %d%s" % (clean[:end], number, clean[end:])


def _describe_table(connection: sqlite3.Connection, name: str) -> _Table:
    """Return how to select rows of a table: by rowid, else by its primary key."""
    columns, primary, named = [], [], set()
    for row in connection.execute("PRAGMA table_xinfo(%s)" % _quoted(name)):
        named.add(row[1].lower())
        if row[6] == 0:
            columns.append(row[1])
        if row[5]:
            primary.append((row[5], _quoted(row[1])))
    for alias in ("rowid", "_rowid_", "oid"):
        if alias in named:
            continue
        try:
            connection.execute("SELECT %s FROM %s LIMIT 0" % (alias, _quoted(name)))
            return _Table(name, [alias], columns)
        except sqlite3.OperationalError:
            break
    return _Table(name, [key for _, key in sorted(primary)], columns)


def _has_traces(policy: PrivacyPolicy, values: Iterable[Any]) -> bool:
    """Return whether any of these values may contain something, wherever it begins and ends."""
    return any(True for _ in policy.find_traces(b"\0".join(one for one in values if isinstance(one, bytes))))


def _find_hits(connection: sqlite3.Connection, table: _Table, policy: PrivacyPolicy) -> Iterator[_Hit]:
    """Yield where in a table something is to be done. Most rows have no finding, so rows are examined in batches.

    Together they are only searched for traces: whether there is a finding depends on where a value begins and ends.
    """
    if not table.columns:
        return
    query = "SELECT %s FROM %s" % (", ".join(table.keys + [_quoted(one) for one in table.columns]), _quoted(table.name))
    cursor, width = connection.execute(query), len(table.keys)
    for rows in iter(lambda: cursor.fetchmany(ROWS), []):
        if not _has_traces(policy, (one for row in rows for one in row[width:])):
            continue
        for row in rows:
            if not _has_traces(policy, row[width:]):
                continue
            for column, value in zip(table.columns, row[width:]):
                if isinstance(value, bytes) and policy.may_concern(value):
                    if not width:
                        raise Unscrubbable("%s has no key to clear its rows by" % table.name)
                    yield _Hit(tuple(key.decode() if isinstance(key, _Text) else key for key in row[:width]), column)
