"""Whatever happens to a memory between exports, every snapshot comes back as it was, however its packs were folded."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine.exports import commit
from sidecar.host.work import NoProgress
from sidecar.receipts import ExportOutcome, RestoreOutcome
from sidecar.store.repository import Repository
from sidecar.store.verification import verify_memory
from sidecar.wiring import open_sandbox, open_store

pytestmark = pytest.mark.usefixtures("forked_programs")

STEPS = 14


class Life:
    """A memory and the random things that happen to it."""

    def __init__(self, home: Path, seed: int) -> None:
        self.home, self.random = home, random.Random(seed)
        self.notes, self.data = home / "memory", home / ".claude-mem"
        (self.data / "corpora").mkdir(parents=True)
        self.notes.mkdir()
        (home / "MEMORY.md").write_text("begin\n")
        database = sqlite3.connect(self.data / "claude-mem.db")
        database.execute("PRAGMA journal_mode=WAL" if seed % 2 else "PRAGMA journal_mode=DELETE")
        database.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, text TEXT)")
        database.executemany("INSERT INTO rows (text) VALUES (?)", [(self.bytes(300).hex(),) for _ in range(400)])
        database.commit()
        database.close()

    def bytes(self, count: int) -> bytes:
        return self.random.randbytes(count)

    def some_file(self) -> Path | None:
        files = [path for path in sorted(self.notes.rglob("*")) if path.is_file() and not path.is_symlink()]
        return self.random.choice(files) if files else None

    def happen(self) -> None:
        for _ in range(self.random.randint(1, 4)):
            self.random.choice(
                [
                    self.create,
                    self.append,
                    self.patch,
                    self.truncate,
                    self.remove,
                    self.chmod,
                    self.link,
                    self.insert,
                    self.folder,
                ]
            )()

    def create(self) -> None:
        folder = self.notes / self.random.choice(["", "a b", "ü/🦊", "new\nline"])
        folder.mkdir(parents=True, exist_ok=True)
        size = self.random.choice([0, 1, 500, 65_535, 65_536, 65_537, 400_000])
        (folder / f"{self.random.randrange(8)}.md").write_bytes(self.bytes(size))

    def append(self) -> None:
        if file := self.some_file():
            with file.open("ab") as stream:
                stream.write(self.bytes(self.random.choice([1, 70_000])))

    def patch(self) -> None:
        if (file := self.some_file()) and (size := file.stat().st_size):
            with file.open("r+b") as stream:
                stream.seek(self.random.randrange(size))
                stream.write(self.bytes(10))

    def truncate(self) -> None:
        if file := self.some_file():
            os.truncate(file, self.random.randrange(file.stat().st_size + 1))

    def remove(self) -> None:
        if file := self.some_file():
            file.unlink()

    def chmod(self) -> None:
        if file := self.some_file():
            file.chmod(self.random.choice([0o600, 0o644, 0o755]))

    def link(self) -> None:
        link = self.notes / "link"
        link.unlink(missing_ok=True)
        link.symlink_to(self.random.choice(["0.md", "a b/1.md", "nowhere"]))

    def folder(self) -> None:
        path = self.notes / f"empty {self.random.randrange(3)}"
        path.rmdir() if path.is_dir() else path.mkdir()

    def insert(self) -> None:
        database = sqlite3.connect(self.data / "claude-mem.db")
        with database:
            database.executemany("INSERT INTO rows (text) VALUES (?)", [(self.bytes(300).hex(),) for _ in range(20)])
            database.execute("DELETE FROM rows WHERE id % 7 = ?", (self.random.randrange(7),))
        database.close()


def state(home: Path) -> dict[str, object]:
    """Everything about a memory that must come back."""
    found: dict[str, object] = {}
    for root in (home / "memory", home / ".claude-mem", home / "MEMORY.md"):
        for path in [root, *sorted(root.rglob("*"))] if root.is_dir() else [root]:
            name, status = str(path.relative_to(home)), path.lstat()
            if path.is_symlink():
                found[name] = os.readlink(path)
            elif path.is_dir():
                found[name] = status.st_mode
            elif path.name == "claude-mem.db":
                found[name] = rows(path)
            elif not path.name.startswith("claude-mem.db-"):
                found[name] = (status.st_mode, status.st_mtime_ns, path.read_bytes())
    return found


def rows(path: Path) -> list[tuple[int, str]]:
    database = sqlite3.connect(path)
    try:
        assert database.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        return database.execute("SELECT id, text FROM rows ORDER BY id").fetchall()
    finally:
        database.close()


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
async def test_every_snapshot_comes_back_as_it_was(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "MOST_PACKS", 3)
    engine = Engine(open_sandbox=open_sandbox, repository=Repository(open_store(f"file:{tmp_path / 'store'}")))
    life = Life(tmp_path / "home", seed)
    past: dict[str, dict[str, object]] = {}
    kinds: set[tuple[str, ...]] = set()
    for step in range(STEPS):
        life.happen()
        receipt = await export(engine, open_sandbox(f"local:{life.home}"), ExportRequest(memory="m"))
        assert receipt.outcome in (ExportOutcome.COMMITTED, ExportOutcome.UNCHANGED), (step, receipt)
        assert receipt.snapshot is not None
        past[receipt.snapshot] = state(life.home)
        manifest = await engine.repository.manifest("m", receipt.snapshot)
        assert len(manifest.packs) <= 3
        kinds.add(tuple(pack.kind for pack in manifest.packs))
        if life.random.random() < 0.2:  # the sandbox goes; a new one takes over
            shutil.rmtree(life.home)
            life.home.mkdir()
            restored = await restore(engine, open_sandbox(f"local:{life.home}"), RestoreRequest(memory="m"))
            assert restored.outcome is RestoreOutcome.COMPLETE
            assert state(life.home) == past[receipt.snapshot]
    assert ("full", "delta") in kinds
    report = await verify_memory(engine.repository, "m", NoProgress())
    assert report.ok
    for number, (snapshot, before) in enumerate(past.items()):
        target = tmp_path / f"target-{number % 2}"  # every other restore lands on what the one before left
        target.mkdir(exist_ok=True)
        restored = await restore(engine, open_sandbox(f"local:{target}"), RestoreRequest(memory="m", snapshot=snapshot))
        assert restored.outcome is RestoreOutcome.COMPLETE, restored
        assert state(target) == before


async def test_an_export_of_one_layout_keeps_what_the_head_has_of_others(tmp_path: Path) -> None:
    engine = Engine(open_sandbox=open_sandbox, repository=Repository(open_store(f"file:{tmp_path / 'store'}")))
    life = Life(tmp_path / "home", 1)
    sandbox = open_sandbox(f"local:{life.home}")
    await export(engine, sandbox, ExportRequest(memory="m"))
    life.insert()
    (life.home / "MEMORY.md").write_text("not exported this time\n")
    receipt = await export(engine, sandbox, ExportRequest(memory="m", layouts=("claude-mem",)))
    assert receipt.outcome is ExportOutcome.COMMITTED
    target = tmp_path / "target"
    target.mkdir()
    await restore(engine, open_sandbox(f"local:{target}"), RestoreRequest(memory="m"))
    assert (target / "MEMORY.md").read_text() == "begin\n"
    assert rows(target / ".claude-mem" / "claude-mem.db") == rows(life.data / "claude-mem.db")
    again = await export(engine, sandbox, ExportRequest(memory="m"))
    assert (again.outcome, again.kind) == (ExportOutcome.COMMITTED, "delta")
