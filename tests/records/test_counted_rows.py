"""What an export taught is counted where its database is: exactly, without the parent's packs, and whatever an agent wrote
into the files that it is counted by."""

from __future__ import annotations

import os
import random
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from adapters.sandboxes.local import open_local
from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine.comparison import compare_records
from sidecar.engine.exports import counts
from sidecar.engine.queries import list_snapshots
from sidecar.engine.sandbox.dialogue import ask
from sidecar.format.protocol import ExportAnswer
from sidecar.layouts import load_built_in
from sidecar.program.sqlite import pages, sketches
from sidecar.records.matches import Row, match_rows
from tests.parts.conversations import CONVERSATIONS, SCRIPTS, Taught
from tests.parts.homes import engine_at
from tests.records.test_reading import Watched

pytestmark = pytest.mark.usefixtures("forked_programs")

PATH = "claude-mem/claude-mem.db"


def count(taught: Taught) -> dict[str, tuple[int, int, int]]:
    by_kind = [Counter(kind for kind, _ in getattr(taught, change)) for change in ("added", "changed", "removed")]
    return {kind: (by_kind[0][kind], by_kind[1][kind], by_kind[2][kind]) for kind in {*by_kind[0], *by_kind[1]}}


async def tell(engine: Engine) -> dict[str, tuple[int, int, int]] | None:
    """Return what the log says of the newest snapshot."""
    changes = (await list_snapshots(engine.repository, "m")).snapshots[0].changes
    return None if changes is None else {kind: (n.added, n.changed, n.removed) for kind, n in changes.items()}


@pytest.fixture
def poor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be read to count."""
    monkeypatch.setattr(counts, "MOST_FETCHED", 0)
    monkeypatch.setattr(counts, "MOST_COUNTED", 0)


@pytest.mark.usefixtures("poor")
async def test_each_conversation_is_counted_without_a_pack_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_at(tmp_path / "store")
    home = tmp_path / "home"
    home.mkdir()
    watched = Watched(engine, monkeypatch)
    for number in range(CONVERSATIONS):
        if number % 3 == 2:  # a new sandbox: its restore is all that knows what was there before
            home = tmp_path / f"home-{number}"
            home.mkdir()
            await restore(engine, open_local(str(home)), RestoreRequest(memory="m"))
        taught = SCRIPTS["claude-mem"](home, number)
        watched.read.clear()
        await export(engine, open_local(str(home)), ExportRequest(memory="m"))
        assert await tell(engine) == count(taught)
        assert watched.packs == [] or number == 8  # the ninth pack makes a fold


@pytest.mark.usefixtures("poor")
async def test_files_that_cannot_be_afforded_are_counted_as_files(tmp_path: Path) -> None:
    engine, home = engine_at(tmp_path / "store"), tmp_path / "home"
    home.mkdir()
    for number in range(2):
        taught = SCRIPTS["claude-mem"](home, number)
        SCRIPTS["three-tier"](home, number)
        await export(engine, open_local(str(home)), ExportRequest(memory="m", projects=(str(home),)))
    assert await tell(engine) == {**count(taught), "file": (0, 2, 0)}
    SCRIPTS["three-tier"](home, 2)
    await export(engine, open_local(str(home)), ExportRequest(memory="m", projects=(str(home),)))
    assert await tell(engine) is None


def spoil(place: Path, chance: random.Random) -> None:
    """Change a file of the program's as an agent might."""
    data = bytearray(place.read_bytes()) or bytearray(b"{}\n")
    way = chance.randrange(6)
    if way == 0:
        del data[chance.randrange(len(data)) :]
    elif way == 1:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif way == 2:
        data = bytearray(
            chance.choice([b"", b"{}\n", b"[" * 50_000, b'{"rows": "1 little", "tables": 7}\n', b"null\n"])
        )
    elif way == 3:
        end = data.find(b"\n")
        data = data[:end].replace(b'"observation", ', b'"observation", -') + data[end:]
    place.unlink()
    if way == 4:
        place.symlink_to("/dev/zero")
    elif way == 5:
        os.mkfifo(place)
    else:
        place.write_bytes(data)


