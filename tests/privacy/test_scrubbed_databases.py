"""What is private leaves the copy of a database: its rows, indexes, full-text mirrors, free pages and gaps."""

from __future__ import annotations

import mmap
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from sidecar.program.privacy.credentials import may_hold
from sidecar.program.privacy.scrub import PrivacyPolicy, PrivacyReport
from sidecar.program.privacy.tables import Unscrubbable, scrub
from sidecar.program.sqlite.backup import read_page_size
from sidecar.program.sqlite.pages import Pages, may_concern
from tests.parts.secret_kinds import KINDS
from tests.parts.secret_trees import CREDENTIALS

pytestmark = pytest.mark.usefixtures("forked_programs")

SECRET = "zqjxkvw-hunter2"
TEXT = f"public <private>{SECRET} and more</private> rest"
LEFT = "public [private] rest"
STRICT = PrivacyPolicy(True, "redact")
LOOKS = STRICT.find_traces
MIRROR = """CREATE TABLE t (id INTEGER PRIMARY KEY, a TEXT);
CREATE VIRTUAL TABLE f USING fts5(a, content='t', content_rowid='id');
CREATE TRIGGER ai AFTER INSERT ON t BEGIN INSERT INTO f(rowid, a) VALUES (new.id, new.a); END;
CREATE TABLE log (x TEXT);
CREATE TRIGGER au AFTER UPDATE ON t BEGIN
  INSERT INTO f(f, rowid, a) VALUES ('delete', old.id, old.a); INSERT INTO f(rowid, a) VALUES (new.id, new.a);
  INSERT INTO log VALUES (old.a);
END"""
PLAIN = "CREATE TABLE t (id INTEGER, a TEXT)"
CASES: dict[str, tuple[str, list[tuple[Any, Any]]]] = {
    "plain": ("CREATE TABLE t (id INTEGER PRIMARY KEY, a TEXT)", [(1, TEXT), (2, "kept"), (3, TEXT)]),
    "overflow": (PLAIN, [(n, "y" * 700 * n + TEXT) for n in range(1, 30)]),
    "no-rowid": ("CREATE TABLE t (id, a TEXT PRIMARY KEY) WITHOUT ROWID", [(1, TEXT), (2, f"2 {TEXT}")]),
    "unique": ("CREATE TABLE t (id INTEGER, a TEXT UNIQUE)", [(n, f"{n} {TEXT}") for n in range(300)]),
    "indexes": (f"{PLAIN}; CREATE INDEX i ON t (lower(a)); CREATE INDEX j ON t (a, id)", [(1, TEXT)]),
    "blob": ("CREATE TABLE t (id INTEGER, a BLOB)", [(1, TEXT.encode())]),
    "generated": (
        "CREATE TABLE t (id, a TEXT, g TEXT AS (upper(a)) STORED, v TEXT AS (a || '!')); CREATE INDEX i ON t (v)",
        [(1, TEXT)],
    ),
    "checked": ("CREATE TABLE t (id INTEGER, a TEXT CHECK (a NOT LIKE '[private%'))", [(1, TEXT)]),
    "utf-16": (f"PRAGMA encoding = 'UTF-16le'; {PLAIN}", [(1, TEXT + "é")]),
    "auto-vacuum": (f"PRAGMA auto_vacuum = 1; {PLAIN}", [(n, "q" * 6000 + TEXT) for n in range(20)]),
    "wal": (f"PRAGMA journal_mode = wal; {PLAIN}", [(1, TEXT)]),
    "small-pages": (f"PRAGMA page_size = 512; {PLAIN}", [(n, "q" * 900 + TEXT) for n in range(20)]),
    "large-pages": (f"PRAGMA page_size = 65536; {PLAIN}", [(n, "q" * 90_000 + TEXT) for n in range(3)]),
    "mirror": (MIRROR, [(n, TEXT) for n in range(40)]),
    "full-text": ("CREATE VIRTUAL TABLE t USING fts5(id, a)", [(n, TEXT) for n in range(40)]),
    "older-full-text": ("CREATE VIRTUAL TABLE t USING fts4(id, a)", [(n, TEXT) for n in range(40)]),
    "statistics": (f"{PLAIN}; CREATE INDEX i ON t (a); ANALYZE", [(n, TEXT) for n in range(40)]),
    "view": (f"{PLAIN}; CREATE VIEW w AS SELECT a FROM t", [(1, TEXT)]),
}

