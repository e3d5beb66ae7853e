"""A sink in Postgres (Supabase is one), by psycopg 3.

Nothing is kept between two calls but the knowledge that the tables are there, and nothing is set outside of a transaction:
a pooler that hands out connections by the transaction is fine. One transaction makes a memory's rows equal to a snapshot,
so whatever is cut short leaves the rows as they were.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, LiteralString

import psycopg
from psycopg import AsyncCursor
from psycopg.conninfo import conninfo_to_dict
from psycopg.sql import SQL, Composed, Identifier

from adapters.sinks import postgres_schema, postgres_search
from adapters.sinks.postgres_errors import Redacted, SchemaGone, told_plainly
from sidecar.errors import BadConfig
from sidecar.sink.records import READER, Record
from sidecar.sink.settings import HOW, Postgres
from sidecar.sink.sink import Found, Place, Query, Records, Still, Written

LOCK_SECONDS = 60.0
WRITE_SECONDS = 900.0
IDLE_SECONDS = 300.0
"""How long Postgres waits for a caller that has stopped in the middle, before it lets others have their turn."""
CANCEL_SECONDS = 1.0
MOST_SEARCHES = 8
"""At once, each on a connection of its own: others need some of Postgres's connections too."""
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
INSERT = """
INSERT INTO {schema}.records (memory_id, kind, key, title, body, project, session, at, path, digest, words)
SELECT DISTINCT ON (kind, key) %(id)s::bigint, kind, key, title, body, project, session, at, path, digest,
    setweight(to_tsvector(%(text_search)s::regconfig, translate(title, %(joined)s, %(blanks)s)), 'A')
        || setweight(to_tsvector(%(text_search)s::regconfig, translate(body, %(joined)s, %(blanks)s)), 'B')
FROM pg_temp.incoming ORDER BY kind, key, n
ON CONFLICT (memory_id, kind, key) DO NOTHING
"""
CLAIM = """
INSERT INTO {schema}.memories (store, memory, snapshot, reader, records, problems, indexed)
VALUES (%s, %s, '', '', 0, '{{}}', now())
ON CONFLICT (store, memory) DO UPDATE SET store = excluded.store RETURNING id, snapshot, reader, records
"""
SETTLE = """
UPDATE {schema}.memories SET snapshot = %(snapshot)s, reader = %(reader)s, problems = %(problems)s, indexed = now(),
    records = (SELECT count(*) FROM {schema}.records WHERE memory_id = %(id)s)
WHERE id = %(id)s RETURNING records
"""

# What the driver says when it is cut short is said by us, in a receipt or an error.
logging.getLogger("psycopg").addHandler(logging.NullHandler())


def open_postgres(url: str, settings: Postgres) -> PostgresSink:
    """The sink behind a URL, which is not tried yet. Raise ``BadConfig`` when it is not one."""
    try:
        conninfo_to_dict(url)
    except psycopg.Error:
        raise BadConfig(f"{settings.url_env} is not the URL of a Postgres database.", hint=HOW) from None
    return PostgresSink(url, settings)


