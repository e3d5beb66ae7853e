"""Tenants of one service: whether time tells that a memory of others is there, and how much one that calls as often as it can
slows another down."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

from benchmarks.measure import PROJECT
from benchmarks.table import Section
from sidecar.service.access import refusals
from sidecar.service.access.token_file import TokenRecord, add_token
from tests.parts.tenants import EVERY_VERB, House, path

TOKEN = "a-token-for-the-benchmark-0123456789"
ASKED = (
    ("GET", (), None),
    ("GET", ("snapshots",), None),
    ("GET", ("snapshots", "latest", "archive"), None),
    ("POST", ("restores",), {"sandbox": "local:/nonexistent"}),
    ("POST", ("forks",), {"memory": "acme/new"}),
    ("DELETE", (), None),
)
"""What a tenant may ask about a memory of others."""

TENANTS = {"refused": "calls and bytes used up", "works": "calls used up, exports whenever it may"}

# A tenant that does not stop: as many callers at once, each again as soon as it is answered.
HAMMER = """
import sys, threading, httpx
url, token, home, count = sys.argv[1:5]
answers = {}
def call():
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=60) as client:
        while True:
            for answer in (client.get("/v1/memories"), client.post("/v1/memories/acme%2Fa/exports", json={"sandbox": home})):
                answers[answer.status_code] = answers.get(answer.status_code, 0) + 1
for _ in range(int(count)):
    threading.Thread(target=call, daemon=True).start()
