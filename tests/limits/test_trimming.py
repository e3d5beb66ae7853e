"""Trimmed exports beside everything else: unchanged memories, guards, databases, layouts, sandboxes without Python."""

from __future__ import annotations

import os
import random
import sqlite3
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sidecar.cli.verbs import build_export_result
from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine import limits as limiting
from sidecar.engine.archives.tarballs import adopt
from sidecar.engine.queries import read_contents
from sidecar.errors import BadAnswer
from sidecar.policy.limits import Limits
from sidecar.ports import CommandResult
from sidecar.receipts import ExportReceipt
from tests.parts.homes import WatchedSandbox, empty_home, engine_at, forget_caches, observe, told, tree, write
from tests.parts.memories import BareSandbox, shell_tools

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "acme/agent-7"
OLD = 1_600_000_000


def cold(home: Path, name: str, size: int, age: int) -> None:
    """A file that does not compress, older the larger its ``age``."""
    path = home / "memory/papers" / name
    write(path, random.Random(name).randbytes(size))
    os.utime(path, (OLD - age, OLD - age))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"long term\n" * 10)
    write(home / "memory/today.md", b"warm\n" * 10)
    cold(home, "old.bin", 50_000, 2)
    cold(home, "new.bin", 50_000, 1)
    return home


def engine_with(tmp_path: Path, **limits: object) -> Engine:
    return engine_at(tmp_path / "store", limits=Limits(**limits))  # type: ignore[arg-type]


async def exported(engine: Engine, home: Path, **asked: object) -> ExportReceipt:
    return await export(engine, WatchedSandbox(home), ExportRequest(memory=MEMORY, projects=("~",), **asked))  # type: ignore[arg-type]


def dropped(receipt: ExportReceipt) -> list[str]:
    return [row.path for row in receipt.dropped]


async def test_what_is_dropped_again_is_no_change(home: Path, tmp_path: Path) -> None:
    engine = engine_with(tmp_path, bytes=60_000, over="trim")
    first = await exported(engine, home)
    assert (first.outcome, dropped(first)) == ("committed", ["project/memory/papers/old.bin"])
    assert (first.dropped_files, first.dropped_bytes, first.dropped[0].tier) == (1, 50_000, "cold")
    again = await exported(engine, home)
    assert (again.outcome, dropped(again)) == ("unchanged", dropped(first))
    forget_caches(home)
    assert (await exported(engine, home)).outcome == "unchanged"


async def test_all_that_was_dropped_is_listed_of_thousands_of_files(home: Path, tmp_path: Path) -> None:
    for number in range(6000):
        (home / f"memory/papers/{number}.md").touch()
    receipt = await exported(engine_with(tmp_path, files=5, over="trim"), home)
    assert (receipt.outcome, receipt.dropped_files, receipt.dropped_more) == ("committed", 6001, 0)
    assert len([row for row in receipt.dropped if not row.path.endswith("/")]) == 6001
    assert "5,981 more files; --json lists them." in str(build_export_result(receipt).words)
    short = replace(receipt, dropped=receipt.dropped[:5000], dropped_more=1001)
    assert "5,981 more files; --json lists up to 5,000 paths." in str(build_export_result(short).words)


async def test_what_was_dropped_comes_back_when_there_is_room(home: Path, tmp_path: Path) -> None:
    await exported(engine_with(tmp_path, bytes=60_000, over="trim"), home)
    whole = await exported(engine_with(tmp_path), home)
    assert (whole.outcome, whole.kind, whole.dropped, whole.files) == ("committed", "delta", [], 4)