SIDES: dict[str, tuple[str, tuple[str, ...]]] = {
    "alone": ("CREATE TABLE t (a)", ("{}",)),
    "after a word": ("CREATE TABLE t (id INTEGER PRIMARY KEY, name, a)", ("1", "github", "{}")),
    "before a word": ("CREATE TABLE t (a, name)", ("{}", "github")),
    "before a bracket": ("CREATE TABLE t (a, name)", ("{}", "(github)")),
    "no-rowid": ("CREATE TABLE t (name, a, PRIMARY KEY (name, a)) WITHOUT ROWID", ("github", "{}")),
    "utf-16": ("PRAGMA encoding = 'UTF-16be'; CREATE TABLE t (name, a, more)", ("github", "{}", "hub")),
    "overflow": ("CREATE TABLE t (name, a, more)", ("github" * 2000, "{}", "hub" * 4000)),
    "generated": ("CREATE TABLE t (name, a, rowid INT AS (1))", ("github", "{}")),
}


def made(place: Path, script: str, rows: list[tuple[object, ...]]) -> Path:
    connection = sqlite3.connect(place)
    connection.executescript(script)
    connection.executemany("INSERT INTO t (id, a) VALUES (?, ?)", rows)
    connection.commit()
    if "ANALYZE" in script:
        connection.execute("ANALYZE")
        connection.commit()
    connection.close()
    return place


def holds(place: Path, text: str = SECRET) -> bool:
    raw = place.read_bytes().lower()
    return any(text.lower().encode(code) in raw for code in ("utf-8", "utf-16-le", "utf-16-be"))


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_left_of_it_in_any_byte(case: str, tmp_path: Path) -> None:
    script, rows = CASES[case]
    place = made(tmp_path / "x.db", script, list(rows))
    assert holds(place)
    size, report = place.stat().st_size, PrivacyReport()
    assert scrub(str(place), "x.db", STRICT, None, True, report)
    assert not holds(place)
    assert not holds(place, "hunter2")  # as a full-text index has it
    private = sum(TEXT in str(value) or TEXT.encode() == value for _, value in rows)
    assert report.taken == {"x.db": [private, 0]} and report.counts == {"removed": private}
    assert {row.column for row in report.rows} <= {"t.a", "t_content.c1", "t_content.c1a"}
    connection = sqlite3.connect(place)
    expected = [
        (
            key,
            value.replace(TEXT.encode(), LEFT.encode()) if isinstance(value, bytes) else str(value).replace(TEXT, LEFT),
        )
        for key, value in rows
    ]
    assert sorted(connection.execute("SELECT id, a FROM t")) == sorted(expected)
    assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok" or case == "checked"
    assert place.stat().st_size <= size + read_page_size(str(place)) * 8
    connection.close()
    again = PrivacyReport()
    assert not scrub(str(place), "x.db", STRICT, None, True, again) and not again.rows


@pytest.mark.parametrize("conflict", ["", "ON CONFLICT REPLACE", "ON CONFLICT IGNORE"])
@pytest.mark.parametrize("form", ["(id, a TEXT UNIQUE %s)", "(id, a TEXT PRIMARY KEY %s) WITHOUT ROWID"])
def test_marks_differ_where_no_two_values_may_be_the_same(form: str, conflict: str, tmp_path: Path) -> None:
    secrets = [f"<private>{SECRET} {number}</private> [private]" for number in range(4)]
    rows = [(9, "[private 3] [private]"), *enumerate(secrets)]
    place = made(tmp_path / "x.db", f"CREATE TABLE t {form % conflict}", list(rows))
    report = PrivacyReport()
    assert scrub(str(place), "x.db", STRICT, None, True, report)
    assert not holds(place) and report.counts == {"removed": 4}
    connection = sqlite3.connect(place)
    assert sorted(value for (value,) in connection.execute("SELECT a FROM t")) == [
        "[private 2] [private]",
        "[private 3] [private]",
        "[private 4] [private]",
        "[private 5] [private]",
        "[private] [private]",
    ]
    assert connection.execute("SELECT a FROM t WHERE id = 9").fetchone() == ("[private 3] [private]",)
    connection.close()
    assert not scrub(str(place), "x.db", STRICT, None, True, PrivacyReport())


