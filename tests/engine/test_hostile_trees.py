"""Whatever an agent leaves in its home, nothing outside of it is read, changed or removed, and every run ends in good order."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.errors import SidecarError
from sidecar.policy.local_folders import LocalPolicy
from tests.parts.homes import PROJECT, engine_at, tree, write
from tests.parts.hostile_trees import plant
from tests.parts.in_process import InProcess
from tests.parts.memory_use import peak_kib

MARK = b"this is not for any memory"
BATCH = 100
DEADLINE = 600
"""Seconds for a batch: hundreds of times what it takes."""
ROOM = 300 << 10
"""KiB that a process may need for all of it."""


def _engine(folder: Path) -> Engine:
    store = folder / "store"
    timing = engine_at(store).timing
    return engine_at(store, timing=replace(timing, database_wait=0.2, turn_wait=1, worker_wait=0))


class Enclosed(InProcess):
    """In this process, and apart from the store."""

    def __init__(self, home: Path, store: Path) -> None:
        super().__init__(home)
        self._policy = LocalPolicy(apart=(str(store.resolve()),))


async def _try(engine: Engine, home: Path, store: Path) -> None:
    """An export, a restore over it, and an export again: each ends, well or with an error of ours."""
    for verb in ("export", "restore", "export"):
        try:
            if verb == "export":
                await export(engine, Enclosed(home, store), ExportRequest(memory="m", force=True))
            else:
                await restore(engine, Enclosed(home, store), RestoreRequest(memory="m", snapshot="latest"))
        except SidecarError:
            continue


def try_seeds(folder: Path, seeds: range) -> None:
    """Raise ``AssertionError`` for the first seed that gets out."""
    folder = folder.resolve()
    outside = folder / "outside"
    write(outside / "kept.md", MARK)
    write(outside / "memories/m/head.json", MARK)
    write(outside / "claude-mem.db", MARK)
    for seed in seeds:
        engine, home = _engine(folder), folder / "home"
        victim = folder / "victim"
        write(victim / "MEMORY.md", MARK)
        asyncio.run(export(engine, InProcess(victim), ExportRequest(memory="victim")))
        store = folder / "store"
        before = tree(outside), tree(store / "memories/victim")
        plant(home, [outside, store, store / "memories/victim", victim], seed, "m")
        asyncio.run(_try(engine, home, store))
        assert (tree(outside), tree(store / "memories/victim")) == before, f"seed {seed} changed something outside"
        packs = (
            [file.read_bytes() for file in (store / "memories/m").rglob("*.tar.*")]
            if (store / "memories/m").exists()
            else []
        )
        assert not any(MARK in _plain(pack) for pack in packs), f"seed {seed} read something outside"
        for left in (home, store):
            subprocess.run(["chmod", "-R", "u+rwX", left], check=True)
            shutil.rmtree(left)


def _plain(pack: bytes) -> bytes:
    import gzip

    import zstandard

    if pack[:2] == b"\x1f\x8b":
        return gzip.decompress(pack)
    return zstandard.ZstdDecompressor().decompressobj().decompress(pack)


def test_no_tree_leads_out_of_its_home(tmp_path: Path) -> None:
    try_seeds(tmp_path, range(20))


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(40))
def test_no_tree_leads_out_of_its_home_thousands(tmp_path: Path, batch: int) -> None:
    """In a process of its own, so that the memory it needs can be told."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.engine.test_hostile_trees", str(tmp_path), str(1000 + batch * BATCH)],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


if __name__ == "__main__":
    start = int(sys.argv[2])
    try_seeds(Path(sys.argv[1]), range(start, start + BATCH))
    assert peak_kib() < ROOM, f"{peak_kib()} KiB"