async def test_what_was_dropped_on_purpose_is_not_shrunk(home: Path, tmp_path: Path) -> None:
    assert (await exported(engine_with(tmp_path), home)).outcome == "committed"
    trimmed = await exported(engine_with(tmp_path, bytes=1000, over="trim"), home)
    assert (trimmed.outcome, trimmed.dropped_files) == ("committed", 2)
    other = empty_home(tmp_path / "other")
    engine = engine_with(tmp_path)
    came = await restore(engine, WatchedSandbox(other), RestoreRequest(memory=MEMORY, projects=("~",)))
    assert "This snapshot was trimmed: 2 files with 100,000 bytes were left out." in came.warnings
    assert not (other / "memory/papers").exists()


async def test_a_folder_that_is_left_empty_goes_and_one_that_was_empty_counts(home: Path, tmp_path: Path) -> None:
    (home / "memory/nothing").mkdir()
    engine = engine_with(tmp_path, files=3, over="trim")
    receipt = await exported(engine, home)
    assert receipt.outcome == "committed", receipt.reason
    assert "project/memory/papers/" in dropped(receipt)
    shown = await read_contents(engine.repository, MEMORY, "latest")
    assert len(shown.entries) <= 3


async def test_a_limit_of_one_layout_is_of_its_files_alone(home: Path, tmp_path: Path) -> None:
    write(home / ".claude-mem/corpora/large.bin", random.Random(1).randbytes(70_000))
    observe(home, 30)
    tables = {"three-tier": {"bytes": 60_000, "file_bytes": 55_000, "bytes_over": "trim"}}
    receipt = await exported(engine_with(tmp_path, layouts=tables), home)
    assert (receipt.outcome, dropped(receipt)) == ("committed", ["project/memory/papers/old.bin"])
    assert receipt.dropped[0].reason == "over limits.layouts.three-tier.bytes"
    refused = await exported(engine_with(tmp_path, layouts={"three-tier": {"files": 4}}), home)
    assert refused.reason is not None
    assert (refused.outcome, refused.reason.code) == ("rejected", "limit-files")
    assert "limits.layouts.three-tier.files allows 4" in refused.reason.message


@pytest.mark.parametrize(("limit", "most"), [("files", 6), ("bytes", 100_150)])
async def test_what_a_layout_has_from_before_counts_with_what_is_new(
    limit: str, most: int, home: Path, tmp_path: Path
) -> None:
    engine = engine_with(tmp_path, layouts={"three-tier": {limit: most}})
    assert (await exported(engine, home)).outcome == "committed"
    time.sleep(0.1)  # what is younger than a tick of the clock is not taken for unchanged
    write(home / "memory/more.md", b"warm\n" * 10)
    refused = await exported(engine, home)
    assert refused.reason is not None
    assert (refused.outcome, refused.reason.code) == ("rejected", f"limit-{limit}")


async def test_a_layout_may_have_larger_files_than_the_rest(home: Path, tmp_path: Path) -> None:
    write(home / ".claude-mem/corpora/large.bin", random.Random(1).randbytes(70_000))
    engine = engine_with(tmp_path, file_bytes=51_000, layouts={"claude-mem": {"file_bytes": 1 << 20}})
    assert (await exported(engine, home)).outcome == "committed"
    cold(home, "large.bin", 52_000, 0)
    refused = await exported(engine, home)
    assert refused.reason is not None and refused.reason.code == "limit-file-bytes"


async def test_a_limit_of_some_memories_is_not_of_others(home: Path, tmp_path: Path) -> None:
    engine = engine_with(tmp_path, memories={"acme/*": {"bytes": 1000}})
    refused = await exported(engine, home)
    assert refused.reason is not None and refused.reason.code == "limit-bytes"
    other = await export(engine, WatchedSandbox(home), ExportRequest(memory="acme", projects=("~",)))
    assert other.outcome == "committed"


