"""Copying SQLite while others write, and without leaving a trace beside it."""

from __future__ import annotations

import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from sidecar.format.index import FILE, Entry
from sidecar.format.refusal import Refusal
from sidecar.program import main as main_module
from sidecar.program.cache import KnownEntry
from sidecar.program.capture import export as export_module
from sidecar.program.capture import reader
from sidecar.program.capture.builder import CopyMisread
from sidecar.program.limits import fit
from sidecar.program.sqlite import backup
from sidecar.program.sqlite.backup import CheckedCopy, describe_free_pages, measure, quick_check
from tests.parts.homes import PROJECT

TASKS = "/proc/self/task"


class DatabaseCopy(NamedTuple):
    place: str
    page: int
    check: str


def copy_database(source: str, target: str, wait: float, emptied: list[str] | None = None) -> DatabaseCopy:
    """Copy a database as an export does, and wait for the check."""
    copy = CheckedCopy(source, target, wait, emptied)
    try:
        return DatabaseCopy(target, copy.page, copy.read_check())
    finally:
        copy.wait()


def make(path: Path, mode: str, rows: int = 2000, page: int = 4096) -> None:
    database = sqlite3.connect(path)
    database.execute(f"PRAGMA page_size={page}")
    database.execute(f"PRAGMA journal_mode={mode}")
    database.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, text TEXT)")
    with database:
        database.executemany("INSERT INTO rows (text) VALUES (?)", [(os.urandom(100).hex(),) for _ in range(rows)])
    database.close()


