"""The plan: every snapshot with the rule that keeps it, or the reason it goes. No I/O.

The head, what is pinned or labelled to be kept, and what cannot be read always stay; without rules everything does. Byte
limits come last, and take from the oldest end of whatever else was kept: first where that frees packs; where it frees only
manifests, for all its packs are needed by what has to stay, no more than it takes, and nothing unless it is enough then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from sidecar.retention.rules import KeepLabelled, Rule, SnapshotFacts


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    rules: tuple[Rule, ...] = ()
    labelled: KeepLabelled = KeepLabelled(())
    """These stay whatever the limits say, as if they were pinned."""
    most_bytes: int = 0
    """0: no limit."""


@dataclass(frozen=True, slots=True)
class Decision:
    snapshot: SnapshotFacts
    keep: bool
    reason: str
    fixed: bool = False
    """No byte limit may take it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of a memory's snapshots, newest first."""

    decisions: tuple[Decision, ...]
    over_bytes: int = 0
    """By how much what has to stay is more than the byte limit."""

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
    decisions = []
    for snapshot in snapshots:
        if fixed := _find_fixed_reason(snapshot, instead) or labelled.get(snapshot.id, ""):
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
    """Hold all memories together to a byte limit, oldest first; ``apart``: bytes that count and cannot go.

    Return the plans as they are now, and by how much what has to stay is more than the limit.
    """
    if not most_bytes:
        return dict(plans), 0
    limited, over = _apply_limit(
        [one.decisions for one in plans.values()], most_bytes - apart, f"over {most_bytes:,} bytes in the store"
    )
    return {name: replace(plans[name], decisions=rows) for name, rows in zip(plans, limited, strict=True)}, over


def count_needed_bytes(snapshots: Iterable[SnapshotFacts]) -> int:
    """The bytes that snapshots need together."""
    rows = list(snapshots)
    packs = {pack: size for snapshot in rows for pack, size in snapshot.packs.items()}
    return sum(snapshot.bytes for snapshot in rows) + sum(packs.values())


def count_exclusive_bytes(snapshots: Iterable[SnapshotFacts]) -> dict[str, int]:
    """For each snapshot the bytes that no other one needs."""
    rows = list(snapshots)
    uses = Counter(pack for snapshot in rows for pack in snapshot.packs)
    return {
        snapshot.id: snapshot.bytes + sum(size for pack, size in snapshot.packs.items() if uses[pack] == 1)
        for snapshot in rows
    }


def _find_fixed_reason(snapshot: SnapshotFacts, instead: str) -> str:
    if snapshot.is_head:
        return "head"
    if snapshot.pinned:
        return "pinned"
    if snapshot.problem:
        return "unreadable manifest"
    return "fallback for the head" if snapshot.id == instead else ""


def _choose_head_substitute(snapshots: Sequence[SnapshotFacts]) -> str:
    """The snapshot that a restore takes when there is no head or it is damaged: rather one that was the head than not."""
    if any(snapshot.is_head and not snapshot.beside and not snapshot.problem for snapshot in snapshots):
        return ""
    good = [snapshot for snapshot in snapshots if not snapshot.problem]
    return next((snapshot.id for snapshot in good if not snapshot.beside), good[0].id if good else "")


def _apply_limit(
    memories: Sequence[Sequence[Decision]], most: int, reason: str
) -> tuple[list[tuple[Decision, ...]], int]:
    """Let kept snapshots go until what the others need fits: the oldest of all first, those that free no pack last."""
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
    """What a byte limit may take, with the number of its memory, oldest first: where that can free packs, or where not."""
    loose = []
    for number, decisions in enumerate(memories):
        needed = {pack for decision in decisions if decision.fixed for pack in decision.snapshot.packs}
        loose += [
            (decision.snapshot, number)
            for decision in decisions
            if decision.keep and not decision.fixed and freeing == bool(set(decision.snapshot.packs) - needed)
        ]
    return sorted(loose, key=lambda one: one[0].id)
