"""A search index in Postgres (Supabase is one), by psycopg 3.

Nothing is kept between two calls except the knowledge that the tables exist, and nothing is set outside of a
transaction: a pooler that assigns connections per transaction works. One transaction makes a memory's rows equal to a
snapshot, so an interrupted one leaves the rows unchanged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, LiteralString

import psycopg
from psycopg import AsyncCursor
from psycopg.conninfo import conninfo_to_dict
from psycopg.sql import SQL, Composed, Identifier

from adapters.search import postgres_query, postgres_schema
from adapters.search.postgres_errors import Redactor, SchemaGone, translate_errors
from sidecar.errors import BadConfig
from sidecar.records.record import READER, Record
from sidecar.search.port import MemoryRef, Moment, Query, RecordSource, SearchHits, Still, WriteCounts
from sidecar.search.settings import HOW, Postgres

LOCK_SECONDS = 60.0
WRITE_SECONDS = 900.0
IDLE_SECONDS = 300.0
"""How long Postgres waits for a caller that stopped within a transaction, before it releases its locks."""
CANCEL_SECONDS = 1.0
MOST_SEARCHES = 8
"""Searches at once, each on its own connection: others need some of Postgres's connections too."""
DEAD_AFTER: dict[str, Any] = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}

LIMITS = """
SELECT set_config('statement_timeout', %s, true), set_config('lock_timeout', %s, true),
    set_config('idle_in_transaction_session_timeout', %s, true)
"""
INCOMING = (
    "CREATE TEMPORARY TABLE incoming (n bigint, kind text, key text, title text, body text, project text, session text,"
    " at timestamptz, path text, digest bytea) ON COMMIT DROP"
)
GONE = "CREATE TEMPORARY TABLE gone (digest bytea) ON COMMIT DROP"
STANDING = """
SELECT memory, snapshot, reader FROM {schema}.memories
WHERE store = %(store)s AND (%(memory)s = '' OR memory = %(memory)s)
"""
REMOVE_GONE = """
DELETE FROM {schema}.records r USING pg_temp.gone g WHERE r.memory_id = %s AND r.digest = g.digest
"""
# Where the past is kept: what says the same as before is the same, and what is gone was known until the last snapshot.
AMEND_SAME = """
UPDATE {schema}.records r SET session = i.session, at = i.at, path = i.path, digest = i.digest
FROM pg_temp.gone g, (SELECT DISTINCT ON (kind, key) * FROM pg_temp.incoming ORDER BY kind, key, n) i
WHERE r.memory_id = %s AND r.last IS NULL AND r.digest = g.digest AND (r.kind, r.key) = (i.kind, i.key)
    AND (r.title, r.body, r.project) = (i.title, i.body, i.project)
"""
END_GONE = """
UPDATE {schema}.records r SET last = %(last)s FROM pg_temp.gone g
WHERE r.memory_id = %(id)s AND r.last IS NULL AND r.digest = g.digest
"""
LINES = """
SELECT m.memory, s.snapshot FROM {schema}.memories m JOIN {schema}.snapshots s ON s.memory_id = m.id
WHERE m.store = %(store)s AND (%(memory)s = '' OR m.memory = %(memory)s) ORDER BY m.memory, s.number
"""
FORGET = """
DELETE FROM {schema}.snapshots s USING {schema}.memories m
WHERE m.id = s.memory_id AND m.store = %s AND m.memory = %s AND s.snapshot = ANY (%s)
"""
REMOVE_UNKNOWN = """
DELETE FROM {schema}.records r USING {schema}.memories m
WHERE m.id = r.memory_id AND m.store = %s AND m.memory = %s AND r.last IS NOT NULL AND NOT EXISTS (
    SELECT FROM {schema}.snapshots s WHERE s.memory_id = m.id AND s.number BETWEEN r.first AND r.last)
"""
INSERT = """
INSERT INTO {schema}.records (memory_id, kind, key, title, body, project, session, at, path, digest, first, words)
SELECT DISTINCT ON (kind, key) %(id)s::bigint, kind, key, title, body, project, session, at, path, digest,
    %(first)s::bigint, setweight(to_tsvector(%(text_search)s::regconfig, translate(title, %(joined)s, %(blanks)s)), 'A')
        || setweight(to_tsvector(%(text_search)s::regconfig, translate(body, %(joined)s, %(blanks)s)), 'B')
FROM pg_temp.incoming ORDER BY kind, key, n
ON CONFLICT (memory_id, kind, key) WHERE last IS NULL DO NOTHING
"""
CLAIM = """
INSERT INTO {schema}.memories (store, memory, snapshot, reader, records, problems, indexed)
VALUES (%s, %s, '', '', 0, '{{}}', now())
ON CONFLICT (store, memory) DO UPDATE SET store = excluded.store RETURNING id, snapshot, reader, records
"""
SETTLE = """
UPDATE {schema}.memories SET snapshot = %(snapshot)s, reader = %(reader)s, problems = %(problems)s, indexed = now(),
    records = (SELECT count(*) FROM {schema}.records WHERE memory_id = %(id)s AND last IS NULL)
WHERE id = %(id)s RETURNING records
"""

