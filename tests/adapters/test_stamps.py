"""The stamp of a folder stays as long as nothing changes in it, and is another one after any change, however small."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from adapters.sandboxes import stamps
from adapters.sandboxes.stamps import compute_stamp
from tests.parts.homes import empty_home, write

TICK = 0.05


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(stamps, "TICK_NS", int(TICK * 1e9))
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"# Memory\n")
    write(home / "notes/a.md", b"one\n")
    write(home / "notes/b.md", b"two\n")
    write(home / "memory-sidecar/work-notes.md", b"a project that is called as we are\n")
    (home / "inside").symlink_to("notes")
    (home / "nowhere").symlink_to("notes/not-yet.md")
    write(tmp_path / "outside.md", b"elsewhere\n")
    (home / "outside.md").symlink_to(tmp_path / "outside.md")
    write(home / ".cache/memory-sidecar/m/lineage", b"20260101T000000000Z-00000000\n")
    write(home / ".cache/memory-sidecar/.turn", b"export")
    with closing(sqlite3.connect(home / "live.db", isolation_level=None)) as database:  # open as long as the test runs
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE t (x)")
        settle()
        yield home


def settle() -> None:
    time.sleep(2 * TICK)


def test_it_stays_while_nothing_changes_but_the_programs_own_scratch(home: Path) -> None:
    before = compute_stamp([str(home)])
    own = home / ".cache/memory-sidecar"
    write(own / ".turn", b"another run")
    write(own / "m/turn", b"")
    write(own / "work-0123456789abcdef/x", b"scratch")
    (home / "notes/a.md").read_bytes()
    assert before and compute_stamp([str(home)]) == before


def edit_in_the_dark(home: Path) -> None:
    """As many bytes as before, and the old time put back."""
    place = home / "notes/a.md"
    before = place.stat()
    place.write_bytes(b"ONE\n")
    os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))


def commit(home: Path) -> None:
    with closing(sqlite3.connect(home / "live.db", isolation_level=None)) as database:
        database.execute("INSERT INTO t VALUES (1)")


def swap_names(home: Path) -> None:
    (home / "notes/a.md").rename(home / "notes/c.md")
    (home / "notes/b.md").rename(home / "notes/a.md")
    (home / "notes/c.md").rename(home / "notes/b.md")


CHANGES: dict[str, Callable[[Path], object]] = {
    "edited": edit_in_the_dark,
    "committed": commit,
    "added": lambda home: write(home / "notes/c.md", b""),
    "comes where a link leads": lambda home: write(home / "notes/not-yet.md", b""),
    "removed": lambda home: (home / "notes/b.md").unlink(),
    "names swapped": swap_names,
    "a folder": lambda home: (home / "notes/deep").mkdir(),
    "a mode": lambda home: (home / "notes").chmod(0o700),
    "behind a link": lambda home: write(home.parent / "outside.md", b"ELSEWHERE\n"),
    "a project called as ours": lambda home: write(home / "memory-sidecar/work-notes.md", b"mine\n"),
    "another base": lambda home: write(home / ".cache/memory-sidecar/m/lineage", b"20260102T000000000Z-00000000\n"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_it_is_another_one_after_any_change(home: Path, change: Callable[[Path], object]) -> None:
    before = compute_stamp([str(home)])
    assert before
    change(home)
    settle()
    after = compute_stamp([str(home)])
    assert after and after != before


def test_what_was_changed_just_now_has_none(home: Path) -> None:
    write(home / "notes/a.md", b"ONE\n")
    assert compute_stamp([str(home)]) == ""


@pytest.mark.parametrize("target", ["folder", "nothing"])
def test_what_links_lead_to_and_is_not_looked_at_leaves_none(home: Path, target: str) -> None:
    (home.parent / "folder").mkdir()
    (home / "leads-out").symlink_to(home.parent / target)
    settle()
    assert compute_stamp([str(home)]) == ""
    if target == "folder":
        assert compute_stamp([str(home), str(home.parent / target)])


def test_a_large_folder_has_none(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamps, "MOST_ENTRIES", 5)
    assert compute_stamp([str(home)]) == ""
