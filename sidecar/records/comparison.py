"""Compare two snapshots record by record.

First only digests are compared, unit by unit (``compare_units``); then the records that differ are read again, and only
those become texts (``describe_changes``).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field

from sidecar.format.index import FILE, LINK, Entry
from sidecar.host.values import dataclass
from sidecar.layouts import Layout
from sidecar.models.answers import Counts
from sidecar.models.records import FileChange
from sidecar.records.files import MemoryFile, Unreadable
from sidecar.records.matches import Match, Row, match_rows, sketch_rows
from sidecar.records.record import Record, escape_path
from sidecar.records.texts import diff_texts
from sidecar.records.units import Files, Unit, name_item, narrow_units, plan_units
from sidecar.store.manifest import Manifest

LARGEST_TEXT = 256 << 10
"""Of a larger file no text difference is made."""

Layouts = Mapping[str, Layout]


@dataclass(frozen=True, slots=True)
class Side:
    """A snapshot to compare: its manifest and the entries, before any file is fetched."""

    manifest: Manifest
    entries: Mapping[str, Entry]
    units: Mapping[str, Unit]


@dataclass(frozen=True, slots=True)
class Version:
    """A snapshot whose files, as far as they differ, are on this machine."""

    entries: Mapping[str, Entry]
    units: Mapping[str, Unit]
    files: Files


@dataclass(frozen=True, slots=True)
class UnitDifference:
    """A unit in which something differs, and what."""

    old: Unit | None
    new: Unit | None
    old_rows: list[Row]
    new_rows: list[Row]
    match: Match
    problem: str = ""
    """Why it cannot be told what its records are; then nothing else is known."""

    @property
    def counts(self) -> dict[str, Counts]:
        """The differences by kind."""
        added = Counter(self.new_rows[j].kind for j in self.match.added)
        changed = Counter(self.new_rows[j].kind for _, j in self.match.changed)
        removed = Counter(self.old_rows[i].kind for i in self.match.removed)
        return {
            kind: Counts(added=added[kind], changed=changed[kind], removed=removed[kind])
            for kind in sorted({*added, *changed, *removed})
        }

    @property
    def paths(self) -> set[str]:
        return {path for unit in (self.old, self.new) if unit is not None for path in unit.paths}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedRecord:
    """A record that was added, changed or removed."""

    change: str
    record: Record
    """As it is now; a removed one as it was."""
    diff: list[str] = field(default_factory=list)
    """Of a changed one: the lines of its text that differ, each after "-", "+" or a blank."""
    source: str = ""
    """Exactly what stands in the file now, where that can be told."""


def make_side(manifest: Manifest, entries: Mapping[str, Entry], layouts: Layouts) -> Side:
    """Return one side of a comparison."""
    paths = (path for path, entry in entries.items() if entry.type == FILE)
    return Side(manifest, entries, plan_units(paths, {root.name: root.layout for root in manifest.roots}, layouts))


def list_needed(old: Side, new: Side, *, texts: bool = True) -> set[str]:
    """Return the files that have to be read to compare two snapshots: those that differ and hold records, those read
    together with them and, with ``texts``, small ones that may be text."""
    differing = list_differing(old.entries, new.entries)
    needed: set[str] = set()
    for side, other in ((old, new), (new, old)):
        for name, unit in side.units.items():
            paths = {*unit.paths, *(other.units[name].paths if name in other.units else ())}
            if paths & differing:
                needed |= paths
    small = (path for path in differing if all(_is_small(side.entries.get(path)) for side in (old, new)))
    return needed | (set(small) if texts else set())


def _is_small(entry: Entry | None) -> bool:
    return entry is None or (entry.type == FILE and entry.size <= LARGEST_TEXT)


def list_differing(old: Mapping[str, Entry], new: Mapping[str, Entry]) -> set[str]:
    """Return the files that are not the same in both."""
    return {
        path
        for path in {*old, *new}
        if _pick_contents(old.get(path)) != _pick_contents(new.get(path))
        and any(side[path].type in (FILE, LINK) for side in (old, new) if path in side)
    }


def _pick_contents(entry: Entry | None) -> tuple[object, ...] | None:
    return None if entry is None else (entry.type, entry.size, entry.digest, entry.target)


def compare_units(old: Version, new: Version, check: Callable[[], None] | None = None) -> Iterator[UnitDifference]:
    """Yield the units in which records may differ. Only files that differ are read, and those read together with them.
    ``check`` is called now and then, and may raise to end it."""
    differing = list_differing(old.entries, new.entries)
    for name in sorted({*old.units, *new.units}):
        before, after = old.units.get(name), new.units.get(name)
        paths = {path for unit in (before, after) if unit is not None for path in unit.paths}
        if paths & differing:
            try:
                yield _compare_unit(before, after, (old.files, new.files), check or _go_on)
            except (Unreadable, OSError) as problem:
                path = escape_path((after or before).paths[0])  # type: ignore[union-attr]
                yield UnitDifference(before, after, [], [], Match(), f"{path} cannot be read: {problem}.")


def _go_on() -> None:
    return None


def _compare_unit(
    old: Unit | None, new: Unit | None, files: tuple[Files, Files], check: Callable[[], None]
) -> UnitDifference:
    """Compare two versions of a unit: of databases only the rows that differ, if they all have an identity."""
    if old is not None and new is not None and (narrow := narrow_units(old, new, *files)) is not None:
        check()
        before, after = (sketch_rows(unit.read(side)) for unit, side in zip(narrow, files, strict=True))
        if all(isinstance(row.name, str) for row in (*before, *after)):
            return UnitDifference(*narrow, before, after, match_rows(before, after))
    check()
    before = sketch_rows(old.read(files[0])) if old is not None else []
    check()
    after = sketch_rows(new.read(files[1])) if new is not None else []
    check()
    ordered = any(unit.ordered for unit in (old, new) if unit is not None)
    return UnitDifference(old, new, before, after, match_rows(before, after, ordered=ordered))


def add_counts(counts: Iterable[Mapping[str, Counts]]) -> dict[str, Counts]:
    """Return the sums by kind."""
    total: dict[str, Counts] = {}
    for one in counts:
        for kind, count in one.items():
            total[kind] = total.get(kind, Counts()) + count
    return dict(sorted(total.items()))


def describe_changes(
    difference: UnitDifference, old: Files, new: Files, wanted: Callable[[str], bool]
) -> Iterator[ChangedRecord]:
    """Yield the records of a unit that differ: those of the wanted kinds, in the order of the file."""
    match = difference.match
    before = {i for i, _ in match.changed if wanted(difference.old_rows[i].kind)}
    was = {j: i for i, j in match.changed}
    earlier = dict(_read_records(difference.old, old, before))
    after = {j for j in [*match.added, *was] if wanted(difference.new_rows[j].kind)}
    for j, (record, source) in _read_records(difference.new, new, after):
        if j not in was:
            yield ChangedRecord(change="added", record=record, source=source)
            continue
        past = earlier.pop(was[j])[0]
        lines = diff_texts(_write_out(past), _write_out(record))
        yield ChangedRecord(change="changed", record=record, diff=lines, source=source)
    gone = {i for i in match.removed if wanted(difference.old_rows[i].kind)}
    for _, (record, source) in _read_records(difference.old, old, gone):
        yield ChangedRecord(change="removed", record=record, source=source)


def _write_out(record: Record) -> str:
    """Return a record's title and text as one; the text alone, if it has the title in it."""
    whole = record.kind in ("section", "task") or record.text.startswith(record.title)
    return record.text if whole else f"{record.title}\n{record.text}"


