"""Ten thousand random memories: what is planned is what an independent, obviously right model says."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta

import pytest

from sidecar.policy.retention import (
    KeepLabelled,
    KeepLast,
    KeepPeriods,
    KeepWithin,
    Plan,
    RetentionPolicy,
    RetentionRules,
    SnapshotFacts,
    count_exclusive_bytes,
    plan_memory,
    plan_store,
)
from tests.retention import model
from tests.retention.states import NOW, new_id, random_rules, random_snapshots

STATES, AT_ONCE, QUICK = 10_000, 1_000, 3_000


@pytest.mark.parametrize(
    "first",
    [pytest.param(n, marks=() if n < QUICK else pytest.mark.slow) for n in range(0, STATES, AT_ONCE)],
)
def test_the_plan_is_what_the_model_says(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        chance = random.Random(seed)
        snapshots, rules = random_snapshots(chance), random_rules(chance)
        made = plan_memory(snapshots, rules.policy(), NOW)
        assert {row.id for row in made.kept} == model.kept(snapshots, rules, NOW), (seed, rules)
        assert [decision.snapshot for decision in made.decisions] == snapshots
        assert all(decision.reason for decision in made.decisions)
        assert not [row for row in made.forgotten if row.is_head or row.pinned or row.problem]
        if rules.memory_bytes:
            assert made.over_bytes == max(0, model.bytes_of(made.kept) - rules.memory_bytes)


def test_the_limit_of_a_store_takes_the_oldest_of_all_memories() -> None:
    for seed in range(1_000):
        chance = random.Random(seed)
        memories = [(random_snapshots(chance, f"{number}-"), random_rules(chance)) for number in range(3)]
        most = chance.choice((0, 1, 1500, 4000, 9000))
        plans = {str(n): plan_memory(rows, rules.policy(), NOW) for n, (rows, rules) in enumerate(memories)}
        limited, over = plan_store(plans, most)
        assert [{row.id for row in one.kept} for one in limited.values()] == model.kept_in_store(memories, most, NOW)
        kept = sum(model.bytes_of(one.kept) for one in limited.values())
        assert over == (max(0, kept - most) if most else 0)


def line(count: int, every: timedelta, **more: object) -> list[SnapshotFacts]:
    """So many ordinary snapshots, newest first; the newest is the head."""
    times = [NOW - every * number for number in range(count)]
    chance = random.Random(1)
    return [
        SnapshotFacts(id=new_id(chance, time), time=time, is_head=not number, **more)  # type: ignore[arg-type]
        for number, time in enumerate(times)
    ]


def ages(made: Plan, unit: timedelta) -> list[int]:
    return [round((NOW - row.time) / unit) for row in made.kept]


HOUR, DAY = timedelta(hours=1), timedelta(days=1)


def test_no_rules_keep_everything() -> None:
    made = plan_memory(line(50, DAY), RetentionRules(keep_labelled=["x"]).policy(), NOW)
    assert len(made.kept) == 50
    assert {decision.reason for decision in made.decisions} == {"head", "default (no rules)"}


def test_rules_add_up_and_say_which_of_them_keeps() -> None:
    rows = line(24 * 40, HOUR)
    policy = RetentionPolicy(
        (KeepLast(2), KeepWithin(3 * HOUR, "3h"), KeepPeriods("daily", 3), KeepPeriods("monthly", 2))
    )
    made = plan_memory(rows, policy, NOW)
    why = {round((NOW - d.snapshot.time) / HOUR): d.reason for d in made.decisions if d.keep}
    # It is noon on November 16: the newest of yesterday was at 23:00, the newest of October 16 days and 13 hours ago.
    assert why == {
        0: "head",
        1: "last 2",
        2: "within 3h",
        3: "within 3h",
        13: "daily 3",
        37: "daily 3",
        15 * 24 + 13: "monthly 2",
    }
    assert {d.reason for d in made.decisions if not d.keep} == {"no rule keeps it"}


def test_a_rejected_or_diverged_snapshot_takes_nobodys_place_and_goes_no_sooner() -> None:
    ordinary = line(4, HOUR)
    chance = random.Random(2)
    beside = [
        SnapshotFacts(id=new_id(chance, time), time=time, beside=True)
        for time in (NOW - HOUR * 0.5, NOW - HOUR * 0.6, NOW - HOUR * 1.5, NOW - HOUR * 2.5)
    ]
    rows = sorted(ordinary + beside, key=lambda row: row.id, reverse=True)
    kept = [row.id for row in plan_memory(rows, RetentionPolicy((KeepLast(2),)), NOW).kept]
    assert kept == [ordinary[0].id, beside[0].id, beside[1].id, ordinary[1].id]


def after_a_jump(ahead: timedelta, wrong_clock: timedelta) -> list[SnapshotFacts]:
    """A snapshot a day for 12 days; one by a clock that far ahead; 12 more by one that is so far off, their ids going on."""
    chance = random.Random(4)
    before = [(NOW - DAY * (24 - day), NOW - DAY * (24 - day)) for day in range(12)]
    jump = NOW - DAY * 12 + ahead
    after = [(jump + timedelta(milliseconds=day), NOW - DAY * (12 - day) + wrong_clock) for day in range(1, 13)]
    rows = [SnapshotFacts(id=new_id(chance, by_id), time=made) for by_id, made in (*before, (jump, jump), *after)]
    return [replace(row, is_head=row is rows[-1]) for row in reversed(rows)]


def test_a_clock_that_was_ahead_once_costs_one_day_of_the_history_and_no_more() -> None:
    rows = after_a_jump(DAY * 500, timedelta())
    kept = plan_memory(rows, RetentionPolicy((KeepPeriods("daily", 14),)), NOW).kept
    assert [row.id for row in kept] == [row.id for row in rows[:14]]
    recent = plan_memory(rows, RetentionPolicy((KeepWithin(DAY * 5, "5d"),)), NOW).kept
    assert [row.id for row in recent] == [row.id for row in (*rows[:6], rows[12])]


def test_a_clock_that_fell_back_makes_nothing_older_than_what_was_before() -> None:
    rows = after_a_jump(timedelta(), -DAY * 20_000)
    recent = plan_memory(rows, RetentionPolicy((KeepWithin(DAY * 13, "13d"),)), NOW).kept
    assert [row.id for row in recent] == [row.id for row in rows[:14]]


def test_a_byte_limit_takes_what_came_first_whatever_the_clock_said() -> None:
    rows = [replace(row, packs={row.id: 100}) for row in after_a_jump(DAY * 500, timedelta())]
    kept = plan_memory(rows, RetentionPolicy((), most_bytes=500), NOW).kept
    assert [row.id for row in kept] == [row.id for row in rows[:5]]


def test_pinned_and_labelled_snapshots_stay_whatever_the_limits_say() -> None:
    chance = random.Random(3)
    times = [NOW - DAY * number for number in range(5)]
    more = [{"is_head": True}, {}, {"label": "release-1"}, {"pinned": True}, {"label": "other"}]
    rows = [
        SnapshotFacts(id=new_id(chance, time), time=time, packs={str(number): 100}, **about)  # type: ignore[arg-type]
        for number, (time, about) in enumerate(zip(times, more, strict=True))
    ]
    made = plan_memory(rows, RetentionPolicy((), KeepLabelled(("release-*",)), 1), NOW)
    assert ages(made, DAY) == [0, 2, 3]
    assert made.over_bytes == 299
    assert [d.reason for d in made.decisions if d.keep] == ["head", "labelled release-*", "pinned"]


def test_bytes_take_no_snapshot_for_what_the_head_needs_anyway() -> None:
    packs = [{"full": 100}, {"full": 100, "a": 50}, {"full": 100, "a": 50, "b": 50}]
    rows = [replace(row, bytes=1, packs=need) for row, need in zip(line(3, DAY), reversed(packs), strict=True)]
    made = plan_memory(rows, RetentionPolicy(most_bytes=150), NOW)
    assert (len(made.kept), made.over_bytes) == (3, 53), "without the older ones it would be too much all the same"
    beside = SnapshotFacts(
        id=new_id(random.Random(1), NOW - 1.5 * DAY), time=NOW - 1.5 * DAY, bytes=1, packs={"other": 70}
    )
    rows.insert(2, beside)
    assert plan_memory(rows, RetentionPolicy(most_bytes=210), NOW).forgotten == [beside], (
        "newer, but it frees something"
    )
    assert ages(plan_memory(rows, RetentionPolicy(most_bytes=202), NOW), DAY) == [0, 1], (
        "where manifests are enough, they go"
    )


def test_the_size_of_a_snapshot_is_what_only_it_needs() -> None:
    rows = [
        SnapshotFacts(id="b", time=NOW, bytes=1, packs={"full": 100, "delta": 10}),
        SnapshotFacts(id="a", time=NOW - DAY, bytes=2, packs={"full": 100}),
    ]
    assert count_exclusive_bytes(rows) == {"b": 11, "a": 2}
