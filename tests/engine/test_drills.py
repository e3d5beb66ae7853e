"""A drill brings a snapshot back, and notices when it does not come."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from sidecar.engine import Engine, ExportRequest, export
from sidecar.engine.drills import choose_drills, run_drill
from sidecar.ids import MemoryKeys
from tests.parts.commands import start
from tests.parts.homes import WatchedSandbox, claude_mem_home, empty_home, engine_at, observe, run_cli, write
from tests.parts.samples import SAMPLES
from tests.parts.services import path, serving, until

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "conductor"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return claude_mem_home(empty_home(tmp_path / "home") / "agent")


async def _exported(engine: Engine, home: Path, **more: object) -> str:
    request = ExportRequest(memory=MEMORY, **more)  # type: ignore[arg-type]
    return str((await export(engine, WatchedSandbox(home), request)).snapshot)


async def test_each_snapshot_comes_back_with_every_file_and_database(tmp_path: Path, home: Path) -> None:
    engine = engine_at(tmp_path / "store")
    made = [await _exported(engine, home)]
    observe(home, 5, "later")
    made.append(await _exported(engine, home))
    pairs = await choose_drills(engine, MEMORY, 5, random.Random(1))
    assert pairs[0] == (MEMORY, made[1]) and {snapshot for _, snapshot in pairs} == set(made), "the head comes first"
    for memory, snapshot in pairs:
        done = await run_drill(engine, memory, snapshot)
        assert (done.ok, done.problem, done.databases) == (True, "", 1) and done.files > 5
    assert await choose_drills(engine, "", 5, random.Random(1), most_bytes=1) == []


async def test_memories_of_every_layout_and_several_projects_come_back(tmp_path: Path) -> None:
    engine, home = engine_at(tmp_path / "store"), empty_home(tmp_path / "home")
    for sample in SAMPLES.values():
        sample.build(home)
    for name in ("one", "two"):
        write(home / name / "MEMORY.md", name.encode())
    snapshot = await _exported(engine, home, projects=("~", "~/one", "~/two", "~/app"))
    done = await run_drill(engine, MEMORY, snapshot)
    assert (done.ok, done.problem) == (True, "")


def test_nothing_stays_of_a_drill_that_was_killed(tmp_path: Path, home: Path) -> None:
    store, temporary = tmp_path / "store", empty_home(tmp_path / "tmp")
    asyncio.run(_exported(engine_at(store), home))
    env = {"TMPDIR": str(temporary)}
    process = start("verify", MEMORY, "--drill", store=store, env=env, own_group=True)
    while not any(temporary.rglob("projects")):  # that is the scratch sandbox
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert any(temporary.rglob("projects"))
    assert run_cli("verify", MEMORY, "--drill", store=store, env=env).code == 0
    assert list(temporary.iterdir()) == []


def test_a_snapshot_that_does_not_come_back_is_told(tmp_path: Path, home: Path) -> None:
    engine = engine_at(tmp_path / "store")
    snapshot = asyncio.run(_exported(engine, home))
    (pack,) = (tmp_path / "store/memories" / MEMORY / "packs").glob("*.tar.*")
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    done = asyncio.run(run_drill(engine, MEMORY, snapshot))
    assert not done.ok and done.problem
    ran = run_cli("verify", "--drill", store=tmp_path / "store")
    assert ran.code == 1 and not ran.document["ok"]
    assert [row["snapshot"] for row in ran.document["drills"]] == [snapshot]


def test_a_head_whose_manifest_is_gone_does_not_come_back(tmp_path: Path, home: Path) -> None:
    engine = engine_at(tmp_path / "store")
    asyncio.run(_exported(engine, home))
    observe(home, 5, "later")
    head = asyncio.run(_exported(engine, home))
    (tmp_path / "store" / MemoryKeys.of(MEMORY).snapshot(head)).unlink()
    for words in (["--count", "9"], [MEMORY, "--count", "1"]):
        ran = run_cli("verify", "--drill", *words, store=tmp_path / "store")
        assert (ran.code, ran.document["ok"]) == (1, False)
        assert [row["snapshot"] for row in ran.document["drills"] if not row["ok"]] == [head]


def test_a_service_drills_on_a_schedule_and_counts_it(tmp_path: Path, home: Path) -> None:
    with serving(tmp_path / "store", tmp_path / "log", drill_every=1) as service:
        assert service.export("acme/agent-7", f"local:{home}").status_code == 200
        until(lambda: 'memory_sidecar_drills_total{outcome="passed"}' in service.http.get("/metrics").text)
        assert "memory_sidecar_last_good_drill_timestamp_seconds 1" in service.http.get("/metrics").text
        assert len(service.http.get(path("acme/agent-7", "snapshots")).json()["snapshots"]) == 1
