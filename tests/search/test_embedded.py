"""The index on this machine: killed, damaged, written by many, and never the truth."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest

from adapters.sandboxes.local import LocalSandbox
from adapters.search import sqlite_schema
from adapters.search.sqlite import EmbeddedSearch
from sidecar.engine import Engine, ExportRequest, export
from sidecar.errors import IndexReset, SearchDenied, SearchError
from sidecar.records.record import Record
from sidecar.search.port import MemoryRef, Query
from tests.parts.homes import PROJECT, engine_at
from tests.parts.remembering import Agent
from tests.parts.searched import OnThisMachine, index_of
from tests.parts.writers import writers

PLACE = MemoryRef("store", "conductor")


class Some:
    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.problems: list[str] = []

    async def batches(self) -> AsyncGenerator[Sequence[Record]]:
        yield [Record(kind="section", key=str(n), title="x", text=text) for n, text in enumerate(self.texts)]


async def yes() -> bool:
    return True


@pytest.fixture
def here(tmp_path: Path) -> OnThisMachine:
    return OnThisMachine(tmp_path / "indexes")


async def count(index: EmbeddedSearch, words: str = "otter") -> int:
    return len((await index.search(Query(words=words, store="store"))).hits)


async def exported(engine: Engine, agent: Agent, memory: str = "conductor") -> None:
    request = ExportRequest(memory=memory, projects=(agent.project,), force=True)
    receipt = await export(engine, LocalSandbox(agent.home.resolve()), request)
    assert receipt.outcome == "committed"


async def test_only_the_owner_can_read_it(here: OnThisMachine) -> None:
    index = EmbeddedSearch(here.folder)
    await index.replace(PLACE, "s1", Some("otter"), yes)
    holding = sqlite3.connect(here.files[0])
    holding.execute("SELECT * FROM memories").fetchall()  # its log is there as long as somebody reads
    modes = {path: oct(path.stat().st_mode & 0o777) for path in (here.folder, *here.folder.rglob("*"))}
    assert len(modes) >= 5
    assert all(mode == ("0o700" if path.is_dir() else "0o600") for path, mode in modes.items()), modes
    holding.close()


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _fill(file: Path) -> None:
    file.write_bytes(b"not a database " * 10_000)


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _scratch(file: Path) -> None:
    data = bytearray(file.read_bytes())
    for page in range(1, len(data) // 4096):
        data[page * 4096 : page * 4096 + 100] = random.Random(page).randbytes(100)
    file.write_bytes(data)


def _drop(file: Path) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute("DROP TABLE records")


def _empty_words(file: Path) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute("DELETE FROM words_data")


@pytest.mark.parametrize("damage", [_cut, _fill, _empty, _scratch, _drop, _empty_words])
async def test_a_damaged_index_is_built_again(tmp_path: Path, here: OnThisMachine, damage: object) -> None:
    engine, agent = engine_at(tmp_path / "store"), Agent(tmp_path / "home")
    agent.converse()
    await exported(engine, agent)
    index = index_of(engine, here.open(), embedded=True)
    assert [one.state async for one in index.catch_up()] == ["written"]
    (file,) = here.files
    damage(file)  # type: ignore[operator]
    for _ in range(3):
        assert all([one.state in ("written", "current") async for one in index.catch_up()])
        try:
            found = await index.search(Query(words="otter or brave or lantern"))
        except IndexReset:
            continue
        if found.hits:
            break
    assert found.hits and found.unindexed == [] and here.files != [file]
    assert sorted(here.rows()) == agent.expected("conductor")


async def test_an_index_that_is_gone_is_built_again(tmp_path: Path, here: OnThisMachine) -> None:
    index = EmbeddedSearch(here.folder)
    await index.replace(PLACE, "s1", Some("otter"), yes)
    for path in here.files:
        path.unlink()
    assert await index.standing("store") == {} and await count(index) == 0
    await index.replace(PLACE, "s1", Some("otter"), yes)
    assert await count(index) == 1


async def test_a_process_that_holds_a_discarded_index_takes_nothing_of_the_new_one_along(here: OnThisMachine) -> None:
    index = EmbeddedSearch(here.folder)
    await index.replace(PLACE, "s1", Some("otter"), yes)
    holding = sqlite3.connect(here.files[0])
    holding.execute("SELECT * FROM memories").fetchall()
    _empty(here.files[0])
    with pytest.raises(IndexReset):
        await index.standing("store")
    await index.replace(PLACE, "s1", Some("otter", "otter"), yes)
    reading = sqlite3.connect(here.files[0])
    reading.execute("SELECT * FROM memories").fetchall()  # the new one's log is there, and all is in it
    await index.replace(PLACE, "s2", Some("otter", "otter", "otter"), yes)
    holding.close()
    reading.close()
    assert await count(index) == 3


async def test_another_version_has_its_own_index(here: OnThisMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    index = EmbeddedSearch(here.folder)
    await index.replace(PLACE, "s1", Some("otter"), yes)
    with monkeypatch.context() as later:
        later.setattr(sqlite_schema, "FORMAT", 2)
        later.setattr("adapters.search.sqlite_files.FORMAT", 2)
        assert await index.standing("store") == {}
        (here.folder / "store/index-2-00000000000000000001.db").write_bytes(b"what a later version writes")
    await index.replace(PLACE, "s2", Some("otter"), yes)
    assert (here.folder / "store/index-2-00000000000000000001.db").exists()
    assert await count(index) == 1


async def test_records_of_another_reader_version_are_written_again(
    here: OnThisMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await EmbeddedSearch(here.folder).replace(PLACE, "s1", Some("otter", "heron"), yes)
    monkeypatch.setattr("adapters.search.sqlite.READER", 10_000)
    later = EmbeddedSearch(here.folder)
    assert await later.standing("store") == {"conductor": ""}
    done = await later.replace(PLACE, "s1", Some("otter", "heron"), yes)
    assert done is not None and (done.written, done.removed) == (2, 2)
    assert await later.standing("store") == {"conductor": "s1"}


async def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    index = EmbeddedSearch(tmp_path / "file")
    with pytest.raises(SearchDenied, match="file"):
        await index.replace(PLACE, "s1", Some("otter"), yes)


async def test_a_full_disk_leaves_what_was_there(here: OnThisMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    index = EmbeddedSearch(here.folder)
    await index.replace(PLACE, "s1", Some("otter"), yes)
    from adapters.search.sqlite_files import PlainFiles

    opened = PlainFiles.open_to_write

    def open_small(self: PlainFiles) -> sqlite3.Connection:
        connection = opened(self)
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages + 1}")
        return connection

    monkeypatch.setattr(PlainFiles, "open_to_write", open_small)
    with pytest.raises(SearchError, match="full"):
        await index.replace(PLACE, "s2", Some(*(f"heron{n} " * 50 for n in range(3000))), yes)
    monkeypatch.undo()
    assert await index.standing("store") == {"conductor": "s1"} and await count(index) == 1


async def test_without_fts5_it_is_said(here: OnThisMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    without = [table.replace("USING fts5", "USING fts5_that_is_not_there") for table in sqlite_schema.TABLES]
    monkeypatch.setattr(sqlite_schema, "TABLES", without)
    with pytest.raises(SearchError, match="FTS5"):
        await EmbeddedSearch(here.folder).replace(PLACE, "s1", Some("otter"), yes)


@pytest.mark.parametrize(
    ("changes", "kills"), [(2, 5), pytest.param(40, 15, marks=pytest.mark.slow)], ids=["few", "many"]
)
async def test_whoever_writes_rows_may_be_killed_at_any_moment(
    tmp_path: Path, here: OnThisMachine, changes: int, kills: int
) -> None:
    store, agent, chance = tmp_path / "store", Agent(tmp_path / "home"), random.Random(changes)
    agent.converse(observations=150)
    await exported(engine_at(store), agent)
    with writers(store, tmp_path / "other") as elsewhere:
        elsewhere.run(kill_after=0)  # from here on it has started
        began = time.monotonic()
        assert elsewhere.run() == 0
        took = time.monotonic() - began
    with writers(store, here.folder) as written:
        written.run(kill_after=0)
        cut_short = 0
        for _ in range(kills):  # the very first time, too
            cut_short += written.run(kill_after=chance.uniform(0, took)) == signal.SIGKILL
            assert sorted(here.rows()) in ([], agent.expected("conductor"))
        assert written.run() == 0  # perhaps each of them was killed before it had written anything
        for _ in range(changes):
            before = agent.expected("conductor")
            agent.converse(observations=10)
            agent.forget()
            await exported(engine_at(store), agent)
            after = agent.expected("conductor")
            for _ in range(kills):
                cut_short += written.run(kill_after=chance.uniform(0, took)) == signal.SIGKILL
                assert sorted(here.rows()) in (before, after), "rows of two snapshots at once"
            assert written.run() == 0
            assert sorted(here.rows()) == after
        assert cut_short >= changes, "hardly any was killed on the way"


def test_ten_commands_at_once_on_an_index_that_is_not_there_yet(tmp_path: Path) -> None:
    """Real processes, which all find that nothing is indexed."""
    engine = engine_at(tmp_path / "store")
    agent = Agent(tmp_path / "home")

    async def fill() -> None:
        for number in range(4):
            agent.converse()
            await exported(engine, agent, f"m{number}")

    asyncio.run(fill())
    words = [sys.executable, "-m", "sidecar", "search", "otter or brave", f"--store=file:{tmp_path}/store"]
    running = [
        subprocess.Popen(words, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(10)
    ]
    said = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0] * 10, said
    assert all("m0" in out and "Warning" not in out and "lock" not in err for out, err in said), said