def _read_records(unit: Unit | None, files: Files, positions: set[int]) -> Iterator[tuple[int, tuple[Record, str]]]:
    """Yield the records at these positions of a unit, each with its source."""
    if unit is None or not positions:
        return
    used: Counter[str] = Counter()
    last = max(positions)
    for position, (_, item) in enumerate(unit.read(files)):
        key = name_item(unit.where, item, used)
        if position in positions:
            yield position, (item.build(key), item.source.decode("utf-8", "replace"))
        if position >= last:
            return


def compare_files(old: Version, new: Version, told: set[str]) -> Iterator[FileChange]:
    """Yield the files that differ, but for those whose differences were ``told`` as records."""
    for path in sorted(list_differing(old.entries, new.entries) - told):
        before, after = old.entries.get(path), new.entries.get(path)
        change = "added" if before is None else "removed" if after is None else "changed"
        yield FileChange(
            change=change,
            path=path,
            old_size=before.size if before else 0,
            new_size=after.size if after else 0,
            diff=_diff_files(old.files.get(path), new.files.get(path), before, after),
        )


def _diff_files(old: MemoryFile | None, new: MemoryFile | None, before: Entry | None, after: Entry | None) -> list[str]:
    """Return the difference of two text files; nothing for others, and for those that are not here."""
    texts = []
    for file, entry in ((old, before), (new, after)):
        if entry is None:
            texts.append("")
            continue
        if entry.type != FILE or file is None or entry.size > LARGEST_TEXT or entry.database:
            return []
        if not os.path.exists(file.place):
            return []
        with open(file.place, "rb") as stream:
            data = stream.read(LARGEST_TEXT + 1)
        if b"\0" in data:
            return []
        try:
            texts.append(data.decode("utf-8"))
        except UnicodeDecodeError:
            return []
    return diff_texts(*texts)