@pytest.mark.parametrize("mode", ["reject", "trim"])
async def test_what_is_never_exported_does_not_count(mode: str, home: Path, tmp_path: Path) -> None:
    write(home / "memory/id_ed25519", b"k" * 500)
    engine = engine_with(tmp_path, bytes=100_150, files=6, over=mode)
    receipt = await exported(engine, home)
    assert (receipt.outcome, receipt.dropped, receipt.bytes) == ("committed", [], 100_150), receipt.reason
    assert [(row.path, row.reason) for row in receipt.skipped] == [("project/memory/id_ed25519", "secret")]
    again = await exported(engine, home)
    assert (again.outcome, len(again.skipped)) == ("unchanged", 1)


async def test_a_database_counts_with_what_is_in_its_log(home: Path, tmp_path: Path) -> None:
    (home / ".claude-mem").mkdir()
    connection = sqlite3.connect(home / ".claude-mem/claude-mem.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA wal_autocheckpoint=0")
    connection.execute("CREATE TABLE observations (text)")
    connection.executemany("INSERT INTO observations VALUES (?)", [("x" * 3000,)] * 100)
    pages = connection.execute("PRAGMA page_count").fetchone()[0] * 4096
    assert (home / ".claude-mem/claude-mem.db").stat().st_size < pages
    room = 150 + pages + 50_000
    receipt = await exported(engine_with(tmp_path, bytes=room, over="trim"), home)
    assert (receipt.outcome, dropped(receipt)) == ("committed", ["project/memory/papers/old.bin"])
    assert receipt.bytes == room
    assert (await exported(engine_with(tmp_path, bytes=room, over="trim"), home)).outcome == "unchanged"
    refused = await exported(engine_with(tmp_path, bytes=room), home)
    assert refused.reason is not None and refused.reason.code == "limit-bytes"
    connection.close()


async def test_hot_files_alone_over_a_limit_are_refused_with_their_size(home: Path, tmp_path: Path) -> None:
    receipt = await exported(engine_with(tmp_path, bytes=99, over="trim"), home)
    assert receipt.outcome == "rejected" and receipt.reason is not None
    assert receipt.reason.message == (
        "This memory has 100 bytes; limits.bytes allows 99. All that is left is hot, and never left out."
    )


async def test_what_a_layout_requires_is_never_dropped(home: Path, tmp_path: Path) -> None:
    engine = engine_with(tmp_path, bytes=60_000, over="trim")
    layouts = dict(engine.layouts)
    layouts["three-tier"] = replace(layouts["three-tier"], required=("memory/papers/old.bin",))
    receipt = await exported(replace(engine, layouts=layouts), home)
    assert dropped(receipt) == ["project/memory/papers/new.bin"]


async def test_a_pack_is_made_smaller_and_the_rest_comes_with_the_next(home: Path, tmp_path: Path) -> None:
    for number in range(4):
        cold(home, f"more-{number}.bin", 20_000, 10 + number)
    engine = engine_with(tmp_path, packed_bytes=120_000, over="trim")
    first = await exported(engine, home)
    assert (first.outcome, first.packed_bytes < 125_000) == ("committed", True)
    assert first.dropped and {row.reason for row in first.dropped} == {"over limits.packed_bytes"}
    second = await exported(engine, home)
    assert (second.outcome, second.kind, second.dropped) == ("committed", "delta", [])
    assert (await exported(engine, home)).outcome == "unchanged"


