"""Beside a version whose layouts know less: what it would drop it must refuse, and what it knows it goes on with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parts.earlier import BEFORE_OWNED, Earlier, earlier
from tests.parts.homes import PROJECT, claude_mem_home, empty_home, observe, run_cli, titles, write

MEMORY = "agent-7"
REFUSED = "is in a format this version does not know"


@pytest.fixture
def before(tmp_path: Path) -> Earlier:
    return earlier(tmp_path / "earlier", BEFORE_OWNED)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return claude_mem_home(tmp_path / "home", rows=20)


def _learn(home: Path, kind: str) -> Path:
    """Add something that only later layouts know. Return where it is, in the home."""
    place = {"unknown": ".claude-mem/notes.md", "found": "work/app/MEMORY.md", "layout": ".hermes/memories/USER.md"}[
        kind
    ]
    write(home / place, b"learned\n")
    return Path(place)


def _formats(store: Path) -> tuple[int, set[int]]:
    folder = store / "memories" / MEMORY
    manifests = [json.loads(path.read_text()) for path in (folder / "snapshots").glob("[!.]*.json")]
    return json.loads((folder / "head.json").read_text())["format"], {one["format"] for one in manifests}


def _head(store: Path) -> str:
    return str(run_cli("show", MEMORY, store=store).document["snapshot"])


@pytest.mark.parametrize("kind", ["unknown", "found", "layout"])
def test_an_earlier_version_refuses_what_it_would_drop(
    before: Earlier, store: Path, home: Path, tmp_path: Path, kind: str
) -> None:
    place = _learn(home, kind)
    new = run_cli("export", MEMORY, "--sandbox", f"local:{home}", store=store)
    assert (new.code, new.document["outcome"]) == (0, "committed")
    assert _formats(store) == (3, {3})
    fresh = empty_home(tmp_path / "fresh")
    read = before.run("restore", MEMORY, "--sandbox", f"local:{fresh}", store=store)
    assert (read.code, REFUSED in str(read.document)) == (1, True), read.document
    assert not (fresh / ".claude-mem").exists()
    observe(home, 3, "through the earlier one")
    wrote = before.run("export", MEMORY, "--sandbox", f"local:{home}", store=store)
    assert (wrote.code, wrote.document["outcome"]) == (3, "diverged")
    assert REFUSED in wrote.document["reason"]["message"]
    assert before.run("forget", MEMORY, "--keep-last", "1", store=store).document["memories"][0]["forgotten"] == 0
    # Nothing is lost: this version reads what both wrote, and goes on from either.
    assert _head(store) == new.document["snapshot"]
    assert run_cli("restore", MEMORY, "--sandbox", f"local:{fresh}", store=store).document["warnings"] == []
    assert (fresh / place).read_text() == "learned\n"
    beside = empty_home(tmp_path / "beside")
    asked = ("--snapshot", wrote.document["snapshot"])
    assert run_cli("restore", MEMORY, "--sandbox", f"local:{beside}", *asked, store=store).code == 0
    assert titles(beside) == titles(home)
    observe(home, 3, "now")
    after = run_cli("export", MEMORY, "--sandbox", f"local:{home}", store=store)
    assert (after.code, after.document["outcome"]) == (0, "committed"), after.document
    last = empty_home(tmp_path / "last")
    assert run_cli("restore", MEMORY, "--sandbox", f"local:{last}", store=store).document["outcome"] == "complete"
    assert (last / place).read_text() == "learned\n"
    assert titles(last) == titles(home)
    standings = [row["standing"] for row in run_cli("log", MEMORY, store=store).document["snapshots"]]
    assert standings == ["head", "diverged", "earlier head"]
    assert run_cli("verify", store=store).code == 0


def test_what_an_earlier_version_calls_damaged_gives_its_place_to_nothing(
    before: Earlier, store: Path, home: Path, tmp_path: Path
) -> None:
    first = before.run("export", MEMORY, "--sandbox", f"local:{home}", store=store)
    assert (first.code, _formats(store)) == (0, (1, {1}))
    place = _learn(home, "unknown")
    new = run_cli("export", MEMORY, "--sandbox", f"local:{home}", store=store)
    assert (new.document["outcome"], _formats(store)) == ("committed", (3, {1, 3}))
    # What this sandbox compares itself with it cannot read, and notes that it is damaged.
    observe(home, 3, "through the earlier one")
    wrote = before.run("export", MEMORY, "--sandbox", f"local:{home}", store=store)
    assert wrote.document["outcome"] == "diverged"
    assert (store / "memories" / MEMORY / "damaged" / new.document["snapshot"]).exists()
    # Others get an older one: neither version lets that take the place of what the earlier cannot read.
    for name, run in (("by the earlier", before.run), ("by this", run_cli)):
        other = empty_home(tmp_path / name)
        read = before.run("restore", MEMORY, "--sandbox", f"local:{other}", store=store).document
        assert (read["snapshot"], REFUSED in str(read["warnings"])) == (first.document["snapshot"], True)
        observe(other, 3, "since")
        assert run("export", MEMORY, "--sandbox", f"local:{other}", store=store).document["outcome"] == "diverged"
        assert _head(store) == new.document["snapshot"]
    # A sandbox that holds the head sends what changed, and no more.
    observe(home, 3, "now")
    after = run_cli("export", MEMORY, "--sandbox", f"local:{home}", store=store)
    assert (after.document["outcome"], after.document["kind"]) == ("committed", "delta")
    fresh = empty_home(tmp_path / "fresh")
    assert run_cli("restore", MEMORY, "--sandbox", f"local:{fresh}", store=store).code == 0
    assert (fresh / place).exists()


def test_the_number_is_raised_only_while_there_is_something_that_would_be_dropped(
    before: Earlier, store: Path, home: Path
) -> None:
    write(home / "app/MEMORY.md", b"remembered\n")
    write(home / "app/.cm/CONTINUITY.md", b"goes on\n")
    named = ("--sandbox", f"local:{home}", "--project", "~/app")
    assert run_cli("export", MEMORY, *named, store=store).document["outcome"] == "committed"
    assert _formats(store) == (1, {1}), "whoever names a project names it to both"
    place = _learn(home, "unknown")
    assert run_cli("export", MEMORY, *named, store=store).document["outcome"] == "committed"
    assert _formats(store) == (3, {1, 3})
    (home / place).unlink()
    assert run_cli("export", MEMORY, *named, store=store).document["outcome"] == "committed"
    assert _formats(store)[0] == 1
    observe(home, 3, "through the earlier one")
    old = before.run("export", MEMORY, *named, store=store)
    assert (old.code, old.document["outcome"]) == (0, "committed")
    observe(home, 3, "now")
    new = run_cli("export", MEMORY, *named, store=store)
    assert (new.document["outcome"], new.document["parent"]) == ("committed", old.document["snapshot"])


def test_copies_of_heads_do_not_lead_an_earlier_version_back(
    before: Earlier, store: Path, home: Path, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    assert run_cli("keygen", "--signing", "-o", key, store=store).code == 0
    settings = tmp_path / "config.toml"
    settings.write_text(f'[signing]\nkey_file = "{key}"\n')
    signed = ("--sandbox", f"local:{home}", "--config", settings)
    for word in ("one", "two"):
        observe(home, 3, word)
        assert before.run("export", MEMORY, *signed, store=store).document["outcome"] == "committed"
    place = _learn(home, "unknown")
    new = run_cli("export", MEMORY, *signed, store=store)
    assert new.document["outcome"] == "committed"
    observe(home, 3, "through the earlier one")
    wrote = before.run("export", MEMORY, *signed, store=store)
    assert (wrote.code, wrote.document["outcome"]) == (3, "diverged"), wrote.document
    shown = run_cli("show", MEMORY, "--config", settings, store=store).document
    assert shown["snapshot"] == new.document["snapshot"]
    fresh = empty_home(tmp_path / "fresh")
    back = run_cli("restore", MEMORY, "--sandbox", f"local:{fresh}", "--config", settings, store=store)
    assert (back.code, (fresh / place).exists()) == (0, True)


def test_the_stand_alone_reader_knows_both_numbers(store: Path, home: Path, tmp_path: Path) -> None:

    _learn(home, "unknown")
    assert run_cli("export", MEMORY, "--sandbox", f"local:{home}", store=store).code == 0
    reader: list[str | Path] = [sys.executable, PROJECT / "docs" / "read_snapshot.py", store, MEMORY, tmp_path / "out"]
    subprocess.run(reader, check=True, timeout=60)
    assert (tmp_path / "out/claude-mem/notes.md").read_text() == "learned\n"
