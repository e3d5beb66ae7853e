"""Read CodyMaster's learnings and decisions: rows of ``.cm/context.db``, and the same in ``.cm/memory/*.json``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sidecar.records.claude_mem import join_paragraphs
from sidecar.records.record import Record, clean_record, make_unique, parse_time
from sidecar.records.tables import TableReader, Unreadable

NAME = "context.db"
TABLES = ("learnings", "decisions")
FILES = {"learnings.json": "learnings", "decisions.json": "decisions"}
LARGEST_FILE = 32 << 20
AT = ("created_at", "timestamp", "createdAt", "updated_at")

# Two spellings each: the database uses one, the JSON files the other.
FIELDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "learnings": {
        "id": ("id",),
        "title": ("what_failed", "whatFailed"),
        "why": ("why_failed", "whyFailed"),
        "how": ("how_to_prevent", "howToPrevent"),
        "module": ("module",),
        "at": AT,
    },
    "decisions": {"id": ("id",), "title": ("decision",), "why": ("rationale",), "at": AT},
}


def read_table(tables: TableReader, table: str, path: str, project: str) -> Iterator[Record]:
    """Yield the records of one of ``TABLES``. Raise ``Unreadable``, possibly after some records."""
    for row in tables.rows(table, FIELDS[table]):
        yield _build_record(table, row, path, _find_folder(path), project)


def read_file(place: str, path: str, project: str) -> Iterator[Record]:
    """Yield the records of ``learnings.json`` or ``decisions.json``. Raise ``Unreadable``."""
    folder, _, name = path.rpartition("/")
    used: Counter[str] = Counter()
    for number, item in enumerate(_read_items(place)):
        fields = FIELDS[FILES[name]]
        row = {field: _pick_first(item, keys) for field, keys in fields.items()}
        row["id"] = make_unique(row["id"] or f"#{number}", used)
        yield _build_record(FILES[name], row, path, _find_folder(folder), project)


def _read_items(place: str) -> list[Any]:
    file = Path(place)
    if file.stat().st_size > LARGEST_FILE:
        raise Unreadable(f"it is larger than {LARGEST_FILE >> 20} MB")
    try:
        found = json.loads(file.read_bytes().decode("utf-8", "replace"))
    except (ValueError, RecursionError) as problem:
        raise Unreadable(f"it is not JSON: {problem}") from None
    if not isinstance(found, list):
        raise Unreadable("it is not a list")
    return found


def _pick_first(item: Any, keys: tuple[str, ...]) -> str:
    if not isinstance(item, dict):
        return str(item) if "decision" in keys or "whatFailed" in keys else ""
    return next((str(item[key]) for key in keys if item.get(key) not in (None, "")), "")


def _build_record(table: str, row: Mapping[str, str], path: str, folder: str, project: str) -> Record:
    """Build a record. A row and its copy in a JSON file get the same key, so that they count as one record."""
    written = Record(
        kind=table.removesuffix("s"),
        key=f"{folder}/{row['id']}",
        title=row["title"],
        text=join_paragraphs(row["title"], row["why"], row.get("how", ""), row.get("module", "")),
        project=project,
        at=parse_time(row["at"]),
        path=path,
    )
    return clean_record(written)


def _find_folder(path: str) -> str:
    return path.rpartition("/")[0]
