"""A sandbox without python3: sh and tar do it, and the receipt says what that cannot guarantee."""

from __future__ import annotations

import io
import os
import shutil
import sqlite3
import tarfile
from pathlib import Path

import pytest

from adapters.stores.urls import open_store
from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.errors import ProgramFailed
from sidecar.receipts import ExportOutcome, RestoreOutcome
from sidecar.repository import Repository
from tests.parts.homes import OwnMachine

TOOLS = (
    *(
        "sh",
        "cat",
        "cp",
        "cut",
        "dirname",
        "env",
        "find",
        "gzip",
        "head",
        "ls",
        "mkdir",
        "mktemp",
        "mv",
        "printf",
        "rm",
        "sed",
    ),
    *("sha256sum", "sort", "sqlite3", "tail", "tar", "tr", "wc"),
)


class BareSandbox(OwnMachine):
    """A local sandbox that has only the tools named, and no Python."""

    def __init__(self, home: Path, tools: Path) -> None:
        super().__init__(home)
        self._environment = {"HOME": str(home), "PATH": str(tools)}


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in TOOLS:
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    return folder


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(repository=Repository(open_store(f"file:{tmp_path / 'store'}")))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    data = home / ".claude-mem"
    (data / "corpora" / "deep er").mkdir(parents=True)
    (data / "logs").mkdir()
    (data / "logs" / "x.log").write_text("never")
    (data / ".env").write_text("SECRET=1")
    (data / "settings.json").write_text('{"ANTHROPIC_API_KEY": "sk-secret", "MODE": "code"}')
    (data / "corpora" / "deep er" / "ünï 🦊.json").write_text("{}")
    (data / "corpora" / "link").symlink_to("deep er")
    with sqlite3.connect(data / "claude-mem.db") as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE observations (id INTEGER PRIMARY KEY, text TEXT)")
        database.executemany("INSERT INTO observations (text) VALUES (?)", [(f"row {n}",) for n in range(500)])
    database.close()
    (home / "memory").mkdir()
    (home / "MEMORY.md").write_text("long term\n")
    (home / "memory" / "2026-11-16.md").write_text("today\n")
    os.chmod(home / "MEMORY.md", 0o600)
    (home / "unrelated.txt").write_text("stays")
    return home


def rows(home: Path) -> int:
    database = sqlite3.connect(f"file:{home / '.claude-mem' / 'claude-mem.db'}?mode=ro&immutable=1", uri=True)
    try:
        return int(database.execute("SELECT count(*) FROM observations").fetchone()[0])
    finally:
        database.close()


@pytest.mark.parametrize("with_sqlite", [True, False])
async def test_memory_leaves_and_arrives_without_python(
    engine: Engine, home: Path, tools: Path, tmp_path: Path, with_sqlite: bool
) -> None:
    if not with_sqlite:
        (tools / "sqlite3").unlink(missing_ok=True)
    elif not (tools / "sqlite3").exists():
        pytest.skip("the sqlite3 program is not installed")
    receipt = await export(engine, BareSandbox(home, tools), ExportRequest(memory="bare"))
    assert receipt.outcome is ExportOutcome.COMMITTED, receipt
    assert any("no usable python3" in warning for warning in receipt.warnings)
    assert any("copied as a file" in warning for warning in receipt.warnings) is not with_sqlite
    assert [row.check for row in receipt.databases] == ["ok"]
    assert not list((home / ".cache" / "memory-sidecar").glob("work-*"))

    target = tmp_path / "target"
    (target / ".claude-mem").mkdir(parents=True)
    (target / ".claude-mem" / "claude-mem.db-wal").write_text("left over")
    (target / "memory").mkdir()
    (target / "memory" / "old.md").write_text("of an older memory")
    (target / "notes.txt").write_text("not memory")
    restored = await restore(engine, BareSandbox(target, tools), RestoreRequest(memory="bare"))
    assert restored.outcome is RestoreOutcome.COMPLETE, restored
    assert rows(target) == 500
    assert not (target / ".claude-mem" / "claude-mem.db-wal").exists()
    assert not (target / "memory" / "old.md").exists()
    assert (target / "notes.txt").read_text() == "not memory"
    assert (target / "memory" / "2026-11-16.md").read_text() == "today\n"
    assert (target / "MEMORY.md").stat().st_mode & 0o777 == 0o600
    assert (target / "MEMORY.md").stat().st_mtime_ns // 10**9 == (home / "MEMORY.md").stat().st_mtime_ns // 10**9
    assert os.readlink(target / ".claude-mem" / "corpora" / "link") == "deep er"
    assert (target / ".claude-mem" / "corpora" / "deep er" / "ünï 🦊.json").read_text() == "{}"
    for unwanted in ("logs", ".env", "settings.json"):
        assert not (target / ".claude-mem" / unwanted).exists()

    (target / "MEMORY.md").write_text("long term\nand more\n")
    again = await export(engine, BareSandbox(target, tools), ExportRequest(memory="bare"))
    assert (again.outcome, again.parent) == (ExportOutcome.COMMITTED, receipt.snapshot)


async def test_a_sandbox_that_was_not_restored_diverges_without_python_too(
    engine: Engine, home: Path, tools: Path, tmp_path: Path
) -> None:
    await export(engine, BareSandbox(home, tools), ExportRequest(memory="bare"))
    other = tmp_path / "other"
    (other / "memory").mkdir(parents=True)
    (other / ".claude-mem").mkdir()
    shutil.copy(home / ".claude-mem" / "claude-mem.db", other / ".claude-mem")
    (other / "memory" / "a.md").write_text("something else")
    receipt = await export(engine, BareSandbox(other, tools), ExportRequest(memory="bare"))
    assert receipt.outcome is ExportOutcome.DIVERGED