def listing(folder: Path) -> dict[str, tuple[int, int, str]]:
    return {
        path.name: (path.stat().st_size, path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in folder.iterdir()
    }


def count(path: Path) -> int:
    database = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
    try:
        return int(database.execute("SELECT count(*) FROM rows").fetchone()[0])
    finally:
        database.close()


@pytest.mark.parametrize("mode", ["WAL", "DELETE", "TRUNCATE", "PERSIST"])
@pytest.mark.parametrize("page", [512, 4096, 65536])
def test_a_database_nobody_writes_to_is_copied_to_the_byte_and_left_alone(tmp_path: Path, mode: str, page: int) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    make(folder / "a.db", mode, page=page)
    before = listing(folder)
    copied = copy_database(str(folder / "a.db"), str(tmp_path / "copy"), 5)
    assert (copied.check, copied.page) == ("ok", page)
    assert (tmp_path / "copy").read_bytes() == (folder / "a.db").read_bytes()
    assert listing(folder) == before


def test_rows_that_are_only_in_the_log_are_copied(tmp_path: Path) -> None:
    make(tmp_path / "a.db", "WAL", rows=1)
    writer = sqlite3.connect(tmp_path / "a.db")
    writer.execute("PRAGMA wal_autocheckpoint=0")
    with writer:
        writer.executemany("INSERT INTO rows (text) VALUES (?)", [("x" * 500,)] * 3000)
    assert copy_database(str(tmp_path / "a.db"), str(tmp_path / "copy"), 5).check == "ok"
    assert count(tmp_path / "copy") == 3001
    writer.close()


@pytest.mark.parametrize("mode", ["WAL", "DELETE"])
def test_a_crashed_writers_log_is_honoured_and_left_alone(tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    make(folder / "a.db", mode)
    script = f"""
import os, sqlite3
database = sqlite3.connect({str(folder / "a.db")!r}, isolation_level=None)
database.execute("PRAGMA cache_size=1")
if {mode == "WAL"}:
    database.execute("PRAGMA wal_autocheckpoint=0")
    database.execute("INSERT INTO rows (text) VALUES ('committed')")
database.execute("BEGIN")
database.execute("UPDATE rows SET text = 'never committed'")
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", script], check=False)
    (folder / "a.db-shm").unlink(missing_ok=True)
    assert (folder / ("a.db-wal" if mode == "WAL" else "a.db-journal")).stat().st_size > 0
    before = listing(folder)
    assert copy_database(str(folder / "a.db"), str(tmp_path / "copy"), 5).check == "ok"
    assert count(tmp_path / "copy") == (2001 if mode == "WAL" else 2000)
    copy = sqlite3.connect(tmp_path / "copy")
    assert copy.execute("SELECT count(*) FROM rows WHERE text = 'never committed'").fetchone() == (0,)
    copy.close()
    assert listing(folder) == before


def test_a_locked_database_is_given_up_after_a_bounded_wait(tmp_path: Path) -> None:
    make(tmp_path / "a.db", "DELETE")
    writer = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    writer.execute("BEGIN EXCLUSIVE")
    started = time.monotonic()
    with pytest.raises(Refusal) as refused:
        copy_database(str(tmp_path / "a.db"), str(tmp_path / "copy"), 0.5)
    assert refused.value.code == "database-busy"
    assert refused.value.retryable
    assert time.monotonic() - started < 60
    writer.close()


def test_a_damaged_database_is_copied_and_reported(tmp_path: Path) -> None:
    make(tmp_path / "a.db", "DELETE")
    data = bytearray((tmp_path / "a.db").read_bytes())
    data[4096 * 3 : 4096 * 4] = b"\xff" * 4096
    (tmp_path / "a.db").write_bytes(data)
    assert copy_database(str(tmp_path / "a.db"), str(tmp_path / "copy"), 5).check != "ok"
    (tmp_path / "b.db").write_bytes(b"not a database at all" * 100)
    assert copy_database(str(tmp_path / "b.db"), str(tmp_path / "copy-b"), 5).check != "ok"
    assert (tmp_path / "copy-b").read_bytes() == (tmp_path / "b.db").read_bytes()


@pytest.mark.parametrize("size", [40, 9000])
@pytest.mark.parametrize("then", ["DELETE FROM logins WHERE id % 2", "DELETE FROM logins", "DROP TABLE logins"])
def test_nothing_is_left_of_the_rows_of_an_emptied_table(then: str, size: int, tmp_path: Path) -> None:
    make(tmp_path / "a.db", "WAL")
    database = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    database.execute("PRAGMA secure_delete=OFF")
    database.execute("CREATE TABLE logins (id INTEGER PRIMARY KEY, token TEXT UNIQUE)")
    database.executemany("INSERT INTO logins (token) VALUES (?)", [(f"hunter2-{i}" + "x" * size,) for i in range(20)])
    database.execute(then)
    database.close()
    assert b"hunter2" in (tmp_path / "a.db").read_bytes()
    copied = copy_database(str(tmp_path / "a.db"), str(tmp_path / "copy"), 5, ["logins"])
    assert copied.check == "ok" and count(tmp_path / "copy") == 2000
    assert b"hunter2" not in (tmp_path / "copy").read_bytes()


def test_a_table_that_cannot_be_emptied_is_reported(tmp_path: Path) -> None:
    make(tmp_path / "a.db", "DELETE")
    raw = bytearray((tmp_path / "a.db").read_bytes())
    raw[4096 : 2 * 4096] = bytes(4096)  # where the table begins
    (tmp_path / "a.db").write_bytes(raw)
    assert copy_database(str(tmp_path / "a.db"), str(tmp_path / "copy"), 5, ["rows"]).check != "ok"


def test_a_database_without_anything_has_nothing_to_empty(tmp_path: Path) -> None:
    (tmp_path / "a.db").touch()
    assert copy_database(str(tmp_path / "a.db"), str(tmp_path / "copy"), 5, ["rows"]).check == "ok"


def test_a_key_in_another_order_than_the_columns_is_no_damage(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "a.db")
    database.executescript(
        "CREATE TABLE t (a, b TEXT, PRIMARY KEY (b, a)) WITHOUT ROWID; INSERT INTO t VALUES (1, 'x')"
    )
    database.close()
    assert quick_check(str(tmp_path / "a.db")) == "ok"


def test_quick_check_writes_nothing(tmp_path: Path) -> None:
    make(tmp_path / "a.db", "WAL")
    before = listing(tmp_path)
    assert quick_check(str(tmp_path / "a.db")) == "ok"
    assert listing(tmp_path) == before


@pytest.mark.parametrize("checkpointed", [True, False])
def test_free_pages_are_counted_with_what_is_in_the_log_and_nothing_changes(tmp_path: Path, checkpointed: bool) -> None:
    place = tmp_path / "a.db"
    make(place, "WAL", rows=10)
    writer = sqlite3.connect(place, isolation_level=None)
    writer.execute("PRAGMA wal_autocheckpoint=0")
    writer.execute("CREATE TABLE junk (x)")
    writer.execute("BEGIN")
    writer.executemany("INSERT INTO junk VALUES (randomblob(4000))", [()] * 1000)
    writer.execute("COMMIT")
    writer.execute("DROP TABLE junk")
    if checkpointed:
        writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before = listing(tmp_path)
    words = describe_free_pages("m/a.db", str(place))
    assert words.startswith("m/a.db is mostly free pages: 4.1 of its 4.1 MB")
    assert listing(tmp_path) == before
    pages, free = (writer.execute(f"PRAGMA {what}").fetchone()[0] for what in ("page_count", "freelist_count"))
    assert measure(str(place)) == (pages * 4096, free * 4096)
    writer.close()


PEAK = """
import sys
from sidecar.program.sqlite import pages
nothing = lambda data: ((at, lambda *_: False) for at in range(0, len(data), 64))  # traces everywhere
assert not pages.may_concern(sys.argv[1], nothing, None)
assert not pages.has_remains(sys.argv[1], nothing)
with open("/proc/self/status") as status:
    print(next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) // 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_looking_through_a_large_database_takes_little_memory(tmp_path: Path) -> None:
    place = tmp_path / "large.db"
    with closing(sqlite3.connect(place)) as database, database:
        database.execute("PRAGMA synchronous=OFF")
        database.execute("CREATE TABLE rows (data BLOB)")
        database.executemany("INSERT INTO rows VALUES (zeroblob(?))", [(100_000,)] * 2000)
    ran = subprocess.run(
        [sys.executable, "-c", PEAK, str(place)], cwd=PROJECT, capture_output=True, text=True, check=True, timeout=120
    )
    assert place.stat().st_size > 190_000_000
    assert int(ran.stdout) < 80, "MB; the file has 200"


@pytest.mark.parametrize("large", [False, True])
def test_while_a_database_is_read_nothing_else_runs_in_that_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """Another thread that closes a file of the database ends the locks that keep its writer from what is being read."""
    make(tmp_path / "a.db", "WAL")
    monkeypatch.setattr(backup, "LARGE", 0 if large else 1 << 30)
    log, copy_live = tmp_path / "log", backup._copy_live

    def watched(*given: Any) -> str:
        with log.open("a") as told:
            told.write(
                f"{os.getpid()} {threading.current_thread() is threading.main_thread()} {len(os.listdir(TASKS))}\n"
            )
        return copy_live(*given)

    monkeypatch.setattr(backup, "_copy_live", watched)
    copied = backup.CheckedCopy(str(tmp_path / "a.db"), str(tmp_path / "copy"), 5)
    try:
        assert copied.read_check() == "ok"
    finally:
        copied.wait()
    ((process, in_main, threads),) = [line.split() for line in log.read_text().splitlines()]
    assert (int(process) == os.getpid()) is not large
    assert in_main == "True"
    assert threads == "1" or not large


@pytest.mark.parametrize("raised", [OSError(5, "Input/output error"), Refusal("database-busy", "Busy.", True)])
def test_what_goes_wrong_in_the_other_process_is_raised_in_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception
) -> None:
    make(tmp_path / "a.db", "WAL")
    monkeypatch.setattr(backup, "LARGE", 0)

    def fail(*given: Any) -> str:
        raise raised

    monkeypatch.setattr(backup, "_copy_live", fail)
    copied = backup.CheckedCopy(str(tmp_path / "a.db"), str(tmp_path / "copy"), 5)
    with pytest.raises(type(raised), match=raised.args[-1] if isinstance(raised, OSError) else "Busy"):
        copied.expect()
    copied.wait()


def test_a_database_is_copied_by_this_process_if_the_other_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "a.db", "WAL")
    monkeypatch.setattr(backup, "LARGE", 0)
    parent, copy_live = os.getpid(), backup._copy_live

    def killed(*given: Any) -> str:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return copy_live(*given)

    monkeypatch.setattr(backup, "_copy_live", killed)
    copied = copy_database(str(tmp_path / "a.db"), str(tmp_path / "copy"), 5)
    assert copied.check == "ok" and quick_check(str(tmp_path / "copy")) == "ok"