@pytest.mark.usefixtures("poor")
async def test_spoilt_notes_never_fail_an_export(tmp_path: Path) -> None:
    engine, home = engine_at(tmp_path / "store"), tmp_path / "home"
    home.mkdir()
    chance = random.Random(22)
    known = 0
    for number in range(14):
        taught = SCRIPTS["claude-mem"](home, number % CONVERSATIONS if number < CONVERSATIONS else 0)
        receipt = await export(engine, open_local(str(home)), ExportRequest(memory="m"))
        assert receipt.outcome == "committed" and (number == 0 or receipt.warnings == [])
        found = await tell(engine)
        assert found is None or number >= CONVERSATIONS or found == count(taught)
        known += found is not None
        notes = list((home / ".cache/memory-sidecar").glob("*/rows-*"))
        assert notes
        if number % 4 != 3:
            for place in (one for one in notes if one.is_file() and not one.is_symlink()):
                spoil(place, chance)
    assert 4 <= known < 14


@pytest.mark.parametrize(
    "told",
    [
        {"claude-mem/settings.json": {"observation": (1, 0, 0)}},
        {"nowhere/x.db": {"observation": (1, 0, 0)}},
        {PATH: {"password-hunter2": (1, 0, 0)}},
        {PATH: {"observation": (10**15, 0, 0)}},
    ],
)
async def test_made_up_counts_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, Any]
) -> None:
    engine, home = engine_at(tmp_path / "store"), tmp_path / "home"
    home.mkdir()
    SCRIPTS["claude-mem"](home, 0)

    async def forge(*args: Any, **more: Any) -> tuple[ExportAnswer, bytes]:
        answer, inline = await ask(*args, **more)
        answer.counted = told
        return answer, inline

    monkeypatch.setattr("sidecar.engine.exports.arrival.ask", forge)
    receipt = await export(engine, open_local(str(home)), ExportRequest(memory="m"))
    assert receipt.outcome == "committed" and await tell(engine) is None


def make_database(place: Path, rows: list[tuple[int, str | None, str]]) -> None:
    place.unlink(missing_ok=True)
    with closing(sqlite3.connect(place)) as database, database:
        database.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, uuid TEXT, body TEXT)")
        database.executemany("INSERT INTO notes VALUES (?, ?, ?)", rows)


def test_rows_are_counted_as_records_are_matched(tmp_path: Path) -> None:
    chance, place = random.Random(5), tmp_path / "notes.db"
    table = {"files": ["*"], "table": "notes", "kind": "note", "contents": ["body"], "key": [["uuid"]]}
    for _ in range(60):
        sides = []
        rows = [(n, chance.choice([None, f"u{n}", "u1"]), chance.choice("abc")) for n in range(chance.randrange(9))]
        later = [(n, uuid, chance.choice([body] * 4 + ["d"])) for n, uuid, body in rows if chance.random() < 0.8]
        later += [
            (n, chance.choice([None, f"u{n}"]), chance.choice("abe")) for n in range(20, 20 + chance.randrange(4))
        ]
        later = [(n + chance.choice([0, 0, 0, 40]), uuid, body) for n, uuid, body in later]
        for side in (rows, later):
            make_database(place, side)
            sketch = sketches.sketch_database(str(place), [table])
            assert sketch is not None
            sketches.write(str(tmp_path), "d", [table], sketch)
            assert sketches.load(str(tmp_path), "d", [table]) == sketch
            sides.append(sketch)
        differing = [
            [
                Row("note", uuid or body.encode(), body.encode(), b"")
                for n, uuid, body in one
                if (n, uuid, body) not in two
            ]
            for one, two in ((sorted(rows), later), (sorted(later), rows))
        ]
        match = match_rows(*differing)
        expected = (len(match.added), len(match.changed), len(match.removed))
        assert sketches.count_changes(*sides) == ({"note": expected} if any(expected) else {})


def test_what_cannot_be_sketched_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "notes.db"
    (table, *_) = load_built_in()["claude-mem"].for_sandbox()["tables"]
    for data in (b"", b"SQLite format 3\0" + bytes(500), b"#" * 5000):
        place.write_bytes(data)
        sketch = sketches.sketch_database(str(place), [table])
        assert sketch is None or sketch.tables == [("session", {})]
    make_database(place, [(n, None, "x") for n in range(20)])
    table = {"files": ["*"], "table": "notes", "kind": "note", "contents": ["body"], "key": []}
    monkeypatch.setattr(sketches, "MOST_ROWS", 19)
    assert sketches.sketch_database(str(place), [table]) is None
    monkeypatch.setattr(sketches, "MOST_ROWS", 20)
    assert sketches.sketch_database(str(place), [table]) is not None
    with closing(sqlite3.connect(place)) as database, database:
        database.execute("ALTER TABLE notes RENAME TO old")
        database.execute(
            "CREATE VIEW notes AS WITH RECURSIVE n(body) AS (SELECT 1 UNION ALL SELECT body + 1 FROM n) SELECT * FROM n"
        )
    sketch = sketches.sketch_database(str(place), [table])
    assert sketch is not None and sketch.tables == [("note", {})]