class PostgresSink:
    def __init__(self, url: str, settings: Postgres) -> None:
        self._url = url
        self._settings = settings
        self._redacted = Redacted(url)
        self._prepared = False
        self._searches = asyncio.Semaphore(MOST_SEARCHES)
        self._reader = f"{READER} {settings.text_search}"

    def __repr__(self) -> str:
        return f"PostgresSink(schema={self._settings.schema!r})"

    async def standing(self, store: str, memory: str = "") -> Mapping[str, str]:
        async with self._transaction(self._settings.timeout) as cursor:
            await cursor.execute(self._sql(STANDING), {"store": store, "memory": memory})
            return {memory: snapshot if reader == self._reader else "" async for memory, snapshot, reader in cursor}

    async def replace(self, place: Place, snapshot: str, records: Records, still: Still) -> Written | None:
        async with self._transaction(WRITE_SECONDS) as cursor:
            await self._turn(cursor, place)
            if not await still():
                return None
            await cursor.execute(self._sql(CLAIM), (place.store, place.memory))
            id, held, reader, count = await cursor.fetchone() or (0, "", "", 0)
            if (held, reader) == (snapshot, self._reader):
                return Written(records=count)
            removed = 0
            if reader != self._reader:  # what is there was made in another way
                await cursor.execute(self._sql("DELETE FROM {schema}.records WHERE memory_id = %s"), (id,))
                removed = cursor.rowcount
            gone = await self._bring_missing(cursor, id, records)
            removed += await self._remove(cursor, id, gone)
            parted = {"joined": postgres_search.JOINED, "blanks": postgres_search.BLANKS}
            await cursor.execute(self._sql(INSERT), {"id": id, "text_search": self._settings.text_search, **parted})
            written = cursor.rowcount
            about = {"id": id, "snapshot": snapshot, "reader": self._reader, "problems": records.problems}
            await cursor.execute(self._sql(SETTLE), about)
            (now,) = await cursor.fetchone() or (0,)
            return Written(records=now, written=written, removed=removed)

    async def remove(self, place: Place, still: Still) -> int | None:
        async with self._transaction(WRITE_SECONDS) as cursor:
            await self._turn(cursor, place)
            if not await still():
                return None
            about = (place.store, place.memory)
            await cursor.execute(
                self._sql("DELETE FROM {schema}.memories WHERE store = %s AND memory = %s RETURNING records"), about
            )
            row = await cursor.fetchone()
            return int(row[0]) if row else 0

    async def search(self, query: Query) -> Found:
        seconds = self._settings.timeout
        with told_plainly(self._redacted):
            async with asyncio.timeout(_patience(seconds)), self._searches, self._transaction(seconds) as cursor:
                return await postgres_search.search(cursor, self._settings.schema, self._settings.text_search, query)

    async def _turn(self, cursor: AsyncCursor[Any], place: Place) -> None:
        """Wait until nobody else writes this memory's rows; nobody else will until the transaction ends."""
        name = f"{self._settings.schema} {place.store} {place.memory}"
        await cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (name,))

    async def _bring_missing(self, cursor: AsyncCursor[Any], id: int, records: Records) -> set[bytes]:
        """Tell Postgres the records it does not have. Return the digests of the rows that are of none of them any more.

        Only digests come from there, and only what changed goes there: most of a memory is the same after a conversation.
        """
        await cursor.execute(self._sql("SELECT digest FROM {schema}.records WHERE memory_id = %s"), (id,))
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
                        await copy.write_row((number, *_columns(record), digest))
                        number += 1
        return held

    async def _remove(self, cursor: AsyncCursor[Any], id: int, digests: set[bytes]) -> int:
        await cursor.execute(GONE)
        async with cursor.copy("COPY pg_temp.gone FROM STDIN") as copy:
            for digest in digests:
                await copy.write_row((digest,))
        await cursor.execute(self._sql(REMOVE_GONE), (id,))
        return cursor.rowcount

    def _sql(self, statement: LiteralString) -> Composed:
        return SQL(statement).format(schema=Identifier(self._settings.schema))

    @asynccontextmanager
    async def _transaction(self, seconds: float) -> AsyncIterator[AsyncCursor[Any]]:
        """A transaction on a connection of its own, with the tables there. Raise a ``SinkError``.

        Postgres ends what takes longer than ``seconds``. One that is there and says nothing is not waited for either.
        """
        try:
            with told_plainly(self._redacted):
                async with asyncio.timeout(_patience(seconds)), await self._connect() as connection:
                    if not self._prepared:
                        async with connection.transaction(), connection.cursor() as cursor:
                            await _limit(cursor, WRITE_SECONDS)
                            await postgres_schema.prepare(cursor, self._settings.schema)
                        self._prepared = True
                    async with connection.transaction(), connection.cursor() as cursor:
                        await _limit(cursor, seconds)
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
    """One that is closed when it is cut short. The driver would wait for Postgres to say that it has stopped."""

    async def cancel_safe(self, *, timeout: float = CANCEL_SECONDS) -> None:
        try:
            await super().cancel_safe(timeout=min(timeout, CANCEL_SECONDS))
        finally:
            self.pgconn.finish()


def _patience(seconds: float) -> float:
    """How long to wait for Postgres to keep to ``seconds`` by itself, connecting included."""
    return 2 * seconds + 1


async def _limit(cursor: AsyncCursor[Any], seconds: float) -> None:
    """How long anything may take, for this transaction alone."""
    await cursor.execute(LIMITS, [f"{round(value * 1000)}ms" for value in (seconds, LOCK_SECONDS, IDLE_SECONDS)])


def _columns(record: Record) -> tuple[Any, ...]:
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
