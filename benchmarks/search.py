"""The search index on this machine with many records: building it beside a bare FTS5 table with the same texts, and how
long a search takes.

Building is compared by CPU time, since other things may run on the machine at the same time.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sqlite3
import statistics
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from adapters.search.sqlite import EmbeddedSearch
from benchmarks.table import Section, seconds, size
from sidecar.records.record import Record
from sidecar.search.port import MemoryRef, Query

WORDS = 60_000
POOL = 2_000_000
MEMORIES = 20
BATCH = 500
ROUNDS = 20
START = datetime(2026, 1, 1, tzinfo=UTC)
QUERIES = {
    "one word, in few": "w2345",
    "two words": "w120 w345",
    "words in order": '"w12 w7"',
    "the commonest word": "w0",
    "two of the commonest": "w0 w1",
    "either of many": " or ".join(f"w{n}" for n in range(50)),
    "all without one word": "-w0",
}


class Texts:
    """Titles and texts as agents write them: few words are common, most are rare."""

    def __init__(self, count: int) -> None:
        self.count = count
        chance = random.Random(7)
        weights = list(itertools.accumulate(1 / (n + 8) for n in range(WORDS)))
        chosen = chance.choices(range(WORDS), cum_weights=weights, k=POOL)
        self._pool = " ".join(f"w{n}" for n in chosen)
        self._starts = [0, *itertools.accumulate(len(f"w{n}") + 1 for n in chosen)]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        chance = random.Random(8)
        for _ in range(self.count):
            at, length = chance.randrange(POOL - 100), 20 + chance.randrange(50)
            middle = self._starts[at + 5]
            yield self._pool[self._starts[at] : middle - 1], self._pool[middle : self._starts[at + length] - 1]


class Source:
    """The records of one memory."""

    def __init__(self, memory: int, texts: Iterator[tuple[str, str]], count: int) -> None:
        self.problems: list[str] = []
        self._memory, self._texts, self._count = memory, texts, count

    async def batches(self) -> AsyncGenerator[Sequence[Record]]:
        for first in range(0, self._count, BATCH):
            yield [
                Record(
                    kind="observation",
                    key=f"claude-mem/claude-mem.db#s,h{first + n},{first + n}000",
                    title=title,
                    text=text,
                    project="app",
                    session=f"session-{self._memory}",
                    at=START + timedelta(minutes=first + n),
                    path="claude-mem/claude-mem.db",
                )
                for n, (title, text) in enumerate(itertools.islice(self._texts, min(BATCH, self._count - first)))
            ]


def measure(folder: Path, count: int) -> Section:
    section = Section(f"Search on this machine, {count:,} records")
    texts = Texts(count)
    began = time.process_time()
    made = sum(len(title) + len(text) for title, text in texts)
    making = time.process_time() - began
    bare = _insert_bare(folder / "bare.db", texts) - making
    ours = asyncio.run(_build(folder / "index", texts, count)) - making
    load = os.getloadavg()[0]
    section.add("texts", size(made), f"load of the machine: {load:.1f}")
    section.add("build, CPU", f"{seconds(ours)}, {ours / bare:.2f} ×", f"bare FTS5 insert: {seconds(bare)}")
    (file,) = (folder / "index").glob("*/index-*.db")
    section.add("size on disk", size(file.stat().st_size), f"bare: {size((folder / 'bare.db').stat().st_size)}")
    for name, words in QUERIES.items():
        section.add(name, asyncio.run(_search(folder / "index", Query(words=words, store="store"))))
    one = Query(words="w0", store="store", memories=["m3"], kinds=["observation"])
    section.add("the commonest word, in one memory", asyncio.run(_search(folder / "index", one)))
    return section


def _insert_bare(path: Path, texts: Texts) -> float:
    began = time.process_time()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE VIRTUAL TABLE words USING fts5(title, text)")
    connection.execute("BEGIN")
    connection.executemany("INSERT INTO words VALUES (?, ?)", texts)
    connection.execute("COMMIT")
    connection.close()
    return time.process_time() - began


async def _yes() -> bool:
    return True


async def _build(folder: Path, texts: Texts, count: int) -> float:
    index, left = EmbeddedSearch(folder), iter(texts)
    began = time.process_time()
    for memory in range(MEMORIES):
        source = Source(memory, left, count // MEMORIES)
        await index.replace(MemoryRef("store", f"m{memory}"), "s1", source, _yes)
    return time.process_time() - began


async def _search(folder: Path, query: Query) -> str:
    index = EmbeddedSearch(folder)
    times = []
    for _ in range(ROUNDS):
        began, working = time.perf_counter(), time.process_time()
        found = await index.search(query)
        times.append((time.perf_counter() - began, time.process_time() - working))
    took, worked = (statistics.median(column) * 1000 for column in zip(*times, strict=True))
    return f"{took:.0f} ms, CPU {worked:.0f} ms, {len(found.hits)} hits"
