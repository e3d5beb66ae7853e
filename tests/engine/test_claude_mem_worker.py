"""The whole way with a real claude-mem worker: it writes, is exported while it writes, and is found again elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.parts.claude_mem import Worker

ROOT = Path(__file__).resolve().parents[2]
MEMORY = "acme/agent-7"
SECRETS = {
    "CLAUDE_MEM_GEMINI_API_KEY": "planted-gemini-1f0c",
    "CLAUDE_MEM_CLOUD_SYNC_TOKEN": "planted-token-77aa",
    "CLAUDE_MEM_PRO_MEMORY_KEY": "planted-memory-9b3e",
}
PREFERENCE = ("CLAUDE_MEM_CONTEXT_OBSERVATIONS", "77")
NOT_RESTORED = ("worker.pid", "supervisor.json", "logs", "backups", ".env", "claude-mem.db-wal", "claude-mem.db-shm")


class Sidecar:
    """The command line, as a person with one store uses it."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"

    def __call__(self, verb: str, home: Path, *more: str) -> dict[str, Any]:
        """Run one verb against a local home and return its receipt. Fail unless it exits 0 with one JSON document."""
        command = [sys.executable, "-m", "sidecar", verb, MEMORY, "--sandbox", f"local:{home}"]
        finished = subprocess.run(
            [*command, "--store", f"file:{self.store}", "--json", *more],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if not name.startswith("CLAUDE_")},
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert finished.returncode == 0, f"exit {finished.returncode}\n{finished.stdout}\n{finished.stderr}"
        return dict(json.loads(finished.stdout))

    def export(self, home: Path) -> dict[str, Any]:
        receipt = self("export", home)
        assert receipt["outcome"] in ("committed", "unchanged"), receipt
        assert receipt["databases"], receipt
        assert all(database["check"] == "ok" for database in receipt["databases"]), receipt
        return receipt

    def restore(self, home: Path, snapshot: str = "latest") -> dict[str, Any]:
        home.mkdir(parents=True, exist_ok=True)
        receipt = self("restore", home, "--snapshot", snapshot)
        assert receipt["outcome"] == "complete", receipt
        return receipt


@pytest.fixture
def sidecar(tmp_path: Path) -> Sidecar:
    return Sidecar(tmp_path)


class Writer:
    """Saves rows through the worker's interface as fast as it answers, and remembers which it acknowledged."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.acknowledged: list[str] = []
        self.error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def save(self) -> None:
        title = f"row{len(self.acknowledged):06d}"
        self.worker.save(f"{title} what the agent learned. " + "It is worth keeping. " * 40, title)
        self.acknowledged.append(title)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.save()
        except Exception as error:
            self.error = error


def titles(database: Path) -> list[str]:
    """The rows as SQLite reads them, once it has found nothing wrong with the file."""
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return [str(title) for (title,) in connection.execute("SELECT title FROM observations ORDER BY id")]


def plant(worker: Worker) -> None:
    """Keys and a preference in the worker's settings, and a file of secrets beside them."""
    path = worker.data / "settings.json"
    settings = json.loads(path.read_text())
    assert str(worker.home) in path.read_text(), "the worker no longer pins its path: this test has lost its point"
    path.write_text(json.dumps({**settings, **SECRETS, PREFERENCE[0]: PREFERENCE[1]}))
    (worker.data / ".env").write_text("ANTHROPIC_API_KEY=planted-env-52d1\n")


def test_memory_written_during_exports_outlives_its_home(tmp_path: Path, sidecar: Sidecar) -> None:
    home_a, home_b = tmp_path / "first" / "home", tmp_path / "second" / "elsewhere" / "home"
    with Worker(home_a) as worker:
        plant(worker)
        writer = Writer(worker)
        for _ in range(20):
            writer.save()

        exported: list[tuple[str, list[str]]] = []
        with writer:
            for _ in range(4):
                before = list(writer.acknowledged)
                exported.append((sidecar.export(home_a)["snapshot"], before))
        assert writer.error is None
        assert len(writer.acknowledged) > len(exported[-1][1]) > len(exported[0][1]), "it wrote while it was exported"

        last = sidecar.export(home_a)["snapshot"]
        exported.append((last, list(writer.acknowledged)))
        worker.shutdown()
        everything = titles(worker.database)
    shutil.rmtree(home_a)

    for number, (snapshot, before) in enumerate(exported):
        scratch = tmp_path / f"scratch-{number}"
        sidecar.restore(scratch, snapshot)
        found = titles(scratch / ".claude-mem" / "claude-mem.db")
        assert found[: len(before)] == before, f"snapshot {number} lacks rows acknowledged before its export began"
        assert found == everything[: len(found)]

    sidecar.restore(home_b)
    data = home_b / ".claude-mem"
    assert [name for name in NOT_RESTORED if (data / name).exists()] == []
    settings = (data / "settings.json").read_text()
    assert str(home_a) not in settings
    assert json.loads(settings)[PREFERENCE[0]] == PREFERENCE[1]
    planted = [*SECRETS.values(), "planted-env-52d1"]
    files = [path for path in home_b.rglob("*") if path.is_file()]
    assert [(path, word) for path in files for word in planted if word.encode() in path.read_bytes()] == []

    with Worker(home_b) as reborn:
        assert reborn.stats()["database"]["path"] == str(reborn.database)
        assert reborn.stats()["database"]["observations"] == len(everything)
        for title in (*everything[:20], everything[len(everything) // 2], everything[-1]):
            assert f"| {title} |" in reborn.search(title), f"the reborn worker does not know {title}"
    assert not home_a.exists(), "the reborn worker went back to the old path"


def test_a_restore_under_a_running_worker_stops_it_swaps_and_starts_it_again(tmp_path: Path, sidecar: Sidecar) -> None:
    with Worker(tmp_path / "origin") as origin:
        for number in range(20):
            origin.save(f"the heron number {number} nests at dawn", f"heron{number:02d}")
        snapshot = sidecar.export(origin.home)["snapshot"]

    with Worker(tmp_path / "running") as running:
        running.save("the magpie was only here", "magpie00")
        pid = running.pid
        receipt = sidecar.restore(running.home)
        assert receipt["snapshot"] == snapshot

        running.wait_ready()
        assert running.pid != pid
        assert running.stats()["database"]["observations"] == 20
        assert all(f"heron{number:02d}" in running.search("heron") for number in range(20))
        assert "magpie00" not in running.search("magpie")

        running.save("the wren came after the restore", "wren00")
        after = sidecar.export(running.home)
        assert (after["outcome"], after["parent"]) == ("committed", snapshot)
        running.shutdown()
        assert titles(running.database) == [f"heron{number:02d}" for number in range(20)] + ["wren00"]

    sidecar.restore(tmp_path / "third")
    assert titles(tmp_path / "third" / ".claude-mem" / "claude-mem.db")[-1] == "wren00"
