"""Stores and sandboxes of an earlier version are taken up, and it can go on with what this one writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.ids import build_memory_key, build_portable_folder
from tests.parts.earlier import WITH_TILDES, WITHOUT_IDS, Earlier, earlier
from tests.parts.homes import PROJECT, claude_mem_home, empty_home, memory_tree, observe, run_cli, titles

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "acme/agent-7"


@pytest.fixture
def before(tmp_path: Path) -> Earlier:
    return earlier(tmp_path / "earlier", WITHOUT_IDS)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return claude_mem_home(tmp_path / "home", rows=20)


def _notes(home: Path) -> list[Path]:
    return [*home.glob(".cache/memory-sidecar/*/notes")]


def test_a_store_and_a_sandbox_from_before_are_taken_up_without_loss(
    before: Earlier, store: Path, home: Path, tmp_path: Path
) -> None:
    first = before.run("export", MEMORY, "--sandbox", f"local:{home}", store=store)
    assert (first.code, first.document["outcome"]) == (0, "committed")
    assert not (store / "store-id").exists() and not _notes(home)
    fresh = empty_home(tmp_path / "fresh")
    restored = run_cli("restore", MEMORY, "--sandbox", f"local:{fresh}", "--must-exist", store=store)
    assert (restored.code, restored.document["snapshot"]) == (0, first.document["snapshot"])
    assert memory_tree(fresh / ".claude-mem") == memory_tree(home / ".claude-mem")
    observe(home, 3, "since")
    after = run_cli("export", MEMORY, "--sandbox", f"local:{home}", store=store)
    assert (after.code, after.document["outcome"], after.document["kind"]) == (0, "committed", "delta")
    assert after.document["parent"] == first.document["snapshot"] and after.document["warnings"] == []
    (notes,) = _notes(home)
    assert json.loads(notes.read_text())["store"] == (store / "store-id").read_text()
    store.rename(tmp_path / "away")
    observe(home, 3, "later")
    refused = run_cli("export", MEMORY, "--sandbox", f"local:{home}", store=store)
    assert (refused.code, refused.document["reason"]["code"]) == (3, "unknown-lineage")


def test_a_version_from_before_goes_on_with_what_this_one_wrote(
    before: Earlier, store: Path, home: Path, tmp_path: Path
) -> None:
    memory = "agent-7"  # a plain one: what is new of others is in folders that earlier versions do not know
    assert run_cli("export", memory, "--sandbox", f"local:{home}", store=store).code == 0
    id = (store / "store-id").read_text()
    for number in range(2):
        observe(home, 3, f"before {number}")
        old = before.run("export", memory, "--sandbox", f"local:{home}", store=store)
        assert (old.code, old.document["outcome"], old.document["kind"]) == (0, "committed", "delta")
        observe(home, 3, f"now {number}")
        new = run_cli("export", memory, "--sandbox", f"local:{home}", store=store)
        assert (new.code, new.document["outcome"], new.document["kind"]) == (0, "committed", "delta")
        assert new.document["parent"] == old.document["snapshot"] and new.document["warnings"] == []
    for name, run in (("by the earlier", before.run), ("by this", run_cli)):
        other = empty_home(tmp_path / name)
        assert run("restore", memory, "--sandbox", f"local:{other}", store=store).document["outcome"] == "complete"
        assert titles(other) == titles(home)
    assert (store / "store-id").read_text() == id
    assert run_cli("verify", store=store).code == before.run("verify", store=store).code == 0


@pytest.fixture
def with_tildes(tmp_path: Path) -> Earlier:
    return earlier(tmp_path / "with tildes", WITH_TILDES)


def _folders(store: Path) -> dict[str, set[str]]:
    """The folders of memories, each with what is directly in it."""
    return {
        folder.name: {entry.name for entry in folder.iterdir() if not entry.name.startswith(".")}
        for folder in (store / "memories").iterdir()
    }


def _head(store: Path, folder: str) -> str:
    return str(json.loads((store / "memories" / folder / "head.json").read_text()).get("snapshot", ""))


OLD, NEW = build_memory_key(MEMORY), build_portable_folder(build_memory_key(MEMORY))


def test_a_memory_from_before_keeps_its_folder(with_tildes: Earlier, store: Path, home: Path, tmp_path: Path) -> None:
    first = with_tildes.run("export", MEMORY, "--sandbox", f"local:{home}", store=store)
    assert first.document["outcome"] == "committed"
    observe(home, 3, "now")
    new = run_cli("export", MEMORY, "--sandbox", f"local:{home}", store=store)
    assert (new.document["outcome"], new.document["kind"]) == ("committed", "delta")
    observe(home, 3, "before")
    old = with_tildes.run("export", MEMORY, "--sandbox", f"local:{home}", store=store)
    assert (old.document["outcome"], old.document["parent"]) == ("committed", new.document["snapshot"])
    assert {*_folders(store)} == {OLD}
    fresh = empty_home(tmp_path / "fresh")
    restored = run_cli("restore", MEMORY, "--sandbox", f"local:{fresh}", "--must-exist", store=store)
    assert restored.document["snapshot"] == old.document["snapshot"]
    assert titles(fresh) == titles(home)
    assert run_cli("delete", MEMORY, "--yes", store=store).code == 0
    assert not (store / "memories").exists()


def test_an_earlier_version_refuses_a_folder_it_does_not_know_and_never_begins_another(
    with_tildes: Earlier, store: Path, home: Path, tmp_path: Path
) -> None:
    new = run_cli("export", MEMORY, "--sandbox", f"local:{home}", store=store)
    assert new.document["outcome"] == "committed"
    assert (_folders(store)[OLD], {*_folders(store)}) == ({"head.json"}, {OLD, NEW})
    fresh = empty_home(tmp_path / "fresh")
    read = with_tildes.run("restore", MEMORY, "--sandbox", f"local:{fresh}", store=store)
    assert (read.code, "in a format this version does not know" in str(read.document)) == (1, True), read.document
    assert not (fresh / ".claude-mem").exists()
    observe(home, 3, "through the earlier one")
    wrote = with_tildes.run("export", MEMORY, "--sandbox", f"local:{home}", store=store)
    assert (wrote.code, wrote.document["outcome"]) == (3, "diverged")
    assert "in a format this version does not know" in wrote.document["reason"]["message"]
    # Nothing is lost: this version has it beside the head, and can take it.
    assert _head(store, NEW) == new.document["snapshot"]
    log = run_cli("log", MEMORY, store=store).document["snapshots"]
    assert {row["snapshot"] for row in log} == {new.document["snapshot"], wrote.document["snapshot"]}
    assert run_cli("verify", store=store).code == 0
    assert run_cli("accept", MEMORY, wrote.document["snapshot"], store=store).code == 0
    restored = run_cli("restore", MEMORY, "--sandbox", f"local:{fresh}", store=store)
    assert restored.document["snapshot"] == wrote.document["snapshot"]
    assert titles(fresh) == titles(home)


def test_a_head_that_an_earlier_version_forces_does_not_split_a_memory(
    with_tildes: Earlier, store: Path, home: Path
) -> None:
    first = run_cli("export", MEMORY, "--sandbox", f"local:{home}", store=store)
    observe(home, 3, "forced")
    forced = with_tildes.run("export", MEMORY, "--sandbox", f"local:{home}", "--force", store=store)
    assert forced.document["outcome"] == "committed"
    assert run_cli("show", MEMORY, store=store).document["snapshot"] == first.document["snapshot"]
    observe(home, 3, "after that")
    after = run_cli("export", MEMORY, "--sandbox", f"local:{home}", "--force", store=store)
    assert after.document["outcome"] == "committed"
    assert (_head(store, NEW), _head(store, OLD)) == (after.document["snapshot"], "")
    log = run_cli("log", MEMORY, store=store).document["snapshots"]
    assert forced.document["snapshot"] in {row["snapshot"] for row in log}
    again = with_tildes.run("export", MEMORY, "--sandbox", f"local:{home}", store=store)
    assert again.document["outcome"] in ("diverged", "unchanged"), "it refuses again"


def test_an_earlier_version_reads_no_store_as_empty_in_which_there_is_a_memory(
    with_tildes: Earlier, store: Path, home: Path
) -> None:
    assert run_cli("export", MEMORY, "--sandbox", f"local:{home}", store=store).code == 0
    assert run_cli("export", "plain", "--sandbox", f"local:{home}", "--allow", "other-memory", store=store).code == 0
    listed = with_tildes.run("list", store=store)
    assert [row["memory"] for row in listed.document["memories"]] == ["plain"]
    assert "is believed" in listed.stderr
    assert [row["memory"] for row in run_cli("list", store=store).document["memories"]] == [MEMORY, "plain"]


def test_the_stand_alone_reader_finds_both_kinds_of_folders(
    with_tildes: Earlier, store: Path, home: Path, tmp_path: Path
) -> None:
    assert with_tildes.run("export", MEMORY, "--sandbox", f"local:{home}", store=store).code == 0
    allowed = ("--allow", "other-memory")
    assert run_cli("export", "new/one", "--sandbox", f"local:{home}", *allowed, store=store).code == 0
    assert {*_folders(store)} == {OLD, build_memory_key("new/one"), build_portable_folder(build_memory_key("new/one"))}
    for memory in (MEMORY, "new/one"):
        out = tmp_path / memory.replace("/", "-")
        reader: list[str | Path] = [sys.executable, PROJECT / "docs" / "read_snapshot.py", store, memory, out]
        subprocess.run(reader, check=True, timeout=60)
        assert memory_tree(out / "claude-mem") == memory_tree(home / ".claude-mem")