sys.stdin.read()
print(answers)
"""


def measure(folder: Path, pairs: int, rounds: int) -> Section:
    section = Section("Tenants of one service")
    asyncio.run(_measure_existence(section, folder / "timing", pairs))
    _measure_neighbours(section, folder / "neighbours", rounds)
    return section


async def _measure_existence(section: Section, folder: Path, pairs: int) -> None:
    """Compare how long it takes to refuse a memory of others that is there, and one that is not."""
    refusals.LONGEST_DELAY = 0.0  # the wait before a refusal would hide what is to be seen
    house = House(folder)
    home = _make_home(folder / "home")
    for memory in ("acme/a", "globex/there"):
        await house.call("POST", path(memory, "exports"), body={"sandbox": f"local:{home}"})
    token = house.grant("acme", ["acme/*"], EVERY_VERB)

    async def ask(memory: str, number: int) -> float:
        method, rest, body = ASKED[number % len(ASKED)]
        began = time.perf_counter()
        reply = await house.call(method, path(memory, *rest), token, body)
        took = time.perf_counter() - began
        assert reply.status == 403, reply.body
        return took

    for number in range(50):
        await ask("globex/there", number)
    names = ("globex/there", "globex/where", "globex/there")
    took: list[list[float]] = [[] for _ in names]
    for number in range(pairs):
        # Each in turn is the first, with every question, so that none has the advantage of a warm cache.
        first = number // len(ASKED)
        for place in (first % 3, (first + 1) % 3, (first + 2) % 3):
            took[place].append(await ask(names[place], number))
    there, not_there, again = (statistics.median(row) * 1e6 for row in took)
    await house.sidecar.close()
    section.add(
        f"refusing a memory of others, median of {pairs}",
        f"{there:.1f} µs there, {not_there:.1f} µs not there",
        f"there, measured again: {again:.1f} µs",
    )


def _measure_neighbours(section: Section, folder: Path, rounds: int) -> None:
    """Measure a tenant's calls alone, beside one that is refused all the time, and beside one that works all the time."""
    homes = {name: _make_home(folder / name) for name in ("acme", "globex")}
    file = folder / "tokens.json"
    tokens = {
        "globex": _grant(file, "globex", "globex/*"),
        "refused": _grant(file, "acme", "acme/*", calls_per_minute=60, concurrent=1, max_bytes=1),
        "works": _grant(file, "acme-2", "acme/*", calls_per_minute=60, concurrent=1),
    }
    environment = {**os.environ, "MEMORY_SIDECAR_TOKEN": TOKEN, "MEMORY_SIDECAR_SERVICE_TOKENS": str(file)}
    words = [sys.executable, "-m", "sidecar", "serve", f"--store=file:{folder}/store", "--bind=127.0.0.1:8079"]
    service = subprocess.Popen(words, cwd=PROJECT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert service.stdout is not None
        service.stdout.readline()
        first = {"sandbox": f"local:{homes['acme']}"}  # what it has is more than it may have
        httpx.post("http://127.0.0.1:8079/v1/memories/acme%2Fa/exports", json=first, headers=_bearer(TOKEN), timeout=60)
        _work(tokens["globex"], homes["globex"], 3)
        for name, callers in (("refused", 4), ("refused", 16), ("works", 1)):
            hammer = [sys.executable, "-c", HAMMER, "http://127.0.0.1:8079", tokens[name], f"local:{homes['acme']}"]
            other = subprocess.Popen([*hammer, str(callers)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            _wait_for_refusal(tokens[name])
            alone, beside = _compare(other, tokens["globex"], homes["globex"], rounds)
            answers = other.communicate()[0].decode().strip()
            section.add(
                f"beside a tenant at its quotas, {callers} callers: {TENANTS[name]}",
                f"exports {beside[0] / alone[0]:.2f} × as long, reads {beside[1] / alone[1]:.2f} ×",
                f"alone {alone[0] * 1e3:.0f} ms and {alone[1] * 1e3:.1f} ms; the other was answered {answers}",
            )
    finally:
        service.terminate()
        service.wait(60)


def _wait_for_refusal(token: str) -> None:
    """Wait until a token has used up its calls."""
    with httpx.Client(headers=_bearer(token), timeout=60) as client:
        while client.get("http://127.0.0.1:8079/v1/memories").status_code != 429:
            pass


def _compare(
    other: subprocess.Popen[bytes], token: str, home: Path, rounds: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return what ``_work`` takes while the other is stopped, and while it runs: by turns, for the machine may have more to
    do at one time than at another."""
    alone, beside = [], []
    for _ in range(rounds):
        for order, found in ((signal.SIGSTOP, alone), (signal.SIGCONT, beside)):
            other.send_signal(order)
            time.sleep(1)  # what has piled up meanwhile is not what is to be measured
            found.append(_work(token, home, 1))
    return _take_medians(alone), _take_medians(beside)


def _take_medians(rows: list[tuple[float, float]]) -> tuple[float, float]:
    exports, reads = zip(*rows, strict=True)
    return statistics.median(exports), statistics.median(reads)


def _work(token: str, home: Path, rounds: int) -> tuple[float, float]:
    """Return how long an export of a changed home and a read take, as medians."""
    exports, reads = [], []
    with httpx.Client(base_url="http://127.0.0.1:8079", headers=_bearer(token), timeout=60) as client:
        for _ in range(rounds):
            (home / "MEMORY.md").write_text(f"# {time.time_ns()}\n" * 50)
            began = time.monotonic()
            answer = client.post("/v1/memories/globex%2Fa/exports", json={"sandbox": f"local:{home}"})
            exports.append(time.monotonic() - began)
            assert answer.json()["outcome"] == "committed", answer.text
            for _ in range(5):
                began = time.monotonic()
                client.get("/v1/memories/globex%2Fa").raise_for_status()
                reads.append(time.monotonic() - began)
    return statistics.median(exports), statistics.median(reads)


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def _make_home(home: Path) -> Path:
    home.mkdir(parents=True)
    (home / "MEMORY.md").write_text("# remembered\n" * 50)
    (home / "memory").mkdir()
    for number in range(50):
        (home / f"memory/note-{number}.md").write_text(json.dumps(list(range(number))) * 10)
    return home


def _grant(file: Path, name: str, memories: str, **quotas: int) -> str:
    wanted = TokenRecord(id="", name=name, salt="", digest="", memories=(memories,), verbs=EVERY_VERB, **quotas)
    return add_token(file, wanted)
