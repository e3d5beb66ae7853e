"""Layouts: which files of a sandbox are memory, as data.

The built-in ones are the TOML files beside this module; users add their own, or switch on options of these, under
``[layouts.NAME]`` in the config. ``docs/layouts.md`` tells how one is written.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from sidecar.errors import UnknownLayout
from sidecar.format.patterns import Rules

AUTO = "auto"
"""In place of names: whatever is there."""

ALWAYS_TOLD = frozenset({"name", "roots", "paths", "keep", "databases", "never", "secrets"})
"""What a sandbox is told of a layout also where it is empty."""

Patterns = tuple[str, ...]
"""Explained in ``sidecar/format/patterns.py``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RootSpec:
    """One folder that memory lives in: below the project folders the caller names, or in a place of its own."""

    name: str
    project: bool = False
    below: str = ""
    """The folder below the project or place that is the root."""
    env: tuple[str, ...] = ()
    """Variables that move it: ``NAME``, or ``NAME/folder`` when it lies in a folder below what the variable says."""
    paths: tuple[str, ...] = ()
    """Where it usually is: ``~/…`` in the home, ``./…`` in a project folder."""
    holds: str = ""
    """Of several places, the first that holds this; of a project, without it there is no such root."""
    keep: Patterns = ()
    """What is memory in this root, where that is not what the layout's ``keep`` and ``databases`` say."""
    owned: bool = False
    """The folder belongs to the memory system alone: whatever is in it is memory, but for ``never`` and ``secrets``."""
    markers: tuple[str, ...] = ()
    """Of a project root: a folder that holds any of these is a project, also when nobody named it. A path; with a slash at
    its end it is a folder."""
    marked: bool = False
    """Of a project root: it is there only where one of its own markers is, whoever named the project."""
    settings: tuple[str, ...] = ()
    """JSON files and the key in them that says where it is, as ``~/FILE:key.key``; ``*`` stands for any key."""
    file: str = ""
    """Variables and settings name a file, which alone is memory, and is called this in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPatterns:
    """Restore order, and the reverse of the order in which a size limit may drop things."""

    hot: Patterns = ()
    warm: Patterns = ()
    cold: Patterns = ()
    rebuildable: Patterns = ()
    dated: Patterns = ()
    """Daily files, with the day as ``{date}``: of today and yesterday warm, older ones cold."""
    active: Patterns = ()
    """Sessions: the one written to last is hot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoupledPaths:
    """Paths that only make sense together: all or none. The same ``{word}`` in several stands for the same text."""

    paths: Patterns


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """A JSON file that names a folder, under the first of ``keys`` it has: both are hot, and stay or go together."""

    file: str
    keys: tuple[str, ...]
    folder: str
    """With ``{}`` for the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Something a layout leaves out unless it is asked for. What is secret stays so."""

    about: str
    keep: Patterns
    allow: Patterns = ()
    """Entries of ``never`` that no longer hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedFolder:
    """A folder whose folders are named after the paths of projects, and so must be renamed when those differ."""

    folder: str
    longest: int
    transcripts: str
    """Files in such a folder, JSON lines, that say under ``path_key`` which project it is."""
    path_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A daemon that has the memory open, how to ask it to stop, and whether it still has something to write."""

    method: str
    path: str
    port_env: str
    settings: str
    settings_key: str
    busy_path: str = ""
    busy_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """Where the program whose memory it is says which version it is; the highest counts. An older one is not trusted
    with a newer one's databases."""

    files: Patterns
    paths: tuple[str, ...]
    env: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CoveredRules:
    """The rules by which a snapshot was made, for one root: what was memory, and what was left out of it. No patterns: it was
    known then, and there was none."""

    keep: Patterns = ()
    left: Patterns = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What counts as memory for one kind of agent."""

    name: str
    roots: tuple[RootSpec, ...]
    keep: Patterns
    databases: Patterns = ()
    required: Patterns = ()
    never: Patterns = ()
    secrets: Patterns = ()
    careful: Patterns = ()
    yields: Patterns = ()
    """Of what is kept: it travels only out of projects that have a marker, and never replaces what is there."""
    rotating: Patterns = ()
    """What its owner removes by itself after a while: when it is gone, no guard takes that for a loss. ``{date}`` is a day."""
    filters: dict[str, tuple[str, ...]] = field(default_factory=dict)
    emptied: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Tables with secrets, by database: a copy leaves without their rows."""
    schemas: dict[str, str] = field(default_factory=dict)
    tiers: TierPatterns = TierPatterns()
    coupled: tuple[CoupledPaths, ...] = ()
    pointers: tuple[Pointer, ...] = ()
    options: dict[str, Option] = field(default_factory=dict)
    keyed: KeyedFolder | None = None
    worker: Worker | None = None
    version: Version | None = None
    chosen: tuple[str, ...] = ()
    """The options that are switched on."""

    def with_options(self, names: Iterable[str]) -> Layout:
        """This layout with some of its options switched on. Raise ``KeyError`` for one it does not have."""
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
        """The part the in-sandbox program needs, as plain data."""
        data = asdict(self)
        for unused in ("options", "chosen", "rotating"):
            del data[unused]
        told = {key: value for key, value in data.items() if value or key in ALWAYS_TOLD}
        told["tiers"] = {tier: patterns for tier, patterns in data["tiers"].items() if patterns}
        told["roots"] = [
            {key: value for key, value in root.items() if value or key in ALWAYS_TOLD} for root in data["roots"]
        ]
        return _convert_lists(told)  # type: ignore[no-any-return]

    def covered(self, root: RootSpec) -> CoveredRules:
        """What the rules for one of its roots are, as a snapshot keeps them."""
        rules = Rules(self.for_sandbox(), _convert_lists(asdict(root)))
        return CoveredRules(keep=tuple(rules.patterns), left=(*self.never, *self.secrets))


def _convert_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _convert_lists(inner) for key, inner in value.items()}
    return [_convert_lists(inner) for inner in value] if isinstance(value, list | tuple) else value


@cache
def load_built_in() -> dict[str, Layout]:
    """The layouts that come with the sidecar, by name."""
    files = (file for file in resources.files(__name__).iterdir() if file.name.endswith(".toml"))
    layouts = (msgspec.convert(tomllib.loads(file.read_text("utf-8")), Layout, strict=True) for file in files)
    return {layout.name: layout for layout in sorted(layouts, key=lambda layout: layout.name)}


def list_other_roots(asked: Iterable[Layout], known: Mapping[str, Layout]) -> list[dict[str, Any]]:
    """The roots of the layouts that were not asked for, as the in-sandbox program needs them: to stay out of these."""
    names = {layout.name for layout in asked}
    others = [layout.for_sandbox()["roots"] for layout in known.values() if layout.name not in names]
    told = ("env", "paths", "project", "file")
    return [{key: root[key] for key in told if key in root} for roots in others for root in roots]


def choose_layouts(names: Iterable[str], known: Mapping[str, Layout]) -> list[Layout]:
    """The named layouts, or all of them for none or ``auto``, whatever is beside it. Raise ``UnknownLayout``."""
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        if name not in known and name != AUTO:
            near = difflib.get_close_matches(name, known, 1)
            raise UnknownLayout(
                f"There is no layout {name!r}.",
                hint=f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(known)}.",
            )
    return [known[name] for name in wanted] if wanted and AUTO not in wanted else list(known.values())
