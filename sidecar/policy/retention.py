"""Retention: rules that say which snapshots to keep, the plan made from them, and the settings behind them. No I/O.

A rule keeps snapshots and gives a reason for each; a policy is the union of its rules. Rules count the snapshots that
are or were the head. A snapshot that is stored beside them (diverged, rejected) or was found damaged takes no other's
place: it is kept if the rule would keep an ordinary one of its age.

A plan has every snapshot with the rule that keeps it, or the reason it is forgotten. The head, what is pinned or
labelled to be kept, and what cannot be read always stay; without rules everything does. Byte limits come last, and take
the oldest of whatever else was kept: first where that frees packs. Where it frees only manifests, because all its packs
are needed by what has to stay, it takes no more than necessary, and nothing unless that is enough.

Without settings every snapshot is kept, and only leftovers are collected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Protocol

from sidecar.host.text import parse_duration
from sidecar.host.values import dataclass
from sidecar.ids import parse_snapshot_time
from sidecar.policy.limits import find_table


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFacts:
    """What the rules need to know of a snapshot."""

    id: str
    """Later snapshots have higher ids, whatever the clock said."""
    time: datetime
    """When it was made; a clock that was wrong for it does not affect other snapshots."""
    label: str = ""
    pinned: bool = False
    is_head: bool = False
    beside: bool = False
    """It takes no other's place: it never was the head, or is damaged."""
    pending: bool = False
    """It waits for a review."""
    problem: str = ""
    """Why its manifest cannot be read; then its packs are not known."""
    bytes: int = 0
    """The size of the manifest itself."""
    packs: Mapping[str, int] = field(default_factory=dict)
    """Each pack it needs, with the size of the pack and its index."""


class Rule(Protocol):
    """A rule that keeps some snapshots."""

    def kept(self, snapshots: Sequence[SnapshotFacts], now: datetime) -> dict[str, str]:
        """Return the ids to keep, each with the reason, given a memory's snapshots, newest first."""
        ...


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keep the last ``count`` snapshots."""

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
    """Keep snapshots that are no older than this, by their ids."""

    age: timedelta
    text: str

    def kept(self, snapshots: Sequence[SnapshotFacts], now: datetime) -> dict[str, str]:
        return {
            snapshot.id: f"within {self.text}"
            for snapshot in snapshots
            if now - _find_creation_time(snapshot, now) <= self.age
        }


def _find_creation_time(snapshot: SnapshotFacts, now: datetime) -> datetime:
    """Return the time in its id, so that a clock that was set back makes nothing look old; its own time if the id is in
    the future, because it continues from a clock that was ahead."""
    by_id = parse_snapshot_time(snapshot.id)
    return by_id if by_id <= now else snapshot.time


@dataclass(frozen=True, slots=True)
class KeepPeriods:
    """Keep the newest of each of the last ``count`` hours, days, weeks, months or years (UTC) that have any."""

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
    """Keep those whose label matches one of these patterns."""

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


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """The rules for one memory."""

    rules: tuple[Rule, ...] = ()
    labelled: KeepLabelled = KeepLabelled(())
    """These stay whatever the limits say, as if they were pinned."""
    most_bytes: int = 0
    """A byte limit; 0: none."""
    pending: int = 100
    """The newest so many that wait for a review stay, as if they were pinned; older ones are under the rules."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether one snapshot is kept, and why."""

    snapshot: SnapshotFacts
    keep: bool
    reason: str
    fixed: bool = False
    """No byte limit may remove it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens to a memory's snapshots, newest first."""

    decisions: tuple[Decision, ...]
    over_bytes: int = 0
    """By how much what has to stay exceeds the byte limit."""

    @property
    def kept(self) -> list[SnapshotFacts]:
        return [decision.snapshot for decision in self.decisions if decision.keep]

    @property
    def forgotten(self) -> list[SnapshotFacts]:
        return [decision.snapshot for decision in self.decisions if not decision.keep]


