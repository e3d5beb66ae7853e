"""A record as it is answered over HTTP and printed as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field

from sidecar.records.comparison import RecordChange
from sidecar.records.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRow:
    """One thing that a memory says. ``id`` is short for its kind and key."""

    id: str
    kind: str
    key: str
    title: str
    text: str = ""
    project: str = ""
    session: str = ""
    at: str | None = None
    """When it was written down; ISO, in UTC."""
    path: str = ""
    """The file it is in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordChangeRow(RecordRow):
    """A record that differs."""

    change: str
    """"added", "changed" or "removed"."""
    diff: list[str] = field(default_factory=list)
    """Of a changed one: the lines of its text that differ, each after "-", "+" or a blank."""
    source: str = ""
    """Exactly what stands in the file, where that can be told; of a removed one, what stood there."""


def make_row(record: Record, *, text: bool = True) -> RecordRow:
    """Return the row of a record, with or without its text."""
    return RecordRow(
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


def make_change_row(changed: RecordChange) -> RecordChangeRow:
    """Return the row of a record that differs."""
    row = make_row(changed.record)
    return RecordChangeRow(
        id=row.id,
        kind=row.kind,
        key=row.key,
        title=row.title,
        text=row.text,
        project=row.project,
        session=row.session,
        at=row.at,
        path=row.path,
        change=changed.change,
        diff=changed.diff,
        source=changed.source,
    )