def test_triggers_are_there_again_and_did_nothing(tmp_path: Path) -> None:
    script, rows = CASES["mirror"]
    place = made(tmp_path / "x.db", script, list(rows))
    scrub(str(place), "x.db", STRICT, None, True, PrivacyReport())
    connection = sqlite3.connect(place)
    assert connection.execute("SELECT count(*) FROM log").fetchone() == (0,)
    assert connection.execute("SELECT count(*) FROM f WHERE f MATCH 'public'").fetchone() == (40,)
    assert connection.execute("SELECT count(*) FROM sqlite_master WHERE type = 'trigger'").fetchone() == (2,)
    connection.execute("UPDATE t SET a = 'new words' WHERE id = 1")
    assert connection.execute("SELECT count(*) FROM f WHERE f MATCH 'words'").fetchone() == (1,)
    connection.close()


def test_a_tag_that_is_cut_by_a_page_is_found(tmp_path: Path) -> None:
    """The text goes on, on one page after the other; the tag lies across each of the cuts, in every way it can."""
    place = made(tmp_path / "x.db", CASES["plain"][0], [(1, "y" * 9000)])
    with place.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        (cell,) = Pages(data).iterate_cells(2, Pages(data).read_page(2))
    head = cell.size - 9000
    cuts = [cell.local - head, cell.local - head + 4092]
    connection = sqlite3.connect(place)
    for before in [cut - part for cut in cuts for part in range(-1, 11)]:
        connection.execute("UPDATE t SET a = ?", (("y" * before + TEXT).ljust(9000, "y"),))
        connection.commit()
        assert may_concern(str(place), LOOKS, None), before
        assert may_concern(str(place), LOOKS, [2]), before
        assert may_concern(str(place), LOOKS, [3]), before  # the page where it begins is as it was
    connection.close()
    assert scrub(str(place), "x.db", STRICT, None, True, PrivacyReport())
    assert not holds(place)


def test_what_was_deleted_before_is_not_left_in_free_space(tmp_path: Path) -> None:
    place = made(tmp_path / "x.db", CASES["plain"][0], [(n, "z" * (n * 40) + TEXT) for n in range(200)])
    connection = sqlite3.connect(place)
    connection.execute("PRAGMA secure_delete = OFF")
    connection.execute("DELETE FROM t WHERE id > 3")
    connection.execute("UPDATE t SET a = 'gone'")
    connection.commit()
    connection.close()
    assert holds(place)
    size, report = place.stat().st_size, PrivacyReport()
    assert scrub(str(place), "x.db", STRICT, None, True, report)
    assert not holds(place) and not report.rows and place.stat().st_size == size


