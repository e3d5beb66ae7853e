"""The tables in Postgres: how they are made, who may see them, and what is said when something is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

import psycopg
import pytest

from adapters.search.postgres import PostgresSearch, open_postgres
from adapters.search.postgres_errors import Redactor
from adapters.search.postgres_schema import STEPS
from sidecar.errors import SearchBusy, SearchDenied, SearchError, SearchUnfit, SearchUnreachable
from sidecar.records.record import READER, Record
from sidecar.search.port import MemoryRef, Moment, Query, WriteCounts
from sidecar.search.settings import Postgres, check_postgres
from tests.parts.leaks import DATABASE_PASSWORD
from tests.parts.postgres import Database

PLACE = MemoryRef("store", "conductor")


class Some:
    """Records of a few words each; with ``problems``, some could not be read."""

    def __init__(self, *records: Record, problems: Sequence[str] = ()) -> None:
        self.records = records
        self.problems = list(problems)

    async def batches(self) -> AsyncGenerator[Sequence[Record]]:
        yield self.records


OTTER = Some(Record(kind="section", key="a", title="Otters", text="swim"))


async def yes() -> bool:
    return True


async def no() -> bool:
    return False


def sink_of(database: Database, url: str = "", **settings: str) -> PostgresSearch:
    return open_postgres(url or database.url, Postgres(**settings))  # type: ignore[arg-type]


def as_role(database: Database, role: str) -> str:
    host = quote(str(database.server.pgdata))
    return f"postgresql://{role}:{DATABASE_PASSWORD}@/{database.name}?host={host}"


@pytest.fixture
def role(database: Database) -> str:
    """A role that may only connect."""
    name = f"r{database.name}"
    database.execute(f"CREATE ROLE {name} LOGIN")
    return name


async def test_many_who_start_at_once_make_the_tables_once(database: Database) -> None:
    sinks = [sink_of(database) for _ in range(5)]
    written = await asyncio.gather(*(sink.replace(PLACE, "s1", OTTER, yes) for sink in sinks))
    assert sorted(one.written for one in written if one) == [0, 0, 0, 0, 1]
    assert database.execute("SELECT number FROM memory_sidecar.version") == [(2,)]
    assert await sinks[0].standing("store") == {"conductor": "s1"}
    assert await sinks[0].standing("store", "nobody") == await sinks[0].standing("other") == {}


async def test_who_is_told_that_it_is_not_so_any_more_changes_nothing(database: Database) -> None:
    sink = sink_of(database)
    assert await sink.replace(PLACE, "s1", OTTER, no) is None
    assert await sink.standing("store") == {}
    await sink.replace(PLACE, "s1", OTTER, yes)
    assert await sink.remove(PLACE, no) is None
    assert await sink.standing("store") == {"conductor": "s1"}
    assert await sink.remove(PLACE, yes) == 1
    assert await sink.remove(PLACE, yes) == 0
    assert database.rows() == []


async def test_of_two_records_with_one_key_there_is_one_row(database: Database) -> None:
    sink = sink_of(database)
    twins = Some(*OTTER.records, Record(kind="section", key="a", title="Other"), problems=["half of it"])
    assert await sink.replace(PLACE, "s1", twins, yes) == WriteCounts(records=1, written=1)
    assert [row[3] for row in database.rows()] == ["Otters"]
    assert database.execute("SELECT problems, records FROM memory_sidecar.memories") == [(["half of it"], 1)]


async def test_another_role_sees_no_row_even_with_every_grant(database: Database, role: str) -> None:
    await sink_of(database).replace(PLACE, "s1", OTTER, yes)
    database.execute(f"GRANT USAGE ON SCHEMA memory_sidecar TO {role}")
    database.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA memory_sidecar TO {role}")
    secured = "SELECT count(*) FROM pg_class WHERE relnamespace = 'memory_sidecar'::regnamespace AND relkind = 'r'"
    assert database.execute(secured) == database.execute(f"{secured} AND relrowsecurity") == [(4,)]
    with psycopg.connect(as_role(database, role)) as connection:
        for table in ("records", "memories", "version"):
            assert connection.execute(f"SELECT * FROM memory_sidecar.{table}").fetchall() == []


async def test_a_role_without_rights_is_told_so_and_one_that_owns_the_schema_needs_no_more(
    database: Database, role: str
) -> None:
    poor = sink_of(database, as_role(database, role))
    with pytest.raises(SearchDenied) as refused:
        await poor.standing("store")
    assert "docs/search.md" in refused.value.hint
    database.execute(f"CREATE SCHEMA memory_sidecar AUTHORIZATION {role}")
    assert await poor.replace(PLACE, "s1", OTTER, yes) == WriteCounts(records=1, written=1)


async def test_tables_of_an_earlier_version_are_kept_and_get_what_is_new(database: Database) -> None:
    database.execute("CREATE SCHEMA memory_sidecar")
    for statement in (
        *STEPS[0],
        "CREATE TABLE {schema}.version (number integer NOT NULL)",
        "INSERT INTO {schema}.version VALUES (1)",
        "INSERT INTO {schema}.memories (store, memory, snapshot, reader, records, problems, indexed)"
        f" VALUES ('store', 'conductor', 's1', '{READER} simple', 1, '{{{{}}}}', now())",
        "INSERT INTO {schema}.records SELECT id, 'section', 'a', 'Otters', 'swim', '', '', NULL, '', '\\x00',"
        " to_tsvector('simple', 'swim') FROM {schema}.memories",
    ):
        database.execute(statement.format(schema="memory_sidecar"))
    sink = sink_of(database)
    assert await sink.standing("store") == {"conductor": "s1"} and await sink.lines("store") == {}
    assert [hit.key for hit in (await sink.search(Query(words="swim", store="store", history=True))).hits] == ["a"]
    again = Some(Record(kind="section", key="a", title="Otters", text="dive"))
    assert await sink.replace(PLACE, "s2", again, yes, Moment("t2", begins=True))
    assert await sink.lines("store") == {"conductor": ["s2"]} and len(database.rows()) == 1


async def test_tables_that_a_newer_version_made_are_left_alone(database: Database) -> None:
    await sink_of(database).replace(PLACE, "s1", OTTER, yes)
    database.execute("UPDATE memory_sidecar.version SET number = 99")
    with pytest.raises(SearchUnfit, match="newer version"):
        await sink_of(database).search(Query(words="otters", store="store"))
    assert database.execute("SELECT number FROM memory_sidecar.version") == [(99,)]


async def test_every_character_is_written_whatever_the_client_is_set_to(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    await sink_of(database).replace(PLACE, "s1", Some(Record(kind="section", key="a", title="記憶 €")), yes)
    monkeypatch.delenv("PGCLIENTENCODING")
    assert [row[3] for row in database.rows()] == ["記憶 €"]


async def test_a_database_that_cannot_hold_every_character_is_refused(database: Database) -> None:
    name = f"{database.name}_latin"
    database.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' TEMPLATE template0 LOCALE 'C'")
    latin = Database(database.server, name)
    with pytest.raises(SearchUnfit, match="UTF-8"):
        await sink_of(latin).replace(PLACE, "s1", OTTER, yes)
    assert latin.heads() == {}


async def test_tables_that_somebody_dropped_are_made_again(database: Database) -> None:
    sink = sink_of(database)
    await sink.replace(PLACE, "s1", OTTER, yes)
    database.execute("DROP SCHEMA memory_sidecar CASCADE")
    with pytest.raises(SearchUnreachable):
        await sink.standing("store")
    assert await sink.standing("store") == {}
    assert await sink.replace(PLACE, "s1", OTTER, yes) == WriteCounts(records=1, written=1)


async def test_whoever_holds_a_memory_too_long_is_not_waited_for_forever(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapters.search.postgres.LOCK_SECONDS", 0.2)
    first, second = sink_of(database), sink_of(database)
    await first.standing("store")

    async def meanwhile() -> bool:
        with pytest.raises(SearchBusy):
            await second.replace(PLACE, "s2", OTTER, yes)
        assert await second.replace(MemoryRef("store", "other"), "s2", OTTER, yes)
        return True

    assert await first.replace(PLACE, "s1", OTTER, meanwhile)
    assert await first.standing("store") == {"conductor": "s1", "other": "s2"}


@pytest.fixture
def freeze(database: Database) -> Iterator[Callable[[], None]]:
    """Stop whoever serves the sidecar in the middle of it: connected, and silent."""
    frozen: list[int] = []

    def now() -> None:
        serving = "SELECT pid FROM pg_stat_activity WHERE application_name = 'memory-sidecar' AND datname = %s"
        for (pid,) in database.execute(serving, database.name):
            frozen.append(pid)
            os.kill(pid, signal.SIGSTOP)

    yield now
    for pid in frozen:
        with contextlib.suppress(ProcessLookupError):  # it was frozen twice, and ended as soon as it could
            os.kill(pid, signal.SIGCONT)


async def test_one_that_stops_answering_is_not_waited_for_forever(
    database: Database, freeze: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = sink_of(database)
    await sink.standing("store")
    monkeypatch.setattr("adapters.search.postgres.WRITE_SECONDS", 0.5)

    async def frozen() -> bool:
        freeze()
        return True

    for write in (sink.replace(PLACE, "s1", OTTER, frozen), sink.remove(MemoryRef("store", "other"), frozen)):
        async with asyncio.timeout(8):
            with pytest.raises(SearchUnreachable, match="in time"):
                await write


async def test_who_gives_up_on_one_that_stopped_answering_is_free_at_once(
    database: Database, freeze: Callable[[], None]
) -> None:
    sink = sink_of(database)
    await sink.standing("store")

    async def frozen() -> bool:
        freeze()
        return True

    began = time.monotonic()
    with pytest.raises((TimeoutError, SearchUnreachable)):
        async with asyncio.timeout(1):
            await sink.replace(PLACE, "s1", OTTER, frozen)
    assert time.monotonic() - began < 4


async def test_many_searches_at_once_wait_for_each_other(database: Database) -> None:
    sink = sink_of(database)
    await sink.replace(PLACE, "s1", OTTER, yes)
    found = await asyncio.gather(*(sink.search(Query(words="otters", store="store")) for _ in range(40)))
    assert all(len(one.hits) == 1 for one in found)


@pytest.mark.parametrize(
    "url", ["postgresql:///db", "postgres://a,b:5433/db", "postgresql://u@[::1]:5432/db?sslmode=require"]
)
def test_every_way_to_write_a_url_is_taken(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("MEMORY_SIDECAR_POSTGRES", url)
    assert check_postgres(Postgres())
    assert open_postgres(url, Postgres())


async def test_better_fits_and_newer_records_come_first(database: Database) -> None:
    now = datetime.now(UTC)
    records = [
        Record(kind="section", key="old", title="x", text="an otter", at=now - timedelta(days=2000)),
        Record(kind="section", key="new", title="x", text="an otter", at=now),
        Record(kind="section", key="title", title="otter", text="something", at=now),
        Record(kind="section", key="timeless", title="x", text="an otter"),
    ]
    sink = sink_of(database)
    await sink.replace(PLACE, "s1", Some(*records), yes)
    found = await sink.search(Query(words="otter", store="store"))
    assert [hit.key for hit in found.hits] == ["title", "new", "old", "timeless"]


CODE = "see src/app/main.py in https://git.example.com:8080/a?b=c, ask ann@example.com, v1.2.3, Vec<Otter> and C:\\temp"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        *((words, True) for words in ("main.py", "app", "src/app/main.py", "app/main.py", '"app/main.py in"', "main")),
        *((words, True) for words in ("example.com", "git.example.com", "ann@example.com", "ann", "v1.2.3", "temp")),
        *((words, True) for words in ("Vec<Otter>", "otter", "see -other.py", "other.py or main.py", "main.py v1.2")),
        *((words, False) for words in ("other.py", "py/main", "see -main.py", "main.py -v1.2", '"main.py src"', "./")),
    ],
)
async def test_parts_of_paths_addresses_and_types_are_words(database: Database, words: str, found: bool) -> None:
    sink = sink_of(database)
    await sink.replace(PLACE, "s1", Some(Record(kind="section", key="a", title="x", text=CODE)), yes)
    hits = (await sink.search(Query(words=words, store="store"))).hits
    assert len(hits) == found
    assert all("**" in hit.snippet for hit in hits)


async def test_no_part_of_the_url_is_ever_said() -> None:
    url = f"postgresql://somebody:p%40ss{DATABASE_PASSWORD}@127.0.0.1:9/db"
    sink = open_postgres(url, Postgres())
    with pytest.raises(SearchUnreachable) as refused:
        await sink.standing("store")
    problem: BaseException | None = refused.value
    said = [repr(sink), repr(vars(sink)["_redacted"])]
    while problem is not None:
        said += [str(problem), repr(problem)]
        problem = problem.__cause__ or (None if problem.__suppress_context__ else problem.__context__)
    assert DATABASE_PASSWORD not in " ".join(said)
    hidden = Redactor(url)(f"at {url}: p@ss{DATABASE_PASSWORD} or p%40ss{DATABASE_PASSWORD}")
    assert hidden == "at …: … or …"
    in_query = f"postgresql://host/db?user=x&password={DATABASE_PASSWORD}"
    assert Redactor(in_query)(f"said {DATABASE_PASSWORD}") == "said …"
    assert issubclass(SearchUnreachable, SearchError)
