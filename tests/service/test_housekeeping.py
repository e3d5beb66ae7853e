"""Retention in a service: over HTTP, after each export, and on its own schedule."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parts.homes import empty_home, forget_caches, write
from tests.parts.services import Service, path, serving

pytestmark = pytest.mark.usefixtures("forked_programs")


def exports(service: Service, home: Path, memory: str, count: int) -> list[str]:
    """Export so many times, something new each time; return the snapshots, newest first."""
    made = []
    for number in range(count):
        write(home / "MEMORY.md", f"{memory} {number} {time.time()}\n".encode())
        forget_caches(home)  # each export is full, so that the older ones are not needed
        made.append(service.export(memory, f"local:{home}", force=True).json()["snapshot"])
    return made[::-1]


def snapshots(service: Service, memory: str) -> list[str]:
    return [row["snapshot"] for row in service.http.get(path(memory, "snapshots")).json()["snapshots"]]


def wait_until(true: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_snapshots_are_pinned_planned_and_forgotten(tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    with serving(tmp_path / "store", tmp_path / "log") as service:
        made = exports(service, home, "acme/agent", 4)
    with serving(tmp_path / "store", tmp_path / "log", more="[retention]\nkeep_last = 2\nevery = '1d'\n") as service:
        pin = path("acme/agent", "snapshots", made[3], "pin")
        assert service.http.put(pin).json() == {"memory": "acme/agent", "snapshot": made[3], "pinned": True}
        rows = service.http.get(path("acme/agent", "snapshots")).json()["snapshots"]
        assert [row["pinned"] for row in rows] == [False, False, False, True]
        assert service.http.get(path("acme/agent", "snapshots", made[3])).json()["pinned"]
        plan = service.http.post(path("acme/agent", "forget"), json={"dry_run": True}).json()
        assert [(row["snapshot"], row["keep"], row["reason"]) for row in plan["snapshots"]] == [
            (made[0], True, "head"),
            (made[1], True, "last 2"),
            (made[2], False, "no rule keeps it"),
            (made[3], True, "pinned"),
        ]
        assert snapshots(service, "acme/agent") == made
        done = service.http.post(path("acme/agent", "forget"), json={}).json()
        assert (done["dry_run"], done["kept"], done["forgotten"]) == (False, 3, 1)
        assert snapshots(service, "acme/agent") == [made[0], made[1], made[3]]
        assert service.http.delete(pin).json()["pinned"] is False
        assert "memory_sidecar_snapshots_forgotten_total 1.0" in service.http.get("/metrics").text
        for answer in (
            service.http.put(path("nobody", "snapshots", "latest", "pin")),
            service.http.delete(path("acme/agent", "snapshots", "20200101T000000000Z-00000000", "pin")),
            service.http.post(path("nobody", "forget"), json={}),
        ):
            assert answer.status_code == 404
        assert service.http.post(path("acme/agent", "forget"), json={"dry": True}).status_code == 422


def test_the_rules_are_applied_after_each_export_and_an_event_says_so(tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    with serving(tmp_path / "store", tmp_path / "log", more="[retention]\nkeep_last = 1\nevery = '1d'\n") as service:
        exports(service, home, "me", 1)
        got: list[dict[str, object]] = []
        listening = threading.Event()

        def listen() -> None:
            with service.http.stream("GET", "/v1/events") as stream:
                for line in stream.iter_lines():
                    listening.set()
                    if line.startswith("data: ") and "retention.forgot" in line:
                        got.append(json.loads(line.removeprefix("data: ")))
                        return

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        assert listening.wait(10)
        made = exports(service, home, "me", 1)
        listener.join(10)
        assert snapshots(service, "me") == made
        (event,) = got
        assert (event["memory"], event["details"]) == ("me", {"snapshots": 1, "objects": 0, "bytes": 0})


def test_on_schedule_the_whole_store_is_looked_after_with_its_limit(tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    with serving(tmp_path / "store", tmp_path / "log") as service:
        made = {memory: exports(service, home, memory, 3) for memory in ("a", "b")}
    more = "[retention]\nstore_bytes = 1\nevery = '1s'\n"
    with serving(tmp_path / "store", tmp_path / "log", more=more) as service:
        for memory, ids in made.items():
            wait_until(lambda memory=memory, ids=ids: snapshots(service, memory) == ids[:1])  # type: ignore[misc]
        wait_until(lambda: any("store_bytes" in line["event"] for line in service.lines()))
