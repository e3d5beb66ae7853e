"""What a search index promises, in Postgres and on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime, timedelta

import pytest

from sidecar.models.answers import Hit
from sidecar.records.record import Record
from sidecar.search.port import MemoryRef, Moment, Query, SearchDatabase, WriteCounts
from tests.parts.searched import Searched

PLACE = MemoryRef("store", "conductor")
NOW = datetime.now(UTC)


class Some:
    """Records of a few words each; with ``problems``, some could not be read."""

    def __init__(self, *records: Record, problems: Sequence[str] = ()) -> None:
        self.records = records
        self.problems = list(problems)

    async def batches(self) -> AsyncGenerator[Sequence[Record]]:
        for record in self.records:
            yield [record]


def section(
    key: str, text: str = "swim", title: str = "Otters", project: str = "", at: datetime | None = NOW
) -> Record:
    return Record(kind="section", key=key, title=title, text=text, project=project, at=at)


async def yes() -> bool:
    return True


async def no() -> bool:
    return False


async def keys(index: SearchDatabase, words: str, **about: object) -> list[str]:
    found = await index.search(Query(words=words, store="store", **about))  # type: ignore[arg-type]
    return [hit.key for hit in found.hits]


async def test_nothing_is_found_where_nothing_was_written(searched: Searched) -> None:
    index = searched.open()
    assert await index.standing("store") == await index.lines("store") == await index.standing("") == {}
    found = await index.search(Query(words="otters", store="store"))
    assert (found.hits, found.more) == ([], False)
    assert await index.remove(PLACE, yes) == 0


async def test_records_are_those_of_the_last_snapshot(searched: Searched) -> None:
    index = searched.open()
    assert await index.replace(PLACE, "s1", Some(section("a"), section("b")), yes) == WriteCounts(records=2, written=2)
    assert await index.replace(PLACE, "s1", Some(), yes) == WriteCounts(records=2)
    second = Some(section("b", "dive"), section("c"), problems=["half of it"])
    assert await index.replace(PLACE, "s2", second, yes) == WriteCounts(records=2, written=2, removed=2)
    assert [(row[2], row[4]) for row in searched.rows()] == [("b", "dive"), ("c", "swim")]
    assert searched.problems() == [["half of it"]]
    assert await index.standing("store") == await index.standing("store", "conductor") == {"conductor": "s2"}
    assert await index.standing("store", "nobody") == await index.standing("other") == {}
    assert await keys(index, "swim") == ["c"]


async def test_nothing_happens_where_the_head_has_moved(searched: Searched) -> None:
    index = searched.open()
    assert await index.replace(PLACE, "s1", Some(section("a")), no) is None
    assert await index.standing("store") == {}
    await index.replace(PLACE, "s1", Some(section("a")), yes)
    assert await index.replace(PLACE, "s2", Some(), no) is None
    assert await index.remove(PLACE, no) is None
    assert await index.standing("store") == {"conductor": "s1"} and len(searched.rows()) == 1
    assert await index.remove(PLACE, yes) == 1
    assert await index.remove(PLACE, yes) == 0
    assert searched.rows() == [] and await keys(index, "swim") == []


async def test_of_two_records_with_one_key_there_is_one(searched: Searched) -> None:
    index = searched.open()
    twins = Some(section("a"), section("a", title="Other"))
    assert await index.replace(PLACE, "s1", twins, yes) == WriteCounts(records=1, written=1)
    assert [row[3] for row in searched.rows()] == ["Otters"]
    changed = Some(section("a", title="New"), section("a", title="Newer"))
    assert await index.replace(PLACE, "s2", changed, yes) == WriteCounts(records=1, written=1, removed=1)
    assert [row[3] for row in searched.rows()] == ["New"]


async def test_who_is_interrupted_leaves_what_was_there(searched: Searched) -> None:
    index = searched.open()
    await index.replace(PLACE, "s1", Some(section("a")), yes)

    class Stopped(Some):
        async def batches(self) -> AsyncGenerator[Sequence[Record]]:
            yield [section("b")]
            await asyncio.sleep(3600)

    writing = asyncio.create_task(index.replace(PLACE, "s2", Stopped(), yes))
    await asyncio.sleep(0.2)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert [row[2] for row in searched.rows()] == ["a"] and await index.standing("store") == {"conductor": "s1"}
    assert await index.replace(PLACE, "s2", Some(section("b")), yes) == WriteCounts(records=1, written=1, removed=1)


CODE = "see src/app/main.py in https://git.example.com:8080/a?b=c, ask ann@example.com, v1.2.3, Vec<Otter> and C:\\temp"
LANGUAGE = [
    *((words, ["code"]) for words in ("main.py", "app", "src/app/main.py", "app/main.py", '"app/main.py in"', "main")),
    *((words, ["code"]) for words in ("example.com", "git.example.com", "ann@example.com", "v1.2.3", "Vec<Otter>")),
    *((words, ["code"]) for words in ("see -other.py", "other.py or main.py", "main.py v1.2", "temp")),
    *((words, []) for words in ("other.py", "py/main", "see -main.py", "main.py -v1.2", '"main.py src"', "./")),
    ("lock order", ["locks", "orders"]),
    ("LOCK Order", ["locks", "orders"]),
    ('"lock order"', ["locks"]),
    ('"lock order', ["locks"]),
    ("lock -took", ["orders"]),
    ('lock -"lock order"', ["orders"]),
    ("lock - took", ["orders"]),
    ("lock --took", ["locks"]),
    ("took or reversed", ["locks", "orders"]),
    ("took OR reversed", ["locks", "orders"]),
    ("took or reversed -order", ["locks"]),
    ("reversed or took -order", ["orders"]),
    ("reversed or see -main", ["orders"]),
    ("lock or", ["or"]),
    ('took "or"', []),
    ("lock or order or ", ["locks", "or", "orders"]),
    ("or lock", ["or"]),
    ("a & b | !", ["code"]),
    ("-lock", ["code", "unicode"]),
    ("-lock or took", ["code", "locks", "unicode"]),
    ("zürich", ["unicode"]),
    ("zurich", []),
    ("ÉCOLE", ["unicode"]),
    ("наблюдение", ["unicode"]),
    ("記憶", ["unicode"]),
    ("नमस्ते", ["unicode"]),
    ("foo_bar", ["unicode"]),
    ("bar foo", ["unicode"]),
    ("foo*", ["unicode"]),
    ("fo*", []),
    ("loc", []),
    *((words, []) for words in ("", "   ", '"', '""', "-", '-""', "\0", "\ud800", "((((", "***", "NEAR(x)")),
    *(
        (words, [])
        for words in ("'); DROP TABLE records; --", "%s {schema}", "title:x", "{title} : lock NOT", "k73 m1")
    ),
]


@pytest.fixture
async def library(searched: Searched) -> SearchDatabase:
    index = searched.open()
    records = (
        section("code", CODE, "x"),
        section("locks", "it took lock order", "x"),
        section("orders", "an order; a lock, reversed", "x"),
        section("or", "lock or order: or else", "either or", at=NOW - timedelta(days=9000)),
        section("unicode", "Zürich École наблюдение 記憶 नमस्ते foo_bar", "x"),
    )
    await index.replace(PLACE, "s1", Some(*records), yes)
    return index


async def test_words_mean_the_same_in_both(library: SearchDatabase) -> None:
    # One test for all: a database is dear.
    for words, expected in LANGUAGE:
        found = await keys(library, words)
        wanted = set(expected)
        # "or" is a word of one record alone, which also has the others.
        if words not in ("lock or", "lock or order or ", "or lock", 'took "or"'):
            found = [key for key in found if key != "or"]
        assert set(found) == wanted, words


async def test_a_hit_shows_where_its_words_are(library: SearchDatabase) -> None:
    (hit,) = (await library.search(Query(words='"took lock" -main', store="store"))).hits
    assert (hit.memory, hit.kind, hit.key, hit.title, hit.snapshot) == ("conductor", "section", "locks", "x", "s1")
    assert hit.snippet in ("**took** **lock** order", "it **took lock** order")
    assert hit.at == NOW.isoformat(timespec="milliseconds") and hit.indexed > hit.at
    assert (hit.first, hit.since, hit.last, hit.until) == ("", None, "", None)


async def test_a_very_long_query_and_a_record_of_one_word_are_answered(searched: Searched) -> None:
    index = searched.open()
    await index.replace(PLACE, "s1", Some(section("a", "otter " * 30_000), section("b", "x" * 100_000)), yes)
    assert await keys(index, "otter") == ["a"]
    for words in ("a" * 1_000, "a " * 500, '"' * 1_000, '"a' * 500, "(" * 1_000):
        assert await keys(index, words) == []
    assert await keys(index, "-b " * 330 + "otter") == ["a"]


async def test_better_fits_and_newer_records_come_first(searched: Searched) -> None:
    index = searched.open()
    records = (
        section("old", "an otter", "x", at=NOW - timedelta(days=2000)),
        section("new", "an otter", "x"),
        section("title", "something", "otter"),
        section("timeless", "an otter", "x", at=None),
    )
    await index.replace(PLACE, "s1", Some(*records), yes)
    assert await keys(index, "otter") == ["title", "new", "old", "timeless"]


async def test_filters_narrow_before_pages_are_cut(searched: Searched) -> None:
    index = searched.open()
    for number, memory in enumerate(("acme/a", "acme/b", "other", "other/c")):
        records = [
            section(f"{memory} {n}", "an otter", "x", f"p{n % 2}", NOW - timedelta(days=10 * n, hours=number))
            for n in range(5)
        ]
        rating = Record(kind="rating", key=f"{memory} r", title="x", text="an otter", at=NOW - timedelta(days=900))
        await index.replace(MemoryRef("store", memory), "s1", Some(*records, rating), yes)

    async def find(**about: object) -> tuple[list[Hit], bool]:
        found = await index.search(Query(words="otter", store="store", **about))  # type: ignore[arg-type]
        return found.hits, found.more

    hits, more = await find(within=r"^(?:acme/[^/]*)\Z".replace(r"\Z", "$"), limit=7)
    assert {hit.memory for hit in hits} == {"acme/a", "acme/b"} and more
    hits, more = await find(within="^acme/", limit=12)
    assert len(hits) == 12 and not more
    pages = [await find(within="^acme/", limit=5, offset=at) for at in (0, 5, 10, 15)]
    assert [more for _, more in pages] == [True, True, False, False]
    assert [hit.key for page, _ in pages for hit in page] == [hit.key for hit in hits]
    assert [hit.memory for hit in (await find(memories=["other", "nobody"]))[0]] == ["other"] * 6
    assert (await find(memories=["other"], within="^acme/"))[0] == (await find(memories=["nobody"]))[0] == []
    assert {hit.kind for hit in (await find(kinds=["rating"], limit=50))[0]} == {"rating"}
    assert len((await find(kinds=["rating", "section"], limit=50))[0]) == 24
    assert {hit.project for hit in (await find(projects=["p1"], limit=50))[0]} == {"p1"}
    assert len((await find(projects=["p1", "p0"], memories=["acme/a"]))[0]) == 5
    since, until = NOW - timedelta(days=25), NOW - timedelta(days=5)
    found = [hit.key for hit in (await find(memories=["acme/a"], since=since, until=until))[0]]
    assert found == ["acme/a 1", "acme/a 2"]


async def test_what_others_hold_does_not_show_in_a_score(searched: Searched) -> None:
    """Who may read one memory alone learns nothing about the words in the others."""
    index = searched.open()
    mine, others = MemoryRef("store", "mine"), MemoryRef("store", "others")
    await index.replace(mine, "s1", Some(section("a", "a secret word", at=None), section("b", "a word", at=None)), yes)
    query = Query(words="secret or word", store="store", within="^mine$")
    before = [(hit.key, hit.score) for hit in (await index.search(query)).hits]
    await index.replace(others, "s1", Some(*(section(str(n), "secret " * 9) for n in range(50))), yes)
    after = [(hit.key, hit.score) for hit in (await index.search(query)).hits]
    assert [key for key, _ in before] == [key for key, _ in after]
    assert all(abs(one - two) < 1e-5 for (_, one), (_, two) in zip(before, after, strict=True))


async def test_the_past_is_found_with_when_it_was_known(searched: Searched) -> None:
    index = searched.open()
    line = {
        "s1": [section("a", "one"), section("b", "stays")],
        "s2": [section("a", "two"), section("b", "stays", at=NOW + timedelta(seconds=5))],
        "s3": [section("b", "stays")],
        "s4": [section("a", "one"), section("b", "stays")],
    }
    for number, (snapshot, records) in enumerate(line.items()):
        moment = Moment(f"t{snapshot[1:]}", begins=number == 0)
        assert await index.replace(PLACE, snapshot, Some(*records), yes, moment)
    assert await index.lines("store") == await index.lines("store", "conductor") == {"conductor": [*line]}
    assert await index.lines("store", "nobody") == {}

    async def known(words: str) -> list[tuple[str, str | None, str, str | None]]:
        found = await index.search(Query(words=words, store="store", history=True))
        return sorted((hit.first, hit.since, hit.last, hit.until) for hit in found.hits)

    assert await known("one") == [("s1", "t1", "s1", "t2"), ("s4", "t4", "", None)]
    assert await known("two") == [("s2", "t2", "s2", "t3")]
    assert await known("stays") == [("s1", "t1", "", None)]  # that its file was written again is no news
    assert await keys(index, "one") == ["a"] and await keys(index, "two") == []
    assert len(searched.rows()) == 2
    await index.forget(PLACE, ["s1", "s2"])
    assert await index.lines("store") == {"conductor": ["s3", "s4"]}
    assert await known("two") == [] and await known("stays") == [("s3", "t3", "", None)]
    assert await known("one") == [("s4", "t4", "", None)]
    assert await index.replace(PLACE, "s5", Some(), yes, Moment("t5"))
    assert await known("stays") == [("s3", "t3", "s4", "t5")]
    assert await index.replace(PLACE, "s9", Some(section("z", "fresh")), yes, Moment("t9", begins=True))
    assert await index.lines("store") == {"conductor": ["s9"]} and await known("stays") == []
    assert await index.replace(PLACE, "s10", Some(section("z", "fresh")), yes) == WriteCounts(records=1)
    assert await index.lines("store") == {} and await known("fresh") == [("", None, "", None)]


async def test_many_who_write_and_search_at_once_see_no_lock(searched: Searched) -> None:
    indexes = [searched.open() for _ in range(4)]

    async def write(number: int) -> None:
        for turn in range(3):
            place = MemoryRef("store", f"m{number % 2}")
            await indexes[number].replace(place, f"s{turn}", Some(section("a", f"otter{turn}")), yes)

    async def read() -> None:
        for _ in range(10):
            await keys(indexes[0], "otter1 or otter2")

    await asyncio.gather(*map(write, range(4)), *(read() for _ in range(4)))
    assert len(searched.rows()) == 2
