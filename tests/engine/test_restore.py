"""What comes back is what left: to the byte, in another home, over whatever was there, or not at all."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import os
import random
import shutil
import signal
import sqlite3
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.format.compression import decompress
from sidecar.ports import CommandResult
from sidecar.receipts import ExportReceipt, RestoreReceipt
from sidecar.store.manifest import Manifest
from tests.parts.homes import (
    KEPT_KEYS,
    LONG_AGO,
    MACHINE_KEYS,
    NEVER,
    SECRET_KEYS,
    SECRETS,
    Tree,
    WatchedSandbox,
    claude_mem_home,
    empty_home,
    engine_at,
    memory_tree,
    observe,
    project_tree,
    run_cli,
    three_tier_home,
    titles,
    tree,
    without_cache,
    write,
)
from tests.parts.sent import request_in

MEMORY = "m"


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_at(tmp_path / "store")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with both layouts in it."""
    return three_tier_home(claude_mem_home(tmp_path / "home of the agent"))


def _export(engine: Engine, home: Path, **asked: Any) -> ExportReceipt:
    receipt = asyncio.run(export(engine, WatchedSandbox(home), ExportRequest(memory=MEMORY, **asked)))
    assert receipt.outcome == "committed", receipt
    return receipt


def _restore(engine: Engine, home: Path, **asked: Any) -> RestoreReceipt:
    return asyncio.run(restore(engine, WatchedSandbox(home), RestoreRequest(memory=MEMORY, **asked)))


def _complete(engine: Engine, home: Path, **asked: Any) -> RestoreReceipt:
    receipt = _restore(engine, home, **asked)
    assert receipt.outcome == "complete", receipt
    return receipt


def _same(home: Path, other: Path) -> None:
    assert memory_tree(other / ".claude-mem") == memory_tree(home / ".claude-mem")
    assert project_tree(other) == project_tree(home)


def test_a_memory_arrives_whole_in_another_home(engine: Engine, home: Path, tmp_path: Path) -> None:
    sent = _export(engine, home)
    other = empty_home(tmp_path / "élsewhere/with blank")
    receipt = _complete(engine, other)
    _same(home, other)
    assert len(memory_tree(other / ".claude-mem")) > 25 and len(project_tree(other)) > 25
    assert (receipt.files, receipt.bytes) == (sent.files, sent.bytes)
    assert [row.check for row in receipt.databases] == ["ok"]
    assert titles(other) == titles(home)


def test_a_receipt_tells_what_was_not_exported_yet(engine: Engine, home: Path, tmp_path: Path) -> None:
    head = _export(engine, home).snapshot
    other = empty_home(tmp_path / "other")
    write(other / "MEMORY.md", b"it came with the sandbox")
    first = _complete(engine, other)
    assert first.warnings == [] and first.set_aside is not None and first.set_aside.files == 1
    reader = sqlite3.connect(other / ".claude-mem/claude-mem.db")
    reader.execute("SELECT count(*) FROM observations").fetchone()
    assert _complete(engine, other).warnings == [], "nothing was written since"
    reader.close()
    write(other / "memory/new.md", b"not exported")
    assert _complete(engine, other, mode="seed").warnings == [], "nothing is replaced"
    observe(other, 1, "not exported")
    write(other / "SESSION-STATE.md", b"not exported either")
    told = "claude-mem/claude-mem.db, project/SESSION-STATE.md, project/memory/new.md"
    kept = _complete(engine, other)
    assert kept.kept and kept.warnings == [f"Changed here since then, and not exported yet: {told}."]
    replaced = _complete(engine, other, snapshot=str(head))
    assert replaced.warnings == [
        f"What was here and in no snapshot ({told}) is kept as {replaced.saved_first}, beside the head."
    ]
    _same(home, other)
    assert _complete(engine, other).warnings == []


