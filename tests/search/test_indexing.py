"""Rows equal what the heads hold, whatever happened on the way."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import sqlite3
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import psycopg
import pytest

from adapters.sandboxes.local import LocalSandbox
from sidecar.engine import Engine, ExportRequest, export
from sidecar.engine.heads import fork, rollback
from sidecar.errors import SnapshotDamaged
from sidecar.ids import MemoryKeys
from sidecar.records.record import Record
from sidecar.search.port import MemoryRef, Moment, Query, RecordSource, SearchDatabase, Still, WriteCounts
from sidecar.search.settings import Postgres
from sidecar.search.upkeep import IndexResult, SearchIndex
from sidecar.store.store_id import read_store_id
from sidecar.wiring import open_search
from tests.parts.homes import engine_at
from tests.parts.postgres import Database
from tests.parts.remembering import Agent
from tests.parts.searched import Searched, index_of

pytestmark = pytest.mark.usefixtures("forked_programs")


def in_postgres(engine: Engine, **settings: object) -> SearchIndex:
    sink = open_search(Postgres(**settings))  # type: ignore[arg-type]
    assert sink is not None
    return SearchIndex(engine.repository, sink)


async def exported(engine: Engine, agent: Agent, memory: str = "conductor") -> str:
    request = ExportRequest(memory=memory, projects=(agent.project,), force=True)
    receipt = await export(engine, LocalSandbox(agent.home.resolve()), request)
    assert receipt.outcome == "committed"
    return receipt.snapshot or ""


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_at(tmp_path / "store")


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    agent = Agent(tmp_path / "home")
    agent.converse()
    return agent


async def test_rows_are_what_the_agent_remembered_after_every_export(
    engine: Engine, agent: Agent, searched: Searched
) -> None:
    index = index_of(engine, searched.open())
    for _ in range(3):
        snapshot = await exported(engine, agent)
        done = await index.update_memory("conductor")
        assert (done.state, done.snapshot, done.problems) == ("written", snapshot, [])
        assert sorted(searched.rows()) == agent.expected("conductor")
        assert done.records == len(agent.rows)
        agent.converse()
        agent.forget()


async def test_what_is_equal_already_is_left_alone(engine: Engine, agent: Agent, database: Database) -> None:
    index = in_postgres(engine)
    await exported(engine, agent)
    assert (await index.update_memory("conductor")).written == len(agent.rows)
    before = dict(database.execute("SELECT kind || key, xmin::text FROM memory_sidecar.records"))
    agent.observe()
    await exported(engine, agent)
    done = await index.update_memory("conductor")
    assert (done.written, done.removed) == (1, 0)
    after = dict(database.execute("SELECT kind || key, xmin::text FROM memory_sidecar.records"))
    assert len(after) == len(before) + 1 and all(after[name] == version for name, version in before.items())
    assert (await index.update_memory("conductor")).state == "current"


async def test_rows_of_a_database_kept_beside_the_first_are_rows_of_their_own(
    engine: Engine, agent: Agent, searched: Searched
) -> None:
    index = index_of(engine, searched.open())
    old = agent.home / ".claude-mem/corpora/old/claude-mem.db"
    old.parent.mkdir(parents=True)
    with sqlite3.connect(agent.database) as source, sqlite3.connect(old) as copy_of_it:
        source.backup(copy_of_it)
    held = sum(kind in ("session", "observation", "summary", "prompt") for kind, _ in agent.rows)
    await exported(engine, agent)
    assert (await index.update_memory("conductor")).records == len(agent.rows) + held
    agent.observe()
    await exported(engine, agent)
    assert (await index.update_memory("conductor")).records == len(agent.rows) + held
    assert set(agent.expected("conductor")) <= set(searched.rows())


async def test_a_rollback_a_fork_and_a_delete_are_followed(engine: Engine, agent: Agent, searched: Searched) -> None:
    index = index_of(engine, searched.open())
    first, before = await exported(engine, agent), copy.deepcopy(agent.rows)
    agent.converse()
    await exported(engine, agent)
    await index.update_memory("conductor")
    await rollback(engine.repository, "conductor", first)
    await fork(engine.repository, "conductor", "other", "latest")
    assert await index.behind() == ["conductor", "other"]
    done = [one async for one in index.catch_up()]
    assert [(one.memory, one.state) for one in done] == [("conductor", "written"), ("other", "written")]
    agent.rows = before
    assert sorted(searched.rows()) == sorted(agent.expected("conductor") + agent.expected("other"))
    assert await index.behind() == []
    await engine.repository.delete_memory("conductor")
    assert [one async for one in index.catch_up()] == [
        IndexResult(memory="conductor", state="removed", removed=len(before))
    ]
    assert sorted(searched.rows()) == agent.expected("other")
    assert list(searched.heads()) == ["other"]


async def test_a_memory_that_was_deleted_and_begun_anew_has_the_new_rows(
    engine: Engine, agent: Agent, searched: Searched, tmp_path: Path
) -> None:
    index = index_of(engine, searched.open())
    await exported(engine, agent)
    agent.converse()
    await exported(engine, agent)  # its head's generation grows
    await index.update_memory("conductor")
    await engine.repository.delete_memory("conductor")
    fresh = Agent(tmp_path / "fresh", seed=9)
    fresh.converse()
    await exported(engine, fresh)
    await index.update_memory("conductor")
    assert sorted(searched.rows()) == fresh.expected("conductor")


class Interfering:
    """A real sink before which something happens: right before it is this one's turn to write."""

    def __init__(self, sink: SearchDatabase, before: object) -> None:
        self._sink = sink
        self._before = before

    def __getattr__(self, name: str) -> object:
        return getattr(self._sink, name)

    async def replace(
        self, place: MemoryRef, snapshot: str, records: RecordSource, still: Still, moment: Moment | None = None
    ) -> WriteCounts | None:
        await self._before()  # type: ignore[operator]
        return await self._sink.replace(place, snapshot, records, still, moment)


