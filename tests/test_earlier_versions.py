"""Stores and sandboxes of an earlier version are taken up, and it can go on with what this one writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parts.earlier import WITHOUT_IDS, Earlier, earlier
from tests.parts.homes import claude_mem_home, empty_home, memory_tree, observe, run_cli, titles

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
    assert run_cli("export", MEMORY, "--sandbox", f"local:{home}", store=store).code == 0
    id = (store / "store-id").read_text()
    for number in range(2):
        observe(home, 3, f"before {number}")
        old = before.run("export", MEMORY, "--sandbox", f"local:{home}", store=store)
        assert (old.code, old.document["outcome"], old.document["kind"]) == (0, "committed", "delta")
        observe(home, 3, f"now {number}")
        new = run_cli("export", MEMORY, "--sandbox", f"local:{home}", store=store)
        assert (new.code, new.document["outcome"], new.document["kind"]) == (0, "committed", "delta")
        assert new.document["parent"] == old.document["snapshot"] and new.document["warnings"] == []
    for name, run in (("by the earlier", before.run), ("by this", run_cli)):
        other = empty_home(tmp_path / name)
        assert run("restore", MEMORY, "--sandbox", f"local:{other}", store=store).document["outcome"] == "complete"
        assert titles(other) == titles(home)
    assert (store / "store-id").read_text() == id
    assert run_cli("verify", store=store).code == before.run("verify", store=store).code == 0
