"""Several processes export one memory at once: each ends well, and everything they kept can be read."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from tests.parts.commands import done, ended, start
from tests.parts.homes import claude_mem_home, observe
from tests.parts.s3_servers import S3Server

MEMORY = "shared"
OUTCOMES = {"committed": 0, "unchanged": 0, "diverged": 3}


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, credentials_of: Callable[[S3Server], None]) -> str:
    if request.param == "file":
        return f"file:{tmp_path}/store"
    weed: S3Server = request.getfixturevalue("weed")
    credentials_of(weed)
    return f"s3://{weed.make_bucket(f'two-{uuid4().hex[:8]}')}/p?endpoint={weed.endpoint}"


def race(homes: list[Path], store: str) -> Counter[str]:
    """Export from all homes at the same moment; return how often each outcome came."""
    processes = [start("export", MEMORY, f"--sandbox=local:{home}", store=store) for home in homes]
    receipts = []
    for process in processes:
        ran = ended(process)
        outcome = ran.document.get("outcome", "")
        assert outcome in OUTCOMES, ran
        assert ran.code == OUTCOMES[outcome], ran
        receipts.append(ran.document)
    log = done("log", MEMORY, store=store)
    kept = {row["snapshot"] for row in log["snapshots"]}
    assert {receipt["snapshot"] for receipt in receipts} <= kept
    committed = [receipt for receipt in receipts if receipt["outcome"] == "committed"]
    assert committed, receipts
    assert log["head"] in [receipt["snapshot"] for receipt in committed]
    report = done("verify", MEMORY, store=store)
    assert report["ok"]
    return Counter(receipt["outcome"] for receipt in receipts)


def assert_winner_goes_on(homes: list[Path], store: str) -> Path:
    """The sandbox whose export became the head is still the one that continues it. Return its home."""
    shown = done("show", MEMORY, store=store)
    (winner,) = {home for home in homes if shown["sandbox"] == f"local:{home}"}
    observe(winner, 1, "after the race")
    receipt = done("export", MEMORY, f"--sandbox=local:{winner}", store=store)
    assert receipt["outcome"] == "committed", receipt
    return winner


SIZES = [(2, 1), pytest.param(8, 1, marks=pytest.mark.slow), pytest.param(8, 10, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("writers", "rounds"), SIZES)
def test_one_home_exported_by_many_processes(store: str, writers: int, rounds: int, tmp_path: Path) -> None:
    home = claude_mem_home(tmp_path / "home", rows=50)
    outcomes: Counter[str] = Counter()
    for turn in range(rounds):
        observe(home, 2, f"turn {turn}")
        outcomes += race([home] * writers, store)
        assert_winner_goes_on([home], store)
    print(f"{writers} processes, one home, {rounds} rounds: {dict(outcomes)}")


@pytest.mark.parametrize(("writers", "rounds"), SIZES)
def test_many_homes_exported_as_one_memory(store: str, writers: int, rounds: int, tmp_path: Path) -> None:
    homes = [claude_mem_home(tmp_path / f"home-{number}", rows=40 + number) for number in range(writers)]
    outcomes = race(homes, store)
    for turn in range(rounds):
        winner = assert_winner_goes_on(homes, store)
        for number, home in enumerate(homes):
            if home != winner:
                shutil.rmtree(home / ".claude-mem")
                assert done("restore", MEMORY, f"--sandbox=local:{home}", store=store)["outcome"] == "complete"
            observe(home, 2, f"turn {turn} of {number}")
        outcomes += race(homes, store)
    assert outcomes["committed"] == rounds + 1
    assert outcomes["diverged"] == (writers - 1) * (rounds + 1)
    print(f"{writers} processes, as many homes, {rounds + 1} rounds: {dict(outcomes)}")
