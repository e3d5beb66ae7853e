"""Memories that mean harm: what reads them ends, in bounded memory, says what it did not read, and shows nothing raw."""

from __future__ import annotations

import json
import os
import pty
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sidecar.engine import histories
from sidecar.layouts.sources import RecordSpec
from sidecar.records import matches
from sidecar.records.files import MemoryFile, Unreadable
from sidecar.records.tables import read_table
from tests.parts.commands import done
from tests.parts.homes import PROJECT

pytestmark = pytest.mark.usefixtures("forked_programs")

READING = (("log", "m"), ("diff", "m"), ("diff", "m", "--markdown"), ("records", "m"), ("blame", "m"))
MOST_MEMORY = 1 << 30


def export_twice(folder: Path, path: str, before: bytes, after: bytes) -> Path:
    """Export a file and then what it became; return the store."""
    home, store = folder / "home", folder / "store"
    place = home / path
    place.parent.mkdir(parents=True)
    for data in (before, after):
        place.write_bytes(data)
        done("export", "m", f"--sandbox=local:{home}", f"--project={home}", store=store)
    return store


def write_headings(count: int, name: str) -> bytes:
    return b"".join(b"# %s %d\n" % (name.encode(), number) for number in range(count))


def test_more_records_than_can_be_told_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (matches, histories):
        monkeypatch.setattr(module, "MOST_COMPARED", 50)
    monkeypatch.setattr("sidecar.cli.records.MOST_LISTED", 30)
    store = export_twice(tmp_path, "MEMORY.md", write_headings(60, "a"), write_headings(70, "b"))
    told = {words[0]: done(*words, store=store) for words in READING}
    assert [row["changes"] for row in told["log"]["snapshots"]] == [None, None]
    for verb in ("diff", "blame"):
        assert told[verb]["records"] == []
        assert told[verb]["problems"] == ["project/MEMORY.md cannot be read: it holds more than 50 records."]
    assert [row["path"] for row in told["diff"]["files"]] == ["project/MEMORY.md"]
    assert len(told["records"]["records"]) == 30 and "more than these 30" in told["records"]["problems"][0]
    asked = done("records", "m", "--limit=100", store=store)
    assert len(asked["records"]) == 50 and "more than 50" in asked["problems"][0]


def test_a_page_has_room_for_so_much_text_and_the_next_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "MOST_TEXT", 1000)
    long = b"".join(b"# a %d\n%s\n" % (number, b"x" * 400) for number in range(10))
    store = export_twice(tmp_path, "MEMORY.md", b"# a\n", long)
    found = done("records", "m", store=store)
    assert len(found["records"]) == 3 and "more than these 3" in found["problems"][0]
    assert len(done("records", "m", "--limit=3", store=store)["problems"]) == 0


def test_more_records_than_blame_lists_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "MOST_BLAMED", 20)
    store = export_twice(tmp_path, "MEMORY.md", write_headings(60, "a"), write_headings(70, "b"))
    told = done("blame", "m", store=store)
    assert len(told["records"]) == 20
    assert told["problems"] == ["There are 70 records: choose some by their kind or their file."]
    assert done("blame", "m", "project/MEMORY.md", store=store)["problems"] == told["problems"]


