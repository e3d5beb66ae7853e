"""Make items of rows: the columns that a record source names, whether they come from a table or from JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from sidecar.layouts.sources import RecordSpec
from sidecar.records.files import MemoryFile
from sidecar.records.record import Record, clean_record, parse_time

LONGEST_IDENTITY = 200

Pick = Callable[[str], str]
"""Returns the text of a column, written as in a ``RecordSpec``; "" if the row has none."""


def list_columns(spec: RecordSpec) -> list[str]:
    """Return every column that a source names, each once."""
    named = [*spec.title, *spec.text, *spec.also, *spec.at, *spec.project, *spec.session]
    return list(dict.fromkeys([*named, *(column for key in spec.key for column in key)]))


def identify(spec: RecordSpec, pick: Pick) -> str:
    """Return what identifies a row: the first key that is set completely; "" if none is."""
    for columns in spec.key:
        values = [pick(column) for column in columns]
        if all(values):
            return join_identity(values)
    return ""


def join_identity(values: Iterable[str]) -> str:
    """Return the values that identify a row as one text, on one line."""
    return ",".join([value[:LONGEST_IDENTITY] for value in values]).replace("\n", " ")


def build_row_record(spec: RecordSpec, file: MemoryFile, pick: Pick, key: str) -> Record:
    """Build the record of a row."""
    written = Record(
        kind=spec.kind,
        key=key,
        title=_pick_first(spec.title, pick),
        text=join_paragraphs(*(join_items(pick(column)) for column in spec.text)),
        project=_pick_first(spec.project, pick) or ("" if spec.project else file.project),
        session=_pick_first(spec.session, pick),
        at=parse_time(_pick_first(spec.at, pick)),
        path=file.path,
    )
    return clean_record(written)


def _pick_first(columns: tuple[str, ...], pick: Pick) -> str:
    return next(filter(None, map(pick, columns)), "")


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
