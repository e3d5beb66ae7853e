"""Which memories a table of the config is for: ``[limits.memories."acme/*"]``, and the same in guards, privacy and
retention.

``*`` and ``?`` match within one part of an id, ``**`` matches any number of parts, ``{a,b}`` is either. The first
pattern that matches counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from sidecar.errors import BadConfig, BadMemoryId
from sidecar.format.patterns import compile_patterns, expand_braces
from sidecar.ids import check_memory_id
from sidecar.layouts import Layout

T = TypeVar("T")

_OTHER = "\ue000"
"""A letter that no pattern contains."""
_MANY = 9


def find_table(memory: str, tables: Mapping[str, T], otherwise: T) -> T:
    """Return the table of the first pattern that matches a memory's id."""
    return next((table for pattern, table in tables.items() if compile_patterns([pattern]).match(memory)), otherwise)


def check_reachable(patterns: Iterable[str], at: tuple[str, ...]) -> None:
    """Raise ``BadConfig`` unless each pattern matches some memory that none before it matches."""
    before: list[str] = []
    for pattern in patterns:
        ids = [*filter(_is_possible_id, _make_examples(pattern))]
        if all(map(compile_patterns(before).match, ids)):
            takers = [repr(earlier) for earlier in before if any(map(compile_patterns([earlier]).match, ids))]
            why = f"every memory it fits is taken by {' or '.join(takers)} before it" if ids else "it fits no memory"
            hint = "The first pattern that fits counts: write the narrower one first." if ids else ""
            raise BadConfig(f"[{'.'.join(at)}] {pattern!r} is never reached: {why}.", hint=hint, at=(*at, pattern))
        before.append(pattern)


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


def _is_possible_id(id: str) -> bool:
    """Return whether a memory may have this id."""
    try:
        check_memory_id(id)
    except BadMemoryId:
        return False
    return True


def _make_examples(pattern: str) -> Iterator[str]:
    """Yield ids that a pattern matches, with nothing, little and much for each wildcard."""
    for full in expand_braces(pattern):
        parts = (full + "**" if full.endswith("/") else full).removeprefix("/").split("/")
        for width in (0, 1, _MANY):
            for depth in (0, 1, 2, _MANY):
                id: list[str] = []
                for part in parts:
                    one = part.replace("*", _OTHER * width).replace("?", _OTHER)
                    id += [_OTHER] * depth if part == "**" else [one]
                if id and all(id):
                    yield "/".join(id)