def plan_memory(snapshots: Sequence[SnapshotFacts], policy: RetentionPolicy, now: datetime) -> Plan:
    """Decide on the snapshots of one memory, given newest first."""
    by_rule: dict[str, str] = {}
    for rule in policy.rules:
        for id, why in rule.kept(snapshots, now).items():
            by_rule.setdefault(id, why)
    labelled = policy.labelled.kept(snapshots, now)
    instead = _choose_head_substitute(snapshots)
    waiting = [snapshot.id for snapshot in snapshots if snapshot.pending][: policy.pending]
    fixed_for = dict.fromkeys(waiting, "waits for a review")
    decisions = []
    for snapshot in snapshots:
        if (
            fixed := _find_fixed_reason(snapshot, instead)
            or labelled.get(snapshot.id, "")
            or fixed_for.get(snapshot.id, "")
        ):
            decisions.append(Decision(snapshot, True, fixed, fixed=True))
        elif not policy.rules:
            decisions.append(Decision(snapshot, True, "default (no rules)"))
        elif snapshot.id in by_rule:
            decisions.append(Decision(snapshot, True, by_rule[snapshot.id]))
        else:
            decisions.append(Decision(snapshot, False, "no rule keeps it"))
    if not policy.most_bytes:
        return Plan(tuple(decisions))
    (limited,), over = _apply_limit([decisions], policy.most_bytes, f"over {policy.most_bytes:,} bytes in this memory")
    return Plan(limited, over)


def plan_store(plans: Mapping[str, Plan], most_bytes: int, apart: int = 0) -> tuple[dict[str, Plan], int]:
    """Apply a byte limit to all memories together, oldest snapshots first; ``apart``: bytes that count and cannot be
    removed.

    Return the changed plans, and by how much what has to stay exceeds the limit.
    """
    if not most_bytes:
        return dict(plans), 0
    limited, over = _apply_limit(
        [one.decisions for one in plans.values()], most_bytes - apart, f"over {most_bytes:,} bytes in the store"
    )
    return {name: replace(plans[name], decisions=rows) for name, rows in zip(plans, limited, strict=True)}, over


def count_needed_bytes(snapshots: Iterable[SnapshotFacts]) -> int:
    """Return the bytes that snapshots need together; shared packs count once."""
    rows = list(snapshots)
    packs = {pack: size for snapshot in rows for pack, size in snapshot.packs.items()}
    return sum(snapshot.bytes for snapshot in rows) + sum(packs.values())


def count_exclusive_bytes(snapshots: Iterable[SnapshotFacts]) -> dict[str, int]:
    """Return for each snapshot the bytes that no other one needs."""
    rows = list(snapshots)
    uses = Counter(pack for snapshot in rows for pack in snapshot.packs)
    return {
        snapshot.id: snapshot.bytes + sum(size for pack, size in snapshot.packs.items() if uses[pack] == 1)
        for snapshot in rows
    }


def _find_fixed_reason(snapshot: SnapshotFacts, instead: str) -> str:
    """Return why a snapshot stays whatever the rules and limits say; "" if it does not."""
    if snapshot.is_head:
        return "head"
    if snapshot.pinned:
        return "pinned"
    if snapshot.problem:
        return "unreadable manifest"
    return "fallback for the head" if snapshot.id == instead else ""


def _choose_head_substitute(snapshots: Sequence[SnapshotFacts]) -> str:
    """Return the snapshot that a restore takes if there is no head or it is damaged: preferably one that was the head."""
    if any(snapshot.is_head and not snapshot.beside and not snapshot.problem for snapshot in snapshots):
        return ""
    good = [snapshot for snapshot in snapshots if not snapshot.problem]
    return next((snapshot.id for snapshot in good if not snapshot.beside), good[0].id if good else "")


