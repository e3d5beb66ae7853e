"""What claude-mem remembers: sessions, observations, summaries and prompts. Columns came and went with its versions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from sidecar.sink.records import Record, moment, record
from sidecar.sink.tables import Tables

NAME = "claude-mem.db"
SESSION = ("memory_session_id", "sdk_session_id")
CONVERSATION = ("content_session_id", "claude_session_id")
AT = ("created_at_epoch", "created_at")
TABLES = ("sdk_sessions", "observations", "session_summaries", "user_prompts")

Columns = Mapping[str, tuple[str, ...]]


def _columns(*names: str, **others: tuple[str, ...]) -> Columns:
    return {"id": ("id",), **{name: (name,) for name in names}, **others}


SESSIONS = _columns(
    "custom_title", "user_prompt", "project", at=("started_at_epoch", "started_at"), session=SESSION, talk=CONVERSATION
)
OBSERVATIONS = _columns(
    *("title", "subtitle", "narrative", "text", "facts", "concepts", "files_read", "files_modified", "project"),
    session=SESSION,
    at=AT,
)
SUMMARIES = _columns(
    *("request", "investigated", "learned", "completed", "next_steps", "notes", "files_read", "files_edited"),
    *("project",),
    session=SESSION,
    at=AT,
)
PROMPTS = _columns("prompt_text", "project", session=CONVERSATION, at=AT)


def read(tables: Tables, table: str, path: str) -> Iterator[Record]:
    """The records of one of ``TABLES``. Raise ``Unreadable``, also after some."""
    return {
        "sdk_sessions": _sessions,
        "observations": _observations,
        "session_summaries": _summaries,
        "user_prompts": _prompts,
    }[table](tables, path)


def _sessions(tables: Tables, path: str) -> Iterator[Record]:
    for row in tables.rows("sdk_sessions", SESSIONS):
        session = row["session"] or row["talk"]
        title = row["custom_title"] or row["user_prompt"]
        yield _record("session", row, path, title=title, text=row["user_prompt"], session=session)


def _observations(tables: Tables, path: str) -> Iterator[Record]:
    for row in tables.rows("observations", OBSERVATIONS):
        words = [row["subtitle"], row["narrative"], row["text"], items(row["facts"]), items(row["concepts"], ", ")]
        files = [items(row["files_read"]), items(row["files_modified"])]
        yield _record("observation", row, path, title=row["title"], text=paragraphs(*words, *files))


def _summaries(tables: Tables, path: str) -> Iterator[Record]:
    for row in tables.rows("session_summaries", SUMMARIES):
        words = [row[name] for name in ("request", "investigated", "learned", "completed", "next_steps", "notes")]
        files = [items(row["files_read"]), items(row["files_edited"])]
        yield _record("summary", row, path, title=row["request"], text=paragraphs(*words, *files))


def _prompts(tables: Tables, path: str) -> Iterator[Record]:
    projects = {row["talk"]: row["project"] for row in tables.rows("sdk_sessions", SESSIONS) if row["talk"]}
    for row in tables.rows("user_prompts", PROMPTS):
        project = row["project"] or projects.get(row["session"], "")
        yield _record("prompt", {**row, "project": project}, path, title="", text=row["prompt_text"])


def _record(
    kind: str, row: Mapping[str, str], path: str, *, title: str, text: str, session: str | None = None
) -> Record:
    return record(
        kind,
        f"{path.rpartition('/')[0]}/{row['id']}",
        title=title,
        text=text,
        project=row["project"],
        session=row["session"] if session is None else session,
        at=moment(row["at"]),
        path=path,
    )


def items(text: str, between: str = "\n") -> str:
    """A JSON list of texts as lines; any other text as it is."""
    if not text or not text.lstrip().startswith("["):
        return text
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return between.join(str(item) for item in found if item) if isinstance(found, list) else text


def paragraphs(*texts: str) -> str:
    return "\n\n".join(text.strip() for text in texts if text.strip())
