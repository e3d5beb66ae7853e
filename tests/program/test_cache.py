"""What a sandbox remembers of its last export: only changes are written, and never more is believed than is so."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.engine import Engine, ExportRequest, export
from sidecar.format import index
from sidecar.program import cache
from sidecar.wiring import open_sandbox
from tests.parts.memories import engine_on


def row(path: str, contents: str = "d") -> cache.Row:
    digest = hashlib.sha256(contents.encode()).hexdigest()
    return cache.KnownEntry(index.Entry(path, index.FILE, 0o644, 1, 2, digest), [1, 2, 3, 4, 5])


def grown(before: cache.Base, snapshot: str, **changed: str | None) -> cache.Base:
    entries = dict(before.entries)
    for path, digest in changed.items():
        entries.pop(path, None)
        if digest is not None:
            entries[path] = row(path, digest)
    return cache.Base(snapshot, before.taken + 1, entries, "rules")


def loaded(folder: Path, snapshot: str) -> cache.Base:
    base = cache.load_base(str(folder), [snapshot])
    assert base is not None
    return base


@pytest.fixture
def first(tmp_path: Path) -> cache.Base:
    base = cache.Base("s0", 7, {f"p{number}": row(f"p{number}") for number in range(100)}, "rules")
    cache.write_exported(str(tmp_path), base, None)
    return loaded(tmp_path, "s0")


def test_an_export_writes_down_what_changed_and_finds_all_of_it_again(tmp_path: Path, first: cache.Base) -> None:
    whole, before = (tmp_path / "index-s0").stat().st_size, first
    for number in range(1, 9):
        base = grown(before, f"s{number}", **{f"p{number}": f"new{number}", f"p{number + 50}": None, f"q{number}": "q"})
        cache.write_exported(str(tmp_path), base, before)
        before = loaded(tmp_path, f"s{number}")
        assert {path: tuple(known[0]) for path, known in before.entries.items()} == {
            path: tuple(known[0]) for path, known in base.entries.items()
        }
        assert (before.taken, before.rules) == (base.taken, "rules")
        if number == 1:
            assert (tmp_path / "index-s1").stat().st_size * 5 < whole
    assert len(list(tmp_path.glob("index-*"))) <= 4


def test_so_many_changes_that_they_are_most_of_it_are_written_whole(tmp_path: Path, first: cache.Base) -> None:
    cache.write_exported(str(tmp_path), grown(first, "s1", **{f"p{number}": "new" for number in range(60)}), first)
    assert loaded(tmp_path, "s1").full == ""
    second = loaded(tmp_path, "s1")
    cache.write_exported(str(tmp_path), grown(second, "s2", p1="x"), second)
    assert loaded(tmp_path, "s2").full == "s1"
    assert not (tmp_path / "index-s0").exists(), "nothing is built on it any more"


@pytest.mark.parametrize("harm", ["gone", "damaged", "changes"])
def test_changes_without_what_they_changed_are_worth_nothing(tmp_path: Path, first: cache.Base, harm: str) -> None:
    second = grown(first, "s1", p1="x")
    cache.write_exported(str(tmp_path), second, first)
    place = tmp_path / "index-s0"
    if harm == "gone":
        place.unlink()
    elif harm == "damaged":
        place.write_bytes(place.read_bytes()[:-1] + b"?")
    else:
        place.write_bytes((tmp_path / "index-s1").read_bytes().replace(b'"snapshot": "s1"', b'"snapshot": "s0"'))
    assert cache.load_base(str(tmp_path), ["s1"]) is None


async def test_a_file_that_a_layout_calls_secret_by_now_is_not_taken_for_unchanged_and_back_when_it_does_not(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    for name in ("kept.md", "told.md"):
        place = home / "memory" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(name)
    engine: Engine = engine_on(f"file:{tmp_path / 'store'}")
    time.sleep(0.15)  # files younger than a tick of the clock are read again
    box = open_sandbox(f"local:{home}")
    assert (await export(engine, box, ExportRequest(memory="m"))).files == 2
    assert (await export(engine, box, ExportRequest(memory="m"))).outcome == "unchanged"
    layout = engine.layouts["three-tier"]
    stricter = replace(engine, layouts={**engine.layouts, "three-tier": replace(layout, secrets=("told.md",))})
    receipt = await export(stricter, box, ExportRequest(memory="m"))
    assert (receipt.outcome, receipt.files) == ("committed", 1)
    assert [skip.reason for skip in receipt.skipped if skip.path.endswith("told.md")] == ["secret"]
    anchored = replace(engine, layouts={**engine.layouts, "three-tier": replace(layout, secrets=("/told.md",))})
    receipt = await export(anchored, box, ExportRequest(memory="m"))
    assert (receipt.outcome, receipt.files) == ("committed", 2)
