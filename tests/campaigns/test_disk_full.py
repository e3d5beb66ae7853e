"""No space left, in each of the three places that need some: a clear error, an unmoved head, and all is well afterwards."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parts.commands import done, ended, start
from tests.parts.homes import Ran, claude_mem_home, memory_tree, observe, write

MEMORY = "conductor"
Mount = Callable[..., Path]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = claude_mem_home(tmp_path / "home", rows=50)
    (home / ".claude-mem/corpora/sparse.bin").unlink()  # larger than some of the disks here
    return home


def export(home: Path, store: Path, **env: str) -> Ran:
    return ended(start("export", MEMORY, f"--sandbox=local:{home}", store=store, env=env))


def grow(home: Path) -> None:
    """More than fits into what is left of a small disk, and does not compress."""
    write(home / ".claude-mem/corpora/large.bin", random.Random(6).randbytes(6 << 20))


def enlarge(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=128m", str(folder)], check=True, timeout=20)


def objects(store: Path) -> set[str]:
    """Everything in a store's folder but locks: unfinished writes would show."""
    return {str(place) for place in store.rglob("*") if place.is_file() and not place.name.startswith(".lock-")}


def assert_refused(ran: Ran, code: str, store: Path, before: set[str], head: str) -> None:
    assert (ran.code, ran.error) == (1, code), ran
    assert ran.document["error"]["message"] and ran.document["error"]["hint"]
    assert not [place for place in objects(store) - before if "/packs/" not in place or "/.tmp-" in place]
    done("forget", MEMORY, "--grace", "0", store=store)
    assert objects(store) == before
    assert done("show", MEMORY, store=store)["snapshot"] == head
    assert done("verify", MEMORY, store=store)["ok"]


@pytest.mark.parametrize("size", ["3m", pytest.param("6m", marks=pytest.mark.slow)])
def test_full_store(home: Path, mount: Mount, size: str, tmp_path: Path) -> None:
    store = mount(tmp_path / "store", size=size)
    head = export(home, store).document["snapshot"]
    before = objects(store)
    grow(home)
    assert_refused(export(home, store), "store-full", store, before, head)
    enlarge(store)
    assert export(home, store).document["outcome"] == "committed"
    assert done("verify", MEMORY, store=store)["ok"]


def test_store_that_fills_up_by_and_by(home: Path, mount: Mount, tmp_path: Path) -> None:
    """The last bytes go at any of an export's writes; whichever it was, the head is the last export acknowledged."""
    store = mount(tmp_path / "store", size="900k")
    head, failed, codes = "", 0, set()
    for turn in range(20):
        observe(home, 1, f"turn {turn}")
        write(home / ".claude-mem/corpora/noise.bin", random.Random(turn).randbytes(90_000))
        ran = export(home, store)
        if ran.code == 0:
            head = ran.document["snapshot"]
        else:
            failed += 1
            codes.add(ran.error)
        assert done("show", MEMORY, store=store)["snapshot"] == head
        if failed == 2:
            break
    assert codes == {"store-full"}
    assert done("verify", MEMORY, store=store)["ok"]
    enlarge(store)
    observe(home, 1, "after")
    assert export(home, store).document["outcome"] == "committed"


def test_full_sandbox(home: Path, mount: Mount, tmp_path: Path) -> None:
    store, cache = tmp_path / "store", mount(home / ".cache", size="2m")
    head = export(home, store).document["snapshot"]
    before = objects(store)
    grow(home)
    assert_refused(export(home, store), "disk-full", store, before, head)
    assert not list(cache.rglob("work-*"))
    enlarge(cache)
    assert export(home, store).document["outcome"] == "committed"


def test_sandbox_too_full_for_a_copy_of_its_database(home: Path, mount: Mount, tmp_path: Path) -> None:
    store, cache = tmp_path / "store", mount(home / ".cache", size="1m")
    head = export(home, store).document["snapshot"]
    before = objects(store)
    observe(home, 3000, "many")
    assert_refused(export(home, store), "disk-full", store, before, head)
    enlarge(cache)
    assert export(home, store).document["outcome"] == "committed"


def test_full_temporary_folder_of_the_sidecar(home: Path, mount: Mount, tmp_path: Path) -> None:
    store, spools = tmp_path / "store", mount(tmp_path / "tmp", size="3m")
    head = export(home, store, TMPDIR=str(spools)).document["snapshot"]
    before = objects(store)
    grow(home)
    assert_refused(export(home, store, TMPDIR=str(spools)), "spool-full", store, before, head)
    assert not list(spools.iterdir())
    enlarge(spools)
    assert export(home, store, TMPDIR=str(spools)).document["outcome"] == "committed"


def test_sidecar_without_room_to_fetch_a_snapshot(home: Path, mount: Mount, tmp_path: Path) -> None:
    store, spools = tmp_path / "store", mount(tmp_path / "tmp", size="3m")
    grow(home)
    export(home, store)
    other = tmp_path / "other"
    other.mkdir()
    words = ("restore", MEMORY, f"--sandbox=local:{other}")
    ran = ended(start(*words, store=store, env={"TMPDIR": str(spools)}))
    assert (ran.code, ran.error) == (1, "spool-full"), ran
    assert not list(spools.iterdir()) and not list(other.iterdir())


def test_sandbox_too_full_for_a_restore_keeps_what_it_had(home: Path, mount: Mount, tmp_path: Path) -> None:
    store, other = tmp_path / "store", mount(tmp_path / "other", size="5m")
    words = ("restore", MEMORY, f"--sandbox=local:{other}")
    export(home, store)
    assert done(*words, store=store)["outcome"] == "complete"
    had = memory_tree(other / ".claude-mem")
    grow(home)
    observe(home, 5, "more")
    export(home, store)
    ran = ended(start(*words, store=store))
    assert (ran.code, ran.document["outcome"], ran.error) == (4, "incomplete", "disk-full"), ran
    assert memory_tree(other / ".claude-mem") == had
    assert not list(other.rglob(".memory-sidecar-*"))
    enlarge(other)
    shutil.rmtree(other / ".claude-mem")
    assert done(*words, store=store)["outcome"] == "complete"
