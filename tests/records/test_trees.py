"""Rows are followed by the pages that changed: none that differs is missed, however SQLite moved them about, and a file that
breaks the rules is noticed."""

from __future__ import annotations

import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from sidecar.format.digests import digest_bytes
from sidecar.format.index import FILE, Entry
from sidecar.layouts.sources import RecordSpec
from sidecar.program.sqlite.pages import UnexpectedPage
from sidecar.records.files import MemoryFile
from sidecar.records.origins import Contents, Mark, TrackedUnit, follow_unit
from sidecar.records.trees import PageReader, TableTree, list_changed_pages
from sidecar.records.units import Unit

PATH = "claude-mem/a.db"
SPEC = RecordSpec(files=("a.db",), reader="table", kind="note", table="notes", title=("title",), text=("text", "more"))
UNIT = Unit(PATH, ((PATH, SPEC),))


def write_rows(database: sqlite3.Connection, chance: random.Random) -> None:
    """Change a table in some way that programs do."""
    ids = [row[0] for row in database.execute("SELECT id FROM notes")]
    some = chance.sample(ids, min(len(ids), chance.choice([1, 3, 40])))
    way = chance.randrange(12)
    if way < 4:
        for _ in range(chance.choice([1, 30, 300])):
            word = chance.choice("abcdef") * chance.choice([0, 3, 300, 9000])
            database.execute(
                "INSERT INTO notes(title, text, more) VALUES (?, ?, ?)", (word[:20], word, chance.random())
            )
            database.execute("INSERT INTO others(text) VALUES (?)", (word,))
    elif way == 4:
        database.executemany("DELETE FROM notes WHERE id = ?", [(one,) for one in some])
    elif way == 5:  # of the same length, at the end of a long row: only an overflow page changes
        database.executemany(
            "UPDATE notes SET more = ? WHERE id = ?", [(chance.random(), one) for one in some if chance.random() < 0.9]
        )
    elif way == 6:
        length = chance.choice([1, 5000, 40_000])
        database.executemany("UPDATE notes SET text = ? WHERE id = ?", [("z" * length, one) for one in some])
    elif way == 7:
        database.execute("DELETE FROM notes")
    elif way == 8:
        database.executemany("UPDATE OR IGNORE notes SET id = id + 1000000 WHERE id = ?", [(one,) for one in some])
    elif way == 9:
        database.execute("DELETE FROM notes WHERE id > ?", (chance.choice(ids) if ids else 0,))
    elif way == 10:
        database.execute("INSERT INTO notes(title, text, more) SELECT title, text, 1.5 FROM notes LIMIT 200")
    else:
        database.execute("UPDATE notes SET text = text || '!' WHERE id % 7 = 0")
    database.commit()
    if chance.random() < 0.08:
        database.execute("VACUUM")
    elif chance.random() < 0.03:
        database.executescript(
            "CREATE TABLE copy AS SELECT * FROM notes WHERE 0; DROP TABLE copy;"
            "ALTER TABLE notes RENAME TO old; CREATE TABLE notes (id INTEGER PRIMARY KEY, title, text, more);"
            "INSERT INTO notes SELECT * FROM old WHERE id % 3; DROP TABLE old"
        )


def take(place: Path) -> Contents:
    """Return a database as the only file of a snapshot."""
    data = place.read_bytes()
    digest, sums = digest_bytes(data, 512)
    entry = Entry(PATH, FILE, size=len(data), digest=digest, block=512, sums=sums, database=True)
    return Contents({PATH: MemoryFile(str(place), PATH)}, {PATH: entry})


def read_notes(place: Path) -> dict[int, tuple[object, ...]]:
    with closing(sqlite3.connect(place)) as database:
        return {row[0]: row[1:] for row in database.execute("SELECT id, title, text, more FROM notes")}


def list_rows(tree: TableTree) -> set[int]:
    return {rowid for leaf in tree._leaves.values() for rowid in leaf.rowids}


