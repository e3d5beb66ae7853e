"""Random memories and policies: small, and full of ties, corner cases and clocks that were wrong."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

from sidecar.ids import parse_snapshot_time
from sidecar.policy.retention import RetentionRules, SnapshotFacts

NOW = datetime(2026, 11, 16, 12, tzinfo=UTC)
SPANS = (timedelta(hours=3), timedelta(days=3), timedelta(days=60), timedelta(days=1500))
LABELS = ("", "", "", "checkpoint", "release-1", "release-2", "before the move")
PATTERNS: tuple[list[str], ...] = ([], [], ["release-*"], ["*"], ["none", "release-2"])


def new_id(chance: random.Random, time: datetime) -> str:
    return f"{time:%Y%m%dT%H%M%S}{time.microsecond // 1000:03d}Z-{chance.getrandbits(32):08x}"


def random_snapshots(chance: random.Random, prefix: str = "") -> list[SnapshotFacts]:
    """Newest first; at most one is the head. Ids may be ahead of the time, never behind it."""
    span = chance.choice(SPANS)
    ahead = span * chance.choice((0, 0, 0.5))
    ids = sorted(
        {new_id(chance, NOW + ahead - span * chance.random()) for _ in range(chance.choice((0, 1, 2, 5, 9, 14)))},
        reverse=True,
    )
    wrong = chance.choice((0.0, 0.0, 0.3))
    packs = {f"{prefix}{number}": chance.randrange(1, 1000) for number in range(10)}
    head = chance.choice([*ids, *ids[:1] * 5, ""]) if ids else ""
    return [
        SnapshotFacts(
            id=id,
            time=parse_snapshot_time(id) - (span * chance.random() if chance.random() < wrong else timedelta()),
            label=chance.choice(LABELS),
            pinned=chance.random() < 0.1,
            is_head=id == head,
            beside=(id != head and chance.random() < 0.25) or chance.random() < 0.05,
            problem="damaged" if chance.random() < 0.03 else "",
            bytes=chance.randrange(1, 30),
            packs={name: packs[name] for name in chance.sample(sorted(packs), chance.randrange(1, 4))},
        )
        for id in ids
    ]


def random_rules(chance: random.Random) -> RetentionRules:
    def some(*values: int) -> int:
        return chance.choice(values) if chance.random() < 0.3 else 0

    return RetentionRules(
        keep_last=some(1, 2, 3, 8),
        keep_within=chance.choice(("1h", "36h", "30d", "52w")) if chance.random() < 0.2 else "",
        hourly=some(1, 2, 5),
        daily=some(1, 2, 7),
        weekly=some(1, 2, 4),
        monthly=some(1, 3),
        yearly=some(1, 2, 9),
        keep_labelled=chance.choice(PATTERNS),
        memory_bytes=chance.choice((0, 0, 1, 500, 2000, 4000)),
    )