def run_bounded(*words: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command that may not take more memory than ``MOST_MEMORY``."""
    script = "import sys; from sidecar.cli.main import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=PROJECT,
        capture_output=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY)),
    )


HUGE: dict[str, Callable[[], tuple[str, bytes, bytes]]] = {
    "headings": lambda: ("MEMORY.md", write_headings(1_000_000, "a"), write_headings(1_000_000, "b")),
    "as many headings as are compared": lambda: (
        "MEMORY.md",
        write_headings(249_000, "a"),
        b"x\n" + write_headings(249_000, "a").replace(b"7", b"seven"),
    ),
    "tasks": lambda: ("MEMORY.md", b"- [ ] t\n" * 1_000_000, b"- [x] t\n" * 1_000_000),
    "one line": lambda: ("MEMORY.md", b"a" * 30_000_000, b"b" * 30_000_000),
    "old line ends": lambda: ("MEMORY.md", b"a\r" * 10_000_000, b"b\r" * 10_000_000),
    "deep lists": lambda: (".cm/memory/learnings.json", b"[]", b"[" * 10_000_000),
    "deep objects": lambda: (".cm/memory/learnings.json", b"[]", b"[" + b'{"a":' * 3_000_000),
    "a number": lambda: (".cm/memory/learnings.json", b"[]", b'[{"id":' + b"9" * 3_000_000 + b"}]"),
    "items": lambda: (".cm/memory/learnings.json", b"[]", json.dumps([{"id": n} for n in range(600_000)]).encode()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HUGE)
def test_huge_memories_are_read_in_bounded_memory(tmp_path: Path, name: str) -> None:
    store = export_twice(tmp_path, *HUGE[name]())
    for verb, *words in READING:
        ran = run_bounded(verb, f"--store=file:{store}", "--json", *words)
        assert (ran.returncode, ran.stderr) == (0, b""), (verb, ran.stderr[-500:])
        json.loads(ran.stdout)


ANSI = b"\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\xe2\x80\xae\xff\xfe\xed\xa0\x80\xc3\x28\0"


def test_what_a_terminal_acts_on_is_escaped_in_every_reader(tmp_path: Path) -> None:
    """On a real terminal: nothing of what the memory says reaches it raw."""
    after = b"# A " + ANSI + b"\n" + ANSI + b"\n- [ ] " + ANSI + b"\n"
    store = export_twice(tmp_path, "MEMORY.md", b"# A\n", after)
    (record, *_) = done("records", "m", store=store)["records"]
    commands = (
        *READING,
        ("cat", "m", "project/MEMORY.md"),
        ("history", "m", "project/MEMORY.md"),
        ("history", "m", record["id"]),
    )
    for verb, *words in commands:
        shown = run_on_a_terminal(verb, f"--store=file:{store}", *words)
        for raw in (b"\x1b]", b"\x1b[2J", b"\x07", b"\x08", b"\x9b", b"\xe2\x80\xae", b"\0"):
            assert raw not in shown.replace(b"\xe2\x94\x9b", b""), (verb, raw)


def run_on_a_terminal(*words: str) -> bytes:
    script = "import sys; from sidecar.cli.main import main; sys.exit(main(sys.argv[1:]))"
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    with subprocess.Popen(
        [sys.executable, "-c", script, *words],
        cwd=PROJECT,
        env=environment,
        stdin=follower,
        stdout=follower,
        stderr=follower,
    ) as ran:
        os.close(follower)
        shown = b""
        while True:
            try:
                data = os.read(leader, 65536)
            except OSError:  # Linux says so when the last writer is gone
                break
            if not data:
                break
            shown += data
    os.close(leader)
    assert ran.returncode == 0, shown[-500:]
    return shown


OBSERVATIONS = RecordSpec(files=("x.db",), reader="table", kind="observation", table="observations", text=("title",))


def write_database(place: Path, *statements: str) -> None:
    with closing(sqlite3.connect(place)) as database, database:
        for statement in statements:
            database.execute(statement)


@pytest.mark.parametrize(
    "statements",
    [
        ["CREATE VIEW observations AS SELECT 'x' AS title"],
        ["CREATE VIRTUAL TABLE observations USING fts5(title)"],
        ["CREATE TABLE other (title)"],
        ["CREATE TABLE observations (elsewhere)"],
        ["CREATE TABLE observations (title) ", "CREATE TRIGGER t AFTER INSERT ON observations BEGIN SELECT 1; END"],
    ],
)
def test_a_table_that_is_something_else_has_no_records(tmp_path: Path, statements: list[str]) -> None:
    place = tmp_path / "x.db"
    write_database(place, *statements)
    assert list(read_table(MemoryFile(str(place), "claude-mem/x.db"), OBSERVATIONS)) == []


def test_a_damaged_database_is_unreadable_and_nothing_worse(tmp_path: Path) -> None:
    place = tmp_path / "x.db"
    write_database(
        place,
        "CREATE TABLE observations (title)",
        "INSERT INTO observations SELECT hex(randomblob(900)) FROM (SELECT 1 UNION SELECT 2 UNION SELECT 3)",
    )
    whole = place.read_bytes()
    outcomes: set[Any] = set()
    for at in range(0, len(whole), 97):
        place.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            outcomes.add(len(list(read_table(MemoryFile(str(place), "claude-mem/x.db"), OBSERVATIONS))) <= 3)
        except Unreadable:
            outcomes.add("unreadable")
    assert outcomes == {True, "unreadable"}
