"""The audit of a day: many calls, over HTTP and by command, and kill -9 in between. Whatever was acknowledged is told
once, or as something that may have happened; and whatever is done to the audit afterwards is found."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.audit.reader import MAYBE, list_calls, read_store
from tests.parts.forked_sidecar import Sidecar
from tests.parts.homes import empty_home, engine_at, run_cli
from tests.parts.memories import grow, plain_home
from tests.parts.services import TOKEN, Service, path, serving

pytestmark = pytest.mark.usefixtures("forked_programs")

DAYS = [
    pytest.param(40, 2, 10, id="40-calls"),
    pytest.param(1000, 40, 150, id="1000-calls", marks=pytest.mark.slow),
]
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
HANDS = 3
"""How many callers there are."""


class Hand(threading.Thread):
    """A caller that does something at random, again and again, and notes what was acknowledged."""

    def __init__(self, number: int, day: Day) -> None:
        super().__init__(daemon=True)
        self.number, self.day = number, day
        self.chance = random.Random(1000 * day.seed + number)
        self.home = plain_home(empty_home(day.folder / f"home{number}"), rows=2)
        self.mine = f"acme/agent-{number}"
        self.problem = ""

    def run(self) -> None:
        try:
            while (call := self.day.next_call()) is not None:
                if self.chance.random() < 0.1:
                    self._run_command(call)
                else:
                    self._call_service(call)
        except BaseException as problem:
            self.problem = f"{type(problem).__name__}: {problem}"
            raise

    def _run_command(self, call: str) -> None:
        """A command in a process of its own, that is killed now and then."""
        grow(self.home)
        words = ["export", self.mine, "--sandbox", f"local:{self.home}", "--json"]
        if self.chance.random() < 0.4:
            words = ["log", self.mine, "--json"]
        printed = self.day.folder / f"{call}.json"
        with printed.open("wb") as out:
            words = [words[0], f"--store=file:{self.day.store}", *words[1:]]
            command = Sidecar(words, env=self.day.environment, stdout=out, stderr=subprocess.DEVNULL)
        if self.chance.random() < 0.3:
            threading.Timer(self.chance.uniform(0, 0.5), command.send_signal, [signal.SIGKILL]).start()
        if command.wait(60) == 0 and words[0] == "export":
            self.day.commands.append(json.loads(printed.read_text())["snapshot"])

    def _call_service(self, call: str) -> None:
        method, route, body = self._choose()
        grow(self.home)
        headers = {**HEADERS, "X-Request-Id": call}
        while True:
            try:
                answer = httpx.request(method, self.day.service.url + route, json=body, headers=headers, timeout=60)
                break
            except httpx.ConnectError:  # it was killed, and is not back yet
                time.sleep(0.05)
            except httpx.HTTPError:  # it was killed meanwhile; what it did is not known
                return
        assert answer.status_code < 500 or answer.status_code == 503, answer.text
        self.day.note(call, method, answer)

    def _choose(self) -> tuple[str, str, dict[str, Any] | None]:
        copy = f"copy-{self.number}-{self.chance.randrange(3)}"
        ways: list[tuple[str, str, dict[str, Any] | None]] = [
            ("POST", path(self.mine, "exports"), {"sandbox": f"local:{self.home}"}),
            ("POST", path(self.mine, "exports"), {"sandbox": f"local:{self.home}"}),
            ("POST", path(self.mine, "exports"), {"sandbox": f"local:{self.home}"}),
            ("POST", path(self.mine, "restores"), {"sandbox": f"local:{self.home}", "attach": False}),
            ("POST", path(self.mine, "forks"), {"memory": copy}),
            ("DELETE", path(copy), None),
            ("PUT", path(self.mine, "head"), {"snapshot": "latest"}),
            ("PUT", path(self.mine, "snapshots", "latest", "pin"), None),
            ("POST", path(self.mine, "forget"), {"dry_run": False}),
            ("GET", path(self.mine, "snapshots"), None),
            ("GET", path(self.mine, "snapshots", "latest"), None),
            ("GET", "/v1/memories", None),
        ]
        return self.chance.choice(ways)


class Day:
    """A service that is called and killed, and what was acknowledged meanwhile."""

    def __init__(self, seed: int, calls: int, folder: Path) -> None:
        self.seed, self.folder, self.store = seed, folder, folder / "store"
        self.service: Service
        self._left = calls
        self._turn = threading.Lock()
        self.changed: dict[str, str] = {}
        """Requests that changed something and were acknowledged, each with the snapshot in its answer."""
        self.commands: list[str] = []
        """The snapshots of exports by command that were acknowledged."""
        config = folder / "config.toml"
        config.write_text("[audit]\nstore = true\n")
        self.environment = {**os.environ, "MEMORY_SIDECAR_CONFIG": str(config)}

    @property
    def left(self) -> int:
        return self._left

    def next_call(self) -> str | None:
        with self._turn:
            self._left -= 1
            return f"call-{self._left}" if self._left >= 0 else None

    def note(self, call: str, method: str, answer: httpx.Response) -> None:
        if method != "GET" and answer.is_success:
            body = answer.json()
            with self._turn:
                self.changed[call] = body.get("snapshot") or body.get("head") or ""


@pytest.mark.parametrize(("calls", "kills", "forgeries"), DAYS)
def test_the_audit_of_a_day_names_every_acknowledged_change(
    calls: int, kills: int, forgeries: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    day = Day(calls, calls, tmp_path)
    chance = random.Random(calls)
    moments = sorted(chance.sample(range(5, calls - 5), kills), reverse=True)
    with serving(day.store, tmp_path / "log", more="[audit]\nstore = true\n", lease=2) as day.service:
        hands = [Hand(number, day) for number in range(HANDS)]
        for hand in hands:
            hand.start()
        for moment in moments:
            while day.left > moment and any(hand.is_alive() for hand in hands):
                hands[0].join(0.01)
            day.service.kill()
            day.service.start()
        for hand in hands:
            hand.join(600)
            assert not hand.is_alive() and not hand.problem, hand.problem
    with capsys.disabled():
        print(f"\n{calls} calls, {kills} kills: {_check(day)}")
    _tamper(day, chance, forgeries)


def _check(day: Day) -> str:
    """Compare what was acknowledged, and what is in the store, with what the audit tells."""
    ran = run_cli("audit", "--verify", store=day.store)
    assert ran.code == 0, ran.document["problems"]
    rows = ran.document["calls"]
    over_http = Counter(row["request"] for row in rows if row["source"] == "127.0.0.1")
    assert {request for request, count in over_http.items() if count > 1} == set(), "told more than once"
    by_request = {row["request"]: row for row in rows if row["source"] == "127.0.0.1"}
    for request, snapshot in day.changed.items():
        row = by_request[request]
        assert row["outcome"] != MAYBE and (not snapshot or row["snapshot"] == snapshot), (request, snapshot, row)
    commands = [row for row in rows if row["source"] == "cli" and row["what"] == "export"]
    finished = Counter(row["snapshot"] for row in commands if row["outcome"] == "committed")
    assert {snapshot: finished[snapshot] for snapshot in day.commands} == dict.fromkeys(day.commands, 1)
    told = {row["snapshot"] for row in rows}
    by_command = {row["memory"] for row in commands if row["outcome"] == MAYBE}
    for memory in [row["memory"] for row in run_cli("list", store=day.store).document["memories"]]:
        for row in run_cli("log", memory, store=day.store).document["snapshots"]:
            # A fork, and an export by a command, that was cut short is told without the snapshot that it made.
            known = row["snapshot"] in told or row["origin"].startswith("fork of") or memory in by_command
            assert known, f"{memory} {row['snapshot']} is told of nowhere"
    maybe = sum(row["outcome"] == MAYBE for row in rows)
    return f"{len(day.changed) + len(day.commands)} acknowledged changes, each told once; {maybe} may have happened"


def _tamper(day: Day, chance: random.Random, forgeries: int) -> None:
    """Remove or alter something at random, as often as that: each time it is found."""
    files = [file for file in (day.store / "audit").rglob("*.json*") if not file.name.startswith(".")]
    store = engine_at(day.store).repository.store

    async def is_sound() -> bool:
        found = await read_store(store)
        assert list_calls(found.lines)
        return not found.findings

    covered = _find_covered(day.store)
    for _ in range(forgeries):
        file = chance.choice(files)
        whole = file.read_bytes()
        rows = whole.splitlines(keepends=True)
        how = chance.choice(["remove", "line", "letter", "cut"])
        if how == "remove" and file.name not in covered:
            continue  # written in the last second before a kill, so that no tail tells of it yet
        backup = shutil.copy2(file, day.folder / "backup")
        if how == "remove":
            file.unlink()
        elif how == "line":
            rows.pop(chance.randrange(len(rows)))
            file.write_bytes(b"".join(rows))
        elif how == "letter":
            place = chance.randrange(len(whole) - 1)
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        else:
            file.write_bytes(whole[: chance.randrange(len(whole))])
        assert not asyncio.run(is_sound()), (how, file)
        shutil.move(backup, file)
    assert asyncio.run(is_sound())


def _find_covered(store: Path) -> set[str]:
    """The names of files whose removal something else tells: a tail, or lines behind them."""
    covered = {"latest.json"}
    for tail in (store / "audit/tails").glob("*.json"):
        lines = json.loads(tail.read_text())["lines"]
        pieces = sorted((store / "audit/lines" / tail.stem).glob("*.jsonl"))
        covered |= {piece.name for piece in pieces if int(piece.name.split("-")[0]) <= lines or piece != pieces[-1]}
        covered |= {tail.name} if pieces else set()
    return covered
