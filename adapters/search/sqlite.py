"""A search index on this machine, in SQLite with FTS5: nothing to install and nothing to run.

One per store, in the sidecar's cache folder. It is never the truth: whatever is wrong with it, it is thrown away and
built again from the store. Any number of processes read it; those that write take turns, and each makes the rows of one
memory equal to a snapshot in one transaction.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

from adapters.search import sqlite_query
from adapters.search.sqlite_files import (
    WAS_DAMAGED,
    IndexFiles,
    is_damage,
    open_plain,
    run_to_end,
    translate_error,
)
from adapters.search.sqlite_rows import MemoryRows
from sidecar.errors import IndexReset, SearchBusy
from sidecar.records.record import READER
from sidecar.search.port import MemoryRef, Moment, Query, RecordSource, SearchHits, Still, WriteCounts

T = TypeVar("T")
OpenFiles = Callable[[Path, str], Awaitable[IndexFiles]]
SEARCH_SECONDS = 10.0
STANDING = "SELECT memory, snapshot, reader FROM memories WHERE ?1 IN ('', memory)"
LINES = """
SELECT m.memory, s.snapshot FROM memories m JOIN snapshots s ON s.memory_id = m.id WHERE ?1 IN ('', m.memory)
ORDER BY m.memory, s.number
"""


def find_cache_folder() -> Path:
    """Return where the indexes of all stores are, if the settings name no other place."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path is to be ignored: https://specifications.freedesktop.org/basedir-spec/latest/
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return folder / "memory-sidecar" / "search"


class EmbeddedSearch:
    """The search indexes of stores on this machine; ``open_files`` says where the one of a store lies."""

    def __init__(self, base: Path, open_files: OpenFiles = open_plain) -> None:
        self.base = base
        self._open_files = open_files
        self._reader = str(READER)

    async def standing(self, store: str, memory: str = "") -> Mapping[str, str]:
        def read(connection: sqlite3.Connection) -> dict[str, str]:
            rows = connection.execute(STANDING, (memory,))
            return {name: snapshot if reader == self._reader else "" for name, snapshot, reader in rows}

        return await self._read(store, read) or {}

    async def lines(self, store: str, memory: str = "") -> Mapping[str, Sequence[str]]:
        def read(connection: sqlite3.Connection) -> dict[str, list[str]]:
            found: dict[str, list[str]] = {}
            for name, snapshot in connection.execute(LINES, (memory,)):
                found.setdefault(name, []).append(snapshot)
            return found

        return await self._read(store, read) or {}

    async def search(self, query: Query) -> SearchHits:
        try:
            async with asyncio.timeout(SEARCH_SECONDS):
                found = await self._read(query.store, lambda connection: sqlite_query.search(connection, query))
        except TimeoutError:
            raise SearchBusy("The search took too long.", hint="Search for fewer or rarer words.") from None
        return found or SearchHits()

    async def replace(
        self, place: MemoryRef, snapshot: str, records: RecordSource, still: Still, moment: Moment | None = None
    ) -> WriteCounts | None:
        async with self._open_turn(place.store) as turn:
            if not await still():
                return None
            rows = await turn.open_rows(place.memory, self._reader, moment)
            same = rows.is_current and rows.snapshot == snapshot
            if same and rows.has_history == (moment is not None):
                return WriteCounts(records=rows.records)
            await turn.run(rows.begin)
            async with aclosing(records.batches()) as batches:
                async for batch in batches:
                    await turn.run(lambda batch=batch: rows.add(batch))  # type: ignore[misc]
            done = await turn.run(lambda: rows.finish(snapshot, records.problems))
            await turn.commit()
            return done

    async def remove(self, place: MemoryRef, still: Still) -> int | None:
        async with self._open_turn(place.store) as turn:
            if not await still():
                return None
            rows = await turn.open_rows(place.memory, self._reader, None)
            removed = await turn.run(rows.remove)
            await turn.commit()
            return removed

    async def forget(self, place: MemoryRef, snapshots: Collection[str]) -> None:
        async with self._open_turn(place.store) as turn:
            rows = await turn.open_rows(place.memory, self._reader, None)
            await turn.run(lambda: rows.forget(snapshots))
            await turn.commit()

    async def _read(self, store: str, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Return what ``work`` reads; ``None`` if there is no index yet. Raise a ``SearchError``."""
        if not store:
            return None
        files = await self._open_files(self.base, store)
        session = _Session(files)
        try:
            return await run_to_end(lambda: session.read(work), session.interrupt)
        except IndexReset:
            pass  # it still has to be removed
        except sqlite3.Error as problem:
            if not is_damage(problem):
                raise translate_error(problem, self.base / store) from None
        except OSError as problem:
            raise translate_error(problem, self.base / store) from None
        # Unless another process has put a whole one in its place meanwhile.
        async with files.take_turn():
            if await run_to_end(files.identify) == session.identity:
                await run_to_end(files.discard)
        raise IndexReset(WAS_DAMAGED)

    @asynccontextmanager
    async def _open_turn(self, store: str) -> AsyncIterator[_Turn]:
        """Yield a transaction of the only writer. What is not committed is undone. Raise a ``SearchError``."""
        files = await self._open_files(self.base, store)
        async with files.take_turn():
            turn = _Turn(files)
            try:
                await turn.run(turn.begin)
                yield turn
            except IndexReset:
                await run_to_end(files.discard)
                raise
            except sqlite3.Error as problem:
                if is_damage(problem):
                    await run_to_end(files.discard)
                raise translate_error(problem, self.base / store) from None
            except OSError as problem:
                raise translate_error(problem, self.base / store) from None
            finally:
                await run_to_end(turn.close)


class _Session:
    """One connection that reads."""

    def __init__(self, files: IndexFiles) -> None:
        self._files = files
        self._connection: sqlite3.Connection | None = None
        self.identity = ""

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        self.identity = self._files.identify()
        self._connection = self._files.open_to_read()
        if self._connection is None:
            return None
        try:
            self._connection.execute("BEGIN")
            return work(self._connection)
        finally:
            self._connection.close()

    def interrupt(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.ProgrammingError):  # it is closed
                self._connection.interrupt()


class _Turn:
    """One connection that writes, in one transaction."""

    def __init__(self, files: IndexFiles) -> None:
        self._files = files
        self._connection: sqlite3.Connection | None = None

    def begin(self) -> None:
        self._connection = self._files.open_to_write()
        self._connection.execute("BEGIN IMMEDIATE")

    async def open_rows(self, memory: str, reader: str, moment: Moment | None) -> MemoryRows:
        connection = self._connection
        assert connection is not None
        return await self.run(lambda: MemoryRows(connection, memory, reader, moment))

    async def run(self, work: Callable[[], T]) -> T:
        return await run_to_end(work, self._interrupt)

    async def commit(self) -> None:
        connection = self._connection
        assert connection is not None
        await run_to_end(lambda: self._files.commit(connection))

    def _interrupt(self) -> None:
        if self._connection is not None:
            self._connection.interrupt()

    def close(self) -> None:
        if self._connection is not None:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self._connection.close()
