"""Nothing that was written is lost to a restore that is killed, or to somebody who writes while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine.core import Timing
from sidecar.errors import ProgramFailed, SidecarError
from sidecar.host.files import open_spool
from sidecar.ports import CommandResult
from sidecar.program import places
from sidecar.store.fetch import fetch_entries
from tests.parts.homes import (
    WatchedSandbox,
    empty_home,
    engine_at,
    observe,
    run_cli,
    titles,
    tree,
    without_cache,
    write,
)
from tests.parts.in_process import InProcess
from tests.parts.memories import grow, manifests_of, plain_home
from tests.parts.sent import request_in

MEMORY = "m"


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_at(tmp_path / "store")


async def _committed(engine: Engine, home: Path, memory: str = MEMORY) -> str:
    receipt = await export(engine, WatchedSandbox(home), ExportRequest(memory=memory))
    assert receipt.outcome == "committed", receipt
    return str(receipt.snapshot)


async def _complete(engine: Engine, home: Path, memory: str = MEMORY, **asked: Any) -> None:
    receipt = await restore(engine, WatchedSandbox(home), RestoreRequest(memory=memory, **asked))
    assert receipt.outcome == "complete", receipt


def program_in(home: Path) -> int | None:
    """The process of our program that works in a home."""
    for entry in Path("/proc").iterdir():
        try:
            ours = entry.name.isdigit() and b"-I\0-S\0-c\0" in (entry / "cmdline").read_bytes()
            if ours and os.readlink(entry / "cwd") == str(home):
                return int(entry.name)
        except OSError:
            continue
    return None


class KilledSandbox(WatchedSandbox):
    """Kills the program inside at some moment, as a sandbox that is taken away does."""

    def __init__(self, home: Path, verb: str, moment: Callable[[], float]) -> None:
        super().__init__(home)
        self.verb, self.moment, self.killed = verb, moment, 0

    async def run(self, command: str, **how: Any) -> CommandResult:
        running = asyncio.create_task(super().run(command, **how))
        if request_in(command, how.get("environment"))["do"] == self.verb:
            await asyncio.to_thread(self._kill, running)
        return await running

    def _kill(self, running: asyncio.Task[CommandResult]) -> None:
        deadline, pid = time.monotonic() + 5, None
        while pid is None and not running.done() and time.monotonic() < deadline:
            pid = program_in(self.home)
        time.sleep(self.moment())
        if pid is not None and not running.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.killed += 1


def _once_swapping(home: Path, chance: random.Random, state: str) -> float:
    """Wait until a restore writes that state to its journal, and then a moment."""
    journal, deadline = home / f".cache/memory-sidecar/{MEMORY}/journal", time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if f'"{state}"' in journal.read_text():
                return chance.uniform(0, 0.004) if state == "swapping" else 0
        except OSError:
            pass
    return 0


async def _saved_paths(engine: Engine, memory: str = MEMORY) -> set[str]:
    """The paths of all snapshots together."""
    found: set[str] = set()
    async with open_spool() as scratch:
        for manifest in await manifests_of(engine, memory):
            entries, _, _ = await fetch_entries(engine.repository.store, manifest, scratch)
            found |= set(entries)
    return found


def _aside(home: Path) -> set[str]:
    folders = (home / ".cache/memory-sidecar/set-aside").glob("*")
    return {str(path.relative_to(folder)) for folder in folders for path in folder.rglob("*")}


@pytest.mark.parametrize("moment", ["swapping", "done", "export", pytest.param("any", marks=pytest.mark.slow)])
async def test_a_restore_that_is_killed_loses_nothing_that_was_not_saved(
    engine: Engine, tmp_path: Path, moment: str
) -> None:
    chance = random.Random(moment)
    first, home = plain_home(empty_home(tmp_path / "first")), empty_home(tmp_path / "home")
    for number in range(30):
        write(first / f"memory/many/{number}.md", b"%d" % number)
    await _committed(engine, first)
    await _complete(engine, home)
    killed, marks = 0, []
    for number in range(8):
        if killed and number >= 2 and moment != "any":
            break
        marks.append(f"project/memory/mark {number}.md")
        write(home / f"memory/mark {number}.md", b"only here")
        write(first / f"memory/many/{number}.md", b"new")
        observe(first, 1, f"head {number}")
        head = await _committed(engine, first)
        moments: dict[str, tuple[str, Callable[[], float]]] = {
            "export": ("export", lambda: chance.uniform(0.02, 0.3)),
            "any": ("restore", lambda: chance.uniform(0.02, 0.3)),
        }
        verb, when = moments.get(moment, ("restore", lambda: _once_swapping(home, chance, moment)))
        sandbox = KilledSandbox(home, verb, when)
        try:
            receipt = await restore(engine, sandbox, RestoreRequest(memory=MEMORY))
            assert sandbox.killed or receipt.outcome == "complete"
        except SidecarError:
            assert sandbox.killed
        killed += sandbox.killed
        receipt = await restore(engine, WatchedSandbox(home), RestoreRequest(memory=MEMORY))
        assert (receipt.outcome, receipt.snapshot) == ("complete", head), receipt
        assert titles(home) == titles(first)
        kept = (
            await _saved_paths(engine)
            | _aside(home)
            | {f"project/{path.relative_to(home)}" for path in home.rglob("*")}
        )
        assert [mark for mark in marks if mark not in kept] == [], f"round {number}"
        assert not list(home.glob(".memory-sidecar-*"))
    assert killed >= 1, "hardly anything was killed: this test has become too easy"


async def test_a_kill_after_all_was_in_place_is_noted_as_a_restore(engine: Engine, tmp_path: Path) -> None:
    """Otherwise the next export would take the old snapshot for what this memory grew out of."""
    chance = random.Random(1)
    first, home = plain_home(empty_home(tmp_path / "first")), empty_home(tmp_path / "home")
    older = await _committed(engine, first)
    grow(first)
    newer = await _committed(engine, first)
    for _ in range(8):
        await _complete(engine, home, snapshot=newer, discard=True)
        sandbox = KilledSandbox(home, "restore", lambda: _once_swapping(home, chance, "done"))
        with contextlib.suppress(SidecarError):
            await restore(engine, WatchedTidy(sandbox), RestoreRequest(memory=MEMORY, snapshot=older))
        journal = home / f".cache/memory-sidecar/{MEMORY}/journal"
        if sandbox.killed and journal.exists() and '"done"' in journal.read_text():
            break
    else:
        pytest.skip("never killed at that moment")
    receipt = await export(engine, WatchedSandbox(home), ExportRequest(memory=MEMORY))
    assert receipt.outcome in ("unchanged", "diverged") and receipt.head == newer, "what it holds is no newer memory"
    assert (home / f".cache/memory-sidecar/{MEMORY}/lineage").read_text().split()[0] == older


class Writer(threading.Thread):
    """Writes to a memory without a pause. ``written`` are the lines that were in place when a write ended."""

    def __init__(self, home: Path) -> None:
        super().__init__(daemon=True)
        self.home, self.written, self.ended = home, set[str](), threading.Event()

    def run(self) -> None:
        number = 0
        while not self.ended.wait(0.01):
            number += 1
            path = self.home / "memory" / f"log {number % 3}.md"
            try:
                path.parent.mkdir(exist_ok=True)
                with path.open("a") as file:
                    file.write(f"line {number}\n")
                    file.flush()
                    if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                        self.written.add(f"line {number}")
            except OSError:
                continue


@pytest.mark.parametrize("rounds", [6, pytest.param(40, marks=pytest.mark.slow)])
async def test_whoever_writes_while_restores_run_loses_nothing(engine: Engine, tmp_path: Path, rounds: int) -> None:
    first, home = plain_home(empty_home(tmp_path / "first")), empty_home(tmp_path / "home")
    older = await _committed(engine, first)
    grow(first)
    newer = await _committed(engine, first)
    await _complete(engine, home, snapshot=older)
    writer = Writer(home)
    writer.start()
    outcomes, found = [], set[str]()
    for number in range(rounds):
        snapshot = (newer, older)[number % 2]
        receipt = await restore(engine, WatchedSandbox(home), RestoreRequest(memory=MEMORY, snapshot=snapshot))
        outcomes.append(str(receipt.outcome))
        if receipt.outcome == "incomplete":
            assert receipt.reason is not None and receipt.reason.code == "memory-changed"
        if receipt.set_aside is not None:  # only the newest few are kept
            found |= _lines(Path(receipt.set_aside.path))
    writer.ended.set()
    writer.join()
    assert "complete" in outcomes and len(writer.written) > 20
    found |= _lines(home)
    for manifest in await manifests_of(engine, MEMORY):
        box = empty_home(tmp_path / "snapshots" / manifest.snapshot)
        await _complete(engine, box, snapshot=manifest.snapshot)
        found |= _lines(box)
    assert writer.written - found == set()


def _lines(folder: Path) -> set[str]:
    return {line for path in folder.rglob("log ?.md") for line in path.read_text().split("\n")}


async def test_an_intruder_does_not_keep_the_old_memory_from_coming_back(engine: Engine, tmp_path: Path) -> None:
    """A worker that finds no database begins a new one: that one is set aside, and the old one is put back."""
    chance = random.Random(3)
    first, home = plain_home(empty_home(tmp_path / "first")), empty_home(tmp_path / "home")
    for number in range(300):
        write(first / f"memory/many/{number}.md", b"%d" % number)
    older = await _committed(engine, first)
    grow(first)
    newer = await _committed(engine, first)
    for _ in range(20):
        await _complete(engine, home, snapshot=older, discard=True)
        before = titles(home)
        sandbox = KilledSandbox(home, "restore", lambda: _once_swapping(home, chance, "swapping"))
        running = WatchedTidy(sandbox)
        await restore(engine, running, RestoreRequest(memory=MEMORY, snapshot=newer))
        if sandbox.killed and not (home / ".claude-mem/claude-mem.db").exists():
            break
    else:
        pytest.skip("never killed while the database was away")
    observe(home, 1, "begun anew")
    receipt = await export(engine, WatchedSandbox(home), ExportRequest(memory=MEMORY))
    assert titles(home) == before and "cut short earlier" in " ".join(receipt.warnings)
    (aside,) = (home / ".cache/memory-sidecar/set-aside").glob("*-undone-*/claude-mem.db")
    assert aside.stat().st_size > 0


class WatchedTidy(WatchedSandbox):
    """Passes everything on but the tidying afterwards: as if the sidecar had been killed as well."""

    def __init__(self, sandbox: KilledSandbox) -> None:
        super().__init__(sandbox.home)
        self._inner = sandbox

    async def run(self, command: str, **how: Any) -> CommandResult:
        if request_in(command, how.get("environment"))["do"] == "tidy" or self._inner.killed:
            raise ProgramFailed("killed")
        return await self._inner.run(command, **how)


async def test_a_disk_that_is_full_once_all_is_in_place_does_not_make_it_incomplete(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there and what the receipt says have to agree; the next run notes it."""
    first, home = plain_home(empty_home(tmp_path / "first")), empty_home(tmp_path / "home")
    await _committed(engine, first)
    write_file = places.write_file

    def full(place: str, data: bytes, durable: bool = False) -> None:
        if not place.endswith("/journal"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_file(place, data, durable)

    with monkeypatch.context() as patched:
        patched.setattr(places, "write_file", full)
        receipt = await restore(engine, InProcess(home), RestoreRequest(memory=MEMORY))
    assert receipt.outcome == "complete" and any("No space left" in one for one in receipt.warnings)
    assert titles(home) == titles(first)
    observe(home, 1, "since")
    mistyped = await export(engine, WatchedSandbox(home), ExportRequest(memory="another"))
    assert mistyped.reason is not None and mistyped.reason.code == "other-memory"
    assert (await export(engine, WatchedSandbox(home), ExportRequest(memory=MEMORY))).outcome == "committed"


# One run at a time


class PausedSandbox(WatchedSandbox):
    """Stops the program inside in the middle of its swap, until it is told to go on."""

    def __init__(self, home: Path, memory: str) -> None:
        super().__init__(home)
        self.memory, self.paused, self.pid = memory, asyncio.Event(), 0

    async def run(self, command: str, **how: Any) -> CommandResult:
        running = asyncio.create_task(super().run(command, **how))
        await asyncio.to_thread(self._pause, running)
        self.paused.set()
        return await running

    def _pause(self, running: asyncio.Task[CommandResult]) -> None:
        journal, deadline = self.home / f".cache/memory-sidecar/{self.memory}/journal", time.monotonic() + 10
        while time.monotonic() < deadline and not running.done():
            try:
                if '"swapping"' in journal.read_text() and (pid := program_in(self.home)):
                    os.kill(pid, signal.SIGSTOP)
                    self.pid = pid
                    return
            except OSError:
                pass


async def test_an_export_of_one_memory_waits_for_a_restore_of_another_in_the_same_sandbox(
    tmp_path: Path,
) -> None:
    engine = engine_at(tmp_path / "store", timing=Timing(turn_wait=0.5))
    first, home = plain_home(empty_home(tmp_path / "first")), empty_home(tmp_path / "home")
    for number in range(400):
        write(first / f"memory/many/{number}.md", b"%d" % number)
    await _committed(engine, first, "one")
    sandbox = PausedSandbox(home, "one")
    running = asyncio.create_task(restore(engine, sandbox, RestoreRequest(memory="one")))
    await sandbox.paused.wait()
    try:
        assert sandbox.pid, "the restore was over before it could be stopped"
        ran = await asyncio.to_thread(_export_by_hand, tmp_path, home)
        assert (ran.code, ran.error) == (1, "sandbox-busy"), ran
        assert "A restore of one is running in this sandbox." in ran.document["error"]["message"]
        assert await engine.repository.list_snapshot_ids("another") == []
    finally:
        os.kill(sandbox.pid, signal.SIGCONT)
    assert (await running).outcome == "complete"
    receipt = await export(engine, WatchedSandbox(home), ExportRequest(memory="another"))
    manifest = await engine.repository.manifest("another", str(receipt.snapshot))
    assert manifest.files == (await manifests_of(engine, "one"))[0].files, "all of it, not a half"
    assert without_cache(tree(home)).keys() == without_cache(tree(first)).keys()


def _export_by_hand(tmp_path: Path, home: Path) -> Any:
    config = tmp_path / "config.toml"
    config.write_text("[timing]\nturn_wait = 0.5\n")
    return run_cli(
        "export", "another", "--sandbox", f"local:{home}", f"--config={config}", store=tmp_path / "store", env={}
    )


async def test_a_restore_that_was_killed_is_undone_before_another_memory_is_exported(
    engine: Engine, tmp_path: Path
) -> None:
    chance = random.Random(5)
    first, home = plain_home(empty_home(tmp_path / "first")), plain_home(empty_home(tmp_path / "home"), rows=3)
    for number in range(300):
        write(first / f"memory/many/{number}.md", b"%d" % number)
    await _committed(engine, first, MEMORY)
    before = without_cache(tree(home))
    for _ in range(20):
        sandbox = KilledSandbox(home, "restore", lambda: _once_swapping(home, chance, "swapping"))
        await restore(engine, WatchedTidy(sandbox), RestoreRequest(memory=MEMORY))
        if without_cache(tree(home)) != before:
            break
    else:
        pytest.skip("never killed in the middle of a swap")
    receipt = await export(engine, WatchedSandbox(home), ExportRequest(memory="another"))
    if receipt.reason is not None and receipt.reason.code == "other-memory":  # it was killed when all was in place
        assert without_cache(tree(first)).items() <= without_cache(tree(home)).items()
        return
    assert receipt.outcome == "committed" and without_cache(tree(home)) == before
    assert receipt.files == len([one for one in before.values() if one[0] != "dir"])
