"""Where the files of a layout hold records, as data: which files, which reader, and which columns or keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from sidecar.host.values import dataclass

READERS = ("sections", "table", "list", "lines", "whole")
"""The readers of ``sidecar.records``: Markdown sections, a SQLite table, a JSON list, JSON lines, a file as one record."""
MESSAGE = "message"
"""The kind of what transcripts hold: many and large, so they are counted, and listed only if they are asked for."""

_KIND = re.compile(r"[a-z][a-z0-9-]{0,31}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLookup:
    """Another table that knows the project of a session, for rows that do not."""

    table: str
    session: str
    project: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSpec:
    """One source of records. A column is written ``name``, or ``name|other`` for the first of several that is there; in
    JSON ``outer.inner`` reaches into an object."""

    files: tuple[str, ...]
    """Patterns, from the root on."""
    reader: str = "sections"
    kind: str = "section"
    table: str = ""
    """For "table": its name."""
    list: tuple[str, ...] = ()
    """For "list": keys of the document, the first that holds a list counts. Without any, the document is the list."""
    key: tuple[tuple[str, ...], ...] = ()
    """The columns that identify a record, and others if one of those is not set. Without any, its text does."""
    title: tuple[str, ...] = ()
    """The first that is not empty."""
    text: tuple[str, ...] = ()
    """All that are not empty, as paragraphs."""
    also: tuple[str, ...] = ()
    """Columns that count as its contents without being part of its text."""
    at: tuple[str, ...] = ()
    project: tuple[str, ...] = ()
    session: tuple[str, ...] = ()
    sessions: SessionLookup | None = None
    shared: bool = False
    """The same record may be in several files of a root; the first of them counts."""

    @property
    def contents(self) -> tuple[str, ...]:
        """The columns that make up what a record says: if none of them differs, it is the same."""
        return (*self.title, *self.text, *self.also, *self.project)

    def describe_table(self) -> dict[str, Any]:
        """Return what the program in a sandbox needs to count rows."""
        keys = [list(key) for key in self.key]
        return {
            "files": list(self.files),
            "table": self.table,
            "kind": self.kind,
            "contents": list(self.contents),
            "key": keys,
        }


def find_source_faults(sources: tuple[RecordSpec, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield what is wrong with the record sources of a layout, each with its position in the table."""
    for number, source in enumerate(sources):
        at = ("records", number)
        if source.reader not in READERS:
            yield (
                (*at, "reader"),
                f"records has an unknown reader {source.reader!r}: it is one of {', '.join(READERS)}.",
            )
        if not _KIND.match(source.kind) or source.kind == "file":
            yield (*at, "kind"), f"records: the kind {source.kind[:40]!r} must be a word of lower-case letters."
        if (source.reader == "table") != bool(source.table):
            yield (*at, "table"), 'records: reader = "table" needs a table, and no other reader has one.'
        if source.reader in ("table", "list", "lines") and not source.text:
            yield (*at, "text"), f"records: the reader {source.reader!r} needs the columns or keys of the text."
        for pattern in source.files:
            if not pattern or pattern.startswith("/") or ".." in pattern.split("/"):
                yield (*at, "files"), f"{pattern!r} is not a pattern relative to the root."
        if not source.files:
            yield (*at, "files"), "records needs the files that it is about."
