"""A clock that was wrong once: ids go on from there, so that they stay in order, and what is kept goes by the real time."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from sidecar.ids import MemoryKeys, make_snapshot_id
from sidecar.policy.retention import RetentionRules
from sidecar.store import repository as repositories
from sidecar.store import retention
from sidecar.store.repository import Repository
from sidecar.store.selectors import resolve_snapshot
from tests.parts.memory_store import MemoryStore
from tests.retention.stores import manifest_of

MEMORY, DAY, FIRST = "m", timedelta(days=1), datetime(2026, 1, 1, 12, tzinfo=UTC)


class Clock(datetime):
    at = FIRST

    @classmethod
    def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
        return cls.at


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> Repository:
    for module in (retention, repositories):
        monkeypatch.setattr(module, "datetime", Clock)
    return Repository(MemoryStore(time.time()))


async def export(repository: Repository, at: datetime, rules: RetentionRules) -> str:
    Clock.at = at
    last = max(await repository.list_snapshot_ids(MEMORY), default="")
    manifest = manifest_of(MEMORY, make_snapshot_id(at, last), at, [])
    await repository.commit(manifest)
    await repository.move_head(await repository.head(MEMORY), manifest)
    await retention.forget_lightly(repository, MEMORY, rules.policy())
    return manifest.snapshot


async def test_one_export_by_a_clock_that_is_ahead_costs_one_day_of_the_history(repository: Repository) -> None:
    rules = RetentionRules(daily=14)
    days = [FIRST + DAY * day for day in range(12)]
    made = [await export(repository, at, rules) for at in (*days, FIRST + DAY * 500, *(day + DAY * 12 for day in days))]
    assert await repository.list_snapshot_ids(MEMORY) == made[:-15:-1]
    # Nor does it when the time has come that the clock showed too early.
    made += [await export(repository, FIRST + DAY * 501, rules)]
    assert await repository.list_snapshot_ids(MEMORY) == made[:-15:-1]


async def test_a_time_means_the_real_one_also_without_a_head(repository: Repository) -> None:
    clocks = (FIRST, FIRST + DAY * 500, FIRST + DAY, FIRST + DAY * 2)
    made = [await export(repository, at, RetentionRules()) for at in clocks]
    await repository.store.delete([MemoryKeys.of(MEMORY).head])
    assert await resolve_snapshot(repository, MEMORY, f"@{FIRST + DAY * 1.5:%Y-%m-%dT%H:%M}") == made[2]
    assert await resolve_snapshot(repository, MEMORY, f"@{FIRST + DAY * 0.5:%Y-%m-%dT%H:%M}") == made[0]


@pytest.mark.parametrize("created", ["", "yesterday", "2026-01-01T12:00:00", "9999-12-31T23:59:59+00:00"])
def test_a_manifest_that_does_not_say_when_it_was_made_has_the_time_of_its_id(created: str) -> None:
    manifest = manifest_of(MEMORY, make_snapshot_id(FIRST), FIRST, [])
    assert replace(manifest, created=created).time == FIRST