async def test_seed_leaves_what_is_there_without_python(
    engine: Engine, home: Path, tools: Path, tmp_path: Path
) -> None:
    await export(engine, BareSandbox(home, tools), ExportRequest(memory="bare"))
    target = tmp_path / "target"
    target.mkdir()
    (target / "MEMORY.md").write_text("mine")
    receipt = await restore(engine, BareSandbox(target, tools), RestoreRequest(memory="bare", mode="seed"))
    assert receipt.outcome is RestoreOutcome.COMPLETE
    assert (target / "MEMORY.md").read_text() == "mine"
    assert rows(target) == 500


async def test_two_layouts_of_one_project_leave_without_python(engine: Engine, tools: Path, tmp_path: Path) -> None:
    home = tmp_path / "two"
    for name in ("app/MEMORY.md", "app/.cm/CONTINUITY.md"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(name)
    receipt = await export(engine, BareSandbox(home, tools), ExportRequest(memory="m", projects=("app",)))
    assert (receipt.outcome, receipt.files) == (ExportOutcome.COMMITTED, 2)


@pytest.mark.parametrize(
    "broken",
    [b"#!/not/there\n", b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xff\x7f" + bytes(60)],
    ids=["without its interpreter", "for another machine"],
)
async def test_a_python_that_cannot_be_executed_is_as_none(
    engine: Engine, home: Path, tools: Path, tmp_path: Path, broken: bytes
) -> None:
    for name in ("python3", "python"):
        (tools / name).write_bytes(broken)
        (tools / name).chmod(0o755)
    exported = await export(engine, BareSandbox(home, tools), ExportRequest(memory="bare"))
    assert exported.outcome is ExportOutcome.COMMITTED
    assert any("python" in warning.lower() for warning in exported.warnings)
    target = tmp_path / "target"
    target.mkdir()
    restored = await restore(engine, BareSandbox(target, tools), RestoreRequest(memory="bare"))
    assert restored.outcome is RestoreOutcome.COMPLETE
    assert rows(target) == rows(home)


async def test_a_python_that_ends_with_126_by_itself_is_no_reason_for_tar(
    engine: Engine, home: Path, tools: Path
) -> None:
    (tools / "python3").write_text('#!/bin/sh\n[ "$2" = "" ] || exit 126\n')
    (tools / "python3").chmod(0o755)
    with pytest.raises(ProgramFailed, match="exit code 126"):
        await export(engine, BareSandbox(home, tools), ExportRequest(memory="bare"))


SIMPLE_TAR = """#!/bin/sh
for word; do [ "$word" != --null ] || exit 64; done
exec {tar} "$@"
"""
"""A tar that knows no lists with NUL between the names."""


@pytest.mark.parametrize("simple", [False, True])
async def test_a_name_with_a_newline_leaves_or_is_listed(
    engine: Engine, tools: Path, tmp_path: Path, simple: bool
) -> None:
    home = tmp_path / "odd"
    (home / "memory").mkdir(parents=True)
    (home / "memory" / "a\nb.md").write_text("odd")
    (home / "memory" / "c.md").write_text("plain")
    if not simple:
        (home / "memory" / "back\\slash.md").write_text("odd")
    else:
        (tools / "tar").unlink()
        (tools / "tar").write_text(SIMPLE_TAR.format(tar=shutil.which("tar")))
        (tools / "tar").chmod(0o755)
    receipt = await export(engine, BareSandbox(home, tools), ExportRequest(memory="m"))
    assert (receipt.outcome, receipt.files) == (ExportOutcome.COMMITTED, 1 if simple else 3)
    reasons = [skip.reason for skip in receipt.skipped if skip.path == "project/memory/a b.md"]
    assert reasons == (["its name has a newline, which the tar of this sandbox cannot take"] if simple else [])


async def test_secret_files_and_locks_never_leave_and_are_listed(engine: Engine, tools: Path, tmp_path: Path) -> None:
    home = tmp_path / "secret"
    secret = ["memory/id_ed25519", "memory/.netrc", "memory/deep/KEYS.P12", "memory/.env.local", "memory/.env"]
    never = ["memory/x.lock/pid", "memory/\udcff\x01.swp"]
    for name in [*secret, *never, "memory/kept.md"]:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("hunter2")
    sent: list[bytes] = []

    class Listening(BareSandbox):
        async def download(self, path: str):  # type: ignore[no-untyped-def]
            sent.append(Path(path).read_bytes())
            async for chunk in super().download(path):
                yield chunk

    receipt = await export(engine, Listening(home, tools), ExportRequest(memory="m"))
    with tarfile.open(fileobj=io.BytesIO(sent[0])) as tar:
        assert [member.name for member in tar if member.isfile()] == ["./project/memory/kept.md"]
    assert receipt.files == 1
    listed = {skip.path: skip.reason for skip in receipt.skipped}
    assert {f"project/{name}": listed.get(f"project/{name}") for name in secret} == {
        f"project/{name}": "secret" for name in secret
    }
    assert listed["project/memory/x.lock"] == "never exported"
    assert sum(reason == "never exported" for reason in listed.values()) == 2
