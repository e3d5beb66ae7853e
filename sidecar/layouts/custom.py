"""The layouts of a config file: new ones, and options of those that come with the sidecar."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import msgspec

from sidecar.errors import BadConfig
from sidecar.layouts import Layout, built_in


def custom(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Layout]:
    """The layouts under ``[layouts]``. Raise ``BadConfig`` naming the first that is wrong, and how."""
    if not isinstance(tables, Mapping):
        raise BadConfig("[layouts] must hold one table for each layout.")
    layouts = {}
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise BadConfig(f"[layouts] {name} must be a table.", hint=f"Write [layouts.{name}].")
        layouts[name] = _extended(name, table["options"]) if set(table) == {"options"} else _new(name, table)
    _check_roots({**built_in(), **layouts})
    return layouts


def _extended(name: str, options: Any) -> Layout:
    layout = built_in().get(name)
    if layout is None:
        raise _unknown(f"[layouts.{name}] switches on options, but no layout", name, built_in())
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        raise BadConfig(f"[layouts.{name}] options must be a list of names.")
    for option in options:
        if option not in layout.options:
            raise _unknown(f"[layouts.{name}] has no option", option, layout.options)
    return layout.with_options(dict.fromkeys(options))


def _new(name: str, table: Mapping[str, Any]) -> Layout:
    known = {entry.name for entry in fields(Layout)} - {"name", "chosen"}
    for key in table:
        if key not in known:
            raise _unknown(f"[layouts.{name}] has an unknown key", key, known)
    try:
        layout = msgspec.convert({**table, "name": name}, Layout, strict=True)
    except msgspec.ValidationError as problem:
        raise BadConfig(f"[layouts.{name}] is not a layout: {problem}.") from None
    _check_keys(f"layouts.{name}", table, asdict(layout))
    return _sound(layout)


def _check_keys(where: str, written: Any, read: Any) -> None:
    """Raise ``BadConfig`` for a key that was written, at any depth, and that nothing reads."""
    if isinstance(written, Mapping):
        for key, value in written.items():
            if key not in read:
                raise _unknown(f"[{where}] has an unknown key", key, read)
            _check_keys(f"{where}.{key}", value, read[key])
    elif isinstance(written, list):
        for value, each in zip(written, read, strict=True):
            _check_keys(where, value, each)


def _unknown(what: str, name: str, known: Any) -> BadConfig:
    near = difflib.get_close_matches(name, known, 1)
    return BadConfig(f"{what} {name!r}.", hint=f"Did you mean {near[0]!r}?" if near else "")


def _sound(layout: Layout) -> Layout:
    for root in layout.roots:
        plain = root.name.replace("-", "")
        if not plain.isalnum() or not plain.isascii() or root.name != root.name.lower() or root.name.startswith("-"):
            raise BadConfig(f"[layouts.{layout.name}] root {root.name!r} must be lower-case letters, digits and '-'.")
        if root.name.rpartition("-")[2].isdigit():
            raise BadConfig(f"[layouts.{layout.name}] root {root.name!r} must not end in a number.")
        if root.project == bool(root.paths):
            raise BadConfig(f"[layouts.{layout.name}] root {root.name!r} needs either project = true or paths.")
        if ".." in root.below.split("/") or root.below.startswith("/"):
            raise BadConfig(f"[layouts.{layout.name}] root {root.name!r}: below must stay below.")
    if not layout.roots or not layout.keep + layout.databases:
        raise BadConfig(f"[layouts.{layout.name}] needs at least one root and something to keep.")
    tied = {pattern: pattern.removeprefix("/") for pattern in (*layout.never, *layout.secrets, *layout.careful)}
    for pattern in (*layout.keep, *layout.databases, *tied):
        relative = tied.get(pattern, pattern)
        if not relative or relative.startswith("/") or ".." in relative.split("/"):
            raise BadConfig(f"[layouts.{layout.name}] {pattern!r} is not a pattern relative to the root.")
    return layout


def _check_roots(layouts: Mapping[str, Layout]) -> None:
    """Paths in a store begin with a root's name, so no two layouts may have one of the same."""
    owners: dict[str, str] = {}
    for layout in layouts.values():
        for root in layout.roots:
            if owners.setdefault(root.name, layout.name) != layout.name:
                raise BadConfig(
                    f"[layouts.{layout.name}] has a root {root.name!r}, as {owners[root.name]} has.",
                    hint="Give it another name: paths in a store begin with it.",
                )
