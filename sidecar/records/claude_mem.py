"""Read claude-mem's database: sessions, observations, summaries and prompts. Its columns differ between versions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from sidecar.records.record import Record, clean_record, parse_time
from sidecar.records.tables import TableReader

NAME = "claude-mem.db"
SESSION = ("memory_session_id", "sdk_session_id")
CONVERSATION = ("content_session_id", "claude_session_id")
AT = ("created_at_epoch", "created_at")
TABLES = ("sdk_sessions", "observations", "session_summaries", "user_prompts")

Columns = Mapping[str, tuple[str, ...]]


def _build_columns(*names: str, **others: tuple[str, ...]) -> Columns:
    return {"id": ("id",), **{name: (name,) for name in names}, **others}


SESSIONS = _build_columns(
    "custom_title", "user_prompt", "project", at=("started_at_epoch", "started_at"), session=SESSION, talk=CONVERSATION
)
OBSERVATIONS = _build_columns(
    *("title", "subtitle", "narrative", "text", "facts", "concepts", "files_read", "files_modified", "project"),
    session=SESSION,
    at=AT,
)
SUMMARIES = _build_columns(
    *("request", "investigated", "learned", "completed", "next_steps", "notes", "files_read", "files_edited"),
    *("project",),
    session=SESSION,
    at=AT,
)
PROMPTS = _build_columns("prompt_text", "project", session=CONVERSATION, at=AT)


def read_table(tables: TableReader, table: str, path: str) -> Iterator[Record]:
    """Yield the records of one of ``TABLES``. Raise ``Unreadable``, possibly after some records."""
    return {
        "sdk_sessions": _read_sessions,
        "observations": _read_observations,
        "session_summaries": _read_summaries,
        "user_prompts": _read_prompts,
    }[table](tables, path)


def _read_sessions(tables: TableReader, path: str) -> Iterator[Record]:
    for row in tables.rows("sdk_sessions", SESSIONS):
        session = row["session"] or row["talk"]
        title = row["custom_title"] or row["user_prompt"]
        yield _build_record("session", row, path, title=title, text=row["user_prompt"], session=session)


def _read_observations(tables: TableReader, path: str) -> Iterator[Record]:
    for row in tables.rows("observations", OBSERVATIONS):
        words = [
            row["subtitle"],
            row["narrative"],
            row["text"],
            join_items(row["facts"]),
            join_items(row["concepts"], ", "),
        ]
        files = [join_items(row["files_read"]), join_items(row["files_modified"])]
        yield _build_record("observation", row, path, title=row["title"], text=join_paragraphs(*words, *files))


def _read_summaries(tables: TableReader, path: str) -> Iterator[Record]:
    for row in tables.rows("session_summaries", SUMMARIES):
        words = [row[name] for name in ("request", "investigated", "learned", "completed", "next_steps", "notes")]
        files = [join_items(row["files_read"]), join_items(row["files_edited"])]
        yield _build_record("summary", row, path, title=row["request"], text=join_paragraphs(*words, *files))


def _read_prompts(tables: TableReader, path: str) -> Iterator[Record]:
    projects = {row["talk"]: row["project"] for row in tables.rows("sdk_sessions", SESSIONS) if row["talk"]}
    for row in tables.rows("user_prompts", PROMPTS):
        project = row["project"] or projects.get(row["session"], "")
        yield _build_record("prompt", {**row, "project": project}, path, title="", text=row["prompt_text"])


def _build_record(
    kind: str, row: Mapping[str, str], path: str, *, title: str, text: str, session: str | None = None
) -> Record:
    written = Record(
        kind=kind,
        key=f"{path.rpartition('/')[0]}/{row['id']}",
        title=title,
        text=text,
        project=row["project"],
        session=row["session"] if session is None else session,
        at=parse_time(row["at"]),
        path=path,
    )
    return clean_record(written)


def join_items(text: str, between: str = "\n") -> str:
    """Return a JSON list of texts as lines; any other text unchanged."""
    if not text or not text.lstrip().startswith("["):
        return text
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return between.join(str(item) for item in found if item) if isinstance(found, list) else text


def join_paragraphs(*texts: str) -> str:
    """Join the texts that are not empty as paragraphs."""
    return "\n\n".join(text.strip() for text in texts if text.strip())
