"""The in-sandbox program as a sandbox gets it, on the oldest Python it promises to run on."""

from __future__ import annotations

import ast
import os
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapters.sandboxes.remote import LONGEST_ARGUMENT
from sidecar import program
from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine.sandbox.delivery import build_command, build_shell_command, strip_comments
from sidecar.engine.shell.scripts import build_export_script
from sidecar.layouts import load_built_in
from sidecar.ports import AllowedPaths, CommandResult
from sidecar.receipts import RestoreReceipt
from tests.parts.commands import python_38
from tests.parts.homes import Tree, WatchedSandbox, claude_mem_home, empty_home, engine_at, memory_tree, observe, write

INSIDE = Path(program.__file__).parent
SPARE = 2 << 10


def without_docstrings(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = ""
    return ast.dump(tree)


@pytest.mark.parametrize("module", sorted(INSIDE.glob("*.py")), ids=lambda module: module.stem)
def test_a_module_is_sent_without_what_only_its_readers_need(module: Path) -> None:
    text = module.read_text()
    assert without_docstrings(strip_comments(text)) == without_docstrings(text)
    assert strip_comments(text).count("\n") == text.count("\n")


def test_every_command_has_room_to_spare(tmp_path: Path) -> None:
    """With every layout, and with projects and layouts of one's own: a longer one takes another request."""
    projects = [f"~/work/project-{number}" for number in range(8)]
    layouts = [
        *load_built_in().values(),
        *(replace(load_built_in()["pai"], name=f"own-{number}") for number in range(3)),
    ]
    known = [f"20261116T142916734Z-{os.urandom(4).hex()}" for _ in range(100)]
    request = {
        "do": "export",
        "memory": "m",
        "key": "m",
        "snapshot": "20261116T142916734Z-6122b165",
        "known": known,
        "notes": {"heads": known, "store": os.urandom(16).hex(), "memory": "m" * 200, "sandbox": "e2b:" + "i" * 200},
        "layouts": [layout.for_sandbox() for layout in layouts],
        "projects": projects,
    }
    for command in (build_command(request).command, build_shell_command(build_export_script(request, layouts)).command):
        assert len(command) < LONGEST_ARGUMENT - SPARE


class OldSandbox(WatchedSandbox):
    """A sandbox that has Python 3.8, a shell, and no other program."""

    def __init__(self, home: Path, programs: Path) -> None:
        super().__init__(home)
        self._environment = {**self._environment, "PATH": str(programs)}

    def ground(self, projects: Sequence[str] | None) -> AllowedPaths | None:
        return None  # so the program is sent to it, as to a provider's

    async def run(self, command: str, **how: Any) -> CommandResult:
        finished = await super().run(command, **how)
        assert b'"python":"3.8"' in finished.output, finished
        return finished


def kept(home: Path) -> Tree:
    """A home's memory, without the folder of a part of it that stays behind."""
    return {name: about for name, about in memory_tree(home / ".claude-mem").items() if name != b"state"}


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    if not (python := python_38()):
        pytest.skip("there is no Python 3.8 on this machine")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").symlink_to(python)
    return tmp_path / "bin"


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_at(tmp_path / "store")


async def test_program_exports_and_restores_on_python_38(engine: Engine, programs: Path, tmp_path: Path) -> None:
    home = claude_mem_home(tmp_path / "home")
    for rows, kind in ((5, "full"), (6, "delta")):
        observe(home, rows)
        receipt = await export(engine, OldSandbox(home, programs), ExportRequest(memory="m", projects=()))
        assert (receipt.outcome, receipt.kind) == ("committed", kind)
    again = await export(engine, OldSandbox(home, programs), ExportRequest(memory="m", projects=()))
    assert again.outcome == "unchanged"

    other = empty_home(tmp_path / "other")
    for discard in (False, True):  # into nothing, then over what is there
        asked = RestoreRequest(memory="m", projects=(), discard=discard)
        restored = await restore(engine, OldSandbox(other, programs), asked)
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
    assert (await export(engine, WatchedSandbox(home), ExportRequest(memory="m"))).outcome == "committed"
    again = await export(engine, WatchedSandbox(home), ExportRequest(memory="m"))
    assert (again.outcome, again.round_trips) == ("unchanged", 1)
    assert again.transferred_bytes < 16_000  # the request and the answer


def test_a_program_that_was_installed_since_this_process_began_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    request = {"do": "tidy", "memory": "m", "snapshot": "20261116T142916734Z-6122b165"}
    ours = build_command(request, installed=True).command
    monkeypatch.setattr("sidecar.engine.sandbox.delivery._STAND", [("main.py", 1, 1)])
    sent = build_command(request, installed=True).command
    assert len(ours) < len(sent) - 10_000