@pytest.mark.parametrize("most", [40_000, 60_000])
async def test_a_pack_is_made_smaller_where_what_goes_first_compresses_best(most: int, tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", random.Random(1).randbytes(5000))
    write(home / "tasks/todo.md", random.Random(2).randbytes(30_000))
    for number in range(20):
        log = home / f"memory/2020-01-{number + 1:02}.md"
        write(log, "\n".join(f"- did thing {number} again and again, step {step}" for step in range(2000)).encode())
    engine = engine_with(tmp_path, packed_bytes=most, over="trim")
    receipt = await exported(engine, home)
    assert receipt.outcome == "committed", receipt.reason
    kept = {row.path for row in (await read_contents(engine.repository, MEMORY, "latest")).entries}
    assert receipt.dropped and {"project/MEMORY.md", "project/tasks/todo.md"} <= kept
    other = empty_home(tmp_path / "other")
    came = await restore(engine, WatchedSandbox(other), RestoreRequest(memory=MEMORY, projects=("~",)))
    assert came.outcome == "complete" and (other / "tasks/todo.md").stat().st_size == 30_000
    smaller = await exported(engine_with(tmp_path / "new", packed_bytes=4000, over="trim"), home)
    assert smaller.reason is not None and smaller.reason.code == "limit-packed"
    assert "limits.packed_bytes allows 4,000. All that is left is hot" in smaller.reason.message


async def test_layouts_that_were_not_asked_for_count_and_are_not_dropped(home: Path, tmp_path: Path) -> None:
    write(home / ".claude-mem/corpora/large.bin", random.Random(1).randbytes(70_000))
    assert (await exported(engine_with(tmp_path), home)).outcome == "committed"
    write(home / "MEMORY.md", b"longer term\n" * 10)
    engine = engine_with(tmp_path, bytes=130_000, over="trim")
    receipt = await exported(engine, home, layouts=("three-tier",))
    assert (receipt.outcome, dropped(receipt)) == ("committed", ["project/memory/papers/old.bin"])
    assert receipt.bytes == 70_000 + 50_000 + 120 + 50


async def test_a_warning_comes_before_a_limit(home: Path, tmp_path: Path) -> None:
    calm = await exported(engine_with(tmp_path, bytes=200_000), home)
    assert told(calm) == []
    near = await exported(engine_with(tmp_path, bytes=110_000, warn_at=0.9), home)
    assert near.warnings == ["91 % of limits.bytes is used: 100,150 of 110,000 bytes."]
    write(home / "MEMORY.md", b"other term\n" * 10)
    changed = await exported(engine_with(tmp_path, depth=3, files=7, file_bytes=60_000, memory_bytes=120_000), home)
    warned = " ".join(changed.warnings)
    assert "100 % of limits.depth is used: 3 of 3 parts" in warned
    assert "83 % of limits.file_bytes is used: 50,000 of 60,000 bytes, by project/memory/papers/" in warned
    assert "85 % of limits.files" in warned and "% of limits.memory_bytes" in warned


async def test_a_sandbox_without_python_is_trimmed_on_arrival(home: Path, tmp_path: Path) -> None:
    tools = shell_tools(tmp_path / "tools")
    request = ExportRequest(memory=MEMORY, projects=("~",))
    engine = engine_with(tmp_path, bytes=60_000, over="trim")
    receipt = await export(engine, BareSandbox(home, tools), request)
    assert (receipt.outcome, dropped(receipt)) == ("committed", ["project/memory/papers/old.bin"])
    assert any("limits were checked only when it had arrived" in warning for warning in receipt.warnings)
    refused = await export(engine_with(tmp_path, bytes=60_000), BareSandbox(home, tools), request)
    assert refused.reason is not None and (refused.outcome, refused.reason.code) == ("rejected", "limit-bytes")


async def test_what_is_trimmed_on_arrival_may_be_much_larger_than_the_limit(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        cold(home, f"{number}.md", 10, number)
    request = ExportRequest(memory=MEMORY, projects=("~",))
    bare = BareSandbox(home, shell_tools(tmp_path / "tools"))
    engine = engine_with(tmp_path, files=5, bytes=300, file_bytes=200, over="trim", bytes_over="reject")
    receipt = await export(engine, bare, request)
    assert (receipt.outcome, receipt.dropped_files) == ("committed", 41), receipt.reason
    monkeypatch.setattr(limiting, "Limits", lambda: Limits(files=30))
    refused = await export(engine, bare, request)
    assert refused.reason is not None and refused.reason.code == "limit-files"
    assert refused.reason.message == (
        "The tarball holds 31 files, folders and links or more; limits.files allows 5."
        " No more than 30 is taken here to be trimmed to it."
    )


async def test_an_import_is_trimmed_too(home: Path, tmp_path: Path) -> None:
    archive = tmp_path / "home.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("MEMORY.md", "memory"):
            tar.add(home / name, name)
    receipt = await adopt(engine_with(tmp_path, bytes=60_000, over="trim"), archive, ExportRequest(memory=MEMORY))
    assert (receipt.outcome, dropped(receipt)) == ("committed", ["project/memory/papers/old.bin"])


async def test_a_sandbox_may_not_drop_what_it_was_not_told_to(home: Path, tmp_path: Path) -> None:
    engine = engine_with(tmp_path)
    assert (await exported(engine, home)).outcome == "committed"

    class Lying(WatchedSandbox):
        async def run(self, command: str, **how: Any) -> CommandResult:
            finished = await super().run(command, **how)
            told = finished.output.replace(
                b'"status":"changed"', b'"status":"changed","dropped_bytes":99999,"dropped_files":9'
            )
            told = told[: told.rindex(b" end ") + 4] + b"\n"  # as the shell scripts end it, without a hash
            return replace(finished, output=told)

    (home / "memory/papers/old.bin").unlink()
    (home / "memory/papers/new.bin").unlink()
    before = tree(tmp_path / "store")
    with pytest.raises(BadAnswer, match="not told to"):
        await export(engine, Lying(home), ExportRequest(memory=MEMORY, projects=("~",)))
    assert tree(tmp_path / "store") == before


def free_pages(home: Path, rows: int) -> None:
    """A database most of whose pages hold nothing."""
    (home / ".claude-mem").mkdir(exist_ok=True)
    connection = sqlite3.connect(home / ".claude-mem/claude-mem.db", isolation_level=None)
    connection.execute("CREATE TABLE observations (text)")
    connection.execute("BEGIN")
    connection.executemany("INSERT INTO observations VALUES (?)", [("x" * 3000,)] * rows)
    connection.execute("DELETE FROM observations WHERE rowid > 10")
    connection.execute("COMMIT")
    connection.close()


async def test_a_database_of_free_pages_is_named_with_what_to_do(home: Path, tmp_path: Path) -> None:
    free_pages(home, 6000)
    engine = engine_with(tmp_path)
    for outcome in ("committed", "unchanged"):
        receipt = await exported(engine, home)
        assert receipt.outcome == outcome
        told = [words for words in receipt.warnings if "mostly free pages" in words]
        assert len(told) == 1 and "claude-mem/claude-mem.db" in told[0] and "VACUUM" in told[0]
    refused = await exported(engine_with(tmp_path, bytes=1 << 20), home)
    assert refused.reason is not None and refused.reason.code == "limit-bytes"
    assert "claude-mem/claude-mem.db is mostly free pages" in refused.reason.message


async def test_a_small_database_may_have_free_pages(home: Path, tmp_path: Path) -> None:
    free_pages(home, 100)
    assert told(await exported(engine_with(tmp_path), home)) == []


async def test_daily_logs_go_by_the_day_in_their_name(tmp_path: Path) -> None:
    """Whenever they were touched: a restore, a clone or an editor may have changed all of them just now."""
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"hot")
    days = ["2026-10-08", "2026-11-15", "2026-09-30", "2026-11-14"]
    for age, day in enumerate(days):  # the oldest day was touched last
        write(home / f"memory/{day}.md", b"x" * 1000)
        os.utime(home / f"memory/{day}.md", (1_700_000_000 - age, 1_700_000_000 - age))
    os.utime(home / "memory/2026-10-08.md")
    engine = engine_at(tmp_path / "store", limits=Limits(bytes=2500, over="trim"))
    receipt = await export(engine, WatchedSandbox(home), ExportRequest(memory=MEMORY))
    assert [row.path for row in receipt.dropped] == ["project/memory/2026-09-30.md", "project/memory/2026-10-08.md"]
