"""What retention should do, said once more in the most obvious way, by somebody who has not seen the code.

Every question is answered from its definition, by looking at all snapshots again; nothing is counted along the way.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from fnmatch import fnmatchcase

from sidecar.retention.rules import Snapshot
from sidecar.retention.settings import Rules

NAMES = {"hourly": "%Y-%m-%d %H", "daily": "%Y-%m-%d", "weekly": "%G week %V", "monthly": "%Y-%m", "yearly": "%Y"}
HOURS = {"h": 1, "d": 24, "w": 24 * 7}


def kept_by_rules(one: Snapshot, everything: list[Snapshot], rules: Rules, now: datetime) -> bool:
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


def must_stay(one: Snapshot, everything: list[Snapshot], rules: Rules) -> bool:
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


def bytes_of(snapshots: Iterable[Snapshot]) -> int:
    """What these snapshots take together: each manifest, and each pack once."""
    rows = list(snapshots)
    packs = {pack: size for row in rows for pack, size in row.packs.items()}
    return sum(row.bytes for row in rows) + sum(packs.values())


def kept(everything: list[Snapshot], rules: Rules, now: datetime) -> set[str]:
    staying = [
        one for one in everything if must_stay(one, everything, rules) or kept_by_rules(one, everything, rules, now)
    ]
    while rules.memory_bytes and bytes_of(staying) > rules.memory_bytes:
        loose = [one for one in staying if not must_stay(one, everything, rules)]
        if not loose:
            break
        staying.remove(min(loose, key=lambda one: one.id))
    return {one.id for one in staying}


def kept_in_store(memories: list[tuple[list[Snapshot], Rules]], most: int, now: datetime) -> list[set[str]]:
    """The same for several memories that share a limit; packs of different memories are different packs."""
    staying = [kept(everything, rules, now) for everything, rules in memories]

    def rows(number: int) -> list[Snapshot]:
        return [one for one in memories[number][0] if one.id in staying[number]]

    while most and sum(bytes_of(rows(number)) for number in range(len(memories))) > most:
        loose = [
            (one.id, number)
            for number, (everything, rules) in enumerate(memories)
            for one in rows(number)
            if not must_stay(one, everything, rules)
        ]
        if not loose:
            break
        oldest, number = min(loose)
        staying[number].remove(oldest)
    return staying
