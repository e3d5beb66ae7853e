"""A thousand sandboxes on three services and one bucket, with a checkpoint a minute: none is missed, none is written twice,
the services have even shares, and those of one that is killed are taken over. All are processes of their own."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.parts.homes import empty_home, write
from tests.parts.s3_servers import S3Server, seaweedfs
from tests.parts.services import Service, path, serving

pytestmark = pytest.mark.slow

COUNT, EVERY, LEASE = 1000, 60.0, 30.0
ATTACH_WITHIN = 50.0
"""They come over most of a minute, as they would: what comes in one moment has all its checkpoints in one moment."""
KILL_AFTER, END_AFTER = 185.0, 305.0
EDITS_FROM, EDITS_PER_SECOND = 100.0, 1.5
ENDS = ("export committed", "export unchanged")


class RealService(Service):
    """``python -m sidecar``, not forked: its memory is its own."""

    process: subprocess.Popen[bytes]

    def spawn(self, log: Any) -> Any:
        words = [sys.executable, "-m", "sidecar", *self._words]
        return subprocess.Popen(words, cwd=self.code, env=self._env, stderr=log, stdout=subprocess.DEVNULL)

    def measure_memory(self) -> float:
        """The most MB that it ever had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1e3

    def measure_cpu(self) -> tuple[float, float]:
        """Seconds of CPU so far: its own, and of the programs that it ran in sandboxes."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        own, programs = (sum(map(int, fields[at : at + 2])) / os.sysconf("SC_CLK_TCK") for at in (11, 13))
        return own, programs


class Meter:
    """What a minute costs."""

    def __init__(self, server: S3Server, services: Sequence[RealService]) -> None:
        self._server = server
        self._services = services
        self._before = self._read()

    def _read(self) -> tuple[float, Counter[str], list[float]]:
        own, programs = zip(*(service.measure_cpu() for service in self._services), strict=True)
        return time.monotonic(), self._server.count_requests(), [sum(own), sum(programs)]

    def tell(self, what: str) -> None:
        (then, asked, used), (now, asks, uses) = self._before, self._read()
        minutes = (now - then) / 60
        per_minute = {kind: round(number / minutes) for kind, number in (asks - asked).items()}
        own, programs = ((later - earlier) / minutes for earlier, later in zip(used, uses, strict=True))
        print(f"{what}, a minute: requests {per_minute}, CPU {own:.1f} s of services, {programs:.1f} s in sandboxes")


@pytest.fixture
def server() -> Iterator[S3Server]:
    with seaweedfs() as server:
        yield server


def list_rows(service: Service) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    after = ""
    while True:
        answer = service.http.get("/v1/attachments", params={"after": after} if after else {}).json()
        found += answer["attachments"]
        if not (after := answer["next"] or ""):
            return found


def count_shares(service: Service) -> Counter[str]:
    """How many attachments each service has, by its name in the store."""
    return Counter(row["owner"] for row in list_rows(service) if row["state"] == "open")


def read_ends(logs: list[Path]) -> dict[str, list[tuple[float, str]]]:
    """When each memory's exports ended that saved it, and how, by what the services logged."""
    found: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for log in logs:
        for line in map(json.loads, log.read_text().splitlines()):
            if line["event"] in ENDS:
                assert line["saved"], line
                found[line["memory"]].append((datetime.fromisoformat(line["timestamp"]).timestamp(), line["event"]))
            assert not line["event"].startswith(("export diverged", "export rejected")), line
    return {memory: sorted(ends) for memory, ends in found.items()}


def read_taken(logs: list[Path]) -> set[str]:
    """The memories whose sandbox a service took over from one that died."""
    lines = (json.loads(line) for log in logs for line in log.read_text().splitlines())
    return {line["memory"] for line in lines if line["event"] == "taken over"}


def tell(name: str, values: list[float]) -> None:
    values = sorted(values)
    shown = ", ".join(
        f"{part:.0%} {values[min(len(values) - 1, int(len(values) * part))]:.1f}" for part in (0.5, 0.95, 0.99)
    )
    print(f"{name}: {len(values)}, {shown}, most {values[-1]:.1f}")


@contextmanager
def running(store: str, log: Path, server: S3Server) -> Iterator[RealService]:
    with serving(store, log, server.environment(), kind=RealService, lease=LEASE, grace=60) as service:
        assert isinstance(service, RealService)
        yield service


