"""Layouts: which files of a sandbox are memory, as data.

The built-in layouts are the TOML files beside this module; users add their own, or switch on options of these, under
``[layouts.NAME]`` in the config. ``docs/layouts.md`` says how to write one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, fields, is_dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from sidecar.errors import UnknownLayout
from sidecar.format.patterns import Rules
from sidecar.format.roots import split_number
from sidecar.host.text import suggest
from sidecar.host.values import dataclass
from sidecar.layouts.briefs import BriefStep
from sidecar.layouts.sources import RecordSpec

AUTO = "auto"
"""In place of names: whatever layouts are found."""

ALWAYS_TOLD = frozenset({"name", "roots", "paths", "keep", "databases", "never", "secrets"})
"""Fields that are sent to a sandbox even if they are empty."""
NEVER_TOLD = frozenset({"options", "chosen", "rotating", "records", "brief"})
"""Fields that the program there does not need."""

Patterns = tuple[str, ...]
"""Their syntax is explained in ``sidecar/format/patterns.py``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RootSpec:
    """One folder that contains memory: below the project folders that the caller names, or in a place of its own."""

    name: str
    project: bool = False
    below: str = ""
    """The folder below the project or place that is the root."""
    env: tuple[str, ...] = ()
    """Variables that move it: ``NAME``, or ``NAME/folder`` if it is in a folder below what the variable says."""
    paths: tuple[str, ...] = ()
    """Where it usually is: ``~/…`` in the home, ``./…`` in a project folder."""
    holds: str = ""
    """Of several places, the first that contains this is taken; in a project without it there is no such root."""
    keep: Patterns = ()
    """What is memory in this root, if it differs from the layout's ``keep`` and ``databases``."""
    owned: bool = False
    """The folder belongs to the memory system alone: everything in it is memory, except ``never`` and ``secrets``."""
    markers: tuple[str, ...] = ()
    """For a project root: a folder that contains any of these is a project, even if it was not named. A path; one that
    ends in a slash is a folder."""
    marked: bool = False
    """For a project root: it exists only if one of its own markers does, even if the project was named."""
    settings: tuple[str, ...] = ()
    """JSON files and the key in them that says where it is, as ``~/FILE:key.key``; ``*`` stands for any key."""
    file: str = ""
    """Variables and settings name a single file, which alone is memory, and has this name in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPatterns:
    """The order of a restore, and in reverse the order in which a size limit drops files."""

    hot: Patterns = ()
    warm: Patterns = ()
    cold: Patterns = ()
    rebuildable: Patterns = ()
    dated: Patterns = ()
    """Daily files, with the day as ``{date}``: today's and yesterday's are warm, older ones cold."""
    active: Patterns = ()
    """Sessions: the one written to last is hot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoupledPaths:
    """Paths that only make sense together: all or none. The same ``{word}`` in several stands for the same text."""

    paths: Patterns


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """A JSON file that names a folder, under the first of ``keys`` it has: both are hot, and are kept or dropped together."""

    file: str
    keys: tuple[str, ...]
    folder: str
    """With ``{}`` for the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Something a layout leaves out unless it is asked for. Secrets stay left out."""

    about: str
    keep: Patterns
    allow: Patterns = ()
    """Entries of ``never`` that no longer apply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedFolder:
    """A folder whose subfolders are named after project paths, and so must be renamed if those differ."""

    folder: str
    longest: int
    transcripts: str
    """Files in such a folder, JSON lines, that name the project's path under ``path_key``."""
    path_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A daemon that has the memory open: how to ask it to stop, and whether it still has something to write."""

    method: str
    path: str
    port_env: str
    settings: str
    settings_key: str
    busy_path: str = ""
    busy_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """Where a memory's program says which version it is; the highest counts. An older program is not trusted with the
    databases of a newer one."""

    files: Patterns
    paths: tuple[str, ...]
    env: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CoveredRules:
    """The rules by which a snapshot was made, for one root: what was memory, and what was left out. Without patterns
    the rules were known and there were none."""

    keep: Patterns = ()
    left: Patterns = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What counts as memory for one kind of agent."""

    name: str
    roots: tuple[RootSpec, ...]
    keep: Patterns
    """What is memory, in every root that does not say otherwise."""
    databases: Patterns = ()
    """SQLite databases: memory too, copied through SQLite and compared page by page."""
    required: Patterns = ()
    """What the head may not lose: an export without one of these that it has stays beside it."""
    never: Patterns = ()
    """What is no memory, whatever else says so."""
    secrets: Patterns = ()
    """What is left out as it holds credentials, and is named in the receipt."""
    careful: Patterns = ()
    """What is kept, with a warning that credentials may be in it."""
    yields: Patterns = ()
    """Of what is kept: exported only from projects that have a marker, and never replaces a file that is there."""
    rotating: Patterns = ()
    """What its owner removes by itself after a while: a guard does not take that for a loss. ``{date}`` is a day."""
    filters: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """JSON files that travel without the keys that these patterns match, by file."""
    emptied: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Tables with secrets, by database: a copy is exported without their rows."""
    schemas: dict[str, str] = field(default_factory=dict)
    """A query for the number of a database's schema, by database."""
    tiers: TierPatterns = TierPatterns()
    coupled: tuple[CoupledPaths, ...] = ()
    pointers: tuple[Pointer, ...] = ()
    options: dict[str, Option] = field(default_factory=dict)
    keyed: KeyedFolder | None = None
    worker: Worker | None = None
    version: Version | None = None
    records: tuple[RecordSpec, ...] = ()
    """What its files say, and how that is read. Markdown files that no source names are read as sections."""
    brief: tuple[BriefStep, ...] = ()
    """What of it an agent reads first, in order. Without steps: what is hot or warm."""
    chosen: tuple[str, ...] = ()
    """The options that are switched on."""

    def with_options(self, names: Iterable[str]) -> Layout:
        """Return this layout with some of its options switched on. Raise ``KeyError`` if it does not have one."""
        layout = self
        for name in names:
            option = self.options[name]
            layout = replace(
                layout,
                keep=(*layout.keep, *option.keep),
                never=tuple(pattern for pattern in layout.never if pattern not in option.allow),
                chosen=(*layout.chosen, name),
            )
        return layout

    def for_sandbox(self) -> dict[str, Any]:
        """Return the part that the in-sandbox program needs, as plain data."""
        told = {
            each.name: _convert(value)
            for each in fields(self)
            if each.name not in NEVER_TOLD and ((value := getattr(self, each.name)) or each.name in ALWAYS_TOLD)
        }
        told["tiers"] = {tier: patterns for tier, patterns in told["tiers"].items() if patterns}
        if tables := [spec.describe_table() for spec in self.records if spec.reader == "table" and not spec.shared]:
            told["tables"] = tables
        told["roots"] = [
            {key: value for key, value in root.items() if value or key in ALWAYS_TOLD} for root in told["roots"]
        ]
        return told

    def covered(self, root: RootSpec) -> CoveredRules:
        """Return the rules for one of its roots, as a snapshot records them."""
        rules = Rules(self.for_sandbox(), _convert(root))
        return CoveredRules(keep=tuple(rules.patterns), left=(*self.never, *self.secrets))


