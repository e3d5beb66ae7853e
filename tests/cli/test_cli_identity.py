"""The command line does not take a mistyped id, or a store that is not there, for a first start without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.cli import main
from tests.parts.homes import Ran, claude_mem_home, empty_home, observe, run_cli, write

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "acme/agent-7"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return claude_mem_home(tmp_path / "home", rows=5)


def _export(home: Path, store: Path, memory: str = MEMORY, *words: str) -> Ran:
    return run_cli("export", memory, "--sandbox", f"local:{home}", *words, store=store)


def _restore(home: Path, store: Path, memory: str = MEMORY, *words: str) -> Ran:
    return run_cli("restore", memory, "--sandbox", f"local:{home}", *words, store=store)


def _small(home: Path, text: str = "remembered") -> Path:
    write(home / "MEMORY.md", text.encode())
    return home


def test_a_memory_that_must_exist_and_does_not_is_an_error(home: Path, store: Path, tmp_path: Path) -> None:
    other = empty_home(tmp_path / "other")
    missing = _restore(other, store, MEMORY, "--must-exist")
    assert (missing.code, missing.document["error"]["code"]) == (1, "memory-not-found")
    assert f"file:{store}" in missing.document["error"]["message"] and missing.document["error"]["hint"]
    assert not store.exists() and [*other.iterdir()] == []
    assert _restore(other, store).document["outcome"] == "empty"
    assert _export(home, store).code == 0
    mistyped = _restore(other, store, "acme/agnet-7", "--must-exist")
    assert mistyped.code == 1 and f"Is it {MEMORY!r}?" in mistyped.document["error"]["message"]
    there = _restore(other, store, MEMORY, "--must-exist")
    assert (there.code, there.document["outcome"]) == (0, "complete")


def test_snapshots_that_never_became_the_head_are_no_memory_to_restore(store: Path, tmp_path: Path) -> None:
    empty = empty_home(tmp_path / "empty")
    rejected = _export(empty, store).document
    assert rejected["outcome"] == "rejected"
    missing = _restore(empty, store, MEMORY, "--must-exist")
    assert (missing.code, missing.document["error"]["code"]) == (1, "memory-not-found")
    assert rejected["snapshot"] in missing.document["error"]["message"]
    first = _restore(empty, store).document
    assert first["outcome"] == "empty" and rejected["snapshot"] in first["warnings"][0]


def test_a_first_start_says_which_store_was_asked_and_what_looks_alike(home: Path, store: Path, tmp_path: Path) -> None:
    other = empty_home(tmp_path / "other")
    nothing = _restore(other, store).document["warnings"]
    assert nothing[0] == f"There is no memory {MEMORY!r} in file:{store}: a first start, or another store?"
    assert nothing[1].startswith(f"file:{store} holds no memory at all.")
    assert _export(home, store).code == 0
    for alike in ("acme/agnet-7", "Acme/Agent-7", "acme-agent-7", "acme/agent_7", "acme/agent7", "acme/agents-7"):
        warnings = _restore(other, store, alike).document["warnings"]
        assert warnings[1:] == [f"Is it {MEMORY!r}?"], (alike, warnings)
    assert len(_restore(other, store, "conductor").document["warnings"]) == 1


def test_at_most_three_that_look_alike_are_named_and_none_without_a_head(store: Path, tmp_path: Path) -> None:
    for name in ("conductor", "Conductor", "conductor.", "con-ductor"):
        assert _export(_small(empty_home(tmp_path / name)), store, name).code == 0
    assert _export(empty_home(tmp_path / "rejected"), store, "conductor1").document["outcome"] == "rejected"
    warnings = _restore(empty_home(tmp_path / "other"), store, "conducter").document["warnings"]
    assert warnings[1].count("'") == 6 and "conductor1" not in warnings[1]


def test_one_of_many_that_are_numbered_is_not_taken_for_the_others(store: Path, tmp_path: Path) -> None:
    for number in range(1, 6):
        assert _export(_small(empty_home(tmp_path / str(number))), store, f"agent-{number}").code == 0
    other = empty_home(tmp_path / "other")
    assert len(_restore(other, store, "agent-6").document["warnings"]) == 1
    assert "agent-5" in _restore(other, store, "agnet-5").document["warnings"][1]


def test_a_new_store_is_begun_with_a_word(home: Path, store: Path, tmp_path: Path) -> None:
    first = _export(home, store).document["warnings"]
    assert [warning for warning in first if warning.startswith(f"A new store was begun at file:{store}")] == first != []
    observe(home, 2, "later")
    assert _export(home, store).document["warnings"] == []
    assert _export(_small(empty_home(tmp_path / "other")), store, "other").document["warnings"] == []
    for memory in (MEMORY, "other"):
        assert run_cli("delete", memory, "--yes", store=store).code == 0
    again = _export(_small(empty_home(tmp_path / "third")), store, "third").document["warnings"]
    assert len(again) == 1 and again[0].startswith(f"file:{store} held no memory before this one.")


def test_doctor_says_that_a_store_would_be_begun(home: Path, store: Path) -> None:
    def memories() -> str:
        ran = run_cli("doctor", store=store)
        assert ran.code == 0
        return str(next(row["detail"] for row in ran.document["checks"] if row["name"] == "memories"))

    assert f"an export begins a new store at file:{store}" in memories()
    assert _export(home, store).code == 0
    assert memories() == "1 memory"


def test_a_guard_says_what_to_do(home: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _export(home, store).code == 0
    observe(home, 2, "later")
    assert main(["export", "acme/agnet-7", "--sandbox", f"local:{home}", "--store", f"file:{store}"]) == 3
    said = capsys.readouterr().out
    assert "[other-memory]" in said and "--allow other-memory" in said and repr(MEMORY) in said
    store.rename(tmp_path / "away")
    assert main(["export", MEMORY, "--sandbox", f"local:{home}", "--store", f"file:{store}"]) == 3
    said = capsys.readouterr().out
    assert "[unknown-lineage]" in said and "--allow unknown-lineage" in said and "A new store was begun" in said
    assert _export(home, store, MEMORY, "--allow", "unknown-lineage").code == 0
    assert _export(home, store, "acme/agnet-7", "--force").code == 0
