"""Records as they are answered over HTTP and printed as JSON."""

from __future__ import annotations

from typing import TypedDict

from sidecar.models.records import RecordChange, RecordRow
from sidecar.records.comparison import ChangedRecord
from sidecar.records.record import Record


class RowFields(TypedDict):
    """The fields of a ``RecordRow``."""

    id: str
    kind: str
    key: str
    title: str
    text: str
    project: str
    session: str
    at: str | None
    path: str


def list_fields(record: Record, *, text: bool = True) -> RowFields:
    """Return what every row about a record has, with or without its text."""
    return RowFields(
        id=record.id,
        kind=record.kind,
        key=record.key,
        title=record.title,
        text=record.text if text else "",
        project=record.project,
        session=record.session,
        at=record.at.isoformat() if record.at else None,
        path=record.path,
    )


def make_row(record: Record) -> RecordRow:
    """Return the row of a record."""
    return RecordRow(**list_fields(record))


def make_change(changed: ChangedRecord) -> RecordChange:
    """Return the row of a record that differs."""
    fields = list_fields(changed.record)
    return RecordChange(**fields, change=changed.change, diff=changed.diff, source=changed.source)
