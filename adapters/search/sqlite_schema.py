"""The tables of the embedded index. Another version has another number in its file's name, and its own file."""

from __future__ import annotations

import sqlite3

FORMAT = 1
APPLICATION = 0x6D656D73
"""``mems``: what ``PRAGMA application_id`` has."""
# Like Postgres's configuration "simple": words as they are written, but for upper and lower case. Marks belong to the
# letter before them, or words of scripts that write vowels as marks would fall apart.
TOKENIZER = "unicode61 remove_diacritics 0 categories 'L* N* M* Co'"

TABLES = (
    """CREATE TABLE memories (
        id INTEGER PRIMARY KEY,
        memory TEXT NOT NULL UNIQUE,
        snapshot TEXT NOT NULL,
        reader TEXT NOT NULL,
        records INTEGER NOT NULL,
        problems TEXT NOT NULL,
        indexed REAL NOT NULL
    )""",
    # The line of a memory whose history is kept.
    """CREATE TABLE snapshots (
        memory_id INTEGER NOT NULL,
        number INTEGER NOT NULL,
        snapshot TEXT NOT NULL,
        created TEXT NOT NULL,
        PRIMARY KEY (memory_id, number)
    ) WITHOUT ROWID""",
    # A record is known from snapshot ``first`` of the line until ``last``, which is NULL while it still is. What stands in
    # a short record has a larger ``weight``.
    """CREATE TABLE records (
        id INTEGER PRIMARY KEY,
        memory_id INTEGER NOT NULL,
        kind TEXT NOT NULL,
        key TEXT NOT NULL,
        project TEXT NOT NULL,
        session TEXT NOT NULL,
        at REAL,
        path TEXT NOT NULL,
        digest BLOB NOT NULL,
        weight REAL NOT NULL,
        first INTEGER NOT NULL,
        last INTEGER
    )""",
    "CREATE UNIQUE INDEX present ON records (memory_id, kind, key) WHERE last IS NULL",
    "CREATE INDEX past ON records (memory_id) WHERE last IS NOT NULL",
    # ``place`` has words of ours that say which memory and kind it is, so that a search of a few of them reads no others.
    f"""CREATE VIRTUAL TABLE words USING fts5(title, text, place, tokenize="{TOKENIZER}", columnsize=0)""",
    # Fewer and larger pieces while many rows are written.
    "INSERT INTO words(words, rank) VALUES ('hashsize', 8388608)",
)


def create_tables(connection: sqlite3.Connection) -> None:
    """Create the tables in an empty database."""
    connection.execute("BEGIN")
    for statement in TABLES:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION}")
    connection.execute(f"PRAGMA user_version = {FORMAT}")
    connection.execute("COMMIT")


def has_tables(connection: sqlite3.Connection) -> bool:
    """Return whether a database has the tables of this version."""
    about = [connection.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")]
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    return about == [(APPLICATION,), (FORMAT,)] and {"memories", "snapshots", "records", "words", "present"} <= names


def name_memory(id: int) -> str:
    """Return the word in ``place`` for a memory."""
    return f"m{id}"


def name_kind(kind: str) -> str:
    """Return the word in ``place`` for a kind of records."""
    return f"k{kind.encode().hex()}"