NOTES: dict[str, Any] = {"files": ["*"], "table": "notes", "kind": "note", "contents": ["body"], "key": [["uuid"]]}
OTHERS: dict[str, Any] = {"files": ["*"], "table": "others", "kind": "other", "contents": ["body"], "key": []}


def change_rows(database: sqlite3.Connection, chance: random.Random) -> None:
    """Make a few changes, of values of all lengths: on one page, and over many."""
    for _ in range(chance.randrange(4)):
        table = chance.choice(["notes", "others"])
        body = chance.choice("abc") * chance.choice([1, 300, 5000, 40_000])
        act, row = chance.randrange(6), chance.randrange(-5, 150)
        if act < 2:
            database.execute(f"INSERT OR REPLACE INTO {table} (rowid, uuid, body) VALUES (?, ?, ?)", (row, None, body))
        elif act == 2:
            database.execute(f"UPDATE {table} SET body = ? WHERE rowid = ?", (body, row))
        elif act == 3:  # in place, on the pages that a value continues on
            database.execute(
                f"UPDATE {table} SET body = substr(body, 1, length(body) - 1) || 'z' WHERE rowid = ?", (row,)
            )
        elif act == 4:
            database.execute(f"DELETE FROM {table} WHERE rowid BETWEEN ? AND ?", (row, row + chance.randrange(9)))
        else:
            database.execute(f"UPDATE {table} SET rowid = rowid + 200 WHERE rowid = ?", (row,))
    if chance.random() < 0.05:
        column = f"ALTER TABLE notes ADD COLUMN c{chance.getrandbits(60)} TEXT DEFAULT 'x'"
        database.execute(chance.choice([column, "DELETE FROM others"]))