def test_a_copy_is_checked_by_this_process_if_the_other_one_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "a.db", "WAL")
    monkeypatch.setattr(backup, "LARGE", 0)
    check = backup.quick_check

    def fail(place: str, mapped: bool = False) -> str:
        if mapped:
            raise MemoryError
        return check(place)

    monkeypatch.setattr(backup, "quick_check", fail)
    assert copy_database(str(tmp_path / "a.db"), str(tmp_path / "copy"), 5).check == "ok"


def test_nothing_of_a_copy_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a.db", "WAL")
    monkeypatch.setattr(backup, "LARGE", 0)
    copied = backup.CheckedCopy(str(tmp_path / "a.db"), str(tmp_path / "copy"), 5)
    assert copied.read_check() == "ok" and (tmp_path / "copy").exists()
    assert copied._child is not None
    process = copied._child._process
    copied.remove()
    copied.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["a.db"]
    with pytest.raises(ChildProcessError):
        os.waitpid(process, os.WNOHANG)


def test_a_copy_is_read_right_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a.db", "WAL", 40_000)
    monkeypatch.setattr(backup, "LARGE", 0)
    monkeypatch.setattr(backup, "_copy_live", slowly(backup._copy_live))
    copied = backup.CheckedCopy(str(tmp_path / "a.db"), str(tmp_path / "copy"), 5)
    follower = copied.follow(4096)
    assert follower is not None and len(follower.checksums) > 3
    assert copied.read_check() == "ok" and copied.confirm()
    place = str(tmp_path / "copy")
    with open(place, "rb") as stream:
        whole = reader.read_stream(stream, os.path.getsize(place), None, str(tmp_path), 4096)
    flipped = bytearray(whole.sums)
    for number in (0, 300, 301, 1500, len(whole.sums) // 16 - 1):
        flipped[number * 16] ^= 1
    entry = Entry("a.db", FILE, 0o644, whole.size, 0, "0" * 64, 4096, bytes(flipped))
    for given in (None, follower):
        with open(place, "rb") as stream:
            again = reader.read_stream(stream, whole.size, KnownEntry(entry, []), str(tmp_path), 4096, given)
        assert (again.digest, again.sums, again.size) == (whole.digest, whole.sums, whole.size)
        assert again.blocks == [0, 300, 301, 1500, len(whole.sums) // 16 - 1]
        pages = Path(place).read_bytes()
        assert again.carried.read() == b"".join(pages[n * 4096 : (n + 1) * 4096] for n in again.blocks)
    copied.remove()
    assert copied.confirm()  # still, when the copy is gone
    copied.wait()


def slowly(copy_live: Any, before: Any = None) -> Any:
    """A copy that takes its time when it is nearly complete."""

    def copy(source: str, target: str, *given: Any) -> str:
        if before is not None:
            before(Path(target))
        made: str = copy_live(source, target, *given)
        time.sleep(0.3)
        return made

    return copy


def test_what_is_read_before_it_is_written_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a.db", "WAL", 40_000)
    monkeypatch.setattr(backup, "LARGE", 0)
    copy_live = backup._copy_live

    def rewritten(source: str, target: str, *given: Any) -> str:
        made = copy_live(source, target + ".first", *given)
        data = bytearray(Path(target + ".first").read_bytes())
        Path(target).write_bytes(data[: 2 << 20] + bytes(4096) + data[(2 << 20) + 4096 :])
        time.sleep(0.3)  # it is read
        with open(target, "r+b") as file:
            file.seek(2 << 20)
            file.write(data[2 << 20 : (2 << 20) + 4096])
        return made

    monkeypatch.setattr(backup, "_copy_live", rewritten)
    copied = backup.CheckedCopy(str(tmp_path / "a.db"), str(tmp_path / "copy"), 5)
    assert copied.follow(4096) is not None
    assert copied.read_check() == "ok"
    assert not copied.confirm()
    copied.wait()


def test_an_export_that_misread_a_copy_reads_it_again_when_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[bool] = []

    class Export:
        def __init__(self, *given: Any) -> None:
            rounds.append(given[-1])
            self.taking = SimpleNamespace(bundle=SimpleNamespace(abandon=lambda: rounds.append(False)), end=None)

        def run(self) -> str:
            if rounds[-1]:
                raise CopyMisread
            return "answer"

    monkeypatch.setattr(export_module, "Export", Export)
    monkeypatch.setattr(fit, "ExportLimits", lambda limits: None)
    question = SimpleNamespace(limits=None, unusable=[])
    assert main_module._export(question, None, None, "", []) == "answer"  # type: ignore[arg-type, comparison-overlap]
    assert rounds == [True, False, False]