def _apply_limit(
    memories: Sequence[Sequence[Decision]], most: int, reason: str
) -> tuple[list[tuple[Decision, ...]], int]:
    """Forget kept snapshots until what the others need is within the limit: the oldest of all first, those that free no
    pack last."""
    uses: Counter[tuple[int, str]] = Counter()
    total = 0
    for number, decisions in enumerate(memories):
        for snapshot in (decision.snapshot for decision in decisions if decision.keep):
            total += snapshot.bytes + sum(size for pack, size in snapshot.packs.items() if not uses[number, pack])
            uses.update((number, pack) for pack in snapshot.packs)
    gone: set[tuple[int, str]] = set()
    for snapshot, number in _list_removable(memories, freeing=True):
        if total <= most:
            break
        gone.add((number, snapshot.id))
        total -= snapshot.bytes
        for pack, size in snapshot.packs.items():
            uses[number, pack] -= 1
            total -= size if not uses[number, pack] else 0
    light = _list_removable(memories, freeing=False)
    if total - sum(snapshot.bytes for snapshot, _ in light) <= most:
        for snapshot, number in light:
            if total <= most:
                break
            gone.add((number, snapshot.id))
            total -= snapshot.bytes
    limited = [
        tuple(
            replace(decision, keep=False, reason=reason) if (number, decision.snapshot.id) in gone else decision
            for decision in decisions
        )
        for number, decisions in enumerate(memories)
    ]
    return limited, max(0, total - most)


def _list_removable(memories: Sequence[Sequence[Decision]], *, freeing: bool) -> list[tuple[SnapshotFacts, int]]:
    """Return what a byte limit may remove, with the number of its memory, oldest first: those that can free packs, or
    those that cannot."""
    loose = []
    for number, decisions in enumerate(memories):
        needed = {pack for decision in decisions if decision.fixed for pack in decision.snapshot.packs}
        loose += [
            (decision.snapshot, number)
            for decision in decisions
            if decision.keep and not decision.fixed and freeing == bool(set(decision.snapshot.packs) - needed)
        ]
    return sorted(loose, key=lambda one: one[0].id)


SAFE_PART = 0.5
"""The share of the grace period after which an export that read its base no longer commits."""
COUNTS = ("keep_last", *PERIODS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRules:
    """Which snapshots of a memory to keep: those that any of these rules keeps."""

    keep_last: int = 0
    """The last so many snapshots. Without this or any of the next six, every snapshot is kept."""
    keep_within: str = ""
    """Those no older than this: "12h", "30d", "1y"."""
    hourly: int = 0
    """The newest of each of the last so many hours (UTC) that have any."""
    daily: int = 0
    """The same by day."""
    weekly: int = 0
    """The same by week, from Monday."""
    monthly: int = 0
    """The same by month."""
    yearly: int = 0
    """The same by year."""
    keep_labelled: list[str] = field(default_factory=list)
    """Those whose label matches one of these patterns stay for good, as if they were pinned."""
    memory_bytes: int = 0
    """The most bytes a memory's snapshots may need together; the oldest go first. 0: no limit."""
    keep_pending: int = 100
    """The newest so many that wait for a review stay whatever these rules say; older ones are under them."""

    def policy(self) -> RetentionPolicy:
        """Return the policy that these settings describe."""
        rules: list[Rule] = [KeepLast(self.keep_last)] if self.keep_last else []
        if self.keep_within:
            rules.append(KeepWithin(parse_duration(self.keep_within), self.keep_within))
        counts = {name: int(getattr(self, name)) for name in PERIODS}
        rules += [KeepPeriods(name, count) for name, count in counts.items() if count]
        return RetentionPolicy(
            tuple(rules), KeepLabelled(tuple(self.keep_labelled)), self.memory_bytes, self.keep_pending
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention(RetentionRules):
    """The rules for all memories, and what concerns the whole store."""

    store_bytes: int = 0
    """The most bytes all snapshots of the store may need together; the oldest of all go first. 0: no limit."""
    grace: str = "24h"
    """How long a pack that no snapshot needs any more waits before it goes, by the store's clock."""
    every: str = "1h"
    """How often a service applies the rules to the whole store."""
    at: str = ""
    """When it does, as a cron expression, instead of ``every``: "30 2 * * *" is 02:30 by ``service.timezone``."""
    keep_calls: str = "7d"
    """How long the answers to calls with an Idempotency-Key are remembered."""
    memories: dict[str, RetentionRules] = field(default_factory=dict)
    """Other rules for the memories a pattern fits, instead of those above: the first that fits."""

    def build_policy_for(self, memory: str) -> RetentionPolicy:
        """Return the policy of one memory."""
        return find_table(memory, self.memories, self).policy()

    @property
    def grace_seconds(self) -> float:
        return parse_duration(self.grace).total_seconds()

    @property
    def calls_seconds(self) -> float:
        return parse_duration(self.keep_calls).total_seconds()