@pytest.mark.parametrize("order", ["le", "be"])
def test_wide_text_is_cleared_and_rows_keep_their_numbers(order: str, tmp_path: Path) -> None:
    place = tmp_path / "x.db"
    connection = sqlite3.connect(place)
    connection.executescript(
        f"PRAGMA encoding = 'UTF-16{order}'; PRAGMA secure_delete = OFF; CREATE TABLE n (a TEXT);"
        "CREATE TABLE t (id INTEGER, a TEXT); CREATE VIRTUAL TABLE f USING fts5(a, content='n')"
    )
    connection.executemany("INSERT INTO n (rowid, a) VALUES (?, ?)", [(n * 10, f"word{n} ü") for n in range(1, 8)])
    connection.execute("INSERT INTO f(f) VALUES ('rebuild')")
    connection.executemany("INSERT INTO t VALUES (?, ?)", [(n, "ü" * n * 50 + TEXT) for n in range(100)])
    connection.execute("DELETE FROM t")
    connection.commit()
    connection.close()
    for _ in range(2):
        assert holds(place)
        assert scrub(str(place), "x.db", STRICT, None, True, PrivacyReport())
        assert not holds(place)
        assert not scrub(str(place), "x.db", STRICT, None, True, PrivacyReport())
        connection = sqlite3.connect(place)
        assert [row for (row,) in connection.execute("SELECT rowid FROM n")] == [10, 20, 30, 40, 50, 60, 70]
        assert connection.execute("SELECT rowid, a FROM f WHERE f MATCH 'word3'").fetchall() == [(30, "word3 ü")]
        connection.execute("UPDATE n SET a = ? WHERE rowid = 70", (f"<private reason='ļ'>{SECRET}</private>",))
        connection.commit()
        connection.close()


def test_wide_text_with_nothing_to_hide_stays_as_it_is(tmp_path: Path) -> None:
    place = made(tmp_path / "x.db", f"PRAGMA encoding = 'UTF-16be'; {PLAIN}", [(1, "a private ļ <b> word")])
    assert not may_concern(str(place), LOOKS, None)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("size", [512, 1024, 4096])
def test_a_database_that_gives_pages_back_stays_whole(size: int, kept: bool, tmp_path: Path) -> None:
    """It has pages that say where others belong; they look like pages of a tree, and must stay as they are."""
    place = tmp_path / "x.db"
    connection = sqlite3.connect(place)
    connection.executescript(
        f"PRAGMA page_size = {size}; PRAGMA auto_vacuum = INCREMENTAL; PRAGMA secure_delete = OFF;"
        "CREATE TABLE t (id INTEGER PRIMARY KEY, a TEXT); CREATE TABLE u (id INTEGER PRIMARY KEY, a TEXT)"
    )
    many = 24_000 if size == 4096 else 3000
    connection.executemany("INSERT INTO u VALUES (?, ?)", [(n, f"keep {n} " * 20) for n in range(many)])
    connection.executemany("INSERT INTO t VALUES (?, ?)", [(n, TEXT + "z" * 300) for n in range(300)])
    connection.execute("DELETE FROM t WHERE id >= ?", (kept,))
    connection.commit()
    rows = connection.execute("SELECT * FROM u").fetchall()
    connection.close()
    assert holds(place)
    assert scrub(str(place), "x.db", STRICT, None, True, PrivacyReport())
    assert not holds(place)
    connection = sqlite3.connect(place)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert connection.execute("SELECT * FROM u").fetchall() == rows
    assert connection.execute("SELECT a FROM t").fetchall() == [(LEFT + "z" * 300,)] * kept
    connection.close()


def test_pages_that_cannot_be_cleared_keep_the_database_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = made(tmp_path / "x.db", CASES["plain"][0], [(n, TEXT) for n in range(200)])
    connection = sqlite3.connect(place)
    connection.executescript("PRAGMA secure_delete = OFF; DELETE FROM t WHERE id > 3; UPDATE t SET a = 'gone'")
    connection.close()
    monkeypatch.setattr(
        "sidecar.program.sqlite.pages._iterate_gaps", lambda *_: iter([(0, 8)])
    )  # wrong, and it does damage
    with pytest.raises(Unscrubbable, match="damage"):
        scrub(str(place), "x.db", STRICT, None, True, PrivacyReport())


