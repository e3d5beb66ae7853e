"""The service under load, killed again and again, and without its store for a while."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.parts.homes import claude_mem_home, empty_home, observe, titles
from tests.parts.s3_servers import S3Server
from tests.parts.services import TOKEN, Service, path, serving, until
from tests.parts.wire import wire_to

ROUNDS = [
    pytest.param(2, "file", id="2-file"),
    pytest.param(50, "file", id="50-file", marks=pytest.mark.slow),
    pytest.param(50, "s3", id="50-s3", marks=pytest.mark.slow),
]


@pytest.fixture
def bucket(weed: S3Server, credentials_of: Callable[[S3Server], None]) -> str:
    credentials_of(weed)
    return weed.make_bucket(f"service-{time.time_ns()}")


class Caller(threading.Thread):
    """An orchestrator: changes a home, exports it, and repeats a call that was not answered, under the same key."""

    def __init__(self, service: Service, memory: str, home: Path, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.service, self.memory, self.home, self.stop = service, memory, home, stop
        self.acknowledged: list[tuple[str, str, int]] = []
        """Key, snapshot and rows of each export that was answered."""

    def run(self) -> None:
        rows = 0
        while not self.stop.is_set():
            observe(self.home, 1, f"row {rows}")
            rows += 1
            receipt = self._export(key := uuid.uuid4().hex)
            if receipt is not None:
                self.acknowledged.append((key, receipt["snapshot"], len(titles(self.home))))

    def _export(self, key: str) -> dict[str, Any] | None:
        body = {"sandbox": f"local:{self.home}"}
        headers = {"Authorization": f"Bearer {TOKEN}", "Idempotency-Key": key}
        while True:
            try:
                url = self.service.url + path(self.memory, "exports")
                answer = httpx.post(url, json=body, headers=headers, timeout=30)
                if answer.status_code == 200:
                    receipt: dict[str, Any] = answer.json()
                    assert receipt["outcome"] in ("committed", "unchanged"), receipt
                    return receipt
                assert answer.status_code in (429, 503), answer.text
            except httpx.HTTPError:
                if self.stop.is_set():
                    return None
            time.sleep(0.1)


@pytest.mark.parametrize(("kills", "kind"), ROUNDS)
def test_killed_at_any_moment_it_loses_nothing_it_acknowledged(
    kills: int, kind: str, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    chance, stop = random.Random(kills), threading.Event()
    watched = claude_mem_home(empty_home(tmp_path / "watched") / "agent", rows=3)
    store = f"file:{tmp_path / 'store'}"
    if kind == "s3":
        weed = request.getfixturevalue("weed")
        store = f"s3://{request.getfixturevalue('bucket')}/x?endpoint={weed.endpoint}"
    with serving(store, tmp_path / "log", lease=2) as service:
        attached = service.http.put(
            path("attached", "attachment"), json={"sandbox": f"local:{watched}", "checkpoint_every": 1}
        )
        assert attached.status_code == 200
        homes = [claude_mem_home(empty_home(tmp_path / f"home{n}") / "agent", rows=3) for n in range(3)]
        callers = [Caller(service, f"m{n}", home, stop) for n, home in enumerate(homes)]
        for caller in callers:
            caller.start()
        for _ in range(kills):
            time.sleep(chance.uniform(0.2, 1.5))
            service.kill()
            service.start()
        before = [len(caller.acknowledged) for caller in callers]
        until(lambda: all(len(caller.acknowledged) > count for caller, count in zip(callers, before, strict=True)))
        stop.set()
        for caller in callers:
            caller.join(60)
        for caller in callers:
            _nothing_lost(service, caller, tmp_path)
        observe(watched, 1, "the last word")
        until(lambda: "the last word 0" in _restored(service, "attached", tmp_path / "other"))
        with capsys.disabled():
            total = sum(len(caller.acknowledged) for caller in callers)
            print(f"\n{kills} kills, {total} exports acknowledged on {kind}:, none lost, none twice")


def _nothing_lost(service: Service, caller: Caller, tmp_path: Path) -> None:
    log = service.http.get(path(caller.memory, "snapshots")).json()["snapshots"]
    standing = {row["snapshot"]: row["standing"] for row in log}
    for _, snapshot, _ in caller.acknowledged:
        assert standing.get(snapshot) in ("head", "earlier head"), "an acknowledged export is not there"
    keys = Counter(snapshot for _, snapshot, _ in caller.acknowledged)
    assert max(keys.values(), default=0) <= 2, "an export under another key found nothing new"
    restored = _restored(service, caller.memory, tmp_path / f"check-{caller.memory}")
    assert len(restored) >= caller.acknowledged[-1][2] - 1
    assert restored == titles(caller.home)[: len(restored)]


def _restored(service: Service, memory: str, home: Path) -> list[str]:
    home.mkdir(exist_ok=True)
    answer = service.restore(memory, f"local:{home}")
    if answer.status_code != 200 or answer.json()["outcome"] != "complete":
        return []
    return titles(home)


def test_without_its_store_it_says_so_and_comes_back_by_itself(tmp_path: Path) -> None:
    home = claude_mem_home(empty_home(tmp_path / "home") / "agent", rows=3)
    store, away = tmp_path / "store", tmp_path / "away"
    with serving(store, tmp_path / "log") as service:
        assert service.export("me", f"local:{home}").status_code == 200
        store.rename(away)
        store.write_text("in its place")
        observe(home, 2, "meanwhile")
        refused = service.export("me", f"local:{home}", key="k")
        assert refused.status_code == 503, refused.text
        assert refused.json()["code"].startswith("store-")
        store.unlink()
        away.rename(store)
        assert service.export("me", f"local:{home}", key="k").json()["outcome"] == "committed"
        assert service.http.get("/readyz").status_code == 200


@pytest.mark.parametrize("seconds", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_cut_off_from_its_bucket_it_acknowledges_nothing_and_goes_on_by_itself(
    seconds: float, tmp_path: Path, weed: S3Server, bucket: str
) -> None:
    watched = claude_mem_home(empty_home(tmp_path / "watched") / "agent", rows=3)
    homes = [claude_mem_home(empty_home(tmp_path / f"home{n}") / "agent", rows=3) for n in range(2)]
    stop = threading.Event()
    with (
        wire_to(weed.endpoint) as wire,
        serving(f"s3://{bucket}/x?endpoint={wire.endpoint}", tmp_path / "log") as service,
    ):
        attached = {"sandbox": f"local:{watched}", "checkpoint_every": 1}
        assert service.http.put(path("attached", "attachment"), json=attached).status_code == 200
        callers = [Caller(service, f"m{n}", home, stop) for n, home in enumerate(homes)]
        for caller in callers:
            caller.start()
        until(lambda: all(len(caller.acknowledged) > 1 for caller in callers))
        wire.cut_request = lambda sent: True
        time.sleep(1)  # what was answered before is on its way
        before = [len(caller.acknowledged) for caller in callers]
        cut = time.monotonic()
        refused = service.http.get("/readyz")
        assert refused.status_code == 503 and "No answer" in refused.json()["checks"]["store"], refused.text
        assert service.http.get("/healthz").status_code == 200
        time.sleep(max(0.0, seconds - (time.monotonic() - cut)))
        assert [len(caller.acknowledged) for caller in callers] == before, "acknowledged without a store"
        observe(watched, 1, "meanwhile")
        wire.cut_request = lambda sent: False
        until(lambda: all(len(caller.acknowledged) > count for caller, count in zip(callers, before, strict=True)))
        until(lambda: "meanwhile 0" in _restored(service, "attached", tmp_path / "other"))
        assert service.http.get("/readyz").status_code == 200
        stop.set()
        for caller in callers:
            caller.join(60)
            _nothing_lost(service, caller, tmp_path)


@pytest.mark.slow
def test_many_conversations_that_end_at_once_are_all_exported(tmp_path: Path) -> None:
    homes = [claude_mem_home(empty_home(tmp_path / f"home{n}") / "agent", rows=2) for n in range(30)]
    with serving(tmp_path / "store", tmp_path / "log") as service:
        answers: list[int] = []

        def end(number: int) -> None:
            answers.append(service.export(f"m{number}", f"local:{homes[number]}").status_code)

        ends = [threading.Thread(target=end, args=[number]) for number in range(len(homes))]
        for one in ends:
            one.start()
        slowest = 0.0
        while any(one.is_alive() for one in ends):
            began = time.monotonic()
            assert service.http.get("/healthz").status_code == 200
            slowest = max(slowest, time.monotonic() - began)
            time.sleep(0.05)
        assert answers == [200] * len(homes)
        assert len(service.http.get("/v1/memories").json()["memories"]) == len(homes)
        assert slowest < 2, "a probe would have called it dead"
