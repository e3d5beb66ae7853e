"""Decide what to leave out if the limits are exceeded, by names, sizes and times alone.

Rebuildable files are dropped first, then cold, then warm ones, the oldest first; hot ones never, and a coupled set only
as a whole.
"""

from __future__ import annotations

from typing import Callable, Dict, FrozenSet, Iterable, List, NamedTuple, Optional

from sidecar.format.protocol import MOST_DROPPED, DroppedPath, ExportAnswer, encode
from sidecar.format.refusal import Refusal
from sidecar.program.limits.tiers import COLD, HOT, REBUILDABLE, TIERS, WARM

ORDER = (REBUILDABLE, COLD, WARM)
MOST_REPORTED_TEXT = 4 << 20
"""How many bytes the dropped files take in an answer at most, as they are sent."""


class Row(NamedTuple):
    """One path that was found. Folders and links have no size."""

    path: str
    layout: str
    size: int = 0
    mtime: int = 0
    folder: bool = False


class Limit(NamedTuple):
    """What some rows may weigh, each by itself or all together."""

    name: str
    code: str
    most: int
    trims: bool
    weigh: Callable[[Row], int]
    each: bool = False
    layouts: Optional[FrozenSet[str]] = None
    taken: int = 0
    """What is already used, and cannot be dropped."""
    says: str = "This memory has {have:,} bytes; {name} allows {most:,}."
    surely: int = 0
    """If ``most`` is an estimate: a total from here on is known to be too much, less may turn out to be allowed."""

    def of(self, row: Row) -> int:
        """Return what a row weighs for this limit; 0 if its layout is not concerned."""
        return self.weigh(row) if self.layouts is None or row.layout in self.layouts else 0


class Dropped(NamedTuple):
    """One path that is left out, and why."""

    path: str
    bytes: int
    tier: str
    reason: str


class _Unit(NamedTuple):
    """Rows that are kept or dropped together, as hot as the hottest and as new as the newest of them."""

    rows: List[Row]
    tier: str
    mtime: int

    @property
    def rank(self) -> tuple[int, int, str]:
        """The order in which units are dropped."""
        return ORDER.index(self.tier), self.mtime, self.rows[0].path


def plan_trimming(
    rows: Iterable[Row], limits: Iterable[Limit], tier_of: Callable[[str], str], sets: Iterable[Iterable[str]]
) -> list[Dropped]:
    """Return what to drop, in order, so that the rest is within the limits; the same rows give the same result.

    Only limits that trim drop anything. Raise Refusal, naming the limit, if the rest is still over any of them.
    """
    return _Plan(list(rows), list(limits), tier_of, [list(group) for group in sets]).made()


class _Plan:
    """One plan: what is left, what was dropped, and the totals for each limit."""

    def __init__(
        self, rows: list[Row], limits: list[Limit], tier_of: Callable[[str], str], sets: list[list[str]]
    ) -> None:
        self.left: Dict[str, Row] = {row.path: row for row in sorted(rows)}
        self.limits = limits
        self.tier_of = tier_of
        self.dropped: list[Dropped] = []
        self.totals = [limit.taken + sum(map(limit.of, rows)) for limit in limits]
        self.children: Dict[str, int] = {}
        for path in self.left:
            parent = path.rpartition("/")[0]
            self.children[parent] = self.children.get(parent, 0) + 1
        self.units = self._build_units(sets)

    def made(self) -> list[Dropped]:
        """Return what to drop: units over a limit by themselves, then units in order until all totals are within their
        limits."""
        free = sorted((unit for unit in self.units if unit.tier != HOT), key=lambda unit: unit.rank)
        kept = []
        for unit in free:
            why = next((limit for limit in self.limits if limit.trims and limit.each and _is_over(limit, unit)), None)
            if why is None:
                kept.append(unit)
            else:
                self._drop(unit, why)
        for unit in kept:
            exceeded = self._list_exceeded()
            if not exceeded:
                break
            why = next((limit for limit in exceeded if any(map(limit.of, unit.rows))), None)
            if why is not None:
                self._drop(unit, why)
        self._check()
        return self.dropped

    def _build_units(self, sets: list[list[str]]) -> list[_Unit]:
        """Return everything that can be dropped: files, links and empty folders. A folder is dropped with the last of
        its contents."""
        alone = {path: row for path, row in self.left.items() if not (row.folder and path in self.children)}
        groups = [[alone.pop(path) for path in sorted(set(group)) if path in alone] for group in sets]
        units = []
        for rows in [group for group in groups if group] + [[row] for row in alone.values()]:
            tier = min((self.tier_of(row.path) for row in rows), key=TIERS.index)
            units.append(_Unit(rows, tier, max(row.mtime for row in rows)))
        return units

    def _list_exceeded(self) -> list[Limit]:
        """Return the limits on totals that trim and are exceeded."""
        together = zip(self.limits, self.totals)
        return [limit for limit, total in together if limit.trims and not limit.each and total > limit.most]

    def _drop(self, unit: _Unit, why: Limit) -> None:
        first = unit.rows[0]
        for row in unit.rows:
            self._remove(row, unit.tier, "over " + why.name + (", with " + first.path if row is not first else ""))

    def _remove(self, row: Row, tier: str, reason: str) -> None:
        """Drop a row, and its folder if nothing is left in it."""
        del self.left[row.path]
        self.dropped.append(Dropped(row.path + "/" * row.folder, row.size, tier, reason))
        self.totals = [total - limit.of(row) for limit, total in zip(self.limits, self.totals)]
        above = row.path.rpartition("/")[0]
        self.children[above] -= 1
        if not self.children[above] and above in self.left:
            tier = self.tier_of(above)
            if tier != HOT:
                self._remove(self.left[above], tier, "nothing is left in it")

    def _check(self) -> None:
        """Raise Refusal if a limit is still exceeded."""
        for limit, total in zip(self.limits, self.totals):
            if limit.each:
                for row in self.left.values():
                    if limit.of(row) > limit.most:
                        also = " It is hot, or of one set with what is, and never left out." if limit.trims else ""
                        self._refuse(limit, limit.of(row), also, row.path)
            elif total > limit.most and total >= limit.surely:
                self._refuse(limit, total, " All that is left is hot, and never left out." if limit.trims else "")

    def _refuse(self, limit: Limit, have: int, also: str, path: str = "") -> None:
        raise Refusal(limit.code, limit.says.format(have=have, name=limit.name, most=limit.most, path=path) + also)


def _is_over(limit: Limit, unit: _Unit) -> bool:
    return any(limit.of(row) > limit.most for row in unit.rows)


def describe_dropped(dropped: Iterable[Dropped], answer: ExportAnswer) -> None:
    """Describe in the answer what was left out: a bounded list of paths, and totals of all."""
    all_rows, text = list(dropped), 0
    for row in all_rows:
        told = DroppedPath(*row)
        text += len(encode(told))
        if len(answer.dropped) == MOST_DROPPED or text > MOST_REPORTED_TEXT:
            break
        answer.dropped.append(told)
    files = [row for row in all_rows if not row.path.endswith("/")]
    answer.dropped_more = len(all_rows) - len(answer.dropped)
    answer.dropped_files = len(files)
    answer.dropped_bytes = sum(row.bytes for row in files)