def test_nothing_is_left_in_any_gap_whatever_happened_before(tmp_path: Path) -> None:
    chance = random.Random(1)
    for number in range(40):
        place, size = tmp_path / f"{number}.db", chance.choice([512, 512, 1024, 4096])
        connection = sqlite3.connect(place, isolation_level=None)
        connection.executescript(
            f"PRAGMA page_size = {size}; PRAGMA secure_delete = OFF; PRAGMA synchronous = OFF; PRAGMA journal_mode = OFF;"
            "CREATE TABLE t (id INTEGER PRIMARY KEY, a TEXT); CREATE INDEX i ON t (a);"
            f"INSERT INTO t VALUES (0, '{TEXT}')"
        )
        for row in range(1, 120):
            secret = "w " * chance.randint(0, 30) + f"<private>{SECRET * chance.randint(1, 40)}</private>"
            text = secret if chance.random() < 0.3 else "plain " * chance.randint(1, 80)
            connection.execute("INSERT OR REPLACE INTO t VALUES (?, ?)", (chance.randint(1, row), text))
            if chance.random() < 0.3:
                connection.execute("DELETE FROM t WHERE id = ?", (chance.randint(1, row),))
        connection.close()
        assert scrub(str(place), "x.db", STRICT, None, True, PrivacyReport())
        assert not holds(place), number
        connection = sqlite3.connect(place)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        connection.close()


def test_in_a_binary_value_a_credential_is_overwritten_and_nothing_moves(tmp_path: Path) -> None:
    token = b"ghp_" + b"a1B2" * 9
    values = [b"\0\x28" + token + b"\0" + b"pwd=hunter22\0", b"\x28" + token, token + b"\0" * 9000 + token]
    place = made(tmp_path / "x.db", "CREATE TABLE t (id, a BLOB)", list(enumerate(values)))
    report = PrivacyReport()
    assert scrub(str(place), "x.db", STRICT, None, True, report) and report.counts == {"redacted": 5}
    assert not holds(place, token.decode()) and not holds(place, "hunter22")
    mark = b"[redacted:github-token]".ljust(len(token), b"*")
    connection = sqlite3.connect(place)
    assert [row for (row,) in connection.execute("SELECT a FROM t")] == [
        b"\0\x28" + mark + b"\0pwd=********\0",
        b"\x28[redacted:github-token]",
        mark + b"\0" * 9000 + mark,
    ]
    connection.close()
    assert not scrub(str(place), "x.db", STRICT, None, True, PrivacyReport())


@pytest.mark.parametrize(
    ("script", "value", "reason"),
    [
        ("CREATE TABLE t (id, a TEXT); CREATE VIRTUAL TABLE f USING fts5(a, content='')", TEXT, "full-text"),
        ("CREATE TABLE t (id, a BLOB)", b"\0\1" + TEXT.encode(), "cannot be cleared"),
        ("CREATE TABLE t (id, a TEXT DEFAULT '<private>x</private>')", "x", "schema"),
        ("CREATE TABLE t (id, a TEXT, rowid TEXT, _rowid_ TEXT, oid TEXT)", TEXT, "no key"),
        (
            "CREATE TABLE t (id, a TEXT); CREATE UNIQUE INDEX i ON t (substr(a, 1, 15));"
            f"INSERT INTO t VALUES (0, '{LEFT}')",
            TEXT,
            "UNIQUE",
        ),
    ],
)
def test_what_cannot_be_taken_out_keeps_the_database_back(
    script: str, value: object, reason: str, tmp_path: Path
) -> None:
    place = made(tmp_path / "x.db", script, [(1, value)])
    report = PrivacyReport()
    with pytest.raises(Unscrubbable, match=reason):
        scrub(str(place), "x.db", STRICT, None, True, report)
    assert not report.rows and not report.taken


def test_a_damaged_one_is_kept_back_only_if_it_holds_something(tmp_path: Path) -> None:
    for number, text in enumerate(("harmless", TEXT)):
        place = made(tmp_path / f"{number}.db", CASES["plain"][0], [(n, text * 9) for n in range(200)])
        raw = bytearray(place.read_bytes())
        raw[8192:8300] = bytes(108)
        place.write_bytes(raw)
        if text == TEXT:
            with pytest.raises(Unscrubbable, match="damaged"):
                scrub(str(place), "x.db", STRICT, None, False, PrivacyReport())
        else:
            assert not scrub(str(place), "x.db", STRICT, None, False, PrivacyReport())


