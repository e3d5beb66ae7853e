"""Postgres away for as long as is asked (``make outage``: an hour) while conversations go on, and back again."""

from __future__ import annotations

import time
from pathlib import Path

from tests.parts.homes import run_cli, told
from tests.parts.postgres import Database, Server
from tests.parts.remembering import Agent, Row
from tests.parts.services import Service, path, serving, until

SERVED = ("conductor", "acme/agent-7", "reviewer", "short-lived")
ROUNDS = 700
"""How often each talks in a long outage."""


def test_rows_are_those_of_the_newest_snapshots_after_postgres_was_away(
    tmp_path: Path, database: Database, postgres_server: Server, outage: float
) -> None:
    store = tmp_path / "store"
    agents = {name: Agent(tmp_path / name, seed) for seed, name in enumerate((*SERVED, "by-hand", "rolled-back"))}
    with serving(store, tmp_path / "log") as service:
        for name, agent in agents.items():
            _talk(service, name, agent)
        until(lambda: len(database.heads()) == len(agents))
        assert sorted(database.rows()) == _expected(agents)

        postgres_server.stop()
        try:
            _hold_out(service, store, agents, outage)
        finally:
            postgres_server.start()
        until(lambda: database.heads() == _heads(service), 300)
        assert sorted(database.rows()) == _expected(agents)
        _talk(service, "conductor", agents["conductor"])
        until(lambda: database.heads() == _heads(service))
        assert sorted(database.rows()) == _expected(agents)


def _hold_out(service: Service, store: Path, agents: dict[str, Agent], seconds: float) -> None:
    """Talk and export in turns, with a service that is killed half way.

    Whatever else becomes of memories happens too: one is forked, one rolled back, one deleted.
    """
    began, rounds, killed = time.monotonic(), 0, False
    first, rows_then = _talk(service, "rolled-back", agents["rolled-back"]), dict(agents["rolled-back"].rows)
    while rounds < 3 or time.monotonic() - began < seconds:
        for name in SERVED:
            _talk(service, name, agents[name])
        rounds += 1
        by_hand = agents["by-hand"]
        by_hand.converse()
        ran = run_cli(
            "export", "by-hand", f"--sandbox=local:{by_hand.home}", f"--project={by_hand.project}", store=store
        )
        assert (ran.code, ran.document["outcome"]) == (0, "committed")
        assert "Search does not know of this yet" in str(ran.document["warnings"])
        if not killed and time.monotonic() - began >= seconds / 2:
            service.kill()
            service.start()
            killed = True
        time.sleep(seconds / ROUNDS)
    _talk(service, "rolled-back", agents["rolled-back"])
    service.http.put(path("rolled-back", "head"), json={"snapshot": first}).raise_for_status()
    agents["rolled-back"].rows = rows_then
    service.http.post(path("reviewer", "forks"), json={"memory": "forked"}).raise_for_status()
    agents["forked"] = agents["reviewer"]
    service.http.delete(path("short-lived")).raise_for_status()
    del agents["short-lived"]


def _talk(service: Service, memory: str, agent: Agent) -> str:
    agent.converse()
    answer = service.export(memory, f"local:{agent.home}", projects=[agent.project])
    receipt = answer.json()
    assert (answer.status_code, receipt["outcome"], told(receipt)) == (200, "committed", []), receipt
    return str(receipt["snapshot"])


def _heads(service: Service) -> dict[str, str]:
    memories = service.http.get("/v1/memories").raise_for_status().json()["memories"]
    return {one["memory"]: one["head"] for one in memories}


def _expected(agents: dict[str, Agent]) -> list[Row]:
    return sorted(row for name, agent in agents.items() for row in agent.expected(name))
