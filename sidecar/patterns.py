"""Which memories a table of the config is for: ``[limits.memories."acme/*"]``, and the same in guards, privacy and retention.

``*`` and ``?`` stay within one part of an id, ``**`` spans any number of parts, ``{a,b}`` is either. The first pattern that
fits counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from sidecar.errors import BadConfig
from sidecar.inside.rules import alternatives, compiled

T = TypeVar("T")

_OTHER = "\ue000"
"""A letter that no pattern names."""
_MANY = 9


def fitting(memory: str, tables: Mapping[str, T], otherwise: T) -> T:
    """The table of the first pattern that fits a memory's id."""
    return next((table for pattern, table in tables.items() if compiled([pattern]).match(memory)), otherwise)


def check_reached(patterns: Iterable[str], at: tuple[str, ...]) -> None:
    """Each pattern must fit some memory that none before it fits. Raise ``BadConfig``."""
    before: list[str] = []
    for pattern in patterns:
        ids = list(_examples(pattern))
        if all(map(compiled(before).match, ids)):
            takers = [repr(earlier) for earlier in before if any(map(compiled([earlier]).match, ids))]
            why = f"every memory it fits is taken by {' or '.join(takers)} before it" if ids else "it fits no memory"
            hint = "The first pattern that fits counts: write the narrower one first." if ids else ""
            raise BadConfig(f"[{'.'.join(at)}] {pattern!r} is never reached: {why}.", hint=hint, at=(*at, pattern))
        before.append(pattern)


def _examples(pattern: str) -> Iterator[str]:
    """Ids that a pattern fits, with nothing, little and much for what it leaves open."""
    for full in alternatives(pattern):
        parts = (full + "**" if full.endswith("/") else full).removeprefix("/").split("/")
        for width in (0, 1, _MANY):
            for depth in (0, 1, 2, _MANY):
                id: list[str] = []
                for part in parts:
                    one = part.replace("*", _OTHER * width).replace("?", _OTHER)
                    id += [_OTHER] * depth if part == "**" else [one]
                if id and all(id):
                    yield "/".join(id)