def test_nothing_that_must_stay_behind_arrives(engine: Engine, home: Path, tmp_path: Path) -> None:
    receipt = _export(engine, home)
    other = empty_home(tmp_path / "other")
    _complete(engine, other)
    assert [name for name in (*NEVER, *SECRETS) if (other / ".claude-mem" / name).exists()] == []
    assert {name.split("/")[1] for name in (row.path for row in receipt.skipped) if name.startswith("claude-mem/")} == {
        name.split("/")[0] for name in (*NEVER, *SECRETS)
    }
    for name in ("src", "tasks/scratch.txt", "memory/.env", "memory/.#2026-11-15.md", "memory/2026-11-15.md.swp"):
        assert not (other / name).exists()
    packed = b"".join(path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file())
    assert b"hunter2" not in packed
    held = b"".join(path.read_bytes() for path in other.rglob("*") if path.is_file())
    assert b"hunter2" not in held


def test_a_restore_over_a_restore_changes_nothing(engine: Engine, home: Path, tmp_path: Path) -> None:
    _export(engine, home)
    other = empty_home(tmp_path / "other")
    head = _complete(engine, other).snapshot
    first = without_cache(tree(other))
    for asked in ({}, {"snapshot": str(head)}, {"discard": True}):
        _complete(engine, other, **asked)
        assert without_cache(tree(other)) == first
        _same(home, other)


def test_an_export_of_what_was_restored_is_unchanged(engine: Engine, home: Path, tmp_path: Path) -> None:
    _export(engine, home)
    other = empty_home(tmp_path / "other")
    _complete(engine, other)
    for _ in range(2):
        receipt = asyncio.run(export(engine, WatchedSandbox(other), ExportRequest(memory=MEMORY)))
        assert (receipt.outcome, receipt.packed_bytes, receipt.round_trips) == ("unchanged", 0, 1)


def test_a_sparse_file_comes_back_with_its_holes(engine: Engine, home: Path, tmp_path: Path) -> None:
    _export(engine, home)
    other = empty_home(tmp_path / "other")
    _complete(engine, other)
    came = (other / "memory/sparse.bin").stat()
    assert came.st_size > 4 << 20
    assert came.st_blocks * 512 < 2 << 20


def test_the_old_memory_is_gone_and_nothing_else(engine: Engine, home: Path, tmp_path: Path) -> None:
    _export(engine, home)
    other = three_tier_home(claude_mem_home(tmp_path / "other", rows=7))
    leftovers = [".claude-mem/corpora/old/of before.json", "memory/yesterday/old.md", ".claude-mem/modes/old.json"]
    leftovers.append(".claude-mem/nobody knows.json")
    strangers = ["notes.txt", ".ssh/id_ed25519", "src/mine.py", "memory/x.lock"]
    strangers += ["memory/id_ed25519"]
    for name in (*leftovers, *strangers):
        write(other / name, b"of " + name.encode())
    (other / ".claude-mem/corpora/old link").symlink_to("old")
    mine = tree(other)
    _complete(engine, other)
    _same_memory = memory_tree(home / ".claude-mem")
    assert memory_tree(other / ".claude-mem") == _same_memory
    now = tree(other)
    assert [name for name in (*leftovers, ".claude-mem/corpora/old link") if name.encode() in now] == []
    assert b"memory/yesterday" not in now and b".claude-mem/corpora/old" not in now
    for name in (*strangers, *(f".claude-mem/{name}" for name in (*NEVER, *SECRETS))):
        assert now[name.encode()] == mine[name.encode()], f"{name} was not ours to touch"


def test_seed_never_overwrites(engine: Engine, home: Path, tmp_path: Path) -> None:
    _export(engine, home)
    other = claude_mem_home(tmp_path / "other", rows=7)
    write(other / "MEMORY.md", b"the user's own", 0o600)
    (other / "tasks").mkdir()
    (other / "tasks/todo.md").symlink_to("nowhere")
    mine = without_cache(tree(other))
    receipt = _complete(engine, other, mode="seed")
    now = without_cache(tree(other))
    assert {name: now.get(name) for name in mine} == mine
    assert titles(other) == [f"observed {number}" for number in range(7)]
    assert now[b"SESSION-STATE.md"] == tree(home)[b"SESSION-STATE.md"], "what was not there arrived"
    assert {"project/MEMORY.md", "claude-mem/claude-mem.db", "project/tasks/todo.md"} <= {
        row.path for row in receipt.skipped
    }


