"""A pack that was fetched goes by itself, however it was read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.program import reaper
from tests.parts.services import until


def ended() -> bool:
    return os.waitpid(-1, os.WNOHANG)[0] > 0


def at_once(bundle: Path) -> None:
    bundle.read_bytes()


def two_who_end_together(bundle: Path) -> None:
    first = bundle.open("rb")
    time.sleep(0.3)
    second = bundle.open("rb")
    time.sleep(0.3)
    first.close()
    second.close()


def cut_short_meanwhile(bundle: Path) -> None:
    with bundle.open("rb"), bundle.open("r+b") as file:
        file.truncate(10)


@pytest.mark.parametrize("read", [at_once, two_who_end_together, cut_short_meanwhile])
def test_a_pack_goes_once_it_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(reaper, "GRACE_SECONDS", 0.2)
    folder, bundle = tmp_path / "work", tmp_path / "work/bundle"
    folder.mkdir()
    bundle.write_bytes(b"x" * 100)
    reaper.reap(str(folder), str(bundle))
    time.sleep(0.5)
    assert bundle.exists()
    read(bundle)
    until(ended, 10)
    assert not folder.exists()


def test_nobody_waits_for_readers_of_a_pack_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper, "GRACE_SECONDS", 0.2)
    (tmp_path / "bundle").touch()
    reaper.reap(str(tmp_path / "work"), str(tmp_path / "bundle"))
    with (tmp_path / "bundle").open("rb"):
        (tmp_path / "bundle").unlink()
        until(ended, 10)