def find_root(place: Path) -> int:
    with closing(sqlite3.connect(place)) as database:
        return int(database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'notes'").fetchone()[0])


@pytest.mark.parametrize("seed", range(8))
def test_no_row_that_differs_is_missed(tmp_path: Path, seed: int) -> None:
    chance, place, copy = random.Random(seed), tmp_path / "live.db", tmp_path / "copy.db"
    with closing(sqlite3.connect(place)) as database:
        database.executescript(
            f"PRAGMA page_size=512; PRAGMA auto_vacuum={seed % 3}; PRAGMA secure_delete={'ON' if seed % 2 else 'OFF'};"
            "CREATE TABLE notes (id INTEGER PRIMARY KEY, title, text, more); CREATE INDEX by ON notes(title);"
            "CREATE TABLE others (text)"
        )
        tree: TableTree | None = None
        tracked: TrackedUnit | None = None
        before: dict[int, tuple[object, ...]] = {}
        marks: dict[int, int] = {}
        earlier, root, narrow = take(place), 0, 0
        for number in range(60):
            write_rows(database, chance)
            shutil.copyfile(place, copy)
            contents, rows = take(copy), read_notes(copy)
            with PageReader(str(copy)) as pages:
                changed = list_changed_pages(earlier.entries[PATH], contents.entries[PATH], pages.size)
                if tree is not None and root == find_root(copy) and changed is not None:
                    touched = tree.follow(pages, changed)
                    differing = {one for one in {*before, *rows} if before.get(one) != rows.get(one)}
                    assert differing <= touched and list_rows(tree) == rows.keys()
                    narrow += len(touched) < len(rows)
                else:
                    root = find_root(copy)
                    tree = TableTree(root, pages)
                    assert list_rows(tree) == rows.keys()
            tracked = follow_unit(tracked, UNIT, contents, number)
            assert [mark.row for mark in tracked.list_marks()] == [
                mark.row for mark in follow_unit(None, UNIT, contents, 0).list_marks()
            ]
            marks = {one: number if before.get(one) != rows[one] else marks[one] for one in rows}
            # The same contents elsewhere are the same record, so what is told may be older, and never newer.
            assert all(told.origin <= marks[one] for one, told in _pair(tracked, rows))
            before, earlier = rows, contents
    assert narrow > 10


def _pair(tracked: TrackedUnit, rows: dict[int, tuple[object, ...]]) -> list[tuple[int, Mark]]:
    return list(zip(sorted(rows), tracked.list_marks(), strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_a_file_that_breaks_the_rules_is_noticed_or_read_in_bounds(tmp_path: Path, seed: int) -> None:
    chance, place = random.Random(seed), tmp_path / "a.db"
    with closing(sqlite3.connect(place)) as database:
        database.executescript("PRAGMA page_size=512; CREATE TABLE notes (id INTEGER PRIMARY KEY, title, text, more)")
        for length in (10, 5000) * 40:
            database.execute("INSERT INTO notes(text) VALUES (?)", ("x" * length,))
        database.commit()
    root = find_root(place)
    data = bytearray(place.read_bytes())
    with PageReader(str(place)) as pages:
        tree = TableTree(root, pages)
    old = take(place)
    for _ in range(chance.choice([1, 10, 400])):
        data[chance.randrange(100, len(data))] = chance.choice([0, 1, 5, 13, 255, chance.randrange(256)])
    place.write_bytes(data)
    with PageReader(str(place)) as pages:
        changed = list_changed_pages(old.entries[PATH], take(place).entries[PATH], pages.size)
        assert changed
        for read in (lambda: tree.follow(pages, changed), lambda: TableTree(root, pages)):
            try:
                read()
            except UnexpectedPage:
                continue
        assert sum(len(leaf.rowids) + len(leaf.chain) for leaf in tree._leaves.values()) <= len(data)


def test_pages_that_hang_in_a_circle_and_files_that_are_none_are_noticed(tmp_path: Path) -> None:
    place = tmp_path / "a.db"
    for data in (b"", b"SQLite format 3\0", bytes(200), b"#" * 5000):
        place.write_bytes(data)
        with pytest.raises(UnexpectedPage):
            PageReader(str(place))
    page = bytearray(512)
    page[0], page[8:12] = 5, (2).to_bytes(4, "big")  # its only child is itself
    place.write_bytes(b"SQLite format 3\0" + (512).to_bytes(2, "big") + bytes(494) + page)
    with PageReader(str(place)) as pages, pytest.raises(UnexpectedPage):
        TableTree(2, pages)
