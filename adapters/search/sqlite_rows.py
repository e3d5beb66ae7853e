"""Make the rows of one memory in the embedded index equal to a snapshot, batch by batch, in one transaction."""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Collection, Sequence

from adapters.search.sqlite_schema import name_kind, name_memory
from sidecar.records.record import Record
from sidecar.search.port import Moment, WriteCounts

ADD = """
INSERT OR IGNORE INTO records (id, memory_id, kind, key, project, session, at, path, digest, weight, first)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
LETTERS_PER_WORD = 6
ADD_WORDS = "INSERT INTO words (rowid, title, text, place) VALUES (?, ?, ?, ?)"
FIND = """
SELECT r.id, r.digest, r.project, w.title, w.text FROM records r JOIN words w ON w.rowid = r.id
WHERE r.memory_id = ? AND r.kind = ? AND r.key = ? AND r.last IS NULL
"""
AMEND = "UPDATE records SET session = ?, at = ?, path = ?, digest = ? WHERE id = ?"
UNKNOWN = """
AND last IS NOT NULL AND NOT EXISTS (
    SELECT 1 FROM snapshots s
    WHERE s.memory_id = records.memory_id AND s.number BETWEEN records.first AND records.last
)
"""


class MemoryRows:
    """Writes the rows of one memory. Every method is for a thread, within a transaction of the connection."""

    def __init__(self, connection: sqlite3.Connection, memory: str, reader: str, moment: Moment | None) -> None:
        self._connection = connection
        self._reader = reader
        self._moment = moment
        self._written = self._removed = 0
        row = connection.execute(
            "SELECT id, snapshot, reader, records FROM memories WHERE memory = ?", (memory,)
        ).fetchone()
        if row is None:
            connection.execute(
                "INSERT INTO memories (memory, snapshot, reader, records, problems, indexed) VALUES (?, '', '', 0, '[]', 0)",
                (memory,),
            )
            row = (connection.execute("SELECT last_insert_rowid()").fetchone()[0], "", "", 0)
        self._id, self.snapshot, held_reader, self.records = row
        newest = "SELECT max(number) FROM snapshots WHERE memory_id = ?"
        (self._last,) = connection.execute(newest, (self._id,)).fetchone()
        self.is_current = held_reader == reader
        (highest,) = connection.execute("SELECT coalesce(max(id), 0) FROM records").fetchone()
        self._start = self._next = highest + 1
        self._held: dict[bytes, int] = {}
        self._number = 0
        self._place = name_memory(self._id)

    @property
    def has_history(self) -> bool:
        return self._last is not None

    def begin(self) -> None:
        """Remove what does not stay in any case, and note which records are here."""
        anew = not self.is_current or (self._moment is not None and self._moment.begins)
        if anew or self._moment is None:
            self._delete_where("" if anew else "AND last IS NOT NULL", count=anew)
            self._connection.execute("DELETE FROM snapshots WHERE memory_id = ?", (self._id,))
            self._last = None
        self._number = 0 if self._last is None else self._last + 1
        present = "SELECT digest, id FROM records WHERE memory_id = ? AND last IS NULL"
        self._held = dict(self._connection.execute(present, (self._id,)))

    def add(self, batch: Sequence[Record]) -> None:
        """Add the records that are not here yet."""
        fresh: list[tuple[int, Record, bytes]] = []
        for record in batch:
            digest = record.digest
            if self._held.pop(digest, None) is None:
                fresh.append((self._next, record, digest))
                self._next += 1
        if not fresh:
            return
        before = self._connection.total_changes
        self._connection.executemany(ADD, (self._list_values(id, record, digest) for id, record, digest in fresh))
        if self._connection.total_changes - before < len(fresh):
            ids = range(fresh[0][0], fresh[-1][0] + 1)
            there = {
                id
                for (id,) in self._connection.execute(
                    "SELECT id FROM records WHERE id BETWEEN ? AND ?", (ids[0], ids[-1])
                )
            }
            taken = [one for one in fresh if one[0] not in there]
            fresh = [one for one in fresh if one[0] in there]
            fresh += [one for one in taken if self._replace_version(*one)]
        self._connection.executemany(
            ADD_WORDS,
            ((id, record.title, record.text, f"{self._place} {name_kind(record.kind)}") for id, record, _ in fresh),
        )
        self._written += len(fresh)

    def finish(self, snapshot: str, problems: Sequence[str]) -> WriteCounts:
        """Let go of the records that the snapshot does not have, and note what the rows are of."""
        for id in self._held.values():
            self._let_go(id)
        (records,) = self._connection.execute(
            "SELECT count(*) FROM records WHERE memory_id = ? AND last IS NULL", (self._id,)
        ).fetchone()
        self._connection.execute(
            "UPDATE memories SET snapshot = ?, reader = ?, records = ?, problems = ?, indexed = ? WHERE id = ?",
            (snapshot, self._reader, records, json.dumps(list(problems)), time.time(), self._id),
        )
        if self._moment is not None:
            self._connection.execute(
                "INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?)",
                (self._id, self._number, snapshot, self._moment.created),
            )
        return WriteCounts(records=records, written=self._written, removed=self._removed)

    def remove(self) -> int:
        """Remove the memory; return how many records it had."""
        self._delete_where("", count=False)
        self._connection.execute("DELETE FROM snapshots WHERE memory_id = ?", (self._id,))
        self._connection.execute("DELETE FROM memories WHERE id = ?", (self._id,))
        return int(self.records)

    def forget(self, snapshots: Collection[str]) -> None:
        """Remove past snapshots, and the records that no other has."""
        self._connection.executemany(
            "DELETE FROM snapshots WHERE memory_id = ? AND snapshot = ?", ((self._id, one) for one in snapshots)
        )
        self._delete_where(UNKNOWN, count=False)

    def _list_values(self, id: int, record: Record, digest: bytes) -> tuple[object, ...]:
        at = record.at.timestamp() if record.at else None
        weight = 1 / (1 + math.log1p((len(record.title) + len(record.text)) / LETTERS_PER_WORD))
        about = (record.kind, record.key, record.project, record.session, at, record.path)
        return (id, self._id, *about, digest, weight, self._number)

    def _replace_version(self, id: int, record: Record, digest: bytes) -> bool:
        """Put a record in the place of its last version. Return whether its words are to be added: not if they are the
        same, or if the snapshot has the same record twice."""
        held = self._connection.execute(FIND, (self._id, record.kind, record.key)).fetchone()
        if held is None or held[0] >= self._start or held[1] not in self._held:
            return False
        old, old_digest, *contents = held
        del self._held[old_digest]
        if contents == [record.project, record.title, record.text]:
            at = record.at.timestamp() if record.at else None
            self._connection.execute(AMEND, (record.session, at, record.path, digest, old))
            self._written, self._removed = self._written + 1, self._removed + 1
            return False
        self._let_go(old)
        self._connection.execute(ADD, self._list_values(id, record, digest))
        return True

    def _let_go(self, id: int) -> None:
        """Remove a record; if history is kept, end it."""
        self._removed += 1
        if self._moment is None:
            self._delete(id)
            return
        self._connection.execute("UPDATE records SET last = ? WHERE id = ?", (self._last, id))

    def _delete(self, id: int) -> None:
        self._connection.execute("DELETE FROM words WHERE rowid = ?", (id,))
        self._connection.execute("DELETE FROM records WHERE id = ?", (id,))

    def _delete_where(self, condition: str, *, count: bool) -> None:
        where = f"FROM records WHERE memory_id = ? {condition}"
        if count:
            self._removed += self._connection.execute(
                f"SELECT count(*) {where} AND last IS NULL", (self._id,)
            ).fetchone()[0]
        self._connection.execute(f"DELETE FROM words WHERE rowid IN (SELECT id {where})", (self._id,))
        self._connection.execute(f"DELETE {where}", (self._id,))