def test_seed_into_an_empty_home_brings_everything(engine: Engine, home: Path, tmp_path: Path) -> None:
    _export(engine, home)
    other = empty_home(tmp_path / "other")
    assert _complete(engine, other, mode="seed").skipped == []
    _same(home, other)


def test_seed_keeps_a_database_and_its_log_together(engine: Engine, home: Path, tmp_path: Path) -> None:
    """A database that stays must keep its -wal, in which its newest rows live."""
    _export(engine, home)
    other = claude_mem_home(tmp_path / "other", rows=7)
    _crash_leaving_a_log(other)
    _complete(engine, other, mode="seed")
    assert "only in the log" in _titles_with_log(other)


@pytest.mark.parametrize("tail", ["-wal", "-shm", "-journal"])
def test_the_log_of_an_old_database_does_not_survive_it(tail: str, engine: Engine, home: Path, tmp_path: Path) -> None:
    _export(engine, home)
    other = empty_home(tmp_path / "other")
    write(other / f".claude-mem/claude-mem.db{tail}", b"of a database that is long gone")
    _complete(engine, other)
    assert not (other / f".claude-mem/claude-mem.db{tail}").exists()
    assert titles(other) == titles(home)


def test_a_real_log_of_the_old_database_does_not_spoil_the_new_one(engine: Engine, home: Path, tmp_path: Path) -> None:
    _export(engine, home)
    other = claude_mem_home(tmp_path / "other", rows=300)
    _crash_leaving_a_log(other)
    _complete(engine, other)
    assert _titles_with_log(other) == titles(home)


def test_a_text_that_is_only_called_like_a_log_comes_back(engine: Engine, home: Path, tmp_path: Path) -> None:
    texts = {"plan": b"a text", "plan-journal": b"day one", "deep-journal": b"beside a folder"}
    for name, text in texts.items():
        write(home / ".claude-mem/corpora" / name, text)
    _export(engine, home)
    other = empty_home(tmp_path / "other")
    for _ in range(2):
        _complete(engine, other)
        assert {name: (other / ".claude-mem/corpora" / name).read_bytes() for name in texts} == texts


def _crash_leaving_a_log(home: Path) -> None:
    """Commit a row that only the -wal holds, and leave as a killed worker does."""
    if (pid := os.fork()) == 0:
        connection = sqlite3.connect(home / ".claude-mem/claude-mem.db")
        connection.execute("INSERT INTO observations(title, narrative) VALUES ('only in the log', 'alpha')")
        connection.commit()
        os._exit(0)
    os.waitpid(pid, 0)
    assert (home / ".claude-mem/claude-mem.db-wal").stat().st_size > 0


def _titles_with_log(home: Path) -> list[str]:
    connection = sqlite3.connect(home / ".claude-mem/claude-mem.db")
    try:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return [row[0] for row in connection.execute("SELECT title FROM observations ORDER BY id")]
    finally:
        connection.close()


def test_settings_keep_what_belongs_to_the_machine_they_are_on(engine: Engine, home: Path, tmp_path: Path) -> None:
    _export(engine, home)
    fresh = empty_home(tmp_path / "fresh")
    _complete(engine, fresh)
    assert json.loads((fresh / ".claude-mem/settings.json").read_text()) == KEPT_KEYS
    other = empty_home(tmp_path / "other")
    own = {**MACHINE_KEYS, "CLAUDE_MEM_WORKER_PORT": "40000", "CLAUDE_MEM_GEMINI_API_KEY": "its own"}
    write(other / ".claude-mem/settings.json", json.dumps({**own, "CLAUDE_MEM_MODEL": "large", "OLD": "1"}).encode())
    _complete(engine, other)
    assert json.loads((other / ".claude-mem/settings.json").read_text()) == {**KEPT_KEYS, **own}
    assert (other / ".claude-mem/settings.json").stat().st_mode & 0o777 == 0o600
    assert not SECRET_KEYS.items() & json.loads((fresh / ".claude-mem/settings.json").read_text()).items()


