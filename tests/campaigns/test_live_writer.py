"""Exports while another process commits as fast as it can: every copy is whole and misses nothing committed before."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.parts.commands import done

SLOTS = 20_000
"""The newest commits that stay in the database, so that it does not outgrow the test however fast the writer is."""
LARGE = 1000
"""So many bytes more in each row make a database that is copied by a process of its own, and read meanwhile."""

WRITER = """
import os, sqlite3, sys
path, counter, mode, slots, more = sys.argv[1:]
database = sqlite3.connect(path, timeout=60, isolation_level=None)
assert database.execute("PRAGMA journal_mode=" + mode).fetchone() == (mode.lower(),)
database.execute("PRAGMA synchronous=OFF")
database.execute("CREATE TABLE observations (slot INTEGER PRIMARY KEY, number INTEGER, narrative TEXT)")
published = os.open(counter, os.O_WRONLY | os.O_CREAT)
number = 0
while True:
    number += 1
    database.execute("BEGIN IMMEDIATE")
    row = (number % int(slots), number, "observation %d" % number + "." * int(more))
    database.execute("INSERT OR REPLACE INTO observations VALUES (?, ?, ?)", row)
    database.execute("COMMIT")
    os.pwrite(published, number.to_bytes(8, "big"), 0)
"""


@contextlib.contextmanager
def writing(home: Path, mode: str, more: int = 0) -> Iterator[Callable[[], int]]:
    """A process that commits one row after the other; call what it yields for how many it has committed."""
    counter = home / "counter"
    database = home / ".claude-mem/claude-mem.db"
    database.parent.mkdir(parents=True)
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(database), str(counter), mode, str(SLOTS), str(more)])
    try:
        while not counter.exists() or counter.stat().st_size < 8:
            assert process.poll() is None
            time.sleep(0.01)
        yield lambda: int.from_bytes(counter.read_bytes(), "big")
        assert process.poll() is None, "the writer failed"
    finally:
        process.kill()
        process.wait()


def last_row_in(home: Path) -> int:
    """The newest commit that came back, with all before it there and the database whole."""
    uri = f"file:{home}/.claude-mem/claude-mem.db?mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        numbers = [number for (number,) in database.execute("SELECT number FROM observations ORDER BY number")]
    last: int = numbers[-1]
    assert numbers == list(range(max(1, last - SLOTS + 1), last + 1))
    return last


@pytest.mark.parametrize(
    ("mode", "exports", "more"),
    [
        ("WAL", 6, 0),
        ("DELETE", 3, 0),
        ("WAL", 6, LARGE),
        pytest.param("WAL", 200, 0, marks=pytest.mark.slow),
        pytest.param("DELETE", 200, 0, marks=pytest.mark.slow),
        pytest.param("WAL", 200, LARGE, marks=pytest.mark.slow),
    ],
)
def test_every_export_is_whole_and_holds_every_row_committed_before_it(
    mode: str, exports: int, more: int, tmp_path: Path
) -> None:
    home, store, ahead = tmp_path / "home", tmp_path / "store", []
    with writing(home, mode, more) as committed:
        for number in range(exports):
            while more and committed() < SLOTS // 2:
                time.sleep(0.05)
            before = committed()
            receipt = done("export", "live", "--sandbox", f"local:{home}", store=store)
            assert receipt["outcome"] == "committed", receipt
            assert [row["check"] for row in receipt["databases"]] == ["ok"]
            other = tmp_path / f"home-{number}"
            other.mkdir()
            sandbox = ("--sandbox", f"local:{other}", "--snapshot", receipt["snapshot"])
            assert done("restore", "live", *sandbox, store=store)["outcome"] == "complete"
            ahead.append(last_row_in(other) - before)
            assert ahead[-1] >= 0
            shutil.rmtree(other)
        total = committed()
    left = [name for name in os.listdir(home / ".cache/memory-sidecar") if name.startswith("work-")]
    assert not left
    print(
        f"{mode}: {exports} exports beside {total:,} commits, none of them lost; each had {min(ahead):,} or more made meanwhile"
    )
