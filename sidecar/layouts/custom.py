"""The layouts of a config file: new ones, and additions to the built-in ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

from sidecar.errors import BadConfig
from sidecar.format.patterns import Rules, expand_braces
from sidecar.host.sections import format_setting
from sidecar.host.text import suggest
from sidecar.layouts import AUTO, Layout, load_built_in
from sidecar.layouts.briefs import find_brief_faults
from sidecar.layouts.sources import find_source_faults

At = tuple[str | int, ...]

_WORD = re.compile(r"\{(\w+)\}")


def read_custom_layouts(tables: Any) -> dict[str, Layout]:
    """Return the layouts under ``[layouts]``. Raise ``BadConfig`` naming the first problem and where it is."""
    if not isinstance(tables, Mapping):
        raise BadConfig("[layouts] must hold one table for each layout.", at=("layouts",))
    layouts = {}
    for name, table in tables.items():
        if name == AUTO:
            raise BadConfig("[layouts.auto]: auto stands for whatever is there.", at=("layouts", name))
        if not isinstance(table, Mapping):
            raise BadConfig(f"[layouts] {name} must be a table.", hint=f"Write [layouts.{name}].", at=("layouts", name))
        extends = "roots" not in table and (name in load_built_in() or set(table) == {"options"})
        layouts[name] = _extend_layout(name, table) if extends else _read_new_layout(name, table)
    _check_roots({**load_built_in(), **layouts})
    return layouts


def check_required(layout: Layout, required: Iterable[str], at: At) -> None:
    """Raise ``BadConfig`` for a required path that no snapshot of the layout can ever contain."""
    told = layout.for_sandbox()
    all_rules = [Rules(told, root) for root in told["roots"]] or [Rules(told)]

    def is_kept(way: str) -> bool:
        return any(rules.allows(way.rstrip("/"), way.endswith("/")) for rules in all_rules)

    for pattern in required:
        ways = [way for way in expand_braces(pattern) if _is_relative(way)]
        if not any("*" in way or "?" in way or is_kept(way) for way in ways):
            hint = "Write it as the layout's patterns are, from the root on: see `memory-sidecar layouts " + layout.name
            raise BadConfig(
                f"{format_setting(at)}: {pattern!r} is no path that this layout keeps.", hint=hint + "`.", at=at
            )


def _extend_layout(name: str, table: Mapping[str, Any]) -> Layout:
    """Return a built-in layout with some options switched on and with what the table adds: more entries to lists, more
    keys to tables. Raise ``BadConfig``."""
    options, layout = table.get("options", []), load_built_in().get(name)
    at: At = ("layouts", name, "options")
    if layout is None:
        raise _make_unknown_error(
            f"[layouts.{name}] switches on options, but no layout", name, load_built_in(), ("layouts", name)
        )
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        raise BadConfig(f"[layouts.{name}] options must be a list of names.", at=at)
    for option in options:
        if option not in layout.options:
            raise _make_unknown_error(f"[layouts.{name}] has no option", option, layout.options, at)
    written = {key: value for key, value in table.items() if key != "options"}
    if written:
        import msgspec  # late: as below

        # Parsed alone first, so that a problem is reported in what was written, not in the merged layout.
        _parse_layout(name, {"roots": [], "keep": [], **written}, written)
        merged = _merge_value(msgspec.to_builtins(layout), written)
        if "brief" in written:  # an order is said as a whole
            merged["brief"] = written["brief"]
        layout = _check_layout(msgspec.convert(merged, Layout, strict=True))
    return layout.with_options(dict.fromkeys(options))


def _merge_value(value: Any, more: Any) -> Any:
    """Return a list with more entries or a table with more keys; anything else is replaced."""
    if isinstance(value, list | tuple) and isinstance(more, list):
        return [*value, *(entry for entry in more if entry not in value)]
    if isinstance(value, Mapping) and isinstance(more, Mapping):
        return {**value, **{key: _merge_value(value.get(key), entry) for key, entry in more.items()}}
    return more


def _read_new_layout(name: str, table: Mapping[str, Any]) -> Layout:
    """Return a layout that the config defines. Raise ``BadConfig``."""
    return _check_layout(_parse_layout(name, table, table))


def _parse_layout(name: str, table: Mapping[str, Any], written: Mapping[str, Any]) -> Layout:
    """Convert a table to a layout. Raise ``BadConfig`` if what was ``written`` is not valid."""
    import msgspec  # late: most configs have no layouts

    at = ("layouts", name)
    known = {entry.name for entry in fields(Layout)} - {"name", "chosen"}
    for key in written:
        if key not in known:
            raise _make_unknown_error(f"[layouts.{name}] has an unknown key", key, known, (*at, key))
    try:
        layout = msgspec.convert({**table, "name": name}, Layout, strict=True)
    except msgspec.ValidationError as problem:
        inner = re.search(r"`\$\.?([^`]*)`\Z", str(problem))
        parts = re.findall(r"[^.\[\]]+", inner[1]) if inner else []
        where = [int(part) if part.isdigit() else part for part in parts]
        raise BadConfig(f"[layouts.{name}] is not a layout: {problem}.", at=(*at, *where)) from None
    _check_keys(f"layouts.{name}", written, asdict(layout), at)
    return layout


def _check_keys(where: str, written: Any, read: Any, at: At) -> None:
    """Raise ``BadConfig`` for a key that was written, at any depth, and that has no effect."""
    if isinstance(written, Mapping):
        for key, value in written.items():
            if key not in read:
                raise _make_unknown_error(f"[{where}] has an unknown key", key, read, (*at, key))
            _check_keys(f"{where}.{key}", value, read[key], (*at, key))
    elif isinstance(written, list):
        for number, (value, each) in enumerate(zip(written, read, strict=True)):
            _check_keys(where, value, each, (*at, number))


def _make_unknown_error(what: str, name: str, known: Any, at: At) -> BadConfig:
    return BadConfig(f"{what} {name!r}.", hint=suggest(name, known), at=at)


def _check_layout(layout: Layout) -> Layout:
    """Return the layout. Raise ``BadConfig`` for its first fault."""
    for at, wrong in _find_faults(layout):
        raise BadConfig(f"[layouts.{layout.name}] {wrong}", at=("layouts", layout.name, *at))
    check_required(layout, layout.required, ("layouts", layout.name, "required"))
    return layout


def _find_faults(layout: Layout) -> Iterator[tuple[At, str]]:
    """Yield what is wrong with a layout, each with its position in the table."""
    for number, root in enumerate(layout.roots):
        place, plain = ("roots", number), root.name.replace("-", "")
        if not plain.isalnum() or not plain.isascii() or root.name != root.name.lower() or root.name.startswith("-"):
            yield (*place, "name"), f"root {root.name!r} must be lower-case letters, digits and '-'."
        if root.name.rpartition("-")[2].isdigit():
            yield (*place, "name"), f"root {root.name!r} must not end in a number."
        if root.project == bool(root.paths or root.settings):
            yield place, f"root {root.name!r} needs either project = true or paths."
        if (root.markers or root.marked) and not root.project:
            yield (*place, "markers"), f"root {root.name!r}: only a project has markers."
        for setting in root.settings:
            if not re.match(r"[^/:]+/[^:]+:[^:]+\Z", setting):
                yield (*place, "settings"), f"{setting!r} is not written as ~/FILE:key."
        for key, names in (("keep", root.keep), ("markers", root.markers)):
            for pattern in names:
                if not _is_relative(pattern):
                    yield (*place, key), f"{pattern!r} is not a pattern relative to the root."
        if ".." in root.below.split("/") or root.below.startswith("/"):
            yield (*place, "below"), f"root {root.name!r}: below must stay below."
    if not layout.roots or not layout.keep + layout.databases:
        yield (), "needs at least one root and something to keep."
    tied = ("never", "secrets", "careful")  # a leading slash anchors these at the root
    for key in ("keep", "databases", "rotating", "yields", *tied):
        for pattern in getattr(layout, key):
            if not _is_relative(pattern.removeprefix("/") if key in tied else pattern):
                yield (key,), f"{pattern!r} is not a pattern relative to the root."
    yield from find_source_faults(layout.records)
    yield from find_brief_faults(layout.brief)
    for pattern in layout.rotating:
        if others := [word for word in _WORD.findall(pattern) if word != "date"]:
            yield ("rotating",), f"{pattern!r}: '{{{others[0]}}}' stands for nothing; only '{{date}}' does."
    bound: list[tuple[At, str]] = [(("tiers", "dated"), pattern) for pattern in layout.tiers.dated]
    bound += [(("coupled", n, "paths"), path) for n, coupled in enumerate(layout.coupled) for path in coupled.paths]
    for at, pattern in bound:
        for word in _WORD.findall(pattern):
            if not word.isidentifier():
                yield at, f"{pattern!r}: '{{{word}}}' must be a word that does not begin with a digit."


def _is_relative(pattern: str) -> bool:
    """Return whether a pattern stays inside the root."""
    return bool(pattern) and not pattern.startswith("/") and ".." not in pattern.split("/")


def _check_roots(layouts: Mapping[str, Layout]) -> None:
    """Raise ``BadConfig`` if two roots have the same name: paths in a store begin with it."""
    owners: dict[str, str] = {}
    for layout in layouts.values():
        for number, root in enumerate(layout.roots):
            if root.name in owners:
                other = owners[root.name]
                also = f", as {other} has" if other != layout.name else " twice"
                raise BadConfig(
                    f"[layouts.{layout.name}] has a root {root.name!r}{also}.",
                    hint="Give it another name: paths in a store begin with it.",
                    at=("layouts", layout.name, "roots", number, "name"),
                )
            owners[root.name] = layout.name


def check_layout_patterns(layouts: Iterable[Layout]) -> None:
    """Raise ``BadConfig`` if a layout has a pattern that no path below its root can match."""
    for layout in layouts:
        for key in ("keep", "databases", "never", "secrets"):
            for pattern in getattr(layout, key):
                parts = pattern.removeprefix("/").removesuffix("/").split("/")
                if parts[0] == "~" or not {"", "."}.isdisjoint(parts):
                    raise BadConfig(
                        f"[layouts.{layout.name}] {key}: {pattern!r} can match no path.",
                        hint="Write it from the root on, such as notes/**: without ~, ./ or //.",
                        at=("layouts", layout.name, key),
                    )
