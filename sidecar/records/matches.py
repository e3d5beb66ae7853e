"""Match the records of two versions of a file: which stayed, which changed, which came and which went.

A record is matched by its identity, and where several have the same one, by its contents first and then by order. A
record whose contents are elsewhere in the file under another identity is the same one too: a section below a heading
that was renamed, a row that got an id of its own. So nothing that was left alone counts as changed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from typing import NamedTuple

from sidecar.host.values import dataclass
from sidecar.records.files import Unreadable
from sidecar.records.record import DIGEST_BYTES, Item, digest_contents

MOST_COMPARED = 250_000
"""A file with more records is compared as a file."""
LONGEST_NAME = 200


class Row(NamedTuple):
    """What is kept of an item to compare it: a few dozen bytes, whatever its text."""

    kind: str
    name: str | bytes
    """Its identity, or a digest of it."""
    digest: bytes
    gap: bytes
    """The line breaks before it, or a digest of them."""


@dataclass(slots=True)
class Match:
    """Positions in the old and the new version."""

    pairs: list[tuple[int, int]] = field(default_factory=list)
    """All that are in both, in the order of the new one."""
    changed: list[tuple[int, int]] = field(default_factory=list)
    added: list[int] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    moved: list[tuple[int, int]] = field(default_factory=list)
    """Those that stand elsewhere among the others now."""
    respaced: list[tuple[int, int]] = field(default_factory=list)
    """Not changed, but with other line breaks before them, as another record is before them now."""


def sketch_rows(items: Iterable[tuple[str, Item]]) -> list[Row]:
    """Return what is kept of items to compare them. Raise ``Unreadable`` if there are too many."""
    rows: list[Row] = []
    for _, item in items:
        if len(rows) >= MOST_COMPARED:
            raise Unreadable(f"it holds more than {MOST_COMPARED:,} records")
        rows.append(sketch_row(item))
    return rows


def sketch_row(item: Item) -> Row:
    """Return what is kept of an item to compare it."""
    # A section without headings above it (how a file begins) has no name, and is the same one when its text changes.
    name: str | bytes = item.identity if item.identity or item.kind == "section" else item.digest
    if len(name) > LONGEST_NAME:
        name = digest_contents(item.identity.encode("utf-8", "surrogatepass"))
    gap = item.gap if len(item.gap) <= DIGEST_BYTES else digest_contents(item.gap)
    return Row(item.kind, name, item.digest, gap)


def match_rows(old: Sequence[Row], new: Sequence[Row], *, ordered: bool = False) -> Match:
    """Match two versions of a unit. With ``ordered``, also find what was moved and what has other line breaks."""
    mates: dict[int, int] = {}  # new -> old
    free: set[int] = set(range(len(old)))
    _pair(old, new, mates, free, lambda row: row[:3])
    _pair(old, new, mates, free, lambda row: (row.kind, row.digest))
    _pair(old, new, mates, free, lambda row: row[:2])
    match = Match(pairs=[(mates[j], j) for j in range(len(new)) if j in mates])
    match.added = [j for j in range(len(new)) if j not in mates]
    match.removed = sorted(free)
    match.changed = [(i, j) for i, j in match.pairs if old[i].digest != new[j].digest]
    if ordered:
        _compare_order(old, new, match)
    return match


def _pair(
    old: Sequence[Row], new: Sequence[Row], mates: dict[int, int], free: set[int], by: Callable[[Row], object]
) -> None:
    """Match what is equal by ``by`` and not matched yet, in order."""
    if not free or len(mates) == len(new):
        return
    # The first of those that are equal, and for each the one after it: most are alone, and there may be very many.
    waiting: dict[object, int] = {}
    after: dict[int, int] = {}
    for i in sorted(free, reverse=True):
        key = by(old[i])
        if key in waiting:
            after[i] = waiting[key]
        waiting[key] = i
    for j, row in enumerate(new):
        if j in mates:
            continue
        key = by(row)
        if (i := waiting.get(key, -1)) >= 0:
            mates[j] = i
            free.discard(i)
            waiting[key] = after.get(i, -1)


def _compare_order(old: Sequence[Row], new: Sequence[Row], match: Match) -> None:
    steady = _find_steady([i for i, _ in match.pairs])
    match.moved = [pair for number, pair in enumerate(match.pairs) if number not in steady]
    mates = {j: i for i, j in match.pairs}
    changed = set(match.changed)
    for i, j in match.pairs:
        if old[i].gap == new[j].gap or (i, j) in changed:
            continue
        if (i and j and mates.get(j - 1) == i - 1) or (i == j == 0):
            changed.add((i, j))  # the same record is before it: somebody changed the line breaks
        else:
            match.respaced.append((i, j))
    match.changed = [pair for pair in match.pairs if pair in changed]


def _find_steady(positions: Sequence[int]) -> set[int]:
    """Return which of these form a longest rising sequence: the others are those that were moved."""
    tails: list[int] = []
    ends: list[int] = []
    before = [-1] * len(positions)
    for number, position in enumerate(positions):
        place = bisect_left(tails, position)
        before[number] = ends[place - 1] if place else -1
        if place == len(tails):
            tails.append(position)
            ends.append(number)
        else:
            tails[place], ends[place] = position, number
    steady: set[int] = set()
    number = ends[-1] if ends else -1
    while number >= 0:
        steady.add(number)
        number = before[number]
    return steady
