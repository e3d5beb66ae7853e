"""The service under load, killed again and again, and without its store for a while."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.parts.homes import claude_mem_home, empty_home, observe, titles
from tests.parts.services import TOKEN, Service, path, serving

ROUNDS = [pytest.param(3, id="3"), pytest.param(50, id="50", marks=pytest.mark.slow)]


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


@pytest.mark.parametrize("kills", ROUNDS)
def test_killed_at_any_moment_it_loses_nothing_it_acknowledged(
    kills: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance, stop = random.Random(kills), threading.Event()
    watched = claude_mem_home(empty_home(tmp_path / "watched") / "agent", rows=3)
    with serving(tmp_path / "store", tmp_path / "log", lease=2) as service:
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
        time.sleep(2)
        stop.set()
        for caller in callers:
            caller.join(60)
        for caller in callers:
            _nothing_lost(service, caller, tmp_path)
        observe(watched, 1, "the last word")
        deadline = time.monotonic() + 20
        other = tmp_path / "other"
        while "the last word 0" not in _restored(service, "attached", other):
            assert time.monotonic() < deadline, "the attachment was not taken up again"
            time.sleep(0.5)
        with capsys.disabled():
            total = sum(len(caller.acknowledged) for caller in callers)
            print(f"\n{kills} kills, {total} exports acknowledged, none lost, none twice")


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