@pytest.mark.parametrize("vacuum", [0, 1])
@pytest.mark.parametrize("page", [512, 4096])
def test_what_changed_pages_tell_is_what_all_rows_tell(tmp_path: Path, page: int, vacuum: int) -> None:
    chance, place, tables = random.Random(page + vacuum), tmp_path / "notes.db", [NOTES, OTHERS]
    with closing(sqlite3.connect(place, isolation_level=None)) as database:
        database.executescript(f"PRAGMA page_size={page}; PRAGMA auto_vacuum={vacuum}; PRAGMA journal_mode=DELETE")
        for table in ("notes", "others"):
            database.execute(f"CREATE TABLE {table} (uuid TEXT, body TEXT)")
            database.execute(f"CREATE INDEX {table}_body ON {table} (body)")
            for n in range(120):
                body = "x" * chance.choice([2, 700, 9000])
                database.execute(f"INSERT INTO {table} (rowid, uuid, body) VALUES (?, ?, ?)", (n, f"u{n}", body))
        before, old = place.read_bytes(), sketches.sketch_database(str(place), tables)
        told = 0
        for _ in range(150):
            database.execute("BEGIN")
            change_rows(database, chance)
            database.execute("COMMIT")
            after = place.read_bytes()
            numbers = range(1, len(after) // page + 1)
            changed = [n for n in numbers if after[(n - 1) * page : n * page] != before[(n - 1) * page : n * page]]
            told += pages.find_rowids(str(place), changed) is not None
            new = sketches.sketch_database(str(place), tables, old, changed)
            assert new is not None and new == sketches.sketch_database(str(place), tables)
            before, old = after, new
    assert told > 30


def test_only_rows_on_changed_pages_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "notes.db"
    make_database(place, [(n, f"u{n}", "x" * 900) for n in range(500)])
    before, old = place.read_bytes(), sketches.sketch_database(str(place), [NOTES])
    with closing(sqlite3.connect(place)) as database, database:
        database.execute("INSERT INTO notes VALUES (900, 'u900', 'new')")
    after = place.read_bytes()
    changed = [n + 1 for n in range(len(after) // 4096) if after[n * 4096 :][:4096] != before[n * 4096 :][:4096]]
    digested: list[object] = []
    digest = sketches._digest
    monkeypatch.setattr(sketches, "_digest", lambda values: digested.append(values) or digest(values))
    new = sketches.sketch_database(str(place), [NOTES], old, changed)
    assert old is not None and new is not None and sketches.count_changes(old, new) == {"note": (1, 0, 0)}
    assert 1 <= len(digested) < 40


def test_no_more_sketches_are_kept_than_are_of_use(tmp_path: Path) -> None:
    for number in range(3 * sketches.MOST_KEPT):
        sketches.write(str(tmp_path), str(number), [NOTES], sketches.Sketch([("note", {number: bytes(16)})], "s"))
    assert len(list(tmp_path.iterdir())) == sketches.MOST_KEPT
    assert sketches.load(str(tmp_path), str(number), [NOTES]) == sketches.Sketch([("note", {number: bytes(16)})], "s")


def change_lines(place: Path, chance: random.Random) -> None:
    """Change a transcript, mostly as an agent's program does: it appends."""
    data = place.read_bytes() if place.exists() else b""
    more = b"".join(
        b'{"uuid": "%d", "text": "%s"}\n' % (chance.randrange(40), b"x" * chance.choice([3, 900, 30_000]))
        for _ in range(chance.randrange(1, 6))
    )
    act = chance.choice(["append"] * 5 + ["no end", "middle", "cut", "both", "blank"])
    if act == "no end":
        more = more.rstrip(b"\n")
    elif act == "blank":
        more = b"\n \n" + more
    elif act in ("middle", "both") and data:
        at = chance.randrange(len(data))
        data = data[:at] + b"y" + data[at + 1 :]
    elif act == "cut":
        data = data[: len(data) // 2]
    place.write_bytes(data if act in ("middle", "cut") else data + more)


@pytest.mark.parametrize("seed", range(3))
async def test_lines_and_whole_files_are_counted_as_they_are_compared(tmp_path: Path, seed: int) -> None:
    engine, home, chance = engine_at(tmp_path / "store"), tmp_path / "home", random.Random(seed)
    lines = home / ".claude/projects/-p/3c0a1e1a-0000-4000-8000-000000000000.jsonl"
    whole = home / ".config/opencode/MEMORY/LEARNING"
    for place in (lines.parent, whole):
        place.mkdir(parents=True)
    cheap = 0
    for number in range(14):
        change_lines(lines, chance)
        (whole / f"{chance.randrange(4)}.md").write_text(f"# learned {number}\n")
        if number % 5 == 4:
            next(whole.iterdir()).unlink()
        receipt = await export(engine, open_local(str(home)), ExportRequest(memory="m", force=True))
        told = await tell(engine)
        assert receipt.outcome == "committed" and told is not None
        if number:
            found = await compare_records(engine, "m", "", "latest", messages=True)
            expected = {kind: (n.added, n.changed, n.removed) for kind, n in found.counts.items()}
            assert {kind: n for kind, n in told.items() if kind != "file"} == expected
            cheap += set(expected) == {"message", "learning"}
    assert cheap


async def test_appended_lines_are_counted_without_what_was_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, home = engine_at(tmp_path / "store"), tmp_path / "home"
    place = home / ".claude/projects/-p/3c0a1e1a-0000-4000-8000-000000000000.jsonl"
    place.parent.mkdir(parents=True)
    monkeypatch.setattr(counts, "MOST_FETCHED", 0)
    watched = Watched(engine, monkeypatch)
    for number, size in enumerate((500, 70, 300_000, 2000)):
        with place.open("ab") as transcript:
            transcript.writelines(
                b'{"uuid": "%d-%d", "text": "%s"}\n' % (number, n, b"x" * size) for n in range(number + 1)
            )
        await export(engine, open_local(str(home)), ExportRequest(memory="m"))
        assert await tell(engine) == {"message": (number + 1, 0, 0)}
    assert watched.packs == []


ROWIDS = {
    "texts": "rowid TEXT",
    "of a blob": "rowid BLOB",
    "computed": "rowid AS (title || text)",
    "all of them": "rowid, _rowid_, oid",
}


@pytest.mark.parametrize("columns", ROWIDS.values(), ids=ROWIDS)
async def test_columns_that_are_called_as_rows_are_numbered_fail_no_export(tmp_path: Path, columns: str) -> None:
    """SQLite then means the column, in which anything may be."""
    engine, home = engine_at(tmp_path / "store"), tmp_path / "home"
    (home / ".claude-mem").mkdir(parents=True)
    with closing(sqlite3.connect(home / ".claude-mem/claude-mem.db", isolation_level=None)) as database:
        database.execute(f"CREATE TABLE observations (title TEXT, text TEXT, {columns})")
        for number in range(3):
            database.execute("INSERT INTO observations (title, text) VALUES (?, 'x')", [f"title {number}"])
            if " AS " not in columns:
                database.execute(
                    "UPDATE observations SET rowid = ? WHERE title = ?", [f"x) {number}", f"title {number}"]
                )
            receipt = await export(engine, open_local(str(home)), ExportRequest(memory="m"))
            assert receipt.outcome == "committed"
            if ", oid" not in columns:
                assert await tell(engine) == {"observation": (1, 0, 0)}
