"""What a disk store writes is for its owner alone, whatever the umask; or for a group that shares it on purpose."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import adapters
from adapters.stores.urls import open_store
from sidecar.errors import BadReference
from tests.parts.homes import empty_home, run_cli, three_tier_home, write

PROJECT = Path(adapters.__file__).parents[1]


@pytest.fixture(params=[0o022, 0o000, 0o077], ids=["022", "000", "077"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user of the machine can get at, as pytest's own are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def _modes(root: Path) -> dict[str, set[int]]:
    """Which modes there are below a folder, the folder included: of files, and of folders."""
    found: dict[str, set[int]] = {"files": set(), "folders": {stat.S_IMODE(root.stat().st_mode)}}
    for place in root.rglob("*"):
        found["folders" if place.is_dir() else "files"].add(stat.S_IMODE(place.lstat().st_mode))
    return found


def _used(store: str, home: Path) -> None:
    """All that commands write into a store: exports, a fork, a pin, a rollback."""
    first = run_cli("export", "conductor", "--sandbox", f"local:{home}", store=store)
    assert first.code == 0, first
    write(home / "MEMORY.md", b"# Long term\nmore\n")
    assert run_cli("export", "conductor", "--sandbox", f"local:{home}", store=store).code == 0
    assert run_cli("fork", "conductor", "acme/other", store=store).code == 0
    assert run_cli("pin", "conductor", first.document["snapshot"], store=store).code == 0
    assert run_cli("rollback", "conductor", first.document["snapshot"], store=store).code == 0
    assert run_cli("doctor", store=store).code == 0


def test_a_store_is_for_its_owner_alone(tmp_path: Path, umask: int) -> None:
    home = three_tier_home(empty_home(tmp_path / "home"))
    _used(f"file:{tmp_path}/new/deep/store", home)
    assert _modes(tmp_path / "new") == {"files": {0o600}, "folders": {0o700}}


def test_a_store_shared_by_a_group(tmp_path: Path, umask: int) -> None:
    home = three_tier_home(empty_home(tmp_path / "home"))
    _used(f"file:{tmp_path}/store?shared=group", home)
    assert _modes(tmp_path / "store") == {"files": {0o660}, "folders": {0o2770}}


@pytest.mark.parametrize(("mode", "option"), [(0o755, ""), (0o2775, "?shared=group"), (0o750, "")])
def test_a_folder_that_was_there_keeps_its_mode(tmp_path: Path, mode: int, option: str) -> None:
    store = empty_home(tmp_path / "store")
    store.chmod(mode)
    _used(f"file:{store}{option}", three_tier_home(empty_home(tmp_path / "home")))
    assert stat.S_IMODE(store.stat().st_mode) == mode
    file, folder = (0o660, 0o2770) if option else (0o600, 0o700)
    assert _modes(store) == {"files": {file}, "folders": {mode, folder}}


def test_a_volume_is_written_the_same_way(tmp_path: Path, mount: object) -> None:
    volume = mount(empty_home(tmp_path / "data"))  # type: ignore[operator]
    _used(f"volume:{volume}?prefix=own", three_tier_home(empty_home(tmp_path / "home")))
    _used(f"volume:{volume}?prefix=team&shared=group", three_tier_home(empty_home(tmp_path / "other")))
    assert _modes(volume / "own") == {"files": {0o600}, "folders": {0o700}}
    assert _modes(volume / "team") == {"files": {0o660}, "folders": {0o2770}}


_PUT_AND_HANG = """
import asyncio, os, sys, time
from pathlib import Path
from adapters.stores.urls import open_store
os.umask(0)
sync = os.fsync
os.fsync = lambda descriptor: time.sleep(60) if os.path.isfile(f"/proc/self/fd/{descriptor}") else sync(descriptor)
asyncio.run(open_store(sys.argv[1]).put("memories/m/x", b"half of a pack"))
"""


@pytest.mark.parametrize(("option", "mode"), [("", 0o600), ("?shared=group", 0o660)])
def test_half_written_files_are_as_closed_as_whole_ones(tmp_path: Path, option: str, mode: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    writer = subprocess.Popen([sys.executable, "-c", _PUT_AND_HANG, f"file:{tmp_path}{option}"], env=environment)
    try:
        deadline = time.monotonic() + 30
        while not (found := [*(tmp_path / "memories/m").glob(".tmp-*")]) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [stat.S_IMODE(place.stat().st_mode) for place in found] == [mode]
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait(10)


def test_a_store_from_before_is_used_as_it_is_and_doctor_warns(tmp_path: Path, open_folder: Path) -> None:
    store, home = open_folder / "store", three_tier_home(empty_home(tmp_path / "home"))
    _used(f"file:{store}", home)
    calm = run_cli("doctor", store=store)
    assert (calm.code, calm.document["warnings"]) == (0, [])
    for place in [store, *store.rglob("*")]:
        place.chmod(0o755 if place.is_dir() else 0o644)
    warned = run_cli("doctor", store=store)
    assert warned.code == 0 and warned.document["ok"]
    assert [str(store) in text and "chmod" in text for text in warned.document["warnings"]] == [True]
    write(home / "MEMORY.md", b"# Long term\nmuch more\n")
    assert run_cli("export", "acme/other", "--sandbox", f"local:{home}", "--force", store=store).code == 0
    head = next(store.glob("memories/conductor/head.json"))
    assert stat.S_IMODE(head.stat().st_mode) == 0o644  # what nobody wrote again stays as it was
    store.chmod(0o700)  # nobody gets in, whatever the modes below
    assert run_cli("doctor", store=store).document["warnings"] == []


def test_doctor_does_not_warn_of_a_group_that_shares_on_purpose(tmp_path: Path, open_folder: Path) -> None:
    store, home = f"file:{open_folder}/store?shared=group", three_tier_home(empty_home(tmp_path / "home"))
    _used(store, home)
    assert run_cli("doctor", store=store).document["warnings"] == []
    for place in [open_folder / "store", *(open_folder / "store").rglob("*")]:
        place.chmod(0o2775 if place.is_dir() else 0o664)
    assert len(run_cli("doctor", store=store).document["warnings"]) == 1


@pytest.mark.parametrize("url", ["file:/x?shared=everyone", "volume:/x?shared=true", "file:/x?shared="])
def test_there_is_no_other_way_to_share(url: str) -> None:
    with pytest.raises(BadReference):
        open_store(url)
