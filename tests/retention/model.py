"""What retention should do, said once more in the most obvious way, by somebody who has not seen the code.

Every question is answered from its definition, by looking at all snapshots again; nothing is counted along the way.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from fnmatch import fnmatchcase

from sidecar.policy.retention import RetentionRules, SnapshotFacts

NAMES = {"hourly": "%Y-%m-%d %H", "daily": "%Y-%m-%d", "weekly": "%G week %V", "monthly": "%Y-%m", "yearly": "%Y"}
HOURS = {"h": 1, "d": 24, "w": 24 * 7}


def kept_by_rules(one: SnapshotFacts, everything: list[SnapshotFacts], rules: RetentionRules, now: datetime) -> bool:
    """Whether any rule keeps this snapshot; with none at all, everything is kept."""
    ordinary_and_newer = [other for other in everything if other.id > one.id and not other.beside]
    answers = []
    if rules.keep_last:
        answers.append(len(ordinary_and_newer) < rules.keep_last)
    if rules.keep_within:
        hours = int(rules.keep_within[:-1]) * HOURS[rules.keep_within[-1]]
        by_id = datetime.strptime(one.id.split("Z")[0] + "000+0000", "%Y%m%dT%H%M%S%f%z")
        answers.append((by_id if by_id <= now else one.time) >= now - timedelta(hours=hours))
    for rule, name in NAMES.items():
        if count := getattr(rules, rule):
            newer_names = {other.time.strftime(name) for other in ordinary_and_newer}
            answers.append(one.time.strftime(name) not in newer_names and len(newer_names) < count)
    return any(answers) or not answers


def must_stay(one: SnapshotFacts, everything: list[SnapshotFacts], rules: RetentionRules) -> bool:
    """Whether nothing may take this snapshot."""
    if one.is_head or one.pinned or one.problem:
        return True
    if one.label and any(fnmatchcase(one.label, pattern) for pattern in rules.keep_labelled):
        return True
    good_heads = [other for other in everything if other.is_head and not other.problem and not other.beside]
    if good_heads:
        return False
    readable = [other for other in everything if not other.problem]
    was_head = [other for other in readable if not other.beside]
    return one.id == max(other.id for other in was_head or readable)


def bytes_of(snapshots: Iterable[SnapshotFacts]) -> int:
    """What these snapshots take together: each manifest, and each pack once."""
    rows = list(snapshots)
    packs = {pack: size for row in rows for pack, size in row.packs.items()}
    return sum(row.bytes for row in rows) + sum(packs.values())


def frees_packs(one: SnapshotFacts, everything: list[SnapshotFacts], rules: RetentionRules) -> bool:
    """Whether any pack of this snapshot can ever go: none that must stay has it."""
    staying = [other for other in everything if must_stay(other, everything, rules)]
    return any(all(pack not in other.packs for other in staying) for pack in one.packs)


def kept(everything: list[SnapshotFacts], rules: RetentionRules, now: datetime) -> set[str]:
    staying = [
        one for one in everything if must_stay(one, everything, rules) or kept_by_rules(one, everything, rules, now)
    ]
    (left,) = within([(staying, everything, rules)], rules.memory_bytes)
    return {one.id for one in left}


def within(
    memories: list[tuple[list[SnapshotFacts], list[SnapshotFacts], RetentionRules]], most: int
) -> list[list[SnapshotFacts]]:
    """What stays of several memories that share a limit; packs of different memories are different packs."""
    left = [list(staying) for staying, _, _ in memories]

    def over() -> bool:
        return bool(most) and sum(map(bytes_of, left)) > most

    def oldest(freeing: bool) -> tuple[int, SnapshotFacts] | None:
        loose = [
            (one.id, number, one)
            for number, (_, everything, rules) in enumerate(memories)
            for one in left[number]
            if not must_stay(one, everything, rules) and frees_packs(one, everything, rules) == freeing
        ]
        return min(loose, key=lambda row: row[:2])[1:] if loose else None

    while over() and (found := oldest(freeing=True)):
        left[found[0]].remove(found[1])
    before = [list(rows) for rows in left]
    while over() and (found := oldest(freeing=False)):
        left[found[0]].remove(found[1])
    return before if over() else left


def kept_in_store(
    memories: list[tuple[list[SnapshotFacts], RetentionRules]], most: int, now: datetime
) -> list[set[str]]:
    """The same for several memories, first each by its own rules and then all by the limit they share."""
    staying = []
    for everything, rules in memories:
        own = kept(everything, rules, now)
        staying.append(([one for one in everything if one.id in own], everything, rules))
    return [{one.id for one in rows} for rows in within(staying, most)]
