"""Files that no layout knows: memory in a folder of its own, counted in one that is shared, and never lost to a restore."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from adapters.sandboxes.local import LocalSandbox
from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.policy.limits import Limits
from sidecar.receipts import ExportReceipt
from tests.parts.earlier import WITHOUT_IDS, earlier
from tests.parts.homes import OwnMachine, claude_mem_home, empty_home, engine_at, observe, run_cli, write
from tests.parts.samples import database

pytestmark = pytest.mark.usefixtures("forked_programs")

ROWS = ("CREATE TABLE t (x)", "INSERT INTO t VALUES ('remembered')")


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_at(tmp_path / "store")


async def out(engine: Engine, home: Path, **asked: object) -> ExportReceipt:
    return await export(engine, LocalSandbox(home), ExportRequest(memory="m", **asked))  # type: ignore[arg-type]


async def files(engine: Engine, receipt: ExportReceipt, tmp_path: Path) -> set[str]:
    """The files of a snapshot, by restoring it into a home of their own."""
    home = empty_home(tmp_path / f"seen-{receipt.snapshot}")
    asked = RestoreRequest(memory="m", snapshot=receipt.snapshot or "")
    assert (await restore(engine, LocalSandbox(home), asked)).outcome == "complete"
    found = (path.relative_to(home) for path in home.rglob("*") if path.is_file())
    return {str(path) for path in found if path.parts[0] != ".cache"}


@pytest.mark.parametrize(
    "name",
    [
        ".claude-mem/added-tomorrow.json",
        ".claude-mem/new/deep/er.bin",
        "app/.cm/next.txt",
        ".config/opencode/MEMORY/NEW/x.md",
        ".config/opencode/MEMORY/README.md",
        ".config/opencode/MEMORY/STATE/algorithm-state.json",
        ".config/opencode/projects/a/b/c.jsonl",
        "app/memory/notes.bin",
        "app/AGENTS.md",
        "app/CLAUDE.md",
        "app/cm-tasks.json",
        "app/.cm/learnings.json",
        "app/.cm/meta-learnings.json",
        "app/.cm/decisions.json",
    ],
)
async def test_a_file_nobody_told_of_leaves_and_arrives(name: str, engine: Engine, tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    for known in ("app/MEMORY.md", "app/.cm/CONTINUITY.md", ".config/opencode/MEMORY/WORK/x/META.yaml"):
        write(home / known, b"known")
    (home / ".claude-mem").mkdir()
    await out(engine, home)
    write(home / name, b"new")
    receipt = await out(engine, home)
    assert (receipt.outcome, receipt.learned) == ("committed", None), "its layout covered it before"
    assert name in await files(engine, receipt, tmp_path)


async def test_a_database_nobody_told_of_is_copied_with_what_is_in_its_log(engine: Engine, tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    database(home / ".claude-mem/memory.db", *ROWS)
    writer = sqlite3.connect(home / ".claude-mem/memory.db")
    writer.execute("INSERT INTO t VALUES ('in the log')")
    writer.commit()
    receipt = await out(engine, home)
    writer.close()
    assert [(row.path, row.method, row.check) for row in receipt.databases] == [
        ("claude-mem/memory.db", "online-backup", "ok")
    ]
    other = empty_home(tmp_path / "other")
    await restore(engine, LocalSandbox(other), RestoreRequest(memory="m"))
    assert not (other / ".claude-mem/memory.db-wal").exists()
    found = sqlite3.connect(other / ".claude-mem/memory.db").execute("SELECT x FROM t").fetchall()
    assert found == [("remembered",), ("in the log",)]


async def test_what_is_only_called_like_the_tail_of_a_database_is_saved(engine: Engine, tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    folder = home / ".claude-mem"
    write(folder / "daily", b"")
    (folder / "notes").symlink_to("daily")
    os.mkfifo(folder / "pipe")
    texts = {"daily-journal": b"day one", "notes-journal": b"day two", "pipe-wal": b"three", "daily-shm": b"four"}
    for name, text in texts.items():
        write(folder / name, text)
    other = empty_home(tmp_path / "other")
    assert (await out(engine, home)).outcome == "committed"
    await restore(engine, LocalSandbox(other), RestoreRequest(memory="m"))
    assert {name: (other / ".claude-mem" / name).read_bytes() for name in texts} == texts


@pytest.mark.parametrize(
    ("tail", "begins"),
    [("-journal", "d9d505f920a163d7"), ("-wal", "377f0682"), ("-wal", "377f0683"), ("-shm", "18e22d00"), ("-wal", "")],
)
async def test_the_tail_of_a_database_that_is_still_empty_stays_behind(
    tail: str, begins: str, engine: Engine, tmp_path: Path
) -> None:
    home = empty_home(tmp_path / "home")
    write(home / ".claude-mem/new.db", b"")
    write(home / f".claude-mem/new.db{tail}", bytes.fromhex(begins))
    assert await files(engine, await out(engine, home), tmp_path) == {".claude-mem/new.db"}


async def test_what_must_stay_behind_does_so_among_unknown_files(engine: Engine, tmp_path: Path) -> None:
    home = claude_mem_home(tmp_path / "home", rows=3)
    write(home / ".claude-mem/new/.env", b"hunter2")
    write(home / ".claude-mem/new/id_ed25519", b"hunter2")
    write(home / ".openclaw/workspace/MEMORY.md", b"known")
    database(home / ".openclaw/state/openclaw.sqlite", *ROWS)
    receipt = await out(engine, home)
    reasons = {row.path: row.reason for row in receipt.skipped}
    assert reasons["claude-mem/new/.env"] == reasons["claude-mem/new/id_ed25519"] == "secret"
    assert reasons["openclaw/state"] == "secret" and receipt.databases_not_taken == []
    assert not {path for path in await files(engine, receipt, tmp_path) if "new" in path or "state" in path}


async def test_in_a_shared_folder_the_rest_is_counted_and_a_database_named(engine: Engine, tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    write(home / ".codex/session_index.jsonl", b"{}")
    write(home / ".codex/plugins/x.json", b"{}")
    write(home / ".codex/version.json", b"{}")
    database(home / ".codex/new_1.sqlite", *ROWS)
    write(home / "app/MEMORY.md", b"known")
    write(home / "app/src/main.py", b"pass")
    database(home / "app/site.db", *ROWS)
    receipt = await out(engine, home)
    assert receipt.not_taken == {"codex": 3, "project": 2}
    assert receipt.databases_not_taken == ["codex/new_1.sqlite", "project/site.db"]
    told = receipt.warnings[-1]
    assert "codex/new_1.sqlite" in told and "site.db" not in told
    assert await files(engine, receipt, tmp_path) == {".codex/session_index.jsonl", "app/MEMORY.md"}


async def test_a_path_of_two_layouts_in_one_folder_is_saved_once_and_not_said_to_be_left_out(
    engine: Engine, tmp_path: Path
) -> None:
    home = empty_home(tmp_path / "home")
    for name in ("MEMORY.md", "AGENTS.md", "cm-tasks.json", ".cm/CONTINUITY.md", ".env"):
        write(home / "app" / name, b"x")
    receipt = await out(engine, home)
    assert (receipt.files, receipt.not_taken) == (4, {})
    assert [row.path for row in receipt.skipped] == ["cm-project/.env"]


async def test_instructions_travel_only_with_a_marker_and_never_replace_what_is_there(
    engine: Engine, tmp_path: Path
) -> None:
    home, other = empty_home(tmp_path / "home"), empty_home(tmp_path / "other")
    for name in ("app/CLAUDE.md", "app/AGENTS.md", "app/MEMORY.md", "plain/CLAUDE.md", "plain/AGENTS.md"):
        write(home / name, name.encode())
    write(home / "plain/tasks/todo.md", b"- [ ] x")
    receipt = await out(engine, home, projects=("~/app", "~/plain"))
    assert receipt.files == 4
    write(other / "app/AGENTS.md", b"of the repository")
    arrived = await restore(engine, LocalSandbox(other), RestoreRequest(memory="m"))
    assert arrived.outcome == "complete"
    assert [(row.path, row.reason) for row in arrived.skipped] == [("project/AGENTS.md", "already there")]
    assert (other / "app/AGENTS.md").read_bytes() == b"of the repository"
    assert (other / "app/CLAUDE.md").read_bytes() == b"app/CLAUDE.md"


async def test_a_setting_that_moves_auto_memory_is_followed(engine: Engine, tmp_path: Path) -> None:
    home, other = empty_home(tmp_path / "home"), empty_home(tmp_path / "other")
    write(home / ".claude/settings.json", b'{"autoMemoryDirectory": "~/notes/auto"}')
    write(home / "notes/auto/MEMORY.md", b"moved")
    write(home / "notes/auto/deep/topic.md", b"moved too")
    receipt = await out(engine, home)
    assert (receipt.outcome, receipt.files) == ("committed", 2)
    write(other / ".claude/settings.json", b'{"autoMemoryDirectory": "~/elsewhere"}')
    assert (await restore(engine, LocalSandbox(other), RestoreRequest(memory="m"))).outcome == "complete"
    assert (other / "elsewhere/deep/topic.md").read_bytes() == b"moved too"
    assert (await out(engine, other)).outcome == "unchanged"


@pytest.mark.parametrize("value", ['"~"', '"/"', '"/etc"', "7", '{"x": 1}', '"~/.."'])
async def test_a_setting_that_names_no_place_for_a_memory_is_not_followed(
    value: str, engine: Engine, tmp_path: Path
) -> None:
    home = empty_home(tmp_path / "home")
    write(home / ".claude/settings.json", b'{"autoMemoryDirectory": %s}' % value.encode())
    write(home / ".claude/CLAUDE.md", b"known")
    write(home / "private.txt", b"hunter2")
    assert (await out(engine, home)).files == 1


async def test_a_variable_that_names_the_file_of_a_knowledge_graph_is_followed(engine: Engine, tmp_path: Path) -> None:
    class Moved(OwnMachine):
        def __init__(self, home: Path, file: str) -> None:
            super().__init__(home)
            self._environment = {**self._environment, "MEMORY_FILE_PATH": f"{home}/{file}"}

    home, other = empty_home(tmp_path / "home"), empty_home(tmp_path / "other")
    write(home / "data/graph.jsonl", b"{}\n")
    write(home / "data/other.jsonl", b"hunter2")
    receipt = await export(engine, Moved(home, "data/graph.jsonl"), ExportRequest(memory="m"))
    assert (receipt.outcome, receipt.files) == ("committed", 1)
    there = Moved(other, "kg/memory.json")
    assert (await restore(engine, there, RestoreRequest(memory="m"))).outcome == "complete"
    assert (other / "kg/memory.json").read_bytes() == b"{}\n"
    assert (await export(engine, there, ExportRequest(memory="m"))).outcome == "unchanged"
    assert (await restore(engine, there, RestoreRequest(memory="m"))).kept


# Snapshots of an earlier version


def test_a_memory_of_an_earlier_version_gains_files_and_loses_none(tmp_path: Path) -> None:
    home, other, store = claude_mem_home(tmp_path / "home", rows=30), empty_home(tmp_path / "other"), tmp_path / "store"
    write(home / "app/MEMORY.md", b"in a project")
    write(home / "MEMORY.md", b"in the home")
    write(home / ".codex/session_index.jsonl", b"{}")
    write(home / ".claude-mem/notes.txt", b"unknown to it")
    write(home / "app/.cm/CONTINUITY.md", b"not looked for by it")
    past = earlier(tmp_path / "past", WITHOUT_IDS)
    words = ("m", "--sandbox", f"local:{home}")
    assert past.run("export", *words, store=store).document["outcome"] == "committed"
    before = run_cli("show", "m", store=store).document["entries"]
    now = run_cli("export", *words, store=store)
    assert (now.code, now.document["outcome"]) == (0, "committed")
    learned = now.document["learned"]
    assert learned["files"] == 3 and "claude-mem/notes.txt" in learned["paths"]
    assert any("New because the layouts know of it by now: 3 files" in told for told in now.document["warnings"])
    after = {row["path"]: row for row in run_cli("show", "m", store=store).document["entries"]}
    assert {row["path"] for row in before} <= set(after)
    assert len(after) > len(before)
    again = run_cli("export", *words, store=store)
    assert (again.document["outcome"], again.document["learned"]) == ("unchanged", None)

    # Its snapshot knows nothing of the new files, so that a restore of it leaves them.
    first = run_cli("log", "m", store=store).document["snapshots"][-1]["snapshot"]
    write(home / ".claude-mem/modes/later.json", b"{}")
    run_cli("export", *words, store=store)
    back = run_cli("restore", *words, "--snapshot", first, store=store)
    assert back.document["outcome"] == "complete", back.document
    assert (home / ".claude-mem/notes.txt").read_bytes() == b"unknown to it"
    assert (home / "app/.cm/CONTINUITY.md").is_file()
    assert not (home / ".claude-mem/modes/later.json").exists(), "what its rules covered goes"
    assert run_cli("restore", "m", "--sandbox", f"local:{other}", store=store).document["outcome"] == "complete"
    assert (other / ".claude-mem/notes.txt").is_file()


async def test_a_restore_leaves_what_the_rules_of_its_snapshot_did_not_cover(engine: Engine, tmp_path: Path) -> None:
    from dataclasses import replace

    from sidecar.layouts.custom import read_custom_layouts

    home = empty_home(tmp_path / "home")
    write(home / ".codex/session_index.jsonl", b"{}")
    old = await out(engine, home)
    later = replace(engine, layouts={**engine.layouts, **read_custom_layouts({"codex": {"keep": ["skills/**"]}})})
    write(home / ".codex/skills/x.md", b"learned")
    grown = await out(later, home)
    assert grown.learned is not None and grown.learned.paths == ["codex/skills/x.md"]
    await restore(later, LocalSandbox(home), RestoreRequest(memory="m", snapshot=old.snapshot or ""))
    assert (home / ".codex/skills/x.md").is_file()
    (home / ".codex/skills/x.md").unlink()
    empty = await out(later, home)
    write(home / ".codex/skills/y.md", b"later")
    assert (await out(later, home)).learned is None
    await restore(later, LocalSandbox(home), RestoreRequest(memory="m", snapshot=empty.snapshot or "", discard=True))
    assert not (home / ".codex/skills/y.md").exists()


async def test_an_unknown_file_that_is_too_large_is_left_out_alone(tmp_path: Path) -> None:
    engine = engine_at(tmp_path / "store", limits=Limits(file_bytes=400_000))
    home = empty_home(tmp_path / "home")
    (home / ".claude-mem").mkdir()
    observe(home, 5)
    write(home / ".claude-mem/models/huge.bin", b"x" * 400_001)
    write(home / ".claude-mem/models/small.bin", b"x")
    for outcome in ("committed", "unchanged"):
        receipt = await out(engine, home)
        assert receipt.outcome == outcome, receipt.reason
        left = [row.path for row in receipt.skipped if row.reason == "larger than limits.file_bytes"]
        assert left == ["claude-mem/models/huge.bin"]
        (told,) = [warning for warning in receipt.warnings if "huge.bin" in warning]
        assert told.startswith(
            "claude-mem/models/huge.bin has 400,001 bytes, and was left out alone: limits.file_bytes"
        )
    # One that grew beyond the limit since goes likewise, a database too, whose rows are still in its log.
    write(home / ".claude-mem/models/small.bin", b"x" * 500_000)
    log = sqlite3.connect(home / ".claude-mem/memory.db")
    log.executescript("PRAGMA journal_mode=WAL; CREATE TABLE t (x);")
    log.execute("INSERT INTO t VALUES (zeroblob(600000))")
    log.commit()
    receipt = await out(engine, home)
    assert receipt.outcome == "committed", receipt.reason
    assert {row.path for row in receipt.skipped if row.reason == "larger than limits.file_bytes"} == {
        f"claude-mem/{name}" for name in ("models/huge.bin", "models/small.bin", "memory.db")
    }
    log.close()
    # It stays where it is, also when the memory is restored there.
    back = await restore(engine, LocalSandbox(home), RestoreRequest(memory="m"))
    assert back.outcome == "complete" and (home / ".claude-mem/models/huge.bin").stat().st_size == 400_001


async def test_a_known_file_that_is_too_large_is_a_reason_to_reject(tmp_path: Path) -> None:
    engine = engine_at(tmp_path / "store", limits=Limits(file_bytes=400_000))
    home = empty_home(tmp_path / "home")
    (home / ".claude-mem").mkdir()
    observe(home, 5)
    write(home / ".claude-mem/corpora/huge.json", b"x" * 400_001)
    receipt = await out(engine, home)
    assert receipt.outcome == "rejected" and receipt.reason is not None
    assert receipt.reason.code == "limit-file-bytes"