# What the driver logs when it is interrupted is reported in a receipt or an error instead.
logging.getLogger("psycopg").addHandler(logging.NullHandler())


def open_postgres(url: str, settings: Postgres) -> PostgresSearch:
    """Return the search index behind a URL, without connecting. Raise ``BadConfig`` if the URL is not valid."""
    try:
        conninfo_to_dict(url)
    except psycopg.Error:
        raise BadConfig(f"{settings.url_env} is not the URL of a Postgres database.", hint=HOW) from None
    return PostgresSearch(url, settings)


class PostgresSearch:
    """A search index in one schema of a database."""

    def __init__(self, url: str, settings: Postgres) -> None:
        self._url = url
        self._settings = settings
        self._redacted = Redactor(url)
        self._prepared = False
        self._searches = asyncio.Semaphore(MOST_SEARCHES)
        self._reader = f"{READER} {settings.text_search}"

    def __repr__(self) -> str:
        return f"PostgresSink(schema={self._settings.schema!r})"

    async def standing(self, store: str, memory: str = "") -> Mapping[str, str]:
        """Return the snapshot that each memory's rows are of; "" if another reader version made them."""
        async with self._open_transaction(self._settings.timeout) as cursor:
            await cursor.execute(self._format_sql(STANDING), {"store": store, "memory": memory})
            return {memory: snapshot if reader == self._reader else "" async for memory, snapshot, reader in cursor}

    async def lines(self, store: str, memory: str = "") -> Mapping[str, Sequence[str]]:
        """Return the snapshots of each memory whose past is kept."""
        found: dict[str, list[str]] = {}
        async with self._open_transaction(self._settings.timeout) as cursor:
            await cursor.execute(self._format_sql(LINES), {"store": store, "memory": memory})
            async for name, snapshot in cursor:
                found.setdefault(name, []).append(snapshot)
        return found

    async def forget(self, place: MemoryRef, snapshots: Collection[str]) -> None:
        """Remove past snapshots of a memory, and the rows that no other has."""
        async with self._open_transaction(WRITE_SECONDS) as cursor:
            await self._take_turn(cursor, place)
            await cursor.execute(self._format_sql(FORGET), (place.store, place.memory, list(snapshots)))
            await cursor.execute(self._format_sql(REMOVE_UNKNOWN), (place.store, place.memory))

    async def replace(
        self, place: MemoryRef, snapshot: str, records: RecordSource, still: Still, moment: Moment | None = None
    ) -> WriteCounts | None:
        """Make a memory's rows equal to a snapshot's records, in one transaction. Return ``None`` if it is outdated
        (``still``)."""
        async with self._open_transaction(WRITE_SECONDS) as cursor:
            await self._take_turn(cursor, place)
            if not await still():
                return None
            await cursor.execute(self._format_sql(CLAIM), (place.store, place.memory))
            id, held, reader, count = await cursor.fetchone() or (0, "", "", 0)
            last = await self._find_last(cursor, id)
            if (held, reader) == (snapshot, self._reader) and (last is not None) == (moment is not None):
                return WriteCounts(records=count)
            removed = 0
            anew = reader != self._reader or (moment is not None and moment.begins)
            if anew or moment is None:  # those rows were made by another reader version or configuration, or are past
                await self._execute(
                    "DELETE FROM {schema}.records WHERE memory_id = %s AND last IS NOT NULL", cursor, id
                )
                await self._execute("DELETE FROM {schema}.snapshots WHERE memory_id = %s", cursor, id)
                last = None
            if anew:
                removed = await self._execute("DELETE FROM {schema}.records WHERE memory_id = %s", cursor, id)
            await self._insert_missing(cursor, id, records)
            gone, amended = await self._let_go(cursor, id, last if moment is not None else None)
            parted = {"joined": postgres_query.JOINED, "blanks": postgres_query.BLANKS}
            first = 0 if last is None else last + 1
            await cursor.execute(
                self._format_sql(INSERT),
                {"id": id, "first": first, "text_search": self._settings.text_search, **parted},
            )
            written = cursor.rowcount + amended
            if moment is not None:
                line = "INSERT INTO {schema}.snapshots VALUES (%s, %s, %s, %s)"
                await self._execute(line, cursor, id, first, snapshot, moment.created)
            about = {"id": id, "snapshot": snapshot, "reader": self._reader, "problems": records.problems}
            await cursor.execute(self._format_sql(SETTLE), about)
            (now,) = await cursor.fetchone() or (0,)
            return WriteCounts(records=now, written=written, removed=removed + gone + amended)

    async def _find_last(self, cursor: AsyncCursor[Any], id: int) -> int | None:
        """Return the number of the last snapshot in the line; ``None`` if the memory's past is not kept."""
        await self._execute("SELECT max(number) FROM {schema}.snapshots WHERE memory_id = %s", cursor, id)
        row = await cursor.fetchone()
        return row[0] if row else None

    async def _let_go(self, cursor: AsyncCursor[Any], id: int, last: int | None) -> tuple[int, int]:
        """Delete the rows that no record has any more, or end them with snapshot ``last``. Return how many these were,
        and how many say the same as before and were amended."""
        if last is None:
            return await self._execute(REMOVE_GONE, cursor, id), 0
        amended = await self._execute(AMEND_SAME, cursor, id)
        await cursor.execute(self._format_sql(END_GONE), {"id": id, "last": last})
        return cursor.rowcount, amended

    async def _execute(self, statement: LiteralString, cursor: AsyncCursor[Any], *values: object) -> int:
        await cursor.execute(self._format_sql(statement), values)
        return cursor.rowcount

    async def remove(self, place: MemoryRef, still: Still) -> int | None:
        """Delete a memory's rows; return how many records it had, or ``None`` if it is outdated (``still``)."""
        async with self._open_transaction(WRITE_SECONDS) as cursor:
            await self._take_turn(cursor, place)
            if not await still():
                return None
            about = (place.store, place.memory)
            await cursor.execute(
                self._format_sql("DELETE FROM {schema}.memories WHERE store = %s AND memory = %s RETURNING records"),
                about,
            )
            row = await cursor.fetchone()
            return int(row[0]) if row else 0

    async def search(self, query: Query) -> SearchHits:
        seconds = self._settings.timeout
        with translate_errors(self._redacted):
            async with (
                asyncio.timeout(_compute_patience(seconds)),
                self._searches,
                self._open_transaction(seconds) as cursor,
            ):
                return await postgres_query.search(cursor, self._settings.schema, self._settings.text_search, query)

    async def _take_turn(self, cursor: AsyncCursor[Any], place: MemoryRef) -> None:
        """Lock this memory's rows: wait until no other writer has them; the lock lasts until the transaction ends."""
        name = f"{self._settings.schema} {place.store} {place.memory}"
        await cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (name,))

    async def _insert_missing(self, cursor: AsyncCursor[Any], id: int, records: RecordSource) -> None:
        """Copy the records that Postgres does not have into a temporary table, and into another the digests of rows that
        no record has any more.

        Only digests are read, and only what changed is sent: most of a memory is the same after a conversation.
        """
        await self._execute("SELECT digest FROM {schema}.records WHERE memory_id = %s AND last IS NULL", cursor, id)
        held = {digest async for (digest,) in cursor}
        await cursor.execute(INCOMING)
        async with (
            cursor.copy("COPY pg_temp.incoming FROM STDIN") as copy,
            aclosing(records.batches()) as batches,
        ):
            number = 0
            async for batch in batches:
                for record in batch:
                    digest = record.digest
                    if digest in held:
                        held.discard(digest)
                    else:
                        await copy.write_row((number, *_list_columns(record), digest))
                        number += 1
        await cursor.execute(GONE)
        async with cursor.copy("COPY pg_temp.gone FROM STDIN") as copy:
            for digest in held:
                await copy.write_row((digest,))

    def _format_sql(self, statement: LiteralString) -> Composed:
        return SQL(statement).format(schema=Identifier(self._settings.schema))

    @asynccontextmanager
    async def _open_transaction(self, seconds: float) -> AsyncIterator[AsyncCursor[Any]]:
        """Yield a cursor in a transaction on its own connection, with the tables created. Raise a ``SearchError``.

        Postgres ends what takes longer than ``seconds``. A server that accepts the connection and says nothing is not
        waited for either.
        """
        try:
            with translate_errors(self._redacted):
                async with asyncio.timeout(_compute_patience(seconds)), await self._connect() as connection:
                    if not self._prepared:
                        async with connection.transaction(), connection.cursor() as cursor:
                            await _set_limits(cursor, WRITE_SECONDS)
                            await postgres_schema.prepare_schema(cursor, self._settings.schema)
                        self._prepared = True
                    async with connection.transaction(), connection.cursor() as cursor:
                        await _set_limits(cursor, seconds)
                        yield cursor
        except SchemaGone:
            self._prepared = False
            raise

    async def _connect(self) -> psycopg.AsyncConnection[Any]:
        async with asyncio.timeout(self._settings.timeout):
            return await _Connection.connect(
                self._url,
                autocommit=True,
                prepare_threshold=None,
                connect_timeout=max(2, round(self._settings.timeout)),
                application_name="memory-sidecar",
                client_encoding="utf8",  # whatever PGCLIENTENCODING says
                **DEAD_AFTER,
            )


class _Connection(psycopg.AsyncConnection[Any]):
    """A connection that is closed when it is interrupted. The driver would wait for Postgres to confirm that it has
    stopped."""

    async def cancel_safe(self, *, timeout: float = CANCEL_SECONDS) -> None:
        try:
            await super().cancel_safe(timeout=min(timeout, CANCEL_SECONDS))
        finally:
            self.pgconn.finish()


def _compute_patience(seconds: float) -> float:
    """Return how long to wait for Postgres to keep to ``seconds`` by itself, connecting included."""
    return 2 * seconds + 1


async def _set_limits(cursor: AsyncCursor[Any], seconds: float) -> None:
    """Set the time limits of this transaction."""
    await cursor.execute(LIMITS, [f"{round(value * 1000)}ms" for value in (seconds, LOCK_SECONDS, IDLE_SECONDS)])


def _list_columns(record: Record) -> tuple[Any, ...]:
    return (
        record.kind,
        record.key,
        record.title,
        record.text,
        record.project,
        record.session,
        record.at,
        record.path,
    )