def test_a_file_from_before_1970_travels(engine: Engine, home: Path, tmp_path: Path) -> None:
    os.utime(home / "MEMORY.md", ns=(-LONG_AGO, -LONG_AGO))
    _export(engine, home)
    other = empty_home(tmp_path / "other")
    _complete(engine, other)
    assert (other / "MEMORY.md").stat().st_mtime_ns == -LONG_AGO


def test_a_delta_restores_to_the_same_bytes_as_a_full_export(engine: Engine, home: Path, tmp_path: Path) -> None:
    _export(engine, home)
    observe(home, 20, "later")
    (home / "memory/blocks.bin").write_bytes(random.Random(8).randbytes(70_000) + random.Random(7).randbytes(300_000))
    (home / "memory/private.md").chmod(0o644)
    (home / "memory/link.md").unlink()
    (home / "memory/link.md").symlink_to("private.md")
    (home / "memory/closed").chmod(0o755)
    (home / "memory/-rf").unlink()
    shutil.rmtree(home / "memory/sub")
    write(home / "memory/sub", b"a file where a folder was")
    assert _export(engine, home).kind == "delta"
    other = empty_home(tmp_path / "other")
    _complete(engine, other)
    _same(home, other)


def _tampered(store: Path) -> None:
    """Change a file in the only pack and make sizes, hashes and seals fit again: only the file's own digest knows."""
    (manifest_path,) = (store / "memories" / MEMORY / "snapshots").glob("[0-9]*.json")
    snapshot = manifest_path.stem
    manifest = Manifest.decode(manifest_path.read_bytes(), MEMORY, snapshot)
    (pack,) = manifest.packs
    place = store / "memories" / MEMORY / f"packs/{pack.id}.tar.{pack.codec}"
    with place.open("rb") as packed, decompress(packed, pack.codec) as plain:
        data = _repacked(plain.read())
    place.with_suffix(".gz").write_bytes(data)
    forged = replace(pack, bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), codec="gz")
    manifest_path.write_bytes(replace(manifest, packs=[forged]).encode())


def _repacked(data: bytes) -> bytes:
    out = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(data), mode="r:", errors="surrogateescape") as old,
        tarfile.open(fileobj=out, mode="w", errors="surrogateescape") as new,
    ):
        for member in old:
            contents = old.extractfile(member) if member.isreg() else None
            text = contents.read() if contents else b""
            if member.name.endswith("SESSION-STATE.md"):
                text = text.replace(b"half", b"HALF")
            new.addfile(member, io.BytesIO(text) if contents else None)
    return gzip.compress(out.getvalue())


def test_a_hash_that_differs_in_staging_leaves_the_target_as_it_was(tmp_path: Path) -> None:
    store = tmp_path / "store"
    _export(engine_at(store), three_tier_home(tmp_path / "home"))
    _tampered(store)
    other = three_tier_home(claude_mem_home(tmp_path / "other", rows=7))
    before = without_cache(tree(other))
    ran = run_cli("restore", MEMORY, "--sandbox", f"local:{other}", store=store)
    assert (ran.code, ran.document["outcome"], ran.error) == (4, "incomplete", "incomplete")
    assert "SESSION-STATE.md" in ran.document["reason"]["message"]
    assert without_cache(tree(other)) == before


@pytest.mark.parametrize("blocked", [".claude-mem", "memory", "memory/2026-11-10.md", ".claude-mem/claude-mem.db"])
def test_what_is_in_the_way_stops_a_restore_before_anything_changed(blocked: str, home: Path, tmp_path: Path) -> None:
    """A file where a folder must be, or a folder where a file must be, that is not memory."""
    _export(engine_at(tmp_path / "store"), home)
    other = empty_home(tmp_path / "other")
    write(other / "SESSION-STATE.md", b"the one before")
    if blocked.endswith((".md", ".db")):
        write(other / blocked / "inside.lock", b"not memory")
    else:
        write(other / blocked, b"a file")
    before = without_cache(tree(other))
    ran = run_cli("restore", MEMORY, "--sandbox", f"local:{other}", store=tmp_path / "store")
    assert (ran.code, ran.document["outcome"], ran.error) == (4, "incomplete", "in-the-way")
    assert without_cache(tree(other)) == before


