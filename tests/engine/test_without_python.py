"""A sandbox without python3: sh and tar do it, and the receipt says what that cannot guarantee."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sqlite3
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from adapters.stores.urls import open_store
from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.errors import ProgramFailed
from sidecar.host.files import open_spool
from sidecar.policy.limits import Guards
from sidecar.receipts import ExportOutcome, RestoreOutcome
from sidecar.store.fetch import fetch_entries
from sidecar.store.repository import Repository
from sidecar.wiring import open_sandbox
from tests.parts.bare import BUSYBOX, KINDS, NOBODY, Open, as_nobody, busybox_tools, opener
from tests.parts.homes import OwnMachine, Tree, three_tier_home, tree, write
from tests.parts.memories import BareSandbox, Name, Provider, shell_tools


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    return shell_tools(tmp_path / "tools")


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(open_sandbox=open_sandbox, repository=Repository(open_store(f"file:{tmp_path / 'store'}")))


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


async def test_a_python_that_ends_with_126_by_itself_is_no_reason_for_tar(
    engine: Engine, home: Path, tools: Path
) -> None:
    (tools / "python3").write_text('#!/bin/sh\n[ "$1" = -E ] || exit 126\n')
    (tools / "python3").chmod(0o755)
    with pytest.raises(ProgramFailed, match="exit code 126"):
        await export(engine, BareSandbox(home, tools), ExportRequest(memory="bare"))


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


@pytest.fixture(params=["no python", "busybox"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """What opens a home as a sandbox of one kind that has no usable Python."""
    return opener(request.param, tmp_path / "kind")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_memory_leaves_and_arrives_whatever_is_wrong_with_python(
    engine: Engine, tmp_path: Path, kind: str
) -> None:
    opened, home, target = opener(kind, tmp_path / "kind"), tmp_path / "plain", tmp_path / "target"
    write(home / "MEMORY.md", b"# Long term\n")
    target.mkdir()
    sent = await export(engine, opened(home), ExportRequest(memory="m"))
    got = await restore(engine, opened(target), RestoreRequest(memory="m"))
    assert (sent.outcome, got.outcome) == (ExportOutcome.COMMITTED, RestoreOutcome.COMPLETE)
    assert any("no usable python3" in warning for warning in [*sent.warnings, *got.warnings])
    assert (target / "MEMORY.md").read_bytes() == b"# Long term\n"


def odd_home(home: Path) -> Path:
    """A home with all that travels badly: names, links of every kind, modes, empty folders."""
    three_tier_home(home)
    memory = home / "memory"
    write(memory / "back\\slash\\n.md", b"backslash")
    write(memory / "deep\nfolder/-x/ends with\n", b"newlines")
    write(memory / ("long " * 30) / ("name " * 30), b"long")
    write(memory / "two names.md", b"one file")
    os.link(memory / "two names.md", memory / "sub/second name.md")
    (memory / "empty folder/deeper").mkdir()
    (memory / "empty folder/deeper").chmod(0o750)
    (memory / "inward.md").symlink_to(memory / "with blank.md")
    return home


def outward(home: Path) -> dict[str, str]:
    """Put what cannot be exported into an odd home. Return what a receipt has to say of it."""
    outside = home.parent / "outside"
    write(outside / "passwd", b"not memory")
    (home / "memory/absolute.md").symlink_to(outside / "passwd")
    (home / "memory/sub/relative.md").symlink_to("../../../outside/passwd")
    (home / "tasks/todo.md").unlink()
    (home / "tasks/lessons.md").unlink()
    (home / "tasks/scratch.txt").unlink()
    (home / "tasks").rmdir()
    (home / "tasks").symlink_to(outside)
    os.mkfifo(home / "memory/pipe.md")
    return {
        "project/memory/absolute.md": "link leads out of the memory",
        "project/memory/sub/relative.md": "link leads out of the memory",
        "project/tasks": "a link, not a folder",
        "project/memory/pipe.md": "not a file, folder or link",
    }


def by_the_second(found: Tree) -> Tree:
    """tar has no more than that of a file's time."""
    return {name: (about[0], about[1], about[2] // 10**9, about[3]) for name, about in found.items()}


def memory_in(home: Path) -> Tree:
    """The memory of an odd home, without what must not leave and the links that lead out."""
    found = {name: about for name, about in tree(home).items() if name.startswith((b"memory/", b"MEMORY", b"SESSION"))}
    ours = {b"memory/absolute.md", b"memory/sub/relative.md", b"memory/pipe.md", b"memory/inward.md"}
    stays = (b".#2026-11-15.md", b".swp", b".env")
    return by_the_second(
        {name: about for name, about in found.items() if name not in ours and not name.endswith(stays)}
    )


async def test_what_can_be_exported_is_and_comes_back_and_the_rest_is_listed(
    engine: Engine, opened: Open, tmp_path: Path
) -> None:
    home = odd_home(tmp_path / "odd home")
    told = outward(home)
    sent = await export(engine, opened(home), ExportRequest(memory="m", projects=("~",)))
    assert sent.outcome is ExportOutcome.COMMITTED, sent
    assert any("no usable python3" in warning for warning in sent.warnings)
    listed = {row.path: row.reason for row in sent.skipped}
    assert {path: listed.get(path) for path in told} == told

    other = tmp_path / "other home"
    write(other / "memory/old/of another memory.md", b"old")
    got = await restore(engine, opened(other), RestoreRequest(memory="m", projects=("~",), discard=True))
    assert got.outcome is RestoreOutcome.COMPLETE, got
    assert memory_in(other) == memory_in(home)
    assert os.readlink(other / "memory/inward.md") == "with blank.md"
    assert not os.path.samefile(other / "memory/two names.md", other / "memory/sub/second name.md")
    assert (got.files, got.bytes, got.skipped) == (sent.files, sent.bytes, [])

    again = await export(engine, opened(other), ExportRequest(memory="m", projects=("~",)))
    assert (again.outcome, again.files) == (ExportOutcome.UNCHANGED, sent.files)


async def test_the_same_is_exported_counted_and_listed_as_with_python(
    engine: Engine, opened: Open, tmp_path: Path
) -> None:
    home = odd_home(tmp_path / "odd home")
    outward(home)
    asked = {"projects": ("~",)}
    here = await export(engine, OwnMachine(home), ExportRequest(memory="with", **asked))  # type: ignore[arg-type]
    there = await export(engine, opened(home), ExportRequest(memory="without", **asked))  # type: ignore[arg-type]
    assert (there.files, there.bytes) == (here.files, here.bytes)
    entries = []
    for receipt in (here, there):
        async with open_spool() as scratch:
            manifest = await engine.repository.manifest(receipt.memory, receipt.snapshot or "")
            found, _, _ = await fetch_entries(engine.repository.store, manifest, scratch)
        entries.append({path: (entry.type, entry.mode, entry.target, entry.digest) for path, entry in found.items()})
    assert entries[1] == entries[0]
    listed = [{(row.path.rstrip("/"), row.reason) for row in receipt.skipped} for receipt in (here, there)]
    assert listed[1] == listed[0]

    got = []
    for number, sandbox in enumerate([OwnMachine, opened]):
        (tmp_path / str(number)).mkdir()
        got.append(await restore(engine, sandbox(tmp_path / str(number)), RestoreRequest(memory="with", **asked)))  # type: ignore[arg-type]
    assert (got[1].files, got[1].bytes) == (got[0].files, got[0].bytes)
    assert memory_in(tmp_path / "1") == memory_in(tmp_path / "0")


FAILING_TAR = """#!/bin/sh
case " $* " in *" - ./"*) echo "tar: the disk is on fire" >&2; exit 1;; esac
exec {busybox} tar "$@"
"""
"""A tar that cannot pack files."""
LATE_TAR = """#!/bin/sh
case " $* " in *" - ./"*) rm -f ./memory/going.md;; esac
exec {tar} "$@"
"""
"""A tar before which a file is gone that was there a moment ago."""


async def test_an_error_says_why_tar_failed_and_not_only_that_its_input_ended(engine: Engine, tmp_path: Path) -> None:
    opened, home = opener("busybox", tmp_path / "kind"), tmp_path / "home"
    write(home / "memory/a.md", b"a")
    (tmp_path / "kind/tar").unlink()
    write(tmp_path / "kind/tar", FAILING_TAR.format(busybox=BUSYBOX).encode(), 0o755)
    with pytest.raises(ProgramFailed, match="the disk is on fire") as failed:
        await export(engine, opened(home), ExportRequest(memory="m"))
    assert failed.value.code == "tar-failed"


async def test_an_error_says_why_a_memory_could_not_be_unpacked(engine: Engine, opened: Open, tmp_path: Path) -> None:
    home, target = tmp_path / "home", tmp_path / "target"
    write(home / "memory/a.md", b"a")
    target.mkdir()
    await export(engine, opened(home), ExportRequest(memory="m"))
    (tmp_path / "kind/tar").unlink()
    write(tmp_path / "kind/tar", b"#!/bin/sh\necho 'tar: the disk is on fire' >&2\nexit 1\n", 0o755)
    receipt = await restore(engine, opened(target), RestoreRequest(memory="m"))
    assert receipt.outcome is RestoreOutcome.INCOMPLETE
    assert receipt.reason is not None and "the disk is on fire" in receipt.reason.message


async def test_a_file_that_vanishes_while_it_is_read_is_listed(engine: Engine, tools: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    write(home / "memory/going.md", b"gone")
    write(home / "memory/here.md", b"here")
    (tools / "tar").unlink()
    write(tools / "tar", LATE_TAR.format(tar=shutil.which("tar")).encode(), 0o755)
    receipt = await export(engine, BareSandbox(home, tools), ExportRequest(memory="m"))
    assert (receipt.outcome, receipt.files) == (ExportOutcome.COMMITTED, 1)
    assert [(row.path, row.reason) for row in receipt.skipped] == [
        ("project/memory/going.md", "it vanished while it was read")
    ]


async def test_a_name_that_cannot_be_restored_is_not_exported_but_listed(
    engine: Engine, opened: Open, tmp_path: Path
) -> None:
    home, target = tmp_path / "home", tmp_path / "target"
    write(home / "memory/here.md", b"here")
    write(home / "memory/unit\x1fseparator.md", b"odd")
    receipt = await export(engine, opened(home), ExportRequest(memory="m"))
    assert [(row.path, row.reason) for row in receipt.skipped] == [
        ("project/memory/unit separator.md", "its name has a character that cannot be restored without Python")
    ]
    write(target / "memory/another\x1fone.md", b"as it was")
    refused = await restore(engine, opened(target), RestoreRequest(memory="m"))
    assert refused.reason is not None and refused.reason.code == "in-the-way"
    assert sorted(path.name for path in (target / "memory").iterdir()) == ["another\x1fone.md"]


async def test_a_folder_in_the_place_of_a_file_leaves_all_as_it_was(
    engine: Engine, opened: Open, tmp_path: Path
) -> None:
    home, target = tmp_path / "home", tmp_path / "target"
    write(home / "MEMORY.md", b"a file")
    write(home / "memory/new/x.md", b"new")
    await export(engine, opened(home), ExportRequest(memory="m", projects=("~",)))
    write(target / "MEMORY.md/not memory.txt", b"as it was")
    write(target / "memory/old.md", b"as it was")
    before = {name: about for name, about in tree(target).items() if not name.startswith(b".cache")}
    refused = await restore(engine, opened(target), RestoreRequest(memory="m", projects=("~",)))
    assert refused.outcome is RestoreOutcome.INCOMPLETE, refused
    assert {name: about for name, about in tree(target).items() if not name.startswith(b".cache")} == before


async def test_a_seed_and_what_is_withheld_are_counted_as_with_python(
    engine: Engine, opened: Open, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    for name in ("app/MEMORY.md", "app/memory/a.md", "app/memory/sub/b.md", "away/MEMORY.md", "away/memory/c.md"):
        write(home / name, name.encode())
    (home / "app/memory/link.md").symlink_to("a.md")
    sent = await export(engine, OwnMachine(home), ExportRequest(memory="m", projects=("~/app", "~/away")))
    assert sent.files == 5
    told = []
    for number, sandbox in enumerate([OwnMachine, opened]):
        target = tmp_path / str(number)
        write(target / "app/MEMORY.md", b"mine")
        asked = RestoreRequest(memory="m", mode="seed", withhold_projects=True)
        got = await restore(engine, sandbox(target), asked)
        told.append((got.outcome, got.files, got.bytes, got.skipped, [(row.name, row.files) for row in got.withheld]))
        assert (target / "app/MEMORY.md").read_bytes() == b"mine"
    assert told[1] == told[0]
    assert told[1][1:3] == (2, 34) and told[1][4] == [("project-2", 2)]


async def test_folders_that_are_no_memory_any_more_go_and_others_stay(
    engine: Engine, opened: Open, tmp_path: Path
) -> None:
    home, target = tmp_path / "home", tmp_path / "target"
    write(home / "memory/a.md", b"a")
    (home / "memory/empty").mkdir()
    await export(engine, opened(home), ExportRequest(memory="m"))
    write(target / "memory/old/deeper/b.md", b"b")
    (target / "src/empty").mkdir(parents=True)
    got = await restore(engine, opened(target), RestoreRequest(memory="m"))
    assert got.outcome is RestoreOutcome.COMPLETE and got.set_aside is not None
    folders = {name for name, about in tree(target).items() if about[0] == "dir" and not name.startswith(b".cache")}
    assert folders == {b"memory", b"memory/empty", b"src", b"src/empty"}


@pytest.mark.parametrize("name", ["e2b", pytest.param("daytona", marks=pytest.mark.slow)])
async def test_a_memory_leaves_and_arrives_at_a_provider_with_busybox(
    engine: Engine, open_provider: Callable[[Name], Provider], tmp_path: Path, name: Name
) -> None:
    provider = open_provider(name)
    tools = busybox_tools(tmp_path / "kind")
    box, other = provider.box(tools=tools), provider.box(tools=tools)
    odd_home(box.home)
    outward(box.home)
    sent = await export(engine, box.open(), ExportRequest(memory="m", projects=("~",)))
    got = await restore(engine, other.open(), RestoreRequest(memory="m", projects=("~",)))
    assert (sent.outcome, got.outcome) == (ExportOutcome.COMMITTED, RestoreOutcome.COMPLETE)
    assert memory_in(other.home) == memory_in(box.home)
    for each in (box, other):
        assert await each.is_clean(), each.left_behind()


@pytest.mark.parametrize("kind", ["no python", "busybox"])
async def test_modes_travel_also_where_the_user_is_not_root(engine: Engine, kind: str) -> None:
    with tempfile.TemporaryDirectory(prefix="bare-") as name:
        base = Path(name).resolve()
        base.chmod(0o755)  # pytest's own folders are root's alone
        opened, home, target = opener(kind, base / "kind"), base / "home", base / "target"
        for file, mode in (("a.md", 0o640), ("shared/b.md", 0o664), ("shared/own/c.md", 0o600)):
            write(home / "memory" / file, b"x", mode)
        for folder, mode in (("shared", 0o775), ("shared/own", 0o700), ("shared/empty", 0o750), (".", 0o755)):
            (home / "memory" / folder).mkdir(exist_ok=True)
            (home / "memory" / folder).chmod(mode)
        target.mkdir()
        here, there = as_nobody(opened(home)), as_nobody(opened(target))
        for path in (home, target, *home.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        sent = await export(engine, here, ExportRequest(memory="m"))
        got = await restore(engine, there, RestoreRequest(memory="m"))
        assert (sent.outcome, got.outcome) == (ExportOutcome.COMMITTED, RestoreOutcome.COMPLETE)
        modes = [{name: about[1] for name, about in tree(at / "memory").items()} for at in (home, target)]
        assert modes[1] == modes[0]


def rows_in_log(path: Path, rows: int = 500) -> sqlite3.Connection:
    """A database of which all rows are in its log, and the connection that keeps them there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("CREATE TABLE t (x)")
    database.commit()
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.executemany("INSERT INTO t VALUES (?)", [(number,) for number in range(rows)])
    database.commit()
    return database


def counted(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as database:
        return int(database.execute("SELECT count(*) FROM t").fetchone()[0])


@pytest.mark.parametrize("with_sqlite", [True, False])
@pytest.mark.parametrize("kind", ["no python", "busybox"])
async def test_the_rows_of_databases_that_nobody_knows_travel_whatever_they_are_called(
    engine: Engine, tmp_path: Path, kind: str, with_sqlite: bool
) -> None:
    program = shutil.which("sqlite3")
    if with_sqlite and program is None:
        pytest.skip("the sqlite3 program is not installed")
    opened, home, target = opener(kind, tmp_path / "kind"), tmp_path / "o'home", tmp_path / "target"
    (tmp_path / "kind/sqlite3").unlink(missing_ok=True)
    if with_sqlite:
        (tmp_path / "kind/sqlite3").symlink_to(str(program))
    names = ["claude-mem.db", "vectors", "it's.db", "deep er/-x.db3", "new\nline", 'quo"te\\.sqlite']
    paths = [*(f".claude-mem/{name}" for name in names), "memory/notes in here", "memory/it's.db"]
    kept = [rows_in_log(home / path) for path in paths]
    write(home / ".claude-mem/about.md", b"SQLite format 3 is a format.\n" * 40)
    sent = await export(engine, opened(home), ExportRequest(memory="m", projects=("~",)))
    assert sent.outcome is ExportOutcome.COMMITTED, sent
    methods = {row.path: (row.method, row.check) for row in sent.databases}
    # Of two names the answer of a shell does not tell what they are: control characters are taken out.
    told = {path: how for path, how in methods.items() if "\n" not in path}
    assert set(told.values()) == {("sqlite3-program" if with_sqlite else "file-copy", "ok")} and len(methods) == 8
    warned = [warning for warning in sent.warnings if "was copied as a file" in warning]
    assert len(warned) == (sum("\n" in path for path in methods) if with_sqlite else len(methods))
    target.mkdir()
    await restore(engine, opened(target), RestoreRequest(memory="m", projects=("~",)))
    assert {path: counted(target / path) for path in paths} == dict.fromkeys(paths, 500)
    assert (target / ".claude-mem/about.md").exists()
    for database in kept:
        database.close()


async def test_files_that_are_called_like_logs_travel_and_logs_stay_with_their_databases(
    engine: Engine, opened: Open, tmp_path: Path
) -> None:
    home, target = tmp_path / "home", tmp_path / "target"
    lone = ["dev-journal", "a-wal", "b-shm", "deep/bread-journal", "text-wal", "-wal", "folder-journal"]
    for name in lone:
        write(home / ".claude-mem" / name, name.encode())
    write(home / ".claude-mem/text", b"no database")
    write(home / ".claude-mem/folder/x.md", b"x")
    kept = [rows_in_log(home / ".claude-mem" / name) for name in ("vectors", "secret.env", "logs/x.db", "cut.db")]
    (home / ".claude-mem/cut.db").unlink()  # nobody can read what is left, and nobody is to say so
    sent = await export(engine, opened(home), ExportRequest(memory="m", projects=()))
    assert sent.outcome is ExportOutcome.COMMITTED, sent
    target.mkdir()
    await restore(engine, opened(target), RestoreRequest(memory="m"))
    files = {
        str(path.relative_to(target / ".claude-mem")) for path in target.rglob(".claude-mem/**/*") if path.is_file()
    }
    assert files == {*lone, "text", "folder/x.md", "vectors", "cut.db-wal", "cut.db-shm"}
    assert counted(target / ".claude-mem/vectors") == 500
    for database in kept:
        database.close()


async def test_rows_that_must_not_leave_do_not_leave_in_a_log_either(
    engine: Engine, tools: Path, tmp_path: Path
) -> None:
    layout = replace(engine.layouts["claude-mem"], emptied={"vectors": ("t",), "removed": ("t",)})
    engine = replace(engine, layouts={**engine.layouts, "claude-mem": layout})
    home, target = tmp_path / "home", tmp_path / "target"
    write(home / ".claude-mem/n.md", b"n")
    kept = [rows_in_log(home / ".claude-mem" / name) for name in ("vectors", "removed")]
    (home / ".claude-mem/removed").unlink()
    sent = await export(engine, BareSandbox(home, tools), ExportRequest(memory="m"))
    for database in kept:
        database.close()
    assert any("claude-mem/vectors was left out" in warning for warning in sent.warnings)
    target.mkdir()
    await restore(engine, BareSandbox(target, tools), RestoreRequest(memory="m"))
    assert [path.name for path in (target / ".claude-mem").iterdir()] == ["n.md"]


async def test_a_damaged_database_that_nobody_knows_does_not_become_the_head(
    engine: Engine, opened: Open, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    rows_in_log(home / ".claude-mem/vectors").close()
    text = (home / ".claude-mem/vectors").read_bytes()
    write(home / ".claude-mem/vectors", text[:100] + b"\xff" * (len(text) - 100))
    write(home / ".claude-mem/n.md", b"n")
    sent = await export(engine, opened(home), ExportRequest(memory="m"))
    assert sent.outcome is ExportOutcome.REJECTED and sent.reason is not None
    assert sent.reason.code == "database-damaged"


CASES = {
    "in another order": (("~/b", "~/a"), {"a": "A", "b": "B"}),
    "by absolute paths": (("{home}/b", "{home}/a/"), {"a": "A", "b": "B"}),
    "by a link": (("~/way", "~/a"), {"a": "A", "b": "B"}),
    "one of them": (("~/b",), {"a": "A", "b": "B"}),
    "one is elsewhere": (("~/new", "~/a"), {"a": "A", "new": "B"}),
    "both elsewhere": (("~/one", "two"), {"one": "A", "two": "B"}),
    "twice the same": (("~/b", "b", "~/c"), {"b": "B", "c": "A"}),
}


@pytest.mark.parametrize("case", CASES)
async def test_projects_that_are_named_are_those_that_were_there_as_with_python(
    engine: Engine, tmp_path: Path, case: str
) -> None:
    named, wanted = CASES[case]
    opened, home = opener("busybox" if "elsewhere" in case else "no python", tmp_path / "kind"), tmp_path / "home"
    for name in ("a", "b"):
        write(home / name / "MEMORY.md", name.upper().encode())
        write(home / name / ".cm/CONTINUITY.md", name.upper().encode())
    await export(engine, OwnMachine(home), ExportRequest(memory="m", projects=("~/a", "~/b")))
    for number, sandbox in enumerate([OwnMachine, opened]):
        target = tmp_path / f"target {number}"
        (target / "b").mkdir(parents=True)
        (target / "way").symlink_to("b")
        projects = tuple(name.format(home=target) for name in named)
        got = await restore(engine, sandbox(target), RestoreRequest(memory="m", projects=projects))
        assert got.outcome is RestoreOutcome.COMPLETE, got
        for file in ("MEMORY.md", ".cm/CONTINUITY.md"):
            found = {path.relative_to(target).parts[0]: path.read_text() for path in target.glob(f"[!w]*/{file}")}
            assert found == wanted, sandbox


async def test_two_projects_never_land_in_one_folder(engine: Engine, opened: Open, tmp_path: Path) -> None:
    home, outside = tmp_path / "home", tmp_path / "outside"
    home.mkdir()
    for name in ("a", "b"):
        write(outside / name / "MEMORY.md", name.encode())
    projects = tuple(str(outside / name) for name in ("a", "b"))
    await export(engine, OwnMachine(home), ExportRequest(memory="m", projects=projects))
    target = tmp_path / "target"
    target.mkdir()
    got = await restore(engine, opened(target), RestoreRequest(memory="m"))
    assert got.outcome is RestoreOutcome.INCOMPLETE and got.reason is not None
    assert got.reason.code == "roots-collide" and not list(target.glob("*.md"))


@pytest.mark.parametrize(("kind", "made"), [("busybox", False), ("no python", True)])
async def test_a_project_that_is_only_withheld_is_never_taken_for_lost(
    engine: Engine, tmp_path: Path, kind: str, made: bool
) -> None:
    opened, home, target = opener(kind, tmp_path / "kind"), tmp_path / "home", tmp_path / "target"
    engine = replace(engine, guards=Guards(accept_after_conversations=2))
    for name in (".claude-mem/n.md", "app/MEMORY.md", "app/memory/a.md", "app/memory/b.md"):
        write(home / name, b"of the memory")
    first = await export(engine, opened(home), ExportRequest(memory="m", projects=("~/app",)))
    target.mkdir()
    got = await restore(engine, opened(target), RestoreRequest(memory="m", withhold_projects=True))
    assert [row.name for row in got.withheld] == ["project"]
    if made:
        write(target / "app/MEMORY.md", b"of the clone")
    for number in range(2):
        write(target / ".claude-mem/n.md", str(number).encode())
        between = await export(engine, opened(target), ExportRequest(memory="m", conversation=f"c{number}"))
        assert (between.outcome, between.reason and between.reason.code) == (ExportOutcome.REJECTED, "root-missing")
        assert not any("becomes the head by itself" in warning for warning in between.warnings)
        assert between.head == first.snapshot
    (target / "app").mkdir(exist_ok=True)
    again = await restore(engine, opened(target), RestoreRequest(memory="m", withhold_projects=True))
    assert (again.outcome, again.kept, again.withheld) == (RestoreOutcome.COMPLETE, False, [])
    assert (target / "app/MEMORY.md").read_bytes() == b"of the memory"
    assert again.saved_first
    write(target / ".claude-mem/n.md", b"after that")
    last = await export(engine, opened(target), ExportRequest(memory="m"))
    assert (last.outcome, last.files) == (ExportOutcome.COMMITTED, 4), last
