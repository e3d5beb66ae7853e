"""Where what is searched may be: in Postgres, or on this machine. The same to ask of either."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from adapters.search.sqlite import EmbeddedSearch
from sidecar.engine import Engine
from sidecar.engine.histories import read_line
from sidecar.search.port import SearchDatabase
from sidecar.search.settings import Postgres
from sidecar.search.upkeep import SearchIndex
from sidecar.store.manifest import Manifest
from sidecar.wiring import open_search
from tests.parts.postgres import Database

ROWS = """
SELECT m.memory, r.kind, r.key, w.title, w.text, r.project, r.session, r.at, r.path
FROM records r JOIN memories m ON m.id = r.memory_id JOIN words w ON w.rowid = r.id WHERE r.last IS NULL
ORDER BY 1, 2, 3
"""


class Searched(Protocol):
    def open(self) -> SearchDatabase: ...

    def rows(self) -> list[tuple[Any, ...]]:
        """Every record of the heads: memory, kind, key, title, text, project, session, at, path."""
        ...

    def heads(self) -> dict[str, str]: ...

    def problems(self) -> list[list[str]]: ...


class InPostgres:
    def __init__(self, database: Database) -> None:
        self._database = database

    def open(self) -> SearchDatabase:
        database = open_search(Postgres())
        assert database is not None
        return database

    def rows(self) -> list[tuple[Any, ...]]:
        return self._database.rows()

    def heads(self) -> dict[str, str]:
        return self._database.heads()

    def problems(self) -> list[list[str]]:
        return [problems for (problems,) in self._database.execute("SELECT problems FROM memory_sidecar.memories")]


class OnThisMachine:
    """All indexes in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self) -> SearchDatabase:
        return EmbeddedSearch(self.folder)

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*/index-*.db"))

    def rows(self) -> list[tuple[Any, ...]]:
        found = self._ask(ROWS)
        return [(*row[:7], _read_time(row[7]), row[8]) for row in found]

    def heads(self) -> dict[str, str]:
        return dict(self._ask("SELECT memory, snapshot FROM memories"))

    def problems(self) -> list[list[str]]:
        return [json.loads(problems) for (problems,) in self._ask("SELECT problems FROM memories")]

    def _ask(self, statement: str) -> list[tuple[Any, ...]]:
        found = []
        for file in self.files:
            with contextlib.closing(sqlite3.connect(file, timeout=60)) as connection:
                assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
                connection.execute("INSERT INTO words(words) VALUES ('integrity-check')")
                found += connection.execute(statement).fetchall()
        return found


def _read_time(at: float | None) -> datetime | None:
    return None if at is None else datetime.fromtimestamp(at, UTC)


def index_of(engine: Engine, database: SearchDatabase, *, embedded: bool = False) -> SearchIndex:
    """The search index of a store in a database."""

    async def read_manifests(memory: str, snapshot: str) -> list[Manifest]:
        return [manifest for manifest, _ in await read_line(engine.repository, memory, snapshot)]

    return SearchIndex(engine.repository, database, read_line=read_manifests, embedded=embedded)
