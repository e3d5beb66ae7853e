"""What a user can say about retention, and the policies made of it.

Nothing said: every snapshot is kept, and only leftovers are collected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta

from sidecar.errors import BadConfig
from sidecar.patterns import check_reachable, find_table
from sidecar.retention.planning import RetentionPolicy
from sidecar.retention.rules import PERIODS, KeepLabelled, KeepLast, KeepPeriods, KeepWithin, Rule

SAFE_PART = 0.5
"""Of the grace period: an export that read its base longer ago than this does not commit."""
COUNTS = ("keep_last", *PERIODS)
LONGEST = timedelta(days=365 * 1000)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdwy])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400, "y": 365 * 86400}


def parse_duration(text: str) -> timedelta:
    """How long ``30d``, ``12h`` or ``1d12h`` is. Raise ``ValueError`` saying how to write it."""
    compact = text.strip()
    if not compact or _DURATION.sub("", compact).strip():
        raise ValueError('write a number and one of s, m, h, d, w, y, such as "12h" or "30d"')
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(compact))
    if seconds > LONGEST.total_seconds():
        raise ValueError("nothing is kept for more than a thousand years")
    return timedelta(seconds=seconds)


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

    def policy(self) -> RetentionPolicy:
        rules: list[Rule] = [KeepLast(self.keep_last)] if self.keep_last else []
        if self.keep_within:
            rules.append(KeepWithin(parse_duration(self.keep_within), self.keep_within))
        counts = {name: int(getattr(self, name)) for name in PERIODS}
        rules += [KeepPeriods(name, count) for name, count in counts.items() if count]
        return RetentionPolicy(tuple(rules), KeepLabelled(tuple(self.keep_labelled)), self.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention(RetentionRules):
    """The rules for all memories, and what concerns the whole store."""

    store_bytes: int = 0
    """The most bytes all snapshots of the store may need together; the oldest of all go first. 0: no limit."""
    grace: str = "24h"
    """How long a pack that no snapshot needs any more waits before it goes, by the store's clock."""
    every: str = "1h"
    """How often a service applies the rules to the whole store."""
    keep_calls: str = "7d"
    """How long the answers to calls with an Idempotency-Key are remembered."""
    memories: dict[str, RetentionRules] = field(default_factory=dict)
    """Other rules for the memories a pattern fits, instead of those above: the first that fits."""

    def build_policy_for(self, memory: str) -> RetentionPolicy:
        return find_table(memory, self.memories, self).policy()

    @property
    def grace_seconds(self) -> float:
        return parse_duration(self.grace).total_seconds()

    @property
    def calls_seconds(self) -> float:
        return parse_duration(self.keep_calls).total_seconds()


def check_retention(retention: Retention, given: dict[str, set[str]], command_seconds: float) -> None:
    """Raise ``BadConfig`` for what cannot be meant, naming the key and what to write.

    ``given``: the keys that were written down, for ``""`` (all memories) and for each pattern.
    """
    check_reachable(retention.memories, ("retention", "memories"))
    for pattern, rules in [("", retention), *retention.memories.items()]:
        section = f'[retention.memories."{pattern}"]' if pattern else "[retention]"
        at = ("retention", "memories", pattern) if pattern else ("retention",)
        for key, message, hint in _find_problems(rules, given.get(pattern, set()), retention.store_bytes):
            raise BadConfig(f"{section} {message}", hint=hint, at=(*at, key))
    least = command_seconds / SAFE_PART
    if retention.grace_seconds < least:
        raise BadConfig(
            f"[retention] grace = {retention.grace!r} is shorter than what an export may take.",
            hint=f'Write grace = "{least:.0f}s" or more (twice [timing] command), or lower [timing] command.',
            at=("retention", "grace"),
        )
    if parse_duration(retention.every) < timedelta(seconds=1):
        raise BadConfig(
            "[retention] every must be at least a second.", hint='Write every = "1h".', at=("retention", "every")
        )


def _find_problems(rules: RetentionRules, given: set[str], store_bytes: int) -> Iterator[tuple[str, str, str]]:
    """Key, what is wrong with it, and what to write."""
    for key in ("keep_within", "grace", "every", "keep_calls"):
        text = getattr(rules, key, "")
        if text or key in given:
            try:
                if not parse_duration(text):
                    yield key, f"{key} = {text!r} is no time at all.", 'Write more, such as "12h" or "30d".'
            except ValueError as problem:
                yield key, f"{key} = {text!r} is no duration.", f"{str(problem)[:1].upper()}{str(problem)[1:]}."
    if (zeros := [key for key in COUNTS if key in given]) and not rules.policy().rules:
        key = zeros[0]
        yield (
            key,
            f"{key} = 0 and nothing else keeps no snapshot but the head.",
            f"Write {key} = 1 or more; or leave it out, and all are kept.",
        )
    if store_bytes and rules.memory_bytes > store_bytes:
        yield (
            "memory_bytes",
            f"memory_bytes = {rules.memory_bytes} is more than store_bytes = {store_bytes}: it could never be reached.",
            "Lower memory_bytes, or raise store_bytes in [retention].",
        )
    if any(not pattern for pattern in rules.keep_labelled):
        said = "keep_labelled has an empty pattern, which no label matches."
        yield "keep_labelled", said, 'Write keep_labelled = ["release-*"].'
