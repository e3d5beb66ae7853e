"""Which files of a snapshot hold records, and which are read together.

A unit is one file or, where a layout says that a record may be in several files of a root, all of those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from re import Pattern

from sidecar.format.patterns import compile_patterns
from sidecar.layouts import Layout, load_built_in
from sidecar.layouts.sources import RecordSpec
from sidecar.records.documents import read_lines, read_list, read_rest, read_whole
from sidecar.records.files import MemoryFile
from sidecar.records.record import Item, escape_path, make_unique
from sidecar.records.sections import read_ending, read_sections
from sidecar.records.tables import read_table

MARKDOWN = RecordSpec(files=("**/*.md",))

Files = Mapping[str, MemoryFile]


@dataclass(frozen=True, slots=True)
class Unit:
    """Files that are read together, in this order, each with its source. ``where`` begins the keys of its records."""

    where: str
    sources: tuple[tuple[str, RecordSpec], ...]
    shared: bool = False

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
        for path, spec in self.sources:
            if path not in files:
                continue
            for item in read_source(files[path], spec):
                if self.shared and item.identity:
                    if (item.kind, item.identity) in seen:
                        continue
                    seen.add((item.kind, item.identity))
                yield path, item

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
                rest.append(read_rest(files[path].place, spec))
        return b"\0".join(rest)


def name_item(where: str, item: Item, used: Counter[str]) -> str:
    """Return the key of an item: where it is, its identity, and a number if that is not the first."""
    identity = item.identity or (f"~{item.digest.hex()[:16]}" if item.kind != "section" else "")
    return make_unique(f"{escape_path(where)}#{identity}", used)


def read_source(file: MemoryFile, spec: RecordSpec) -> Iterator[Item]:
    """Yield the items of one source of a file. Raise ``Unreadable``, possibly after some items."""
    if spec.reader == "table":
        return read_table(file, spec)
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
        for spec in _choose_specs(relative, layout.records if layout else ()):
            name = f"{root}#" if spec.shared else path
            found.setdefault(name, []).append((path, spec))
            where[name] = (root if spec.shared else path, spec.shared)
    # Databases first: if a JSON file has the same record as a row, the row counts.
    return {
        name: Unit(where[name][0], tuple(sorted(sources, key=_rank)), where[name][1]) for name, sources in found.items()
    }


def _rank(source: tuple[str, RecordSpec]) -> tuple[bool, str]:
    return source[1].reader != "table", source[0]


def _choose_specs(relative: str, specs: tuple[RecordSpec, ...]) -> list[RecordSpec]:
    """Return the sources of a file: all its tables, or the first other one that names it."""
    named = [spec for spec in specs if _compile(spec.files).match(relative)]
    tables = [spec for spec in named if spec.reader == "table"]
    if tables or named:
        return tables or named[:1]
    return [MARKDOWN] if relative.lower().endswith(".md") else []


@lru_cache(maxsize=512)
def _compile(patterns: tuple[str, ...]) -> Pattern[str]:
    return compile_patterns(patterns)
