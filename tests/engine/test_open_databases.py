"""A database that somebody has open is copied again only if something was committed, and always if something was."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sidecar.engine import Engine, ExportRequest, export
from sidecar.receipts import ExportOutcome
from sidecar.wiring import open_sandbox
from tests.parts.homes import engine_at

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture
def live(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """A claude-mem database in WAL mode that stays open, its log in use from before."""
    folder = tmp_path / "home/.claude-mem"
    folder.mkdir(parents=True)
    with closing(sqlite3.connect(folder / "claude-mem.db", isolation_level=None)) as database:
        for setting in ("journal_mode=WAL", "wal_autocheckpoint=0"):
            database.execute(f"PRAGMA {setting}")
        database.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, text TEXT)")
        database.executemany("INSERT INTO rows (text) VALUES (?)", [("a" * 50,)] * 100)
        database.execute("PRAGMA wal_checkpoint(PASSIVE)")  # the next commit writes over the log's beginning
        yield database


async def _export(engine: Engine, home: Path) -> tuple[str, ExportOutcome]:
    time.sleep(0.2)  # older than a tick of the clock, or it is read again
    receipt = await export(engine, open_sandbox(f"local:{home}"), ExportRequest(memory="m"))
    return receipt.databases[0].method, receipt.outcome


async def test_an_unchanged_database_with_its_log_open_is_not_copied(tmp_path: Path, live: sqlite3.Connection) -> None:
    engine, home = engine_at(tmp_path / "store"), tmp_path / "home"
    assert await _export(engine, home) == ("online-backup", ExportOutcome.COMMITTED)
    live.execute("UPDATE rows SET text = 'b' WHERE id = 7")
    assert await _export(engine, home) == ("online-backup", ExportOutcome.COMMITTED)
    assert await _export(engine, home) == ("unchanged", ExportOutcome.UNCHANGED)
    live.execute("BEGIN IMMEDIATE")
    live.execute("ROLLBACK")
    with closing(sqlite3.connect(home / ".claude-mem/claude-mem.db")) as reader:
        assert reader.execute("SELECT count(*) FROM rows").fetchone() == (100,)
    assert await _export(engine, home) == ("unchanged", ExportOutcome.UNCHANGED)


async def test_a_commit_is_seen_though_the_log_has_its_size_and_time_of_before(
    tmp_path: Path, live: sqlite3.Connection
) -> None:
    """In a log that was begun again, a commit writes over old frames: the file does not grow. Its time can be set."""
    engine, home = engine_at(tmp_path / "store"), tmp_path / "home"
    log = home / ".claude-mem/claude-mem.db-wal"
    live.execute("UPDATE rows SET text = 'b' WHERE id = 7")
    assert await _export(engine, home) == ("online-backup", ExportOutcome.COMMITTED)
    before = log.stat()
    live.execute("UPDATE rows SET text = 'c' WHERE id = 8")
    assert log.stat().st_size == before.st_size
    os.utime(log, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert await _export(engine, home) == ("online-backup", ExportOutcome.COMMITTED)


@pytest.mark.parametrize("mode", ["PASSIVE", "RESTART", "TRUNCATE"])
async def test_no_commit_is_missed_around_a_checkpoint(tmp_path: Path, live: sqlite3.Connection, mode: str) -> None:
    engine, home = engine_at(tmp_path / "store"), tmp_path / "home"
    assert (await _export(engine, home))[1] == ExportOutcome.COMMITTED
    for number in range(3):
        live.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
        assert (await _export(engine, home))[1] == ExportOutcome.UNCHANGED
        live.execute("UPDATE rows SET text = ? WHERE id = 9", (f"now {number}",))
        assert await _export(engine, home) == ("online-backup", ExportOutcome.COMMITTED)