async def test_rows_of_an_older_head_never_replace_those_of_a_newer_one(
    engine: Engine, agent: Agent, searched: Searched
) -> None:
    older = await exported(engine, agent)
    quick = index_of(engine, searched.open())
    moved: list[str] = []

    async def overtake() -> None:
        """While the older head is about to be written, it moves, and another sidecar is done with the newer one."""
        if not moved:
            agent.converse()
            moved.append(await exported(engine, agent))
            await quick.update_memory("conductor")

    slow = SearchIndex(engine.repository, Interfering(searched.open(), overtake))  # type: ignore[arg-type]
    done = await slow.update_memory("conductor")
    assert done.snapshot == moved[0] != older
    assert done.state == "current"
    assert sorted(searched.rows()) == agent.expected("conductor")


async def test_rows_are_not_removed_when_the_memory_is_there_again(
    engine: Engine, agent: Agent, searched: Searched
) -> None:
    await exported(engine, agent)
    index = index_of(engine, searched.open())
    await index.update_memory("conductor")
    sink = searched.open()
    id = await read_store_id(engine.repository.store)

    async def no() -> bool:
        return False

    assert await sink.remove(MemoryRef(id, "conductor"), no) is None
    assert sorted(searched.rows()) == agent.expected("conductor")


async def test_many_at_once_end_with_the_newest(engine: Engine, agent: Agent, searched: Searched) -> None:
    indexes = [index_of(engine, searched.open()) for _ in range(3)]
    for _ in range(2):
        await exported(engine, agent)
        done = await asyncio.gather(*(index.update_memory("conductor") for index in indexes))
        assert len({one.snapshot for one in done}) == 1
        assert sorted(searched.rows()) == agent.expected("conductor")
        agent.converse()


async def test_two_stores_share_a_database_and_never_a_row(
    engine: Engine, agent: Agent, searched: Searched, tmp_path: Path
) -> None:
    other, second = engine_at(tmp_path / "other"), Agent(tmp_path / "second", seed=3)
    second.converse()
    await exported(engine, agent)
    await exported(other, second)
    assert [one.state async for one in index_of(engine, searched.open()).catch_up()] == ["written"]
    assert [one.state async for one in index_of(other, searched.open()).catch_up()] == ["written"]
    assert sorted(searched.rows()) == sorted(agent.expected("conductor") + second.expected("conductor"))
    word = second.observed[0][1][0].split()[-1]
    assert (await index_of(engine, searched.open()).search(Query(words=word))).hits == []
    assert len((await index_of(other, searched.open()).search(Query(words=word))).hits) == 1
    await other.repository.delete_memory("conductor")
    assert [one.state async for one in index_of(other, searched.open()).catch_up()] == ["removed"]
    assert sorted(searched.rows()) == agent.expected("conductor")


async def test_a_snapshot_that_cannot_be_read_does_not_keep_others_from_being(
    engine: Engine, agent: Agent, searched: Searched, tmp_path: Path
) -> None:
    snapshot = await exported(engine, agent, "broken")
    await exported(engine, agent, "whole")
    manifest = await engine.repository.manifest("broken", snapshot)
    pack = tmp_path / "store" / MemoryKeys.of("broken").pack(manifest.packs[0].id, manifest.packs[0].codec)
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(data)
    index = index_of(engine, searched.open())
    done = {one.memory: one async for one in index.catch_up()}
    assert done["broken"].state == "failed" and "damaged" in done["broken"].problem
    assert done["whole"].state == "written"
    assert sorted(searched.rows()) == agent.expected("whole")
    with pytest.raises(SnapshotDamaged):
        await index.update_memory("broken")


