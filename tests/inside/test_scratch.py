"""The program's own folder: tidied by whoever comes next, never under another's feet."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from sidecar.inside import scratch
from sidecar.inside.scratch import Scratch


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return tmp_path / ".cache" / "memory-sidecar"


def test_what_a_killed_run_left_is_removed_and_what_is_in_use_is_not(tmp_path: Path, base: Path) -> None:
    running = Scratch(str(tmp_path), "one", 1, "s")
    dead = base / "work-dead"
    dead.mkdir()
    (dead / "lock").write_text("")
    begun = base / "work-begun"
    begun.mkdir()
    other = Scratch(str(tmp_path), "two", 1, "s")
    assert not dead.exists()
    assert begun.exists(), "it may be about to be locked"
    assert Path(running.work).exists()
    os.utime(begun, (0, 0))
    Scratch(str(tmp_path), "three", 1, "s").leave()
    assert not begun.exists()
    running.leave()
    other.leave()
    assert [path.name for path in base.iterdir() if path.name.startswith("work-")] == []


def test_a_folder_that_vanishes_while_it_is_looked_at_is_no_trouble(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Scratch(str(tmp_path), "one", 1, "s").leave()
    (base / "work-leaving").mkdir()
    listed = os.listdir

    def list_then_remove(folder: str) -> list[str]:
        names = listed(folder)
        shutil.rmtree(base / "work-leaving", ignore_errors=True)
        return names

    monkeypatch.setattr(scratch.os, "listdir", list_then_remove)
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