@pytest.mark.parametrize("encoding", ["UTF-8", "UTF-16le"])
def test_a_damaged_one_is_kept_back_if_its_pages_cut_a_tag(encoding: str, tmp_path: Path) -> None:
    """The tag lies across the end of a page, in every way it can: after the first part of a value, and after a later one."""
    place, most = tmp_path / "x.db", 1000 if encoding == "UTF-8" else 500
    connection = sqlite3.connect(place, isolation_level=None)
    connection.executescript(
        f"PRAGMA encoding = '{encoding}'; PRAGMA page_size = 512; PRAGMA synchronous = OFF; PRAGMA journal_mode = OFF;"
        f"{PLAIN}; INSERT INTO t VALUES (1, '')"
    )
    for tag in ("<private>", "\\u003cPrivate\\u003e", "< private why='x'>"):
        for before in range(most):
            text = "y" * before + tag + SECRET + "</private>"
            connection.execute("UPDATE t SET a = ?", (text.ljust(most * 2, "y"),))
            with pytest.raises(Unscrubbable, match="damaged"):
                scrub(str(place), "x.db", STRICT, None, False, PrivacyReport())
    for before in range(most):
        connection.execute("UPDATE t SET a = ?", (("y" * before + "a <b> privation <pre> here").ljust(most * 2, "y"),))
        assert not scrub(str(place), "x.db", STRICT, None, False, PrivacyReport()), before
    connection.close()


def test_one_with_nothing_to_hide_stays_as_it_is(tmp_path: Path) -> None:
    place = made(tmp_path / "x.db", MIRROR, [(n, f"a private matter, <privateer> {n} task-x" * 90) for n in range(300)])
    raw = place.read_bytes()
    assert not scrub(str(place), "x.db", PrivacyPolicy(True, "warn"), None, True, PrivacyReport())
    assert place.read_bytes() == raw


def test_looking_at_changed_pages_alone_finds_what_changed(tmp_path: Path) -> None:
    """Rows are added, changed in place and made longer; only pages that differ from before are looked at."""
    place = made(tmp_path / "x.db", CASES["plain"][0], [(n, "w" * (n % 50) * 300) for n in range(1, 200)])
    for seed in range(25):
        chance = random.Random(seed)
        connection = sqlite3.connect(place)
        for _ in range(3):
            text = "v" * chance.randint(0, 15_000)
            connection.execute("UPDATE t SET a = ? WHERE id = ?", (text, chance.randint(1, 199)))
        connection.commit()
        target = chance.randint(1, 199)
        old = connection.execute("SELECT a FROM t WHERE id = ?", (target,)).fetchone()[0]
        at = chance.randint(0, max(0, len(old) - len(TEXT)))
        secret = old[:at] + TEXT + old[at + len(TEXT) :] if len(old) >= len(TEXT) else TEXT
        clean = place.read_bytes()
        connection.execute("UPDATE t SET a = ? WHERE id = ?", (secret, target))
        connection.commit()
        changed = _changed(clean, place.read_bytes())
        assert may_concern(str(place), LOOKS, changed), (seed, changed)
        connection.execute("UPDATE t SET a = ? WHERE id = ?", (old, target))
        connection.commit()
        connection.close()


def test_words_of_a_row_that_was_deleted_later_are_not_left(tmp_path: Path) -> None:
    place = made(
        tmp_path / "x.db",
        MIRROR + "; CREATE TRIGGER ad AFTER DELETE ON t BEGIN "
        "INSERT INTO f(f, rowid, a) VALUES ('delete', old.id, old.a); END",
        [(n, TEXT) for n in range(40)],
    )
    connection = sqlite3.connect(place)
    connection.execute("DELETE FROM t")
    connection.commit()
    connection.close()
    assert holds(place, "hunter2")
    assert scrub(str(place), "x.db", STRICT, [], True, PrivacyReport(), before=True)
    assert not holds(place, "hunter2") and not holds(place, "zqjxkvw")