async def test_a_memory_whose_rows_somebody_holds_does_not_keep_others_from_being_written(
    engine: Engine, agent: Agent, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapters.search.postgres.LOCK_SECONDS", 0.2)
    index = in_postgres(engine)
    for memory in ("held", "other"):
        await exported(engine, agent, memory)
        await index.update_memory(memory)
    agent.converse()
    for memory in ("held", "other"):
        await exported(engine, agent, memory)
    with psycopg.connect(database.url) as connection:
        connection.execute("SELECT FROM memory_sidecar.memories WHERE memory = 'held' FOR UPDATE")
        done = {one.memory: one async for one in index.catch_up()}
    assert (done["held"].state, done["held"].retryable, done["other"].state) == ("failed", True, "written")
    assert [(one.memory, one.state) async for one in index.catch_up()] == [("held", "written")]
    assert sorted(database.rows()) == sorted(agent.expected("held") + agent.expected("other"))


async def test_another_text_search_configuration_writes_all_rows_anew(
    engine: Engine, agent: Agent, database: Database
) -> None:
    (Path(agent.project) / "MEMORY.md").write_text("# Habits\nShe was running quickly\n")
    await exported(engine, agent)
    plain, english = in_postgres(engine), in_postgres(engine, text_search="english")
    await plain.update_memory("conductor")
    count = len(database.rows())
    assert (await plain.search(Query(words="run"))).hits == []
    done = await english.update_memory("conductor")
    assert (done.state, done.written) == ("written", count)
    assert [hit.title for hit in (await english.search(Query(words="run"))).hits] == ["Habits"]
    assert await plain.behind() == ["conductor"]


async def test_a_search_finds_by_words_kind_and_memory_and_says_how_far_it_looked(
    engine: Engine, agent: Agent, searched: Searched
) -> None:
    snapshot = await exported(engine, agent, "a")
    await exported(engine, agent, "b/c")
    index = index_of(engine, searched.open())
    done = [one async for one in index.catch_up()]
    assert len(done) == 2
    title, text = agent.observed[0][1][:2]
    answer = await index.search(Query(words=f'"{title}"'))
    assert {hit.memory for hit in answer.hits} == {"a", "b/c"}
    hit = next(hit for hit in answer.hits if hit.memory == "a")
    assert (hit.kind, hit.key, hit.title, hit.path) == (
        "observation",
        agent.observed[0][0],
        title,
        "claude-mem/claude-mem.db",
    )
    assert (hit.snapshot, answer.behind, answer.more) == (snapshot, [], False)
    rare = text.split()[30]
    (hit,) = (await index.search(Query(words=rare, memories=["a"]))).hits
    assert f"**{rare}**" in hit.snippet
    assert (await index.search(Query(words=rare, kinds=["section", "prompt"]))).hits == []
    assert (await index.search(Query(words=rare, memories=["nobody"]))).hits == []
    agent.observe()
    await exported(engine, agent, "a")
    assert (await index.search(Query(words=rare))).behind == ["a"]
    pages = [await index.search(Query(words="otter or brave", limit=3, offset=at)) for at in (0, 3, 6)]
    keys = [(hit.memory, hit.kind, hit.key) for page in pages for hit in page.hits]
    assert len(set(keys)) == 9 and pages[0].more


NO_WORDS = ["", "   ", "'); DROP TABLE records; --", '"', "-", "a & b | !", "\0", "\ud800", "%s {schema}", "(((("]


async def test_no_words_break_a_search(engine: Engine, agent: Agent, searched: Searched) -> None:
    await exported(engine, agent)
    index = index_of(engine, searched.open())
    await index.update_memory("conductor")
    for words in NO_WORDS:
        assert (await index.search(Query(words=words))).hits == []
    assert sorted(searched.rows()) == agent.expected("conductor")


class Many:
    """So many records, made up."""

    problems: list[str] = []  # noqa: RUF012

    def __init__(self, count: int) -> None:
        self.count = count

    async def batches(self) -> AsyncGenerator[Sequence[Record]]:
        for start in range(0, self.count, 500):
            yield [
                Record(kind="observation", key=str(n), title=f"title {n}", text=f"word{n % 997} " * 20)
                for n in range(start, min(self.count, start + 500))
            ]


@pytest.mark.parametrize("count", [3_000, pytest.param(100_000, marks=pytest.mark.slow)])
async def test_many_records_are_written_and_searched(searched: Searched, count: int) -> None:
    sink = searched.open()

    async def yes() -> bool:
        return True

    place = MemoryRef("store", "large")
    written = await sink.replace(place, "one", Many(count), yes)
    assert written == WriteCounts(records=count, written=count)
    written = await sink.replace(place, "two", Many(count - 10), yes)
    assert written == WriteCounts(records=count - 10, removed=10)
    found = await sink.search(Query(words="word5", store="store", limit=10))
    assert len(found.hits) == (10 if count > 10_000 else 3)


HOSTILE = ["'; DROP SCHEMA memory_sidecar CASCADE; --", "nul\0inside", "\\x00 \\. \t tab", "{schema} %s %(id)s", "**"]


async def test_hostile_contents_are_rows_like_any_other(engine: Engine, agent: Agent, searched: Searched) -> None:
    """What a sandbox writes may be anything at all."""
    connection = sqlite3.connect(agent.database)
    with connection:
        for title in HOSTILE:
            connection.execute(
                "INSERT INTO observations (memory_session_id, project, type, title, narrative, created_at,"
                " created_at_epoch) VALUES ('s', 'p', 't', ?, ?, '', 0)",
                (title, "needle " + title),
            )
        distinct = " ".join(f"needle{n:x}-{n:o}.{n}/x{n}" for n in range(90_000))
        for value in (b"\xff\xfe needle \x80", distinct, "記憶 " * 400_000, 3.5, 10**15):
            connection.execute(
                "INSERT INTO observations (memory_session_id, project, type, title, narrative, created_at,"
                " created_at_epoch) VALUES ('s', 'p', 't', ?, ?, '', 9e300)",
                ("odd", value),
            )
    connection.close()
    memory = Path(agent.project) / "memory"
    (memory / "raw.md").write_bytes(b"# needle \xff\n\x00\xed\xa0\x80 text\n" + b"#" * 5000 + b" " * 5000 + b"x\n")
    (memory / "one-line.md").write_bytes(b"needle " * 300_000)
    (memory / "headings.md").write_bytes(b"# same\nneedle\n" * 300)
    (memory / ("n" * 200 + ".md")).write_bytes(b"# " + b"long " * 300 + b"\nneedle\n")
    (Path(agent.project) / ".cm/memory/learnings.json").write_text(json.dumps([None, 3, [], {"id": {}}, "needle"]))
    (Path(agent.project) / ".cm/memory/decisions.json").write_text("[" * 100_000)
    await exported(engine, agent)
    index = index_of(engine, searched.open())
    done = await index.update_memory("conductor")
    assert done.state == "written"
    assert [problem.partition(":")[0] for problem in done.problems] == ["cm/memory/decisions.json cannot be read"]
    rows = {(row[1], row[2]): row for row in searched.rows()}
    titles = [row[3] for row in rows.values()]
    assert all(" ".join(title.replace("\0", "\ufffd").split()) in titles for title in HOSTILE)
    assert max(len(row[4].encode()) for row in rows.values()) <= 200_000
    assert sum(key.startswith("project/memory/headings.md#same") for _, key in rows) == 300
    found = await index.search(Query(words="needle", limit=1000))
    assert {hit.key for hit in found.hits} >= {key for kind, key in rows if "one-line" in key or "nnnn" in key}
    assert (await index.search(Query(words="needle77-167.119/x119"))).hits


async def test_a_table_that_is_not_there_or_is_no_table_is_no_problem(
    engine: Engine, agent: Agent, searched: Searched
) -> None:
    connection = sqlite3.connect(agent.database)
    with connection:
        connection.execute("DROP TABLE user_prompts")
        connection.execute("DROP TABLE session_summaries")
        connection.execute(
            "CREATE VIEW session_summaries AS WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n)"
            " SELECT id, 'x' AS request FROM n"
        )
        connection.execute("ALTER TABLE observations DROP COLUMN narrative")
        connection.execute("ALTER TABLE observations RENAME COLUMN memory_session_id TO sdk_session_id")
    connection.close()
    await exported(engine, agent)
    done = await index_of(engine, searched.open()).update_memory("conductor")
    assert done.problems == []
    kinds = {row[1] for row in searched.rows()}
    assert kinds == {"session", "observation", "learning", "decision", "section"}
    assert {row[6] for row in searched.rows() if row[1] == "observation"} == {"s"}


async def test_of_a_damaged_database_what_can_be_read_is_there_and_the_rest_is_told(
    engine: Engine, agent: Agent, searched: Searched
) -> None:
    agent.observe(300)
    connection = sqlite3.connect(agent.database)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    data = bytearray(agent.database.read_bytes())
    chance = random.Random(5)
    for page in range(8, len(data) // 4096, 3):
        data[page * 4096 : page * 4096 + 200] = chance.randbytes(200)
    agent.database.write_bytes(data)
    await exported(engine, agent)
    done = await index_of(engine, searched.open()).update_memory("conductor")
    assert done.state == "written"
    assert any(problem.startswith("claude-mem/claude-mem.db cannot be read") for problem in done.problems)
    kinds = {row[1] for row in searched.rows()}
    assert kinds >= {"learning", "decision", "section"}
    noted = searched.problems()[0]
    assert noted == done.problems
