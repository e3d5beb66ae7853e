"""Ten thousand random stores: after the rules were applied, all that had to stay is there with every pack it needs, and in
the end nothing else is."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace

import pytest

from sidecar.ids import MemoryKeys, parse_snapshot_time
from sidecar.policy.retention import Retention, RetentionRules, SnapshotFacts
from sidecar.store import retention as forgetting
from sidecar.store.marks import State
from sidecar.store.repository import Repository
from tests.parts.memory_store import MemoryStore
from tests.retention import model
from tests.retention.states import NOW, random_rules, random_snapshots
from tests.retention.stores import CONTENTS, manifest_of, packs_in, put_head, put_packs, put_snapshots

pytestmark = pytest.mark.usefixtures("forked_programs")

STATES, AT_ONCE, MEMORY, HOUR = 10_000, 1_000, "m", 3600.0
QUICK = 200
"""So many of them in the default run, the rest in the campaign."""


class Frozen(forgetting.datetime):  # type: ignore[misc,name-defined]
    """The time that the rules compare with."""

    @classmethod
    def now(cls, tz: object = None) -> object:
        return NOW


class World:
    """One random store: a memory with a head, diverged, rejected, pinned and damaged snapshots, and leftovers."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rules = random_rules(self.chance)
        self.store = MemoryStore(time.time() - 100 * HOUR)
        self.repository = Repository(self.store)
        self.keys = MemoryKeys.of(MEMORY)
        self.rows: list[SnapshotFacts] = []
        self.unreadable = False

    async def write(self) -> None:
        store, keys, chance = self.store, self.keys, self.chance
        rows = random_snapshots(chance)
        head = next((row.id for row in rows if row.is_head), "")
        damaged = {row.id for row in rows if (row.is_head and row.beside) or chance.random() < 0.05}
        past = [row.id for row in rows if not row.beside and not row.is_head] if head else []
        for row in rows:
            await put_packs(store, MEMORY, row.packs)
            manifest = manifest_of(MEMORY, row.id, row.time, row.packs, row.label, "empty: x" if row.beside else "")
            await put_snapshots(store, [manifest])
            size = len(manifest.encode())
            if row.problem:
                await store.put(keys.snapshot(row.id), b"not a manifest")
                size = len(b"not a manifest")
            if row.pinned:
                await store.put(keys.pin(row.id), b"")
            if row.id in damaged:
                await store.put(keys.damage(row.id), b"")
            beside = row.id not in (head, *past) or row.id in damaged or bool(row.problem)
            packs = {} if row.problem else dict.fromkeys(row.packs, 2 * len(CONTENTS))
            # What cannot be read does not say when it was made; then only its id does.
            time = parse_snapshot_time(row.id) if row.problem else row.time
            self.rows.append(replace(row, time=time, beside=beside, bytes=size, packs=packs))
        if head:
            times = {row.id: row.time for row in rows}
            await put_head(store, MEMORY, [(id, times[id]) for id in (head, *past)])
        await put_packs(store, MEMORY, [f"left{number}" for number in range(chance.randrange(3))])
        for pack in await packs_in(store, MEMORY):
            if chance.random() < 0.2:
                await store.put(keys.mark(pack), f"{chance.choice([*State])} 0".encode())
        self.unreadable = any(row.problem for row in self.rows)

    async def check(self, grace: float) -> None:
        """Forget, look; wait, forget again, look again."""
        before = await packs_in(self.store, MEMORY)
        expected = model.kept(self.rows, self.rules, NOW)
        retention = Retention(
            **{name: getattr(self.rules, name) for name in RetentionRules.__dataclass_fields__}, grace=f"{grace}s"
        )
        for wait in (30 * HOUR, 0.0, 30 * HOUR, 30 * HOUR):
            self.store.now += wait
            await forgetting.forget(self.repository, MEMORY, retention)
            there = set(await self.repository.list_snapshot_ids(MEMORY))
            assert there == expected
            needed = {pack for row in self.rows if row.id in there for pack in row.packs}
            assert needed <= await packs_in(self.store, MEMORY)
            if self.unreadable:
                assert await packs_in(self.store, MEMORY) == before
        if not self.unreadable:
            assert await packs_in(self.store, MEMORY) == needed
        pins = {row.id for row in self.rows if row.pinned}
        assert await self.repository.pinned(MEMORY) == pins <= there


@pytest.mark.parametrize(
    ("first", "count"),
    [(0, QUICK), *(pytest.param(n, AT_ONCE, marks=pytest.mark.slow) for n in range(QUICK, STATES, AT_ONCE))],
)
def test_nothing_that_is_needed_goes_and_nothing_else_stays(
    first: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgetting, "datetime", Frozen)

    async def all_of_them() -> None:
        for seed in range(first, first + count):
            world = World(seed)
            await world.write()
            try:
                await world.check(world.chance.choice((0, HOUR, 24 * HOUR)))
            except AssertionError as problem:
                raise AssertionError(f"seed {seed}: {problem}") from problem

    asyncio.run(all_of_them())


@pytest.mark.parametrize("seeds", [range(QUICK), pytest.param(range(QUICK, 1_000), marks=pytest.mark.slow)], ids=str)
def test_the_light_way_after_an_export_forgets_the_same(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgetting, "datetime", Frozen)

    async def all_of_them() -> None:
        for seed in seeds:
            world = World(seed)
            await world.write()
            if not any(row.is_head for row in world.rows):
                continue
            expected = model.kept(world.rows, world.rules, NOW)
            await forgetting.forget_lightly(world.repository, MEMORY, world.rules.policy())
            there = set(await world.repository.list_snapshot_ids(MEMORY))
            # It does not look at what it keeps, and so cannot know which of those cannot be read, nor of one that never was
            # the head that its id is ahead of it.
            ahead = {row.id for row in world.rows if row.beside and row.time < parse_snapshot_time(row.id)}
            assert there - ahead == expected - ahead or world.unreadable, seed
            assert expected <= there or world.unreadable, seed
            assert {row.id for row in world.rows if row.is_head or row.pinned or row.problem} <= there, seed

    asyncio.run(all_of_them())