INDEX = """CREATE TABLE t (id INTEGER PRIMARY KEY, a TEXT);
CREATE VIRTUAL TABLE f USING %s;
CREATE TRIGGER ai AFTER INSERT ON t BEGIN INSERT INTO f(rowid, a) VALUES (new.id, new.a); END;
CREATE TRIGGER ad AFTER DELETE ON t BEGIN INSERT INTO f(f, rowid, a) VALUES ('delete', old.id, old.a); END"""
MODULES = [
    "fts5(a, content='t', content_rowid='id')",
    "\"fts5\"(a, content='t', content_rowid='id')",
    "[FTS5] /* one */ (a, content = t, content_rowid=id, tokenize='porter')",
    "`fts5`(a, content='t', content_rowid='id', tokenize=\"trigram\")",
    "fts5(a, content='t', content_rowid='id', detail=none)",
    "fts5(a, content='t', content_rowid='id', detail=column, prefix='2 3')",
]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("others", [1, 4000])
def test_words_of_a_row_that_came_and_went_are_not_left(module: str, others: int, tmp_path: Path) -> None:
    """Nobody looked in between, and nothing is left of the row itself: the index alone still has its words."""
    place = made(tmp_path / "x.db", INDEX % module, [(n, f"harmless, prior private {n}") for n in range(others)])
    clean = place.read_bytes()
    assert not scrub(str(place), "x.db", STRICT, None, True, PrivacyReport()) and place.read_bytes() == clean
    connection = sqlite3.connect(place)
    connection.execute("PRAGMA secure_delete = ON")
    for number in range(9_000, 9_003):
        connection.execute("INSERT INTO t VALUES (?, ?)", (number, TEXT))
        connection.commit()
        connection.execute("DELETE FROM t WHERE id = ?", (number,))
        connection.commit()
    connection.close()
    assert not holds(place) and holds(place, "qjx")
    assert scrub(str(place), "x.db", STRICT, _changed(clean, place.read_bytes()), True, PrivacyReport())
    assert not holds(place, "qjx")
    connection = sqlite3.connect(place)
    assert connection.execute("SELECT count(*) FROM f WHERE f MATCH 'harmless'").fetchone() == (others,)
    connection.execute("INSERT INTO f(f) VALUES ('integrity-check')")
    connection.close()
    assert not scrub(str(place), "x.db", STRICT, None, True, PrivacyReport())


@pytest.mark.parametrize(
    "schema",
    [
        "CREATE VIRTUAL TABLE docs USING fts5(x); CREATE TABLE docs_segments(id INTEGER PRIMARY KEY, a TEXT)",
        "CREATE VIRTUAL TABLE docs USING fts4(x); CREATE TABLE docs_data(id INTEGER PRIMARY KEY, a TEXT)",
    ],
)
def test_a_table_that_is_only_called_like_a_part_of_an_index_is_cleared(schema: str, tmp_path: Path) -> None:
    place = tmp_path / "x.db"
    connection = sqlite3.connect(place)
    connection.executescript(schema)
    table = "docs_segments" if "fts5" in schema else "docs_data"
    connection.execute(f"INSERT INTO {table} VALUES (1, ?)", (TEXT,))
    connection.commit()
    connection.close()
    assert scrub(str(place), "x.db", STRICT, None, True, PrivacyReport())
    assert not holds(place)


def test_an_index_with_an_odd_name_is_built_anew(tmp_path: Path) -> None:
    place = tmp_path / "x.db"
    connection = sqlite3.connect(place)
    connection.execute("CREATE VIRTUAL TABLE a$b USING fts5(x)")
    connection.execute("INSERT INTO a$b VALUES (?)", (TEXT,))
    connection.commit()
    connection.close()
    assert scrub(str(place), "x.db", STRICT, None, True, PrivacyReport())
    assert not holds(place) and not holds(place, "qjx")