def _convert(value: Any) -> Any:
    """Return a value as JSON has it: dataclasses as tables and tuples as lists, at any depth."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return {key: _convert(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_convert(inner) for inner in value]
    return {each.name: _convert(getattr(value, each.name)) for each in fields(value)} if is_dataclass(value) else value


class BuiltInLayouts(Mapping[str, Layout]):
    """The layouts that come with the sidecar, by name. They are read when one is asked for: many commands need none."""

    @cached_property
    def _read(self) -> dict[str, Layout]:
        import tomllib

        import msgspec

        files = Path(__file__).parent.glob("*.toml")
        layouts = (msgspec.convert(tomllib.loads(file.read_text("utf-8")), Layout, strict=True) for file in files)
        return {layout.name: layout for layout in sorted(layouts, key=lambda layout: layout.name)}

    def __getitem__(self, name: str) -> Layout:
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


@cache
def load_built_in() -> BuiltInLayouts:
    """Return the layouts that come with the sidecar, by name."""
    return BuiltInLayouts()


def choose_layouts(names: Iterable[str], known: Mapping[str, Layout]) -> list[Layout]:
    """Return the named layouts; all of them if no name, or ``auto``, is given. Raise ``UnknownLayout``."""
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        if name not in known and name != AUTO:
            raise UnknownLayout(f"There is no layout {name!r}.", hint=suggest(name, known, listed=True))
    return [known[name] for name in wanted] if wanted and AUTO not in wanted else list(known.values())


def find_spec(root: str, layout: Layout | None) -> tuple[RootSpec | None, int]:
    """Return which of its layout's roots this is, and the number of its project. ``None`` if the layout has no such
    root."""
    base, number = split_number(root)
    for spec in layout.roots if layout else ():
        if spec.name == root:
            return spec, 1
        if number and spec.name == base:
            return spec, number
    return None, 1
