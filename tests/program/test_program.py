"""The in-sandbox program as a sandbox gets it, on every Python it promises to run on."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine.sandbox import delivery
from sidecar.engine.sandbox.delivery import Load, build_command, build_program
from sidecar.format.protocol import PROTOCOL, Request, TidyQuestion
from sidecar.ports import AllowedPaths, CommandResult
from sidecar.program.main import main
from sidecar.receipts import RestoreReceipt
from tests.parts.commands import PYTHONS, find_python
from tests.parts.homes import Tree, WatchedSandbox, claude_mem_home, empty_home, engine_at, memory_tree, observe, write

TIDY = TidyQuestion(memory="m", key="m", snapshot="20261116T142916734Z-6122b165", turn_wait=1)


class OldSandbox(WatchedSandbox):
    """A sandbox that has one Python, a shell, and no other program."""

    def __init__(self, home: Path, programs: Path, version: str = PYTHONS[0]) -> None:
        super().__init__(home)
        self._environment = {**self._environment, "PATH": str(programs)}
        self._version = version
        self.answered = 0

    def ground(self, projects: Sequence[str] | None) -> AllowedPaths | None:
        return None  # so the program is sent to it, as to a provider's

    async def run(self, command: str, **how: Any) -> CommandResult:
        finished = await super().run(command, **how)
        if b'"need-program"' not in finished.output:
            assert f'"python":"{self._version}"'.encode() in finished.output, finished
            self.answered += 1
        return finished


def kept(home: Path) -> Tree:
    """A home's memory, without the folder of a part of it that stays behind."""
    return {name: about for name, about in memory_tree(home / ".claude-mem").items() if name != b"state"}


def programs_of(version: str, folder: Path) -> Path:
    """A folder with nothing but this Python in it, to be all of a PATH."""
    if not (python := find_python(version)):
        pytest.skip(f"there is no Python {version} on this machine")
    folder.mkdir()
    (folder / "python3").symlink_to(python)
    return folder


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    return programs_of(PYTHONS[0], tmp_path / "bin")


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_at(tmp_path / "store")


@pytest.mark.parametrize("version", PYTHONS)
async def test_program_exports_and_restores_on(version: str, engine: Engine, tmp_path: Path) -> None:
    programs, home = programs_of(version, tmp_path / "bin"), claude_mem_home(tmp_path / "home")
    for rows, kind in ((5, "full"), (6, "delta")):
        observe(home, rows)
        receipt = await export(engine, OldSandbox(home, programs, version), ExportRequest(memory="m", projects=()))
        assert (receipt.outcome, receipt.kind) == ("committed", kind)
    again = OldSandbox(home, programs, version)
    assert (await export(engine, again, ExportRequest(memory="m", projects=()))).outcome == "unchanged"
    assert again.answered == 1

    other = empty_home(tmp_path / "other")
    for discard in (False, True):  # into nothing, then over what is there
        asked = RestoreRequest(memory="m", projects=(), discard=discard)
        restored = await restore(engine, OldSandbox(other, programs, version), asked)
        assert restored.outcome == "complete"
        assert kept(other) == kept(home)


async def test_nothing_is_lost_to_a_restore_on_python_38(engine: Engine, programs: Path, tmp_path: Path) -> None:
    home, other = claude_mem_home(tmp_path / "home"), claude_mem_home(tmp_path / "other", rows=3)

    async def restored() -> RestoreReceipt:
        return await restore(engine, OldSandbox(other, programs), RestoreRequest(memory="m", projects=()))

    await export(engine, OldSandbox(home, programs), ExportRequest(memory="m", projects=()))
    assert (await restored()).set_aside is not None
    observe(other, 2, "not exported")
    assert (await restored()).kept
    observe(home, 2)
    await export(engine, OldSandbox(home, programs), ExportRequest(memory="m", projects=()))
    assert (await restored()).saved_first is not None
    assert kept(other) == kept(home)


async def test_large_packs_travel_both_ways_without_any_compressor(
    engine: Engine, programs: Path, tmp_path: Path
) -> None:
    home = claude_mem_home(tmp_path / "home")
    write(home / ".claude-mem/corpora/large.bin", random.Random(5).randbytes(9 << 20))
    here = await export(engine, WatchedSandbox(home), ExportRequest(memory="zstd", projects=()))
    there = await export(engine, OldSandbox(home, programs), ExportRequest(memory="gzip", projects=(), force=True))
    manifests = [await engine.repository.manifest(row.memory, row.snapshot or "") for row in (here, there)]
    assert [row.packs[0].codec for row in manifests] == ["zst" if shutil.which("zstd") else "gz", "gz"]
    for memory in ("zstd", "gzip"):
        other = empty_home(tmp_path / memory)
        restored = await restore(engine, OldSandbox(other, programs), RestoreRequest(memory=memory, projects=()))
        assert restored.outcome == "complete"
        assert kept(other) == kept(home)


async def test_on_this_machine_the_installed_program_runs(engine: Engine, tmp_path: Path) -> None:
    home = claude_mem_home(tmp_path / "home")
    first = await export(engine, WatchedSandbox(home), ExportRequest(memory="m"))
    assert (first.outcome, first.round_trips) == ("committed", 1)
    again = await export(engine, WatchedSandbox(home), ExportRequest(memory="m"))
    assert (again.outcome, again.round_trips) == ("unchanged", 1)
    assert list((home / ".cache/memory-sidecar").glob(".program-*")) == []


def test_a_program_that_was_installed_since_this_process_began_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert delivery.is_installed()
    monkeypatch.setattr(delivery, "_STAND", [("main.py", 1, 1)])
    assert not delivery.is_installed()


def test_a_command_is_short(tmp_path: Path) -> None:
    load = Load(question=TIDY, program=build_program())
    assert len(build_command(load).command) < 3500


def test_a_program_refuses_another_protocol(capfd: pytest.CaptureFixture[str]) -> None:
    request = json.loads(Request(TIDY).encode())
    assert request["protocol"] == PROTOCOL
    later = {**request, "protocol": PROTOCOL + 1, "question": {**request["question"], "unheard": "of"}}
    assert main("0" * 16, json.dumps(later).encode(), b"", b"") == 0
    answer = json.loads(capfd.readouterr().out.splitlines()[2])
    assert (answer["status"], answer["memory"], answer["error"]["code"]) == ("error", "m", "other-protocol")
