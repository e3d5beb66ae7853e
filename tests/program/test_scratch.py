"""The program's own folder: tidied by whoever comes next, never under another's feet."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from sidecar.format.refusal import Refusal
from sidecar.program.scratch import Scratch


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return tmp_path / ".cache" / "memory-sidecar"


def test_what_a_killed_run_left_is_removed_and_what_is_in_use_is_not(tmp_path: Path, base: Path) -> None:
    Scratch(str(tmp_path), "one", 1, "s").leave()
    names = ("work-00000000000000aa", "work-00000000000000bb", "work-00000000000000cc")
    dead, begun, running = (base / name for name in names)
    for folder in (dead, begun, running):
        folder.mkdir()
    (dead / "lock").write_text("")
    with (running / "lock").open("w") as lock:  # as a run of an earlier version, which takes no turn in the sandbox
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = Scratch(str(tmp_path), "two", 1, "s")
        assert not dead.exists()
        assert begun.exists(), "it may be about to be locked"
        assert running.exists()
        other.leave()
    os.utime(begun, (0, 0))
    Scratch(str(tmp_path), "three", 1, "s").leave()
    assert not begun.exists()
    assert [path.name for path in base.iterdir() if path.name.startswith("work-")] == []


@pytest.mark.parametrize("name", ["work-items", "work-00000000000000aa"])
def test_a_memory_that_is_called_like_a_work_folder_keeps_its_notes(tmp_path: Path, base: Path, name: str) -> None:
    Scratch(str(tmp_path), name, 1, "s").leave()
    (base / name / "lineage").write_text("x")
    os.utime(base / name, (0, 0))
    Scratch(str(tmp_path), "one", 1, "s").leave()
    assert (base / name / "lineage").exists()


@pytest.mark.parametrize("memory", ["one", "another"])
def test_one_run_at_a_time_works_in_a_sandbox_and_the_next_says_which(tmp_path: Path, base: Path, memory: str) -> None:
    running = Scratch(str(tmp_path), "one", 1, "s", about="A restore of one")
    with pytest.raises(Refusal) as busy:
        Scratch(str(tmp_path), memory, 0.2, "s", about=f"An export of {memory}")
    assert (busy.value.code, busy.value.retryable) == ("sandbox-busy", True)
    assert busy.value.message == "A restore of one is running in this sandbox."
    running.leave()
    Scratch(str(tmp_path), memory, 0.2, "s", about=f"An export of {memory}").leave()


def test_a_run_of_an_earlier_version_is_waited_for_too(tmp_path: Path, base: Path) -> None:
    """It takes the turn of its memory alone."""
    Scratch(str(tmp_path), "one", 1, "s").leave()
    with (base / "one/turn").open("r+") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        with pytest.raises(Refusal, match="Another export or restore is running"):
            Scratch(str(tmp_path), "one", 0.2, "s", about="An export of one")
    Scratch(str(tmp_path), "one", 0.2, "s").leave()


def test_a_folder_that_vanishes_while_it_is_looked_at_is_no_trouble(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Scratch(str(tmp_path), "one", 1, "s").leave()
    (base / "work-00000000000000dd").mkdir()
    listed = os.listdir

    def list_then_remove(folder: str) -> list[str]:
        names = listed(folder)
        shutil.rmtree(base / "work-00000000000000dd", ignore_errors=True)
        return names

    monkeypatch.setattr(os, "listdir", list_then_remove)
    Scratch(str(tmp_path), "one", 1, "s").leave()


def test_a_pack_kept_for_a_snapshot_is_removed_when_that_snapshot_is_asked_for_again(
    tmp_path: Path, base: Path
) -> None:
    first = Scratch(str(tmp_path), "one", 1, "20260101T000000000Z-00000000")
    first.leave(keep=True)
    Scratch(str(tmp_path), "two", 1, "20260202T000000000Z-00000000").leave()
    assert Path(first.work).exists(), "somebody may be fetching it"
    Scratch(str(tmp_path), "one", 1, "20260101T000000000Z-00000000").leave()
    assert not Path(first.work).exists(), "whoever asks again never got the answer"
