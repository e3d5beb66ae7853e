"""``kill -9`` at any moment of an export: the head is always readable, and nothing acknowledged is ever lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.host.files import open_spool
from sidecar.store.fetch import fetch
from sidecar.store.manifest import Head
from sidecar.store.repository import Repository
from sidecar.wiring import open_store
from tests.parts.commands import done, ended, start
from tests.parts.forked_sidecar import Sidecar
from tests.parts.homes import PROJECT, Ran, claude_mem_home, observe, run_cli, titles, write

MEMORY = "conductor"
DIES_AT_A_WRITE = """
import itertools, os, sys
from adapters.stores.disk import DiskStore
from sidecar.cli import main
writes, fatal, when = itertools.count(1), int(sys.argv[1]), sys.argv[2]
write = DiskStore._write
def dying(self, key, fill):
    here = next(writes) == fatal
    if here and when == "before":
        os._exit(9)
    if here and when == "during":
        def fill(file):
            file.write(b"half")
            os._exit(9)
    write(self, key, fill)
    if here:
        os._exit(9)
DiskStore._write = dying
sys.exit(main(sys.argv[3:]))
"""


def export(home: Path, store: Path) -> Ran:
    return run_cli("export", MEMORY, "--sandbox", f"local:{home}", store=store)


def whole_head(store: Path) -> Head | None:
    """The head, with every object of its snapshot there and whole; ``None`` before the first."""

    async def read() -> Head | None:
        repository = Repository(open_store(f"file:{store}"))
        state = await repository.head(MEMORY)
        assert not state.problem
        if state.head is None:
            return None
        async with open_spool() as scratch:
            await fetch(repository.store, await repository.manifest(MEMORY, state.snapshot), scratch)
        return state.head

    return asyncio.run(read())


def assert_nothing_is_lost(store: Path, acknowledged: list[str]) -> None:
    head = whole_head(store)
    assert (head is not None) or not acknowledged
    if head is not None:
        mine = [*dict.fromkeys(acknowledged)][::-1]  # one that found nothing new names its predecessor's again
        assert [past for past, _ in head.history if past in mine] == mine


def assert_leftovers_can_go(store: Path) -> None:
    """After ``forget`` there is nothing in the store but what snapshots refer to."""
    done("forget", MEMORY, "--grace", "0", store=store)
    report = done("verify", MEMORY, store=store)
    files = [place for place in store.rglob("*") if place.is_file() and not place.name.startswith(".lock-")]
    files.remove(store / "store-id")
    assert not [place.name for place in files if place.name.startswith(".tmp-")]
    assert len(files) == report["memories"][0]["objects"]


def work_folders(home: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return [name for name in os.listdir(home / ".cache/memory-sidecar") if name.startswith("work-")]
    return []


def _deaths() -> Iterator[Any]:
    """Every way to die; the one in the default run is where most can go wrong."""
    quick = {(False, "during", False)}
    for case in itertools.product((True, False), ("before", "during", "after"), (False, True)):
        yield pytest.param(*case, marks=() if case in quick else pytest.mark.slow)


@pytest.mark.parametrize(("first", "when", "changed"), [*_deaths()])
def test_export_that_died_at_a_write_is_made_good_by_the_next(
    first: bool, when: str, changed: bool, tmp_path: Path
) -> None:
    """An export writes a pack, an index, a manifest and a head, the first one the store's id before; it dies at each of
    them in turn."""
    home, store, acknowledged = claude_mem_home(tmp_path / "home", rows=20), tmp_path / "store", []
    if not first:
        acknowledged.append(export(home, store).document["snapshot"])
    for fatal in range(1, 6 if first else 5):
        if first:
            home, store = claude_mem_home(tmp_path / f"home-{fatal}", rows=20), tmp_path / f"store-{fatal}"
        observe(home, 2, f"before {fatal} {when}")
        words = ["export", MEMORY, f"--sandbox=local:{home}", f"--store=file:{store}", "--json"]
        died = subprocess.run([sys.executable, "-c", DIES_AT_A_WRITE, str(fatal), when, *words], cwd=PROJECT)
        assert died.returncode == 9
        assert_nothing_is_lost(store, acknowledged)
        if changed:
            observe(home, 2, f"after {fatal} {when}")
        ran = export(home, store)
        assert ran.code == 0, ran
        assert ran.document["outcome"] in ("committed", "unchanged")
        assert not work_folders(home)
        head = whole_head(store)
        assert head is not None and head.snapshot == ran.document["snapshot"] == ran.document["head"]
        other = tmp_path / f"other-{fatal}"
        other.mkdir()
        assert done("restore", MEMORY, f"--sandbox=local:{other}", store=store)["outcome"] == "complete"
        assert titles(other) == titles(home), "the next export did not bring what the dead one had"
        if not first:
            acknowledged.append(head.snapshot)
            assert_nothing_is_lost(store, acknowledged)
        assert_leftovers_can_go(store)


def kill_all(process: subprocess.Popen[bytes] | Sidecar) -> None:
    """Kill a command and everything it started, which lives in sessions of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGSTOP)
        for pid in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(FileNotFoundError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def change(home: Path, turn: int) -> None:
    observe(home, 3, f"turn {turn}")
    write(home / ".claude-mem/corpora/blocks.bin", random.Random(turn).randbytes(200_000))


@pytest.mark.skipif(sys.platform != "linux", reason="finds a command's processes in /proc")
@pytest.mark.parametrize("rounds", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_store_survives_kills_at_random_moments(rounds: int, tmp_path: Path) -> None:
    home, store, spools = claude_mem_home(tmp_path / "home", rows=500), tmp_path / "store", tmp_path / "tmp"
    spools.mkdir()
    chance, acknowledged, killed = random.Random(rounds), [], 0
    started = time.monotonic()
    process = start("export", MEMORY, f"--sandbox=local:{home}", store=store)
    acknowledged.append(ended(process).document["snapshot"])
    usual = time.monotonic() - started
    for turn in range(rounds):
        change(home, turn)
        process = start("export", MEMORY, f"--sandbox=local:{home}", store=store, env={"TMPDIR": str(spools)})
        # Most of an export's time is Python starting; what is worth killing comes after that.
        time.sleep(usual * chance.uniform(0.3, 1.3))
        if turn % 2:
            kill_all(process)
        else:
            process.kill()
        ran = ended(process)
        killed += ran.code == -signal.SIGKILL
        usual *= (
            0.9 if ran.code == 0 else 1.03
        )  # stay where about every fourth gets away, whatever else this machine does
        if ran.code == 0 and ran.document:
            acknowledged.append(ran.document["snapshot"])
        assert ran.code in (0, -signal.SIGKILL), ran
        assert_nothing_is_lost(store, acknowledged)
        if turn % 4 == 3:
            ran = export(home, store)
            assert ran.code == 0, ran
            assert not work_folders(home)
            acknowledged.append(ran.document["snapshot"])
            assert_nothing_is_lost(store, acknowledged)
    change(home, rounds)
    acknowledged.append(done("export", MEMORY, f"--sandbox=local:{home}", store=store)["snapshot"])
    assert_nothing_is_lost(store, acknowledged)
    snapshots: list[dict[str, Any]] = done("log", MEMORY, store=store)["snapshots"]
    assert {row["snapshot"] for row in snapshots} >= set(acknowledged)
    assert_leftovers_can_go(store)
    print(
        f"{killed} of {rounds} exports killed, {len(set(acknowledged))} acknowledged, {len(snapshots)} snapshots, none lost"
    )


def test_spool_of_a_killed_export_is_removed_by_a_later_one(tmp_path: Path) -> None:
    """What passes through the sidecar's own disk can be gigabytes; a killed process cannot take it along."""
    home, store, spools = claude_mem_home(tmp_path / "home", rows=20), tmp_path / "store", tmp_path / "tmp"
    spools.mkdir()
    words = ["export", MEMORY, f"--sandbox=local:{home}", f"--store=file:{store}", "--json"]
    environment = {**os.environ, "TMPDIR": str(spools)}
    command = [sys.executable, "-c", DIES_AT_A_WRITE, "2", "before", *words]
    assert subprocess.run(command, cwd=PROJECT, env=environment).returncode == 9
    assert os.listdir(spools)
    assert ended(start(*words[:3], store=store, env={"TMPDIR": str(spools)})).code == 0
    assert os.listdir(spools) == []
