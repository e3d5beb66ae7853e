"""Without Python in the sandbox: one run at a time, and a restore that is killed is undone, or finished, by the next run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine.core import Timing
from sidecar.errors import SidecarError
from tests.parts.homes import observe, titles, tree, without_cache, write
from tests.parts.memories import Box, Name, Provider, engine_on, plain_home, shell_tools

MEMORY = "conductor"
MOVES = """#!/bin/sh
count=$(($(cat "{folder}/count") + 1))
echo $count > "{folder}/count"
[ "$count" != "$(cat "{folder}/before")" ] || kill -s KILL 0
"{mv}" "$@" || exit 1
[ "$count" != "$(cat "{folder}/after")" ] || kill -s KILL 0
"""
"""Moves files, and kills the run that asked for it before or after one of the moves."""


@pytest.fixture
def local(open_provider: Callable[[Name], Provider]) -> Provider:
    return open_provider("local")


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_on(f"file:{tmp_path / 'store'}", timing=Timing(turn_wait=1))


class Moves:
    """The program ``mv`` of a sandbox, under our control."""

    def __init__(self, tools: Path, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        mv = os.readlink(tools / "mv")
        (tools / "mv").unlink()
        write(tools / "mv", MOVES.format(folder=folder, mv=mv).encode(), 0o755)
        self.kill()

    def kill(self, *, before: int = 0, after: int = 0) -> None:
        for name, value in {"count": 0, "before": before, "after": after}.items():
            (self._folder / name).write_text(str(value))

    @property
    def count(self) -> int:
        return int((self._folder / "count").read_text())


async def _restore(engine: Engine, box: Box) -> str:
    return (await restore(engine, box.open(), RestoreRequest(memory=MEMORY))).outcome.value


def _state(home: Path) -> dict[bytes, object]:
    """What is in a home; of its database what it says, for sqlite3 may copy that to other bytes."""
    found = {name: (about[0], about[1], about[3]) for name, about in without_cache(tree(home)).items()}
    return {**found, b".claude-mem/claude-mem.db": titles(home)}


@pytest.mark.parametrize(
    "steps", [slice(5, None, 24), pytest.param(slice(None), marks=pytest.mark.slow)], ids=["some", "all"]
)
async def test_a_restore_that_is_killed_at_any_move_is_undone_or_finished(
    engine: Engine, local: Provider, tmp_path: Path, steps: slice
) -> None:
    tools = shell_tools(tmp_path / "tools")
    moves = Moves(tools, tmp_path / "moves")
    first, box = local.box(), local.box(tools=tools)
    plain_home(first.home, rows=3)
    write(first.home / "memory/old folder/old\nname.md", b"old")
    await export(engine, first.open(), ExportRequest(memory=MEMORY))
    assert await _restore(engine, box) == "complete"
    observe(first.home, 2, "newer")
    write(first.home / "memory/newer.md", b"newer")
    (first.home / ".claude-mem/modes/code mode.json").unlink()
    shutil.rmtree(first.home / "memory/old folder")
    (first.home / "memory/new folder/deeper").mkdir(parents=True)
    (first.home / "memory/new folder").chmod(0o750)
    assert (await export(engine, first.open(), ExportRequest(memory=MEMORY))).outcome == "committed"
    write(box.home / "memory/only here.md", b"only here")
    old, kept = _state(box.home), tmp_path / "kept"
    shutil.copytree(box.home, kept, symlinks=True)
    moves.kill()
    assert await _restore(engine, box) == "complete"
    new, count = _state(box.home), moves.count
    assert count > 8 and new != old
    kills = [{how: number} for number in range(1, count + 1) for how in ("before", "after")]
    for kill in kills[steps]:
        shutil.rmtree(box.home)
        shutil.copytree(kept, box.home, symlinks=True)
        moves.kill(**kill)
        with contextlib.suppress(SidecarError):
            await _restore(engine, box)
        moves.kill()
        receipt = await export(engine, box.open(), ExportRequest(memory=MEMORY))
        here = _state(box.home)
        assert here in (old, new), kill
        # What came back is what it was; what is in place is known as what it is, though sqlite3 may have copied it anew.
        expected = ["diverged"] if here == old else ["unchanged", "committed"]
        assert receipt.outcome in expected, (kill, receipt)
        assert await _restore(engine, box) == "complete"
        assert _state(box.home) == new, kill
        assert not [path for path in (box.home / ".cache/memory-sidecar").iterdir() if path.name.startswith(".swap")]


async def test_an_export_waits_for_a_restore_of_another_memory_and_says_so(
    engine: Engine, local: Provider, tmp_path: Path
) -> None:
    box = local.box(tools=shell_tools(tmp_path / "tools"))
    plain_home(box.home, rows=3)
    await export(engine, box.open(), ExportRequest(memory=MEMORY))
    turn = box.home / ".cache/memory-sidecar/.turn-sh"
    assert not turn.exists()
    started = Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[19]
    turn.write_text(f"{os.getpid()} {started}\n")
    with pytest.raises(SidecarError) as busy:
        await export(engine, box.open(), ExportRequest(memory="another"))
    assert (busy.value.code, busy.value.retryable) == ("sandbox-busy", True)
    waiting = asyncio.create_task(
        export(engine_on(engine.repository.store.url), box.open(), ExportRequest(memory=MEMORY))
    )
    turn.write_text("1 1\n")  # whoever had it was killed: the number is another's by now
    assert (await waiting).outcome == "unchanged"
    assert not turn.exists()
    write(turn, b"")  # killed before it could say who it was
    os.utime(turn, (time.time() - 120,) * 2)
    assert (await export(engine, box.open(), ExportRequest(memory=MEMORY))).outcome == "unchanged"


@pytest.mark.parametrize(
    "journal",
    [
        b"",
        b"/etc\n/etc\nm\nlineage\n\nproject /etc\n",
        b"/tmp/memory-sidecar-x.unpacked\n/home/x\nm\nlineage\n\nproject /etc\n",
        b"/tmp/memory-sidecar-x/../../etc.unpacked\n{aside}\nm\nlineage\n\nproject /etc\n",
        b"/tmp/memory-sidecar-x.unpacked\n{aside}/../../victim\nm\nlineage\n\nproject /etc\n",
    ],
)
async def test_a_journal_that_somebody_made_up_moves_nothing(
    engine: Engine, local: Provider, tmp_path: Path, journal: bytes
) -> None:
    box = local.box(tools=shell_tools(tmp_path / "tools"))
    plain_home(box.home, rows=3)
    await export(engine, box.open(), ExportRequest(memory=MEMORY))
    cache = box.home / ".cache/memory-sidecar"
    write(cache / "victim/file", b"stays")
    write(cache / ".swap-sh", journal.replace(b"{aside}", str(cache / "set-aside/x").encode()))
    before = without_cache(tree(box.home))
    with pytest.raises(SidecarError) as refused:
        await export(engine, box.open(), ExportRequest(memory=MEMORY))
    assert refused.value.code == "journal-damaged"
    assert without_cache(tree(box.home)) == before and (cache / "victim/file").exists()
