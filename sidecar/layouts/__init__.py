"""Layouts: which files of a sandbox are memory, as data.

The built-in ones are the TOML files beside this module; users add their own under ``[layouts.NAME]`` in the config.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from sidecar.errors import BadConfig, UnknownLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """One folder that memory lives in: the project folders the caller names, or a place of its own."""

    name: str
    project: bool = False
    below: str = ""
    env: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    holds: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Restore order, and the reverse of the order in which a size limit may drop things."""

    hot: tuple[str, ...] = ()
    warm: tuple[str, ...] = ()
    cold: tuple[str, ...] = ()
    rebuildable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Coupled:
    """Paths that only make sense together: all or none."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A daemon that has the memory open, and how to ask it to stop."""

    method: str
    path: str
    port_env: str
    settings: str
    settings_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What counts as memory for one kind of agent. Patterns are explained in ``sidecar/inside/rules.py``."""

    name: str
    roots: tuple[Root, ...]
    keep: tuple[str, ...]
    databases: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    careful: tuple[str, ...] = ()
    filters: dict[str, tuple[str, ...]] = field(default_factory=dict)
    schemas: dict[str, str] = field(default_factory=dict)
    tiers: Tiers = Tiers()
    coupled: tuple[Coupled, ...] = ()
    worker: Worker | None = None

    def for_sandbox(self) -> dict[str, Any]:
        """The part the in-sandbox program needs, as plain data."""
        data = asdict(self)
        if self.worker is None:
            del data["worker"]
        return _lists(data)  # type: ignore[no-any-return]


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(inner) for key, inner in value.items()}
    return [_lists(inner) for inner in value] if isinstance(value, list | tuple) else value


@cache
def built_in() -> dict[str, Layout]:
    """The layouts that come with the sidecar, by name."""
    files = (file for file in resources.files(__name__).iterdir() if file.name.endswith(".toml"))
    layouts = (msgspec.convert(tomllib.loads(file.read_text("utf-8")), Layout, strict=True) for file in files)
    return {layout.name: layout for layout in sorted(layouts, key=lambda layout: layout.name)}


def custom(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Layout]:
    """The layouts of a config file. Raise ``BadConfig`` naming the first that is wrong, and how."""
    layouts = {}
    if not isinstance(tables, Mapping):
        raise BadConfig("[layouts] must hold one table for each layout.")
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise BadConfig(f"[layouts] {name} must be a table.", hint=f"Write [layouts.{name}].")
        known = set(Layout.__dataclass_fields__)
        for key in table:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                raise BadConfig(
                    f"[layouts.{name}] has an unknown key {key!r}.", hint=f"Did you mean {near[0]!r}?" if near else ""
                )
        try:
            layouts[name] = _sound(msgspec.convert({**table, "name": name}, Layout, strict=True))
        except msgspec.ValidationError as problem:
            raise BadConfig(f"[layouts.{name}] is not a layout: {problem}.") from None
    return layouts


def _sound(layout: Layout) -> Layout:
    for root in layout.roots:
        if not root.name.replace("-", "").isalnum() or not root.name.isascii() or root.name != root.name.lower():
            raise BadConfig(f"[layouts.{layout.name}] root {root.name!r} must be lower-case letters, digits and '-'.")
        if root.project == bool(root.paths):
            raise BadConfig(f"[layouts.{layout.name}] root {root.name!r} needs either project = true or paths.")
    if not layout.roots or not layout.keep + layout.databases:
        raise BadConfig(f"[layouts.{layout.name}] needs at least one root and something to keep.")
    return layout


def choose(names: Iterable[str], known: Mapping[str, Layout]) -> list[Layout]:
    """The named layouts, or all of them for none or ``auto``. Raise ``UnknownLayout``."""
    wanted = list(dict.fromkeys(names))
    if not wanted or wanted == ["auto"]:
        return list(known.values())
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise UnknownLayout(
                f"There is no layout {name!r}.",
                hint=f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(known)}.",
            )
    return [known[name] for name in wanted]
