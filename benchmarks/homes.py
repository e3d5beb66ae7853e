"""Homes to measure with: text that compresses as an agent's does (about three to one), from a fixed seed."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import accumulate
from pathlib import Path

SCHEMA = """
PRAGMA page_size=4096;
PRAGMA journal_mode=WAL;
PRAGMA synchronous=NORMAL;
CREATE TABLE schema_versions (version INTEGER PRIMARY KEY, applied_at TEXT);
INSERT INTO schema_versions VALUES (52, 'now');
CREATE TABLE observations (
    id INTEGER PRIMARY KEY AUTOINCREMENT, session TEXT NOT NULL, project TEXT NOT NULL, type TEXT NOT NULL,
    title TEXT, narrative TEXT, facts TEXT, created_at TEXT NOT NULL, created_at_epoch INTEGER NOT NULL
);
CREATE INDEX by_session ON observations(session);
CREATE INDEX by_project ON observations(project);
CREATE INDEX by_time ON observations(created_at_epoch DESC);
CREATE TABLE tool_uses (id INTEGER PRIMARY KEY, session TEXT, input TEXT, output TEXT);
CREATE VIRTUAL TABLE observations_fts USING fts5(
    title, narrative, facts, content='observations', content_rowid='id'
);
CREATE TRIGGER observations_ai AFTER INSERT ON observations BEGIN
    INSERT INTO observations_fts(rowid, title, narrative, facts) VALUES (new.id, new.title, new.narrative, new.facts);
END;
"""


class Words:
    """An endless supply of text; the same seed gives the same text."""

    def __init__(self, seed: int = 1, size: int = 16 << 20) -> None:
        self._chance = random.Random(seed)
        letters = "etaoinshrdlucmfwypvbgkjqxz"
        common = list(accumulate(26 - rank for rank in range(26)))
        words = [
            "".join(self._chance.choices(letters, cum_weights=common, k=self._chance.randint(2, 11)))
            for _ in range(8000)
        ]
        weights = list(accumulate(1 / (rank + 5) for rank in range(len(words))))
        self._pool = " ".join(self._chance.choices(words, cum_weights=weights, k=size // 6))

    def take(self, length: int) -> str:
        start = self._chance.randrange(len(self._pool) - length)
        return self._pool[start : start + length]

    def noise(self, length: int) -> bytes:
        return self._chance.randbytes(length)


def database_of(home: Path) -> Path:
    return home / ".claude-mem/claude-mem.db"


def claude_mem(home: Path, size: int, words: Words) -> None:
    """A claude-mem-like memory whose database has about ``size`` bytes, made of conversations."""
    place = database_of(home)
    place.parent.mkdir(parents=True)
    with closing(sqlite3.connect(place)) as database:
        database.executescript(SCHEMA)
    while _size(place) < size:
        converse(home, words, times=max(1, min(40, size // 4_000_000)))


def converse(home: Path, words: Words, times: int = 1) -> None:
    """One conversation: 30 observations and what the tools said, some 270 KB of rows, in a commit each."""
    with closing(sqlite3.connect(database_of(home))) as database:
        for _ in range(times):
            session = words.noise(16).hex()
            for number in range(30):
                with database:
                    database.execute(
                        "INSERT INTO observations(session, project, type, title, narrative, facts, created_at,"
                        " created_at_epoch) VALUES (?, 'project', 'discovery', ?, ?, ?, 'now', ?)",
                        (session, words.take(60), words.take(1800), words.take(700), number),
                    )
                    database.execute(
                        "INSERT INTO tool_uses(session, input, output) VALUES (?, ?, ?)",
                        (session, words.take(1200), words.take(5200)),
                    )


def _size(place: Path) -> int:
    with closing(sqlite3.connect(place)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return place.stat().st_size


def large(home: Path, size: int, words: Words) -> None:
    """A memory of ``size`` bytes: three fifths one database without an FTS mirror, the rest files, a tenth of them noise."""
    place = database_of(home)
    corpora = home / ".claude-mem/corpora"
    corpora.mkdir(parents=True)
    with closing(sqlite3.connect(place)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=OFF")
        database.execute("CREATE TABLE tool_uses (id INTEGER PRIMARY KEY, input TEXT, output TEXT)")
        rows = size * 3 // 5 // 8000
        for start in range(0, rows, 2000):
            with database:
                batch = ((words.take(1500), words.take(6300)) for _ in range(min(2000, rows - start)))
                database.executemany("INSERT INTO tool_uses(input, output) VALUES (?, ?)", batch)
    for number, length in enumerate(_lengths(size * 2 // 5)):
        data = words.noise(length) if number % 10 == 0 else _text(words, length)
        (corpora / f"corpus-{number}.jsonl").write_bytes(data)


def _lengths(total: int) -> Iterator[int]:
    """Files from 2 KB to 16 MB, as many bytes in the large ones as in the small."""
    lengths = [2_000, 20_000, 200_000, 2_000_000, 16_000_000]
    number = 0
    while total > 0:
        length = lengths[number * 7 % 5] if number % 40 == 0 else lengths[number % 4]
        yield min(length, total)
        total -= length
        number += 1


def _text(words: Words, length: int) -> bytes:
    return b"".join(words.take(min(100_000, length - at)).encode() for at in range(0, length, 100_000))


def small_files(home: Path, count: int, words: Words) -> list[Path]:
    """PAI's memory in many small files; return them."""
    places = []
    for number in range(count):
        place = home / f".config/opencode/MEMORY/LEARNING/ALGORITHM/{number % 97}/note-{number}.md"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(words.take(300 + number % 4000))
        places.append(place)
    return places
