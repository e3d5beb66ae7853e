"""The tables and their migrations: one step for each version, each in a transaction that only one caller runs."""

from __future__ import annotations

from typing import Any

from psycopg import AsyncCursor
from psycopg.sql import SQL, Composed, Identifier

from sidecar.errors import SearchUnfit

# Row-level security without a policy: a role that does not own the tables sees nothing, whatever an API in front of the
# database grants. ``words`` is not a generated column, because the text-search configuration is a setting that may
# change.
STEPS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE {schema}.memories (
            id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            store text NOT NULL,
            memory text NOT NULL,
            snapshot text NOT NULL,
            reader text NOT NULL,
            records bigint NOT NULL,
            problems text[] NOT NULL,
            indexed timestamptz NOT NULL,
            UNIQUE (store, memory)
        )""",
        """CREATE TABLE {schema}.records (
            memory_id bigint NOT NULL REFERENCES {schema}.memories ON DELETE CASCADE,
            kind text NOT NULL,
            key text NOT NULL,
            title text NOT NULL,
            body text NOT NULL,
            project text NOT NULL,
            session text NOT NULL,
            at timestamptz,
            path text NOT NULL,
            digest bytea NOT NULL,
            words tsvector NOT NULL,
            PRIMARY KEY (memory_id, kind, key)
        )""",
        "CREATE INDEX records_words ON {schema}.records USING gin (words)",
        "ALTER TABLE {schema}.memories ENABLE ROW LEVEL SECURITY",
        "ALTER TABLE {schema}.records ENABLE ROW LEVEL SECURITY",
    ),
    # The line of a memory whose history is kept; its records are known from snapshot ``first`` of it until ``last``.
    (
        """CREATE TABLE {schema}.snapshots (
            memory_id bigint NOT NULL REFERENCES {schema}.memories ON DELETE CASCADE,
            number bigint NOT NULL,
            snapshot text NOT NULL,
            created text NOT NULL,
            PRIMARY KEY (memory_id, number)
        )""",
        "ALTER TABLE {schema}.snapshots ENABLE ROW LEVEL SECURITY",
        "ALTER TABLE {schema}.records ADD COLUMN first bigint NOT NULL DEFAULT 0, ADD COLUMN last bigint",
        "ALTER TABLE {schema}.records DROP CONSTRAINT records_pkey",
        "CREATE UNIQUE INDEX records_present ON {schema}.records (memory_id, kind, key) WHERE last IS NULL",
        "CREATE INDEX records_past ON {schema}.records (memory_id) WHERE last IS NOT NULL",
    ),
)


async def prepare_schema(cursor: AsyncCursor[Any], schema: str) -> None:
    """Create the tables, or migrate them, inside a transaction.

    Raise ``SearchUnfit`` if they are newer than this version knows, or the database cannot store every character.
    """
    name = Identifier(schema)
    await cursor.execute("SELECT current_setting('server_encoding')")
    if (await cursor.fetchone()) != ("UTF8",):
        raise SearchUnfit("The database does not hold text as UTF-8.", hint="CREATE DATABASE … ENCODING 'UTF8'.")
    await cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended('memory-sidecar ' || %s, 0))", (schema,))
    # A role may own the schema without the right to create one, so it is created only if it is missing.
    await cursor.execute("SELECT to_regnamespace(%s) IS NULL", (schema,))
    if (await cursor.fetchone()) == (True,):
        await cursor.execute(SQL("CREATE SCHEMA {schema}").format(schema=name))
    await cursor.execute("SELECT to_regclass(%s) IS NULL", (f"{schema}.version",))
    if (await cursor.fetchone()) == (True,):
        await cursor.execute(SQL("CREATE TABLE {schema}.version (number integer NOT NULL)").format(schema=name))
        await cursor.execute(SQL("ALTER TABLE {schema}.version ENABLE ROW LEVEL SECURITY").format(schema=name))
        await cursor.execute(SQL("INSERT INTO {schema}.version VALUES (0)").format(schema=name))
    await cursor.execute(SQL("SELECT max(number) FROM {schema}.version").format(schema=name))
    row = await cursor.fetchone()
    number = int(row[0] or 0) if row else 0
    if number > len(STEPS):
        raise SearchUnfit(
            f"The tables in the schema {schema} were made by a newer version.",
            hint="Update the sidecar, or name another [postgres] schema.",
        )
    for step in STEPS[number:]:
        for statement in step:
            await cursor.execute(_format_sql(statement, name))
    await cursor.execute(SQL("UPDATE {schema}.version SET number = %s").format(schema=name), (len(STEPS),))


def _format_sql(statement: str, schema: Identifier) -> Composed:
    return SQL(statement).format(schema=schema)