def test_an_ordinary_row_about_something_private_may_go_without_building_an_index_anew(tmp_path: Path) -> None:
    place = made(tmp_path / "x.db", INDEX % MODULES[0], [(n, f"a private method {n}") for n in range(50)])
    connection = sqlite3.connect(place)
    connection.execute("UPDATE t SET a = 'a public one' WHERE id = 7")
    connection.execute("DELETE FROM t WHERE id = 8")
    connection.commit()
    connection.close()
    assert not scrub(str(place), "x.db", STRICT, None, True, PrivacyReport())


@pytest.mark.parametrize("module", ["fts5(a, content='')", "'fts5'(a, cont=\"\")", 'fts4(content="", a)'])
def test_an_index_without_texts_is_told_of_if_it_has_the_word(module: str, tmp_path: Path) -> None:
    place = made(tmp_path / "x.db", f"{PLAIN}; CREATE VIRTUAL TABLE f USING {module}", [(1, "harmless")])
    connection = sqlite3.connect(place)
    connection.execute("INSERT INTO f(rowid, a) VALUES (1, 'all is public')")
    connection.commit()
    assert not scrub(str(place), "x.db", STRICT, None, True, PrivacyReport())
    connection.execute("INSERT INTO f(rowid, a) VALUES (2, ?)", (TEXT,))
    connection.commit()
    report = PrivacyReport()
    assert not scrub(str(place), "x.db", STRICT, None, True, report)
    assert ["index f has the word private" in told for told in report.warnings] == [True]
    connection.execute("INSERT INTO t VALUES (2, ?)", (TEXT,))
    connection.commit()
    connection.close()
    with pytest.raises(Unscrubbable, match="cannot be built anew"):
        scrub(str(place), "x.db", STRICT, None, True, PrivacyReport())


def _changed(old: bytes, new: bytes, page: int = 4096) -> list[int]:
    return [
        number // page + 1
        for number in range(0, len(new), page)
        if old[number : number + page] != new[number : number + page]
    ]


@pytest.mark.parametrize("sides", SIDES)
def test_a_credential_is_found_whatever_stands_beside_it(sides: str, tmp_path: Path) -> None:
    """In a page there is nothing between one value and the next."""
    script, values = SIDES[sides]
    secrets = {name: make(random.Random(name)) for name, make in CREDENTIALS.items()}
    for kind in KINDS:
        text = kind.plant(random.Random(kind.name))[0]
        if may_hold(text.encode()):
            secrets[f"{kind.name} in a text"] = text
    for name, secret in secrets.items():
        connection = sqlite3.connect(tmp_path / name, isolation_level=None)
        connection.executescript(script)
        columns = [row[1] for row in connection.execute("PRAGMA table_info(t)")]
        insert = f"INSERT INTO t ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        connection.execute(insert, ["2" if value == "1" else "clean" * (value == "{}") for value in values])
        connection.execute(insert, [value.format(secret) for value in values])
        connection.close()
        report = PrivacyReport()
        assert scrub(str(tmp_path / name), "x.db", STRICT, None, True, report), name
        assert sum(report.counts.values()) >= 1
        connection = sqlite3.connect(tmp_path / name)
        # Letters of a private key are those of its first line too.
        assert not any(secret in str(row) for row in connection.execute("SELECT * FROM t")), name
        connection.close()


def test_a_credential_in_a_page_that_was_freed_is_found_beside_another_value(tmp_path: Path) -> None:
    secret = CREDENTIALS["github-token"](random.Random(1))
    connection = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    connection.execute("PRAGMA secure_delete = OFF")
    connection.execute("CREATE TABLE t (name, a)")
    for table in ("u", "v"):  # one of their pages becomes a leaf of the free list
        connection.execute(f"CREATE TABLE {table} (name, a)")
        connection.execute(f"INSERT INTO {table} VALUES ('github', ?)", [secret])
    for table in ("u", "v"):
        connection.execute(f"DROP TABLE {table}")
    connection.close()
    assert holds(tmp_path / "x.db", secret)
    assert scrub(str(tmp_path / "x.db"), "x.db", STRICT, None, True, PrivacyReport())
    assert not holds(tmp_path / "x.db", secret)
