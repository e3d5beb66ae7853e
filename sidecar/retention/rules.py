"""Rules: each says which snapshots it keeps, and why. A policy is their union.

Rules count the snapshots that are or were the head. One that stands beside them (diverged, rejected) or was found damaged
takes nobody's place: it is kept when the rule would keep an ordinary one of its age.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Protocol

from sidecar.ids import parse_snapshot_time


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFacts:
    """What rules look at."""

    id: str
    """Later ones have higher ids, whatever the clock said."""
    time: datetime
    """When it was made; a clock that was wrong for it is wrong for no other."""
    label: str = ""
    pinned: bool = False
    is_head: bool = False
    beside: bool = False
    """It takes nobody's place: it never was the head, or is damaged."""
    problem: str = ""
    """Why its manifest cannot be read; then its packs are not known."""
    bytes: int = 0
    """Of the manifest itself."""
    packs: Mapping[str, int] = field(default_factory=dict)
    """Each pack it needs, with its bytes and those of its index."""


class Rule(Protocol):
    def kept(self, snapshots: Sequence[SnapshotFacts], now: datetime) -> dict[str, str]:
        """Given the snapshots of a memory, newest first: the ids of those it keeps, each with the reason."""
        ...


@dataclass(frozen=True, slots=True)
class KeepLast:
    """The last so many."""

    count: int

    def kept(self, snapshots: Sequence[SnapshotFacts], now: datetime) -> dict[str, str]:
        kept, newer = {}, 0
        for snapshot in snapshots:
            if newer < self.count:
                kept[snapshot.id] = f"last {self.count}"
            newer += not snapshot.beside
        return kept


@dataclass(frozen=True, slots=True)
class KeepWithin:
    """Those that are no older than this, nor than a snapshot before them."""

    age: timedelta
    text: str

    def kept(self, snapshots: Sequence[SnapshotFacts], now: datetime) -> dict[str, str]:
        return {
            snapshot.id: f"within {self.text}"
            for snapshot in snapshots
            if now - _find_creation_time(snapshot, now) <= self.age
        }


def _find_creation_time(snapshot: SnapshotFacts, now: datetime) -> datetime:
    """By its id, so that a clock which fell back makes nothing old; unless the id goes on from one that was ahead."""
    by_id = parse_snapshot_time(snapshot.id)
    return by_id if by_id <= now else snapshot.time


@dataclass(frozen=True, slots=True)
class KeepPeriods:
    """The newest of each of the last so many hours, days, weeks, months or years (UTC) that have any."""

    name: str
    count: int

    def kept(self, snapshots: Sequence[SnapshotFacts], now: datetime) -> dict[str, str]:
        period_of = PERIODS[self.name]
        kept: dict[str, str] = {}
        seen: set[tuple[int, ...]] = set()
        for snapshot in snapshots:
            period = period_of(snapshot.time)
            if period not in seen and len(seen) < self.count:
                kept[snapshot.id] = f"{self.name} {self.count}"
            if not snapshot.beside:
                seen.add(period)
        return kept


@dataclass(frozen=True, slots=True)
class KeepLabelled:
    """Those whose label matches one of these patterns."""

    patterns: tuple[str, ...]

    def kept(self, snapshots: Sequence[SnapshotFacts], now: datetime) -> dict[str, str]:
        return {
            snapshot.id: f"labelled {pattern}"
            for snapshot in snapshots
            for pattern in reversed(self.patterns)  # so that the first that matches is the one named
            if snapshot.label and fnmatchcase(snapshot.label, pattern)
        }


PERIODS: dict[str, Callable[[datetime], tuple[int, ...]]] = {
    "hourly": lambda time: (time.year, time.month, time.day, time.hour),
    "daily": lambda time: (time.year, time.month, time.day),
    "weekly": lambda time: tuple(time.isocalendar()[:2]),
    "monthly": lambda time: (time.year, time.month),
    "yearly": lambda time: (time.year,),
}
