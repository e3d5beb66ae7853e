"""Killed at any moment, Postgres too: rows are those of one snapshot or of the next, and in the end of the newest."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from adapters.sandboxes.local import LocalSandbox
from sidecar.engine import ExportRequest, export
from tests.parts.homes import engine_at
from tests.parts.postgres import Database, Server
from tests.parts.remembering import Agent
from tests.parts.writers import writers


async def _exported(store: Path, agent: Agent) -> None:
    request = ExportRequest(memory="conductor", projects=(agent.project,), force=True)
    receipt = await export(engine_at(store), LocalSandbox(agent.home.resolve()), request)
    assert receipt.outcome == "committed"


@pytest.mark.parametrize(
    ("changes", "kills"), [(2, 5), pytest.param(60, 15, marks=pytest.mark.slow)], ids=["few", "many"]
)
async def test_whoever_writes_rows_may_be_killed_at_any_moment(
    tmp_path: Path, database: Database, changes: int, kills: int
) -> None:
    store, agent, chance = tmp_path / "store", Agent(tmp_path / "home"), random.Random(changes)
    agent.converse(observations=150)
    await _exported(store, agent)
    with writers(store) as written:
        written.run(kill_after=0)  # from here on it has started
        began = time.monotonic()
        assert written.run() == 0
        took = time.monotonic() - began
        cut_short = 0
        for _ in range(changes):
            before = agent.expected("conductor")
            agent.converse(observations=10)
            agent.forget()
            await _exported(store, agent)
            after = agent.expected("conductor")
            for _ in range(kills):
                cut_short += written.run(kill_after=chance.uniform(0, took)) == signal.SIGKILL
                assert sorted(database.rows()) in (before, after), "rows of two snapshots at once"
            assert written.run() == 0
            assert sorted(database.rows()) == after
        assert cut_short >= changes, "hardly any was killed on the way"


@pytest.mark.slow
async def test_postgres_killed_while_rows_are_written(
    tmp_path: Path, database: Database, postgres_server: Server
) -> None:
    store, agent, chance = tmp_path / "store", Agent(tmp_path / "home"), random.Random(1)
    agent.converse(observations=300)
    await _exported(store, agent)
    with writers(store) as written:
        assert written.run() == 0
        for _ in range(15):
            before = agent.expected("conductor")
            agent.converse(observations=20)
            await _exported(store, agent)
            pid = postgres_server.pid
            if os.fork() == 0:
                time.sleep(chance.uniform(0, 0.3))
                os.kill(pid, signal.SIGQUIT)
                os._exit(0)
            written.run()
            os.wait()
            postgres_server.start()
            assert sorted(database.rows()) in (before, agent.expected("conductor"))
            assert written.run() == 0
            assert sorted(database.rows()) == agent.expected("conductor")
