"""Which files of a snapshot hold records, and which are read together.

A unit is one file or, where a layout says that a record may be in several files of a root, all of those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from re import Pattern

from sidecar.format.patterns import compile_patterns
from sidecar.host.values import dataclass
from sidecar.layouts import Layout, load_built_in
from sidecar.layouts.sources import RecordSpec
from sidecar.records.documents import count_lines, read_lines, read_list, read_rest, read_whole
from sidecar.records.files import MemoryFile
from sidecar.records.record import Item, escape_path, make_unique
from sidecar.records.sections import read_ending, read_sections
from sidecar.records.tables import open_tables, read_table

MARKDOWN = RecordSpec(files=("**/*.md",))

Files = Mapping[str, MemoryFile]


@dataclass(frozen=True, slots=True)
class Unit:
    """Files that are read together, in this order, each with its source. ``where`` begins the keys of its records."""

    where: str
    sources: tuple[tuple[str, RecordSpec], ...]
    shared: bool = False
    only: tuple[tuple[int, ...], ...] = ()
    """For tables: the rowids to read of each source. All, if there is none."""

    @property
    def paths(self) -> list[str]:
        return list(dict.fromkeys(path for path, _ in self.sources))

    @property
    def kinds(self) -> set[str]:
        """The kinds of its records; Markdown files have tasks too."""
        found = {spec.kind for _, spec in self.sources}
        return found | ({"task"} if any(spec.reader == "sections" for _, spec in self.sources) else set())

    @property
    def ordered(self) -> bool:
        """Whether the order of its records is part of what the file says."""
        return any(spec.reader in ("sections", "list", "lines") for _, spec in self.sources)

    def read(self, files: Files) -> Iterator[tuple[str, Item]]:
        """Yield each item with the path of its file. Raise ``Unreadable``, possibly after some items."""
        seen: set[tuple[str, str]] = set()
        for number, (path, spec) in enumerate(self.sources):
            if path not in files:
                continue
            for item in read_source(files[path], spec, self.only[number] if self.only else None):
                if self.shared and item.identity:
                    if (item.kind, item.identity) in seen:
                        continue
                    seen.add((item.kind, item.identity))
                yield path, item

    @property
    def lone(self) -> tuple[str, RecordSpec] | None:
        """Its file and source, if it has but one, whose records are in no other file."""
        return self.sources[0] if len(self.sources) == 1 and not self.shared else None

    def count(self, files: Files) -> Counter[str]:
        """Return how many records it has, by kind. Raise ``Unreadable``."""
        if self.lone is not None and self.lone[1].reader == "lines":
            path, spec = self.lone
            with files[path].open() as stream:
                return Counter({spec.kind: count_lines(stream)})
        return Counter(item.kind for _, item in self.read(files))

    def list_rowids(self, files: Files) -> list[tuple[int, int]]:
        """Return (source, rowid) of each of its records, if they all are rows of tables; else nothing. Raise
        ``Unreadable``."""
        if self.shared or any(spec.reader != "table" for _, spec in self.sources):
            return []
        found = []
        for number, (path, spec) in enumerate(self.sources):
            with open_tables(files[path].place) as tables:
                found += [(number, rowid) for rowid in tables.list_rowids(spec.table)]
        return found

    def read_named(self, files: Files) -> Iterator[tuple[str, Item]]:
        """Yield each item with its key. Raise ``Unreadable``, possibly after some items."""
        used: Counter[str] = Counter()
        for _, item in self.read(files):
            yield name_item(self.where, item, used), item

    def read_rest(self, files: Files) -> bytes:
        """Return what its files hold beside their records. Raise ``Unreadable``."""
        rest = []
        for path, spec in self.sources:
            if path not in files:
                continue
            if spec.reader == "sections":
                rest.append(read_ending(files[path].place))
            elif spec.reader == "list":
                rest.append(read_rest(files[path], spec))
        return b"\0".join(rest)


def list_read(units: Iterable[Unit]) -> set[str]:
    """Return the files that have to be read to count the records of some units. A file that is one record as a whole need
    not be."""
    return {path for unit in units if unit.lone is None or unit.lone[1].reader != "whole" for path in unit.paths}


def name_item(where: str, item: Item, used: Counter[str]) -> str:
    """Return the key of an item: where it is, its identity, and a number if that is not the first."""
    identity = item.identity or (f"~{item.digest.hex()[:16]}" if item.kind != "section" else "")
    return make_unique(f"{escape_path(where)}#{identity}", used)


def narrow_units(old: Unit, new: Unit, old_files: Files, new_files: Files) -> tuple[Unit, Unit] | None:
    """Return two versions of a database as if they had only those rows that differ; ``None`` if that cannot be told.
    Raise ``Unreadable``."""
    if old.shared or old.sources != new.sources or any(spec.reader != "table" for _, spec in new.sources):
        return None
    went, came = [], []
    for path, spec in new.sources:
        with open_tables(new_files[path].place) as tables:
            found = tables.find_differing(old_files[path].place, spec)
        if found is None:
            return None
        went.append(tuple(found[0]))
        came.append(tuple(found[1]))
    return replace(old, only=tuple(went)), replace(new, only=tuple(came))


def read_source(file: MemoryFile, spec: RecordSpec, only: tuple[int, ...] | None = None) -> Iterator[Item]:
    """Yield the items of one source of a file. Raise ``Unreadable``, possibly after some items."""
    if spec.reader == "table":
        return read_table(file, spec, only)
    if spec.reader == "list":
        return read_list(file, spec)
    if spec.reader == "lines":
        return read_lines(file, spec)
    return read_whole(file, spec) if spec.reader == "whole" else read_sections(file)


def plan_units(
    paths: Iterable[str], roots: Mapping[str, str], layouts: Mapping[str, Layout] | None = None
) -> dict[str, Unit]:
    """Return the units of these files, by name. ``roots`` maps each root to its layout."""
    known = load_built_in() if layouts is None else layouts
    found: dict[str, list[tuple[str, RecordSpec]]] = {}
    where: dict[str, tuple[str, bool]] = {}
    for path in paths:
        root, _, relative = path.partition("/")
        layout = known.get(roots.get(root, ""))
        for spec in choose_specs(relative, layout.records if layout else ()):
            name = f"{root}#" if spec.shared else path
            found.setdefault(name, []).append((path, spec))
            where[name] = (root if spec.shared else path, spec.shared)
    # Databases first: if a JSON file has the same record as a row, the row counts.
    return {
        name: Unit(where[name][0], tuple(sorted(sources, key=_rank)), where[name][1]) for name, sources in found.items()
    }


def _rank(source: tuple[str, RecordSpec]) -> tuple[bool, str]:
    return source[1].reader != "table", source[0]


def choose_specs(relative: str, specs: tuple[RecordSpec, ...]) -> list[RecordSpec]:
    """Return the sources of a file: all its tables, or the first other one that names it."""
    named = [spec for spec in specs if _compile(spec.files).match(relative)]
    tables = [spec for spec in named if spec.reader == "table"]
    if tables or named:
        return tables or named[:1]
    return [MARKDOWN] if relative.lower().endswith(".md") else []


@lru_cache(maxsize=512)
def _compile(patterns: tuple[str, ...]) -> Pattern[str]:
    return compile_patterns(patterns)
