"""Follow the records of a file from snapshot to snapshot: which snapshot each came with, and which its text is from.

Of a database only those rows are read that stand on changed pages; of other files that changed, all records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import NamedTuple

from sidecar.format.index import Entry
from sidecar.host.values import dataclass
from sidecar.program.sqlite.pages import UnexpectedPage
from sidecar.records.matches import Row, match_rows, sketch_row, sketch_rows
from sidecar.records.tables import open_tables, read_rows
from sidecar.records.trees import PageReader, TableTree, list_changed_pages
from sidecar.records.units import Files, Unit


class Contents(NamedTuple):
    """The files of a snapshot, and their entries."""

    files: Files
    entries: Mapping[str, Entry]


class Mark(NamedTuple):
    """What is known of a record: the numbers of the snapshots that its text is from, and that it came with."""

    row: Row
    origin: int
    first: int


class TrackedTable(NamedTuple):
    """A table as the last snapshot had it: how it was made, and where its rows stand."""

    definition: tuple[int, str]
    tree: TableTree | None
    """``None`` if there is no such table."""


@dataclass(slots=True)
class TrackedUnit:
    """A unit as the last snapshot had it."""

    unit: Unit
    entries: dict[str, Entry]
    marks: list[dict[int, Mark]]
    """Of tables: for each source its rows, by rowid. Of others: one for all, by position."""
    tables: list[TrackedTable] = field(default_factory=list)
    """One for each source, or none if the rows cannot be followed by pages."""

    def is_same(self, unit: Unit, contents: Contents) -> bool:
        """Return whether the files of the unit still have these contents."""
        return self.unit.sources == unit.sources and all(
            self.entries[path].digest == contents.entries[path].digest for path in unit.paths
        )

    def list_marks(self) -> Iterator[Mark]:
        """Yield the marks in the order in which the unit is read."""
        for marks in self.marks:
            for place in sorted(marks):
                yield marks[place]


def follow_unit(old: TrackedUnit | None, unit: Unit, contents: Contents, number: int) -> TrackedUnit:
    """Return a unit as snapshot ``number`` has it, given what it was before, which is used up. Raise ``Unreadable``."""
    if old is not None and old.tables and old.unit.sources == unit.sources:
        try:
            found = _follow_pages(old, unit, contents, number)
        except UnexpectedPage:
            found = None
        if found is not None:
            return found
    return _follow_all(old, unit, contents, number)


def _follow_all(old: TrackedUnit | None, unit: Unit, contents: Contents, number: int) -> TrackedUnit:
    """Match all records of a unit with those that it had before."""
    before = list(old.list_marks()) if old is not None else []
    rows = sketch_rows(unit.read(contents.files))
    marks = [Mark(row, number, number) for row in rows]
    for i, j in match_rows([mark.row for mark in before], rows).pairs:
        same = before[i].row.digest == rows[j].digest
        marks[j] = Mark(rows[j], before[i].origin if same else number, before[i].first)
    entries = {path: contents.entries[path] for path in unit.paths}
    places = unit.list_rowids(contents.files)
    if not places or len(places) != len(rows):
        return TrackedUnit(unit, entries, [dict(enumerate(marks))])
    by_source: list[dict[int, Mark]] = [{} for _ in unit.sources]
    for (source, rowid), mark in zip(places, marks, strict=True):
        by_source[source][rowid] = mark
    return TrackedUnit(unit, entries, by_source, _plant_trees(unit, contents.files))


def _plant_trees(unit: Unit, files: Files) -> list[TrackedTable]:
    """Return where the rows of each source stand; nothing if that cannot be told."""
    found = []
    try:
        for path, spec in unit.sources:
            with open_tables(files[path].place) as tables:
                definition = tables.describe_table(spec.table)
            with PageReader(files[path].place) as pages:
                tree = TableTree(definition[0], pages) if definition[0] else None
            found.append(TrackedTable(definition, tree))
    except UnexpectedPage:
        return []
    return found


def _follow_pages(old: TrackedUnit, unit: Unit, contents: Contents, number: int) -> TrackedUnit | None:
    """Match only rows on changed pages; ``None`` if those cannot be told. Raise ``Unreadable`` or ``UnexpectedPage``."""
    went: list[Mark] = []
    came: list[tuple[int, int, Row]] = []
    for source, ((path, spec), table) in enumerate(zip(unit.sources, old.tables, strict=True)):
        file = contents.files[path]
        with open_tables(file.place) as tables:
            if tables.describe_table(spec.table) != table.definition:
                return None
        if table.tree is None:
            continue
        with PageReader(file.place) as pages:
            changed = list_changed_pages(old.entries[path], contents.entries[path], pages.size)
            if changed is None:
                return None
            touched = table.tree.follow(pages, changed)
        items = read_rows(file, spec, touched) if touched else {}
        if items is None:
            return None
        marks = old.marks[source]
        for rowid in sorted(touched):
            row = sketch_row(items[rowid]) if rowid in items else None
            mark = marks.get(rowid)
            if mark is not None and mark.row != row:
                went.append(marks.pop(rowid))
            if row is not None and (mark is None or mark.row != row):
                came.append((source, rowid, row))
    match = match_rows([mark.row for mark in went], [row for _, _, row in came])
    for j in match.added:
        source, rowid, row = came[j]
        old.marks[source][rowid] = Mark(row, number, number)
    for i, j in match.pairs:
        source, rowid, row = came[j]
        same = went[i].row.digest == row.digest
        old.marks[source][rowid] = Mark(row, went[i].origin if same else number, went[i].first)
    entries = {path: contents.entries[path] for path in unit.paths}
    return TrackedUnit(unit, entries, old.marks, old.tables)