class Edits:
    """Somebody who writes into one home after the other, into each once."""

    def __init__(self, homes: Mapping[str, Path]) -> None:
        self.made: dict[str, float] = {}
        self._homes = homes
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        for memory in random.sample(sorted(self._homes), len(self._homes)):
            if self._ended.wait(1 / EDITS_PER_SECOND):
                return
            write(self._homes[memory] / "MEMORY.md", b"# It goes on\n")
            self.made[memory] = time.time()

    def __enter__(self) -> Edits:
        return self

    def start(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread.ident:
            self._thread.join()


def test_a_thousand_are_checkpointed_every_minute(tmp_path: Path, server: S3Server) -> None:
    store = f"s3://{server.make_bucket('thousand')}/x?endpoint={server.endpoint}"
    homes = {f"m{number}": empty_home(tmp_path / "homes" / str(number)) for number in range(COUNT)}
    logs = [tmp_path / f"log{number}" for number in range(3)]
    with ExitStack() as held, Edits(homes) as edits:
        services = [held.enter_context(running(store, log, server)) for log in logs]
        began, attached = time.time(), {}

        def attach(number: int) -> None:
            time.sleep(max(0.0, began + number * ATTACH_WITHIN / COUNT - time.time()))
            home = homes[f"m{number}"]
            write(home / "MEMORY.md", b"# It begins\n")
            body = {"sandbox": f"local:{home}", "checkpoint_every": EVERY}
            answer = services[number % 3].http.put(path(f"m{number}", "attachment"), json=body)
            assert answer.is_success, answer.text
            attached[f"m{number}"] = time.time()

        with ThreadPoolExecutor(6) as callers:
            list(callers.map(attach, range(COUNT)))
        print(f"attached within {time.time() - began:.0f} s")
        time.sleep(max(0.0, began + EDITS_FROM - time.time()))
        edits.start()
        meter = Meter(server, services)
        time.sleep(max(0.0, began + KILL_AFTER - time.time()))
        shares = count_shares(services[0])
        print("shares of three:", sorted(shares.values()))
        assert sum(shares.values()) == COUNT and len(shares) == 3
        assert all(abs(share - COUNT / 3) <= 0.2 * COUNT / 3 for share in shares.values())
        meter.tell("while all are new")
        memory = [service.measure_memory() for service in services]
        services[2].process.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        while len(shares) != 2 or sum(shares.values()) != COUNT:
            assert time.monotonic() - killed <= 2 * LEASE, shares
            time.sleep(0.5)
            shares = count_shares(services[0])
        print(
            f"taken over after {time.monotonic() - killed:.1f} s (a lease is {LEASE:.0f} s):", sorted(shares.values())
        )
        services[2].kill()
        time.sleep(max(0.0, began + END_AFTER - EVERY - time.time()))
        meter = Meter(server, services[:2])
        time.sleep(max(0.0, began + END_AFTER - time.time()))
        meter.tell("while one of a dozen changes")
        print("shares of two:", sorted(count_shares(services[0]).values()))
        memory += [service.measure_memory() for service in services[:2]]
        print("most memory, MB:", [round(one) for one in memory])
        assert max(memory) < 200
        ended = time.time()
        ends = read_ends(logs)
        gaps, taken = [], read_taken(logs)
        for name, home in homes.items():
            moments = [attached[name], *(moment for moment, _ in ends[name]), ended]
            late = [later - earlier for earlier, later in pairwise(moments)]
            # What the killed service had waits for the end of its lease, too.
            assert max(late) <= 2 * EVERY + (2 * LEASE if name in taken else 0), (home, moments)
            gaps += late[:-1]
        tell("seconds between checkpoints", gaps)
        print("exports:", Counter(what for each in ends.values() for _, what in each))
        check_snapshots(server, ends, edits.made, ended)


def check_snapshots(
    server: S3Server, ends: Mapping[str, list[tuple[float, str]]], edits: Mapping[str, float], ended: float
) -> None:
    """Each memory has a snapshot of what it began with, and of what was written after that was saved, once."""
    found: Counter[str] = Counter()
    pages = server.client.get_paginator("list_objects_v2").paginate(Bucket="thousand")
    for key in (row["Key"] for page in pages for row in page.get("Contents", ())):
        parts = key.split("/")
        if "snapshots" in parts:
            found[parts[parts.index("snapshots") - 1]] += 1
    assert found.keys() == ends.keys()
    for memory, count in found.items():
        written = edits.get(memory)
        assert count <= (2 if written else 1), f"{memory} was written twice"
        if written and ends[memory][0][0] < written < ended - 2 * EVERY:
            assert count == 2, f"{memory} was not saved"
    print(f"snapshots: {sum(found.values())}, of {len(edits)} homes that were changed")
