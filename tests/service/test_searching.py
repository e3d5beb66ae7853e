"""A service keeps search up to date by itself, and nothing else ever waits for it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from sidecar.client import AsyncClient, Client, Retries, SidecarProblem
from tests.parts.commands import done
from tests.parts.homes import PROJECT, told
from tests.parts.postgres import Database, Server
from tests.parts.remembering import Agent
from tests.parts.services import TOKEN, Service, path, serving, until

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    agent = Agent(tmp_path / "home")
    agent.converse()
    return agent


def export(service: Service, agent: Agent, memory: str = "conductor") -> dict[str, Any]:
    answer = service.export(memory, f"local:{agent.home}", projects=[agent.project])
    assert answer.status_code == 200 and answer.json()["outcome"] == "committed", answer.text
    return dict(answer.json())


def figure(service: Service, name: str) -> float:
    lines = service.http.get("/metrics").text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"memory_sidecar_index_{name} ")))


def test_search_by_http_and_client_follows_every_change(tmp_path: Path, agent: Agent, database: Database) -> None:
    store = tmp_path / "store"
    with serving(store, tmp_path / "log") as service:
        first = export(service, agent)["snapshot"]
        until(lambda: database.heads().get("conductor") == first)
        assert sorted(database.rows()) == agent.expected("conductor")
        rare = agent.observed[0][1][1].split()[30]
        (hit,) = service.http.get("/v1/search", params={"q": rare}).json()["hits"]
        assert (hit["memory"], hit["kind"], hit["snapshot"]) == ("conductor", "observation", first)
        before = dict(agent.rows)
        agent.converse()
        second = export(service, agent)["snapshot"]
        until(lambda: database.heads()["conductor"] == second)
        assert sorted(database.rows()) == agent.expected("conductor")
        assert service.http.post(path("conductor", "forks"), json={"memory": "a/b"}).status_code == 201
        assert service.http.put(path("conductor", "head"), json={"snapshot": first}).status_code == 200
        until(lambda: database.heads().get("conductor") == first and "a/b" in database.heads())
        forked = agent.expected("a/b")
        agent.rows = before
        assert sorted(database.rows()) == sorted(agent.expected("conductor") + forked)
        with Client(service.url, token=TOKEN) as client:
            found = client.search(rare, memories=["conductor", "x"], kinds=["observation", "section"], limit=5)
            assert [one.title for one in found.hits] == [hit["title"]] and found.behind == []
            assert client.search("otter or brave", limit=1).more
        assert asyncio.run(_searched(service, rare)) == 2
        assert service.http.delete(path("conductor")).status_code == 200
        until(lambda: set(database.heads()) == {"a/b"})
        assert sorted(database.rows()) == forked
        until(lambda: figure(service, "behind") == 0)
        assert figure(service, "last_success_timestamp_seconds") > time.time() - 60
        assert figure(service, "failures_total") == 0 and figure(service, "records_written_total") > len(before)
        wrong: tuple[dict[str, Any], ...] = ({}, {"q": ""}, {"q": "x", "limit": 0}, {"q": "x", "kind": "otter"})
        for query in (*wrong, {"q": "x", "offset": -1}):
            assert service.http.get("/v1/search", params=query).status_code == 422
        assert service.http.get("/v1/search", params={"q": "\0'); --"}).json()["hits"] == []
        missing = service.http.get("/v1/search", params={"q": "neverheardof", "memory": "nobody"})
        assert (missing.status_code, missing.json()["code"]) == (404, "memory-not-found")
        assert service.http.get("/v1/search", params={"q": "x"}, headers={"Authorization": ""}).status_code == 401


async def _searched(service: Service, words: str) -> int:
    async with AsyncClient(service.url, token=TOKEN) as client:
        return len((await client.search(words)).hits)


def test_postgres_away_holds_nothing_up_and_is_caught_up_with(
    tmp_path: Path, agent: Agent, database: Database, postgres_server: Server
) -> None:
    other = Agent(tmp_path / "other", seed=4)
    other.converse()
    postgres_server.stop()
    try:
        with serving(tmp_path / "store", tmp_path / "log") as service:
            for _ in range(3):
                assert told(export(service, agent)) == []
                agent.converse()
            export(service, agent)
            export(service, other, "gone")
            assert service.http.delete(path("gone")).status_code == 200
            assert service.http.get("/readyz").status_code == 200
            answer = service.http.get("/v1/search", params={"q": "otter"})
            assert (answer.status_code, answer.json()["code"]) == (503, "index-unreachable")
            assert answer.json()["retryable"] and "Retry-After" in answer.headers
            until(lambda: figure(service, "failures_total") > 0)
            assert figure(service, "behind") >= 1
            with Client(service.url, token=TOKEN, retries=Retries(attempts=1)) as client:
                with pytest.raises(SidecarProblem) as problem:
                    client.search("otter")
                assert problem.value.code == "index-unreachable"
            postgres_server.start()
            until(database.heads)
            until(lambda: figure(service, "behind") == 0)
            assert sorted(database.rows()) == agent.expected("conductor")
            events = [line["event"] for line in service.lines()]
            assert events.count("search is not kept up to date") == 1
            until(lambda: "search is up to date again" in [line["event"] for line in service.lines()])
    finally:
        postgres_server.start()


def test_a_new_service_catches_up_with_what_nobody_told_it(
    tmp_path: Path, agent: Agent, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEMORY_SIDECAR_POSTGRES")
    words = ("export", "conductor", f"--sandbox=local:{agent.home}", f"--project={agent.project}")
    done(*words, store=tmp_path / "store")
    monkeypatch.setenv("MEMORY_SIDECAR_POSTGRES", database.url)
    with serving(tmp_path / "store", tmp_path / "log") as service:
        until(lambda: figure(service, "records_written_total") == len(agent.rows))
        assert sorted(database.rows()) == agent.expected("conductor")
        agent.converse()
        last = export(service, agent)["snapshot"]
        service.stop()  # what it was just told, it still does
    assert database.heads() == {"conductor": last}


def test_a_service_without_postgres_keeps_an_index_from_the_first_search_on(tmp_path: Path, agent: Agent) -> None:
    store, cache = tmp_path / "store", Path(os.environ["XDG_CACHE_HOME"])
    with serving(store, tmp_path / "log") as service:
        first = export(service, agent)["snapshot"]
        rare = agent.observed[0][1][1].split()[30]
        assert not cache.exists(), "nobody has searched yet"

        def find(words: str, **about: Any) -> list[dict[str, Any]]:
            return list(service.http.get("/v1/search", params={"q": words, **about}).raise_for_status().json()["hits"])

        until(lambda: find(rare))
        (hit,) = find(rare)
        assert (hit["memory"], hit["snapshot"], hit["until"]) == ("conductor", first, None)
        agent.converse()
        second = export(service, agent)["snapshot"]
        newest = agent.observed[-1][1][1].split()[30]
        until(lambda: find(newest))
        assert [hit["snapshot"] for hit in find(newest)] == [second]
        with Client(service.url, token=TOKEN) as client:
            found = client.search(
                newest, projects=["app"], until=datetime.now(UTC) - timedelta(days=3650), history=True
            )
            assert (found.hits, found.without_past) == ([], ["conductor"])
        done("index", "--all", store=store)
        assert service.http.get("/v1/search", params={"q": newest, "all": True}).json()["without_past"] == []
        assert figure(service, "failures_total") == 0
    with serving(store, tmp_path / "log") as service:
        agent.converse()
        export(service, agent)
        until(lambda: figure(service, "records_written_total") > 0)  # it is kept without a search
        assert service.http.delete(path("conductor")).status_code == 200
        until(lambda: not find(newest))
        until(lambda: figure(service, "behind") == 0)
        assert figure(service, "failures_total") == 0


def test_two_services_and_ten_commands_share_one_index(tmp_path: Path, agent: Agent) -> None:
    store = tmp_path / "store"
    with serving(store, tmp_path / "log") as one, serving(store, tmp_path / "log2") as two:
        services = (one, two)
        export(one, agent, "m0")
        for number in range(1, 5):
            assert one.http.post(path("m0", "forks"), json={"memory": f"m{number}"}).status_code == 201
        words = [sys.executable, "-m", "sidecar", "search", "otter or brave", "--limit=1000", f"--store=file:{store}"]
        running = [
            subprocess.Popen(words, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(10)
        ]
        for number in range(20):
            answer = services[number % 2].http.get("/v1/search", params={"q": "otter or brave"})
            assert answer.status_code == 200, answer.text
        said = [process.communicate(timeout=120) for process in running]
        assert [process.returncode for process in running] == [0] * 10, said
        assert all("m4" in out and "Warning" not in out and "lock" not in err for out, err in said), said
        for service in services:
            until(lambda service=service: figure(service, "behind") == 0)  # type: ignore[misc]
            assert figure(service, "failures_total") == 0
            assert not [line for line in service.lines() if "locked" in str(line)]