def test_a_link_out_of_the_home_is_not_written_through(engine: Engine, home: Path, tmp_path: Path) -> None:
    _export(engine, home)
    outside = empty_home(tmp_path / "outside")
    write(outside / "2026-11-10.md", b"not the agent's")
    other = empty_home(tmp_path / "other")
    (other / "memory").symlink_to(outside)
    before = tree(outside)
    _restore(engine, other)
    assert tree(outside) == before


def test_projects_go_where_the_caller_says(engine: Engine, tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    for name in ("app", "lib"):
        three_tier_home(home / name)
        write(home / name / "MEMORY.md", f"of {name}".encode())
    _export(engine, home, projects=("app", "~/lib"))
    other = empty_home(tmp_path / "other")
    first, second = tmp_path / "work/one", other / "two"
    _complete(engine, other, projects=(str(first), "two"))
    assert project_tree(first) == project_tree(home / "app")
    assert project_tree(second) == project_tree(home / "lib")
    assert sorted(path.name for path in other.iterdir()) == [".cache", "two"]


def test_without_projects_they_go_where_they_were_in_the_home(engine: Engine, tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    three_tier_home(home / "code/app")
    _export(engine, home, projects=("code/app",))
    other = empty_home(tmp_path / "other")
    _complete(engine, other)
    assert project_tree(other / "code/app") == project_tree(home / "code/app")


def test_two_projects_are_never_laid_over_each_other(engine: Engine, tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    for name in ("app", "lib"):
        three_tier_home(home / name)
    _export(engine, home, projects=("app", "lib"))
    other = empty_home(tmp_path / "other")
    write(home / "lib/MEMORY.md", b"of lib")
    _export(engine, home, projects=("app", "lib"))
    _restore(engine, other, projects=("lib", "lib/../lib"))
    for name in ("app", "lib"):
        assert project_tree(other / name) == project_tree(home / name)


def test_a_time_gets_what_was_the_head_then(engine: Engine, tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"first")
    first = _export(engine, home)
    time.sleep(1.1)
    between = datetime.now(UTC)
    time.sleep(1.1)
    write(home / "MEMORY.md", b"second")
    _export(engine, home)
    other = empty_home(tmp_path / "other")
    for moment in (f"@{between.isoformat()}", f"@{between:%Y-%m-%dT%H:%M:%SZ}"):
        assert _complete(engine, other, snapshot=moment).snapshot == first.snapshot
        assert (other / "MEMORY.md").read_bytes() == b"first"
    _complete(engine, other, snapshot=f"@{datetime.now(UTC).isoformat()}")
    assert (other / "MEMORY.md").read_bytes() == b"second"
    ran = run_cli(
        *("restore", MEMORY, "--sandbox", f"local:{other}", "--snapshot", "@2001-01-01T00:00Z"),
        store=tmp_path / "store",
    )
    assert (ran.code, ran.error) == (1, "snapshot-not-found")


def test_a_first_start_is_no_error_and_touches_nothing(tmp_path: Path) -> None:
    other = three_tier_home(tmp_path / "other")
    before = tree(other)
    ran = run_cli("restore", "never-exported", "--sandbox", f"local:{other}", store=tmp_path / "store")
    assert (ran.code, ran.document["outcome"], ran.document["snapshot"]) == (0, "empty", None)
    assert tree(other) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can work in another user's home")
def test_root_gives_what_it_restores_to_the_owner_of_the_home(engine: Engine, home: Path, tmp_path: Path) -> None:
    _export(engine, home)
    other = empty_home(tmp_path / "other")
    os.chown(other, 12345, 23456)
    _complete(engine, other)
    owners = {}
    for folder, folders, files in os.walk(os.fsencode(other)):
        for name in (*folders, *files):
            status = os.lstat(os.path.join(folder, name))
            owners[os.path.join(folder, name)] = (status.st_uid, status.st_gid)
    assert {place: owner for place, owner in owners.items() if owner != (12345, 23456)} == {}
    assert len(owners) > 60


class _KilledSandbox(WatchedSandbox):
    """Kills the program inside at a moment of its choice, as a sandbox that is taken away does."""

    def __init__(self, home: Path, moment: Callable[[Path], float]) -> None:
        super().__init__(home)
        self.moment = moment
        self.killed = False

    async def run(self, command: str, **how: Any) -> CommandResult:
        if request_in(command, how.get("environment"))["do"] == "tidy":
            return await super().run(command, **how)
        running = asyncio.create_task(super().run(command, **how))
        await asyncio.to_thread(self._kill, running)
        return await running

    def _kill(self, running: asyncio.Task[CommandResult]) -> None:
        time.sleep(self.moment(self.home))
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and not running.done():
                try:
                    inside = b"-I\0-S\0-c\0" in (entry / "cmdline").read_bytes()
                    if inside and os.readlink(entry / "cwd") == str(self.home):
                        os.kill(int(entry.name), signal.SIGKILL)
                        self.killed = True
                except OSError:
                    continue


def _while_swapping(home: Path, chance: random.Random) -> float:
    """Wait until a restore has begun to move files, and then a moment."""
    journal = home / f".cache/memory-sidecar/{MEMORY}/journal"
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if '"swapping"' in journal.read_text():
                return chance.uniform(0, 0.006)
        except OSError:
            pass
        time.sleep(0.0002)
    return 0


def _files(home: Path) -> Tree:
    """A home's memory without its folders: one that is empty now is no remains of another memory."""
    return {name: about for name, about in memory_tree(home / ".claude-mem").items() if about[0] != "dir"}


@pytest.mark.parametrize("when", [pytest.param("at any moment", marks=pytest.mark.slow), "while swapping"])
def test_a_restore_that_is_killed_leaves_the_old_memory_or_the_new_one_after_the_next_run(
    when: str, engine: Engine, tmp_path: Path
) -> None:
    chance = random.Random(when)
    home = claude_mem_home(empty_home(tmp_path / "home") / "inner", rows=30)
    for number in range(150):
        write(home / f".claude-mem/corpora/many/{number}.json", b"old %d" % number)
    wanted: dict[str, Tree] = {}
    old = _export(engine, home)
    wanted[str(old.snapshot)] = _files(home)
    observe(home, 30, "newer")
    for number in range(0, 200, 2):
        write(home / f".claude-mem/corpora/many/{number}.json", b"new %d" % number, 0o600)
    for number in range(1, 100, 3):
        (home / f".claude-mem/corpora/many/{number}.json").unlink(missing_ok=True)
    shutil.rmtree(home / ".claude-mem/corpora/deep")
    new = _export(engine, home)
    wanted[str(new.snapshot)] = _files(home)
    other = empty_home(tmp_path / "other")
    _complete(engine, other)
    killed = 0
    for round_number in range(4):
        snapshot = str((old, new)[round_number % 2].snapshot)
        if when == "while swapping":
            sandbox = _KilledSandbox(other, lambda place: _while_swapping(place, chance))
        else:
            sandbox = _KilledSandbox(other, lambda place: chance.uniform(0.02, 0.25))
        receipt = asyncio.run(restore(engine, sandbox, RestoreRequest(memory=MEMORY, snapshot=snapshot)))
        killed += sandbox.killed
        assert receipt.outcome == ("complete" if not sandbox.killed else receipt.outcome)
        # The next run of any kind finds what was left, and says so.
        asyncio.run(export(engine, WatchedSandbox(other), ExportRequest(memory=MEMORY)))
        held = _files(other)
        assert held in wanted.values(), f"round {round_number}: neither the old memory nor the new one"
        if receipt.outcome == "complete":
            assert held == wanted[snapshot], "what was acknowledged is there"
        assert [path for path in other.iterdir() if path.name.startswith(".memory-sidecar-")] == []
    assert killed >= 1, "hardly anything was killed: this test has become too easy"
    _complete(engine, other, snapshot=str(new.snapshot))
    assert _files(other) == wanted[str(new.snapshot)]
