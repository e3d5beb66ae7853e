"""Nothing planted is ever found in a store, and what is no secret comes back as it was."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from adapters.sandboxes.local import LocalSandbox
from sidecar.engine import ExportRequest, RestoreRequest, export, restore
from sidecar.policy.privacy import Privacy
from sidecar.ports import Sandbox
from tests.parts.commands import python_38
from tests.parts.homes import engine_at
from tests.parts.in_process import InProcess
from tests.parts.secret_trees import NEEDLE, Planted, everything_in

STRICT = Privacy(private="remove", credentials="redact", databases="redact")
TREES, EACH, ALL, QUICK = 30, 5, 5000, 10


async def tried(seed: int, folder: Path, sandbox: Callable[[Path], Sandbox] = InProcess) -> int:
    """One tree: exported, changed, exported again, restored elsewhere. Return how many secrets there were."""
    planted = Planted(folder / "home", random.Random(seed))
    planted.home.mkdir(parents=True)
    engine = engine_at(folder / "store", privacy=STRICT)
    request = ExportRequest(memory="m", projects=(str(planted.home / "app"),), allow=("shrunk",))
    receipts = []
    for _ in range(2):
        planted.plant()
        receipts.append(await export(engine, sandbox(planted.home), request))
        assert receipts[-1].outcome in ("committed", "unchanged"), receipts[-1]
        assert all(row.reason in ("never exported", "not part of the layout") for row in receipts[-1].skipped)
    _search(folder / "store", planted)
    assert NEEDLE not in json.dumps([receipt.as_dict() for receipt in receipts])

    other = folder / "other"
    (other / "app").mkdir(parents=True)
    back = await restore(engine, sandbox(other), RestoreRequest(memory="m", projects=(str(other / "app"),)))
    assert back.outcome == "complete"
    _compare(planted, other)
    assert bool(back.scrubbed.words) == (b"[private]" in _joined(planted) or b"[redacted" in _joined(planted))
    # What was restored holds nothing any more: it is exported as it is.
    again = await export(engine, sandbox(other), ExportRequest(memory="m", projects=(str(other / "app"),)))
    assert (again.outcome, again.findings) == ("unchanged", []), again
    return len(planted.credentials)


def _joined(planted: Planted) -> bytes:
    return b"".join(planted.files.values()) + repr(planted.rows).encode()


def _search(store: Path, planted: Planted) -> None:
    secrets = planted.secrets()
    for path, data in everything_in(store):
        lower = data.lower()
        for secret in secrets:
            assert secret not in data and secret.lower() not in lower, path


def _compare(planted: Planted, other: Path) -> None:
    for name, expected in planted.files.items():
        place = other / name
        if name.startswith(".claude/"):  # named after where the project is
            place = next((other / ".claude/projects").glob(f"*/{Path(name).name}"))
        assert place.read_bytes() == expected, name
    if planted.rows:
        raw = (other / ".claude-mem/claude-mem.db").read_bytes()
        connection = sqlite3.connect(other / ".claude-mem/claude-mem.db")
        rows = {row[0]: row[1:] for row in connection.execute("SELECT * FROM observations")}
        assert rows == planted.rows
        assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        connection.execute("INSERT INTO observations_fts(observations_fts) VALUES ('integrity-check')")
        found = connection.execute(
            "SELECT count(*) FROM observations_fts WHERE observations_fts MATCH ?", (NEEDLE + "*",)
        )
        assert found.fetchone()[0] == 0
        connection.close()
        assert NEEDLE.encode() not in raw.lower()


@pytest.mark.parametrize(
    "first", [pytest.param(n, marks=() if n < QUICK else pytest.mark.slow) for n in range(0, TREES, EACH)]
)
async def test_nothing_planted_is_found_in_the_store(first: int, tmp_path: Path) -> None:
    secrets = 0
    for seed in range(first, first + EACH):
        secrets += await tried(seed, tmp_path / str(seed))
        shutil.rmtree(tmp_path / str(seed))
    assert secrets


async def test_the_same_holds_for_the_program_as_it_is_sent(tmp_path: Path) -> None:
    await tried(7001, tmp_path / "here", LocalSandbox)


async def test_the_same_holds_on_python_38(tmp_path: Path) -> None:
    if not (python := python_38()):
        pytest.skip("there is no Python 3.8 on this machine")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").symlink_to(python)

    def older(home: Path) -> Sandbox:
        sandbox = LocalSandbox(home)
        sandbox._environment = {**sandbox._environment, "PATH": str(tmp_path / "bin")}
        return sandbox

    await tried(7002, tmp_path / "older", older)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 10_000 + ALL, 250))
async def test_nothing_planted_is_found_in_thousands_of_stores(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 250):
        await tried(seed, tmp_path / str(seed))
        shutil.rmtree(tmp_path / str(seed))
