"""Listings over HTTP, a page at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.client import Client
from tests.parts.homes import empty_home, write
from tests.parts.services import TOKEN, Service, serving, until

IDS = ["a", "a-b", "a/b", "b", "🧠", "z/1", "z/2"]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with serving(tmp_path / "store", tmp_path / "log") as service:
        for number, memory in enumerate(IDS):
            home = empty_home(tmp_path / f"home{number}")
            write(home / "MEMORY.md", memory.encode())
            assert service.export(memory, f"local:{home}").json()["outcome"] == "committed"
        yield service


def pages(service: Service, place: str, rows: str, limit: int) -> list[list[dict[str, object]]]:
    found, after = [], ""
    while True:
        answer = service.http.get(place, params={"limit": limit, **({"after": after} if after else {})}).json()
        found.append(answer[rows])
        if not (after := answer["next"]):
            return found


def test_pages_of_memories_have_each_once(service: Service) -> None:
    whole = service.http.get("/v1/memories").json()["memories"]
    assert [row["memory"] for row in whole] == sorted(IDS)
    for limit in (1, 2, 6, 7, 1000):
        got = pages(service, "/v1/memories", "memories", limit)
        assert all(len(page) <= limit for page in got)
        assert len(got) == -(-len(IDS) // limit)
        assert sorted((row for page in got for row in page), key=lambda row: str(row["memory"])) == whole


def test_pages_of_snapshots_go_back_in_time(service: Service, tmp_path: Path) -> None:
    for number in range(4):
        write(tmp_path / "home0" / "MEMORY.md", b"again %d" % number)
        service.export("a", f"local:{tmp_path}/home0")
    whole = service.http.get("/v1/memories/a/snapshots").json()
    assert (len(whole["snapshots"]), whole["next"]) == (5, None)
    for limit in (1, 2, 5):
        got = pages(service, "/v1/memories/a/snapshots", "snapshots", limit)
        assert [row for page in got for row in page] == whole["snapshots"]
        assert all(len(page) <= limit for page in got)


def test_pages_of_attachments(service: Service, tmp_path: Path) -> None:
    for number, memory in enumerate(IDS):
        body = {"sandbox": f"local:{tmp_path}/home{number}"}
        assert service.http.put(f"/v1/memories/{memory.replace('/', '%2F')}/attachment", json=body).is_success
    whole = service.http.get("/v1/attachments").json()["attachments"]
    assert len(whole) == len(IDS)
    for limit in (1, 3, 7):
        got = pages(service, "/v1/attachments", "attachments", limit)
        assert [row["memory"] for page in got for row in page] == [row["memory"] for row in whole]


def test_the_client_walks_all_pages(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    from sidecar.client import wire

    follow = wire.Call.request

    def in_small_pages(call: wire.Call[object]) -> dict[str, object]:
        sent = follow(call)
        return {**sent, "params": {**sent["params"], "limit": 2}}

    monkeypatch.setattr(wire.Call, "request", in_small_pages)
    with Client(service.url, token=TOKEN) as client:
        assert sorted(row.memory for row in client.memories()) == sorted(IDS)
        assert len(client.snapshots("a")) == 1
        assert client.attachments() == client.overview().attachments == []


def test_a_bad_page_is_refused(service: Service) -> None:
    assert service.http.get("/v1/memories", params={"limit": 0}).status_code == 422
    assert service.http.get("/v1/memories", params={"limit": 1001}).status_code == 422
    assert service.http.get("/v1/memories", params={"after": "x" * 300}).status_code == 400


def test_the_worst_are_named_and_not_by_metrics(service: Service, tmp_path: Path) -> None:
    write(tmp_path / "home3" / "MEMORY.md", random.Random(1).randbytes(200_000))
    service.export("b", f"local:{tmp_path}/home3")

    def first(order: str) -> str:
        answer = service.http.get("/v1/memories", params={"order": order, "limit": 1}).json()
        assert answer["next"] is None
        return str(answer["memories"][0]["memory"])

    until(lambda: first("largest") == "b")
    assert first("oldest") in IDS
    assert first("oldest") != "b"
    assert service.http.get("/v1/memories", params={"order": "best"}).status_code == 422
    assert 'memory="' not in service.http.get("/metrics").text
