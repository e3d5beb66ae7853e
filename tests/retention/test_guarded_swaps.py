"""Exports that leave it to the swap of the head to find out what was collected, beside collectors without a grace period, in
thousands of random orders: the head never names a pack that is not there."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from sidecar.engine import Engine
from sidecar.engine.exports.commit import PlannedPacks, advance_head, commit
from sidecar.errors import BaseCollected, SidecarError, SnapshotDamaged, SnapshotNotFound
from sidecar.format.index import Index
from sidecar.ids import MemoryKeys, make_snapshot_id
from sidecar.policy.retention import Retention
from sidecar.ports import ObjectInfo, StoredObject
from sidecar.receipts import ExportOutcome
from sidecar.store.fold import PackFile
from sidecar.store.garbage import collect
from sidecar.store.manifest import Head, Manifest
from sidecar.store.marks import hold_packs
from sidecar.store.repository import Repository
from sidecar.store.retention import forget
from tests.parts.memory_store import MemoryStore
from tests.retention.stores import CONTENTS, manifest_of, packs_of

MEMORY, KEYS = "m", MemoryKeys.of("m")
QUICK, MANY = 60, 3_000
EXPORTS = 5
TICK = 1_000.0
"""Seconds between two writes: more than clocks may differ, so that only the order counts."""


class Racing(MemoryStore):
    """A store in which others get their turn before and after each request. It knows what the head needs."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(time.time())
        self.chance, self.made = chance, dict[str, Manifest]()
        self.lost: list[str] = []

    async def _turn(self) -> None:
        for _ in range(self.chance.choice((0, 0, 1, 1, 2, 5, 20))):
            await asyncio.sleep(0)

    def _check(self, what: str) -> None:
        """Whatever is done: what the head needs is there."""
        held = self.objects.get(KEYS.head)
        if held is not None:
            manifest = self.made[Head.decode(held[0], MEMORY).snapshot]
            for pack in manifest.packs:
                if KEYS.pack(pack.id, "gz") not in self.objects or KEYS.index(pack.id) not in self.objects:
                    self.lost.append(f"{what}: {pack.id} of {manifest.snapshot}")

    async def get(self, key: str) -> StoredObject | None:
        await self._turn()
        found = await super().get(key)
        await self._turn()
        return found

    async def put(self, key: str, source: bytes | Path) -> int:
        await self._turn()
        self.now += TICK
        size = await super().put(key, source)
        self._check(f"put {key}")
        await self._turn()
        return size

    async def swap(self, key: str, data: bytes, *, expected: str | None) -> str:
        await self._turn()
        try:
            found = self.objects.get(key)
            if (found[2] if found else None) == expected:
                self.now += TICK
                self.objects[key] = data, self.now, next(self._versions)
                self._check(f"swap {key}")
                return self.objects[key][2]
            return await super().swap(key, data, expected=expected)
        finally:
            await self._turn()

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        await self._turn()
        found = [info async for info in super().list(prefix)]
        await self._turn()
        for info in found:
            yield info

    async def delete(self, keys: Iterable[str]) -> None:
        for key in [*keys]:
            await self._turn()
            self.objects.pop(key, None)
            self._check(f"delete {key}")


class World:
    """A memory with a head, two who export and two who collect."""

    def __init__(self, seed: int, place: Path) -> None:
        self.chance = random.Random(seed)
        self.store = Racing(self.chance)
        self.place = place
        self.names = map("{:024x}".format, itertools.count())
        self.committed = self.guarded = self.collected = 0

    def plan(self, snapshot: str, below: Iterable[str], generation: int) -> tuple[Manifest, PlannedPacks]:
        names = [*below, next(self.names)]
        manifest = replace(manifest_of(MEMORY, snapshot, datetime.now(UTC), names), generation=generation)
        self.store.made[snapshot] = manifest
        file = PackFile(self.place, "gz", Index(kind="delta", changes=[], gone=[]))
        return manifest, PlannedPacks(packs_of(names), file, CONTENTS)

    async def begin(self) -> None:
        repository = Repository(self.store)
        manifest, packs = self.plan(make_snapshot_id(datetime.now(UTC)), [], 0)
        for key in (KEYS.pack(packs.packs[0].id, "gz"), KEYS.index(packs.packs[0].id)):
            await self.store.put(key, CONTENTS)
        await repository.commit(manifest)
        await repository.move_head(await repository.head(MEMORY), manifest)

    async def export(self) -> None:
        """One export, as its steps are: read the head and its manifest, store, commit, swap."""
        engine = Engine(open_sandbox=_open_none, repository=Repository(self.store))
        state = await engine.repository.head(MEMORY)
        assert state.head is not None
        try:
            base = await engine.repository.manifest(MEMORY, state.snapshot)
        except (SnapshotNotFound, SnapshotDamaged):
            return  # it was replaced and forgotten meanwhile
        below = [pack.id for pack in base.packs][: self.chance.choice((0, 1, 3, 8))]
        new = make_snapshot_id(datetime.now(UTC), state.head.newest)
        manifest, packs = self.plan(new, below, state.head.generation + 1)
        checked: Any = SimpleNamespace(base=base, read=time.monotonic())
        try:
            manifest, _, guarded = await commit(engine, manifest, packs, checked, state.head)
            outcome, _ = await advance_head(engine, manifest, state, moves=True, guarded=guarded)
            if outcome is not ExportOutcome.COMMITTED:
                await hold_packs(self.store, manifest)
        except BaseCollected:
            await self.store.delete([KEYS.snapshot(manifest.snapshot)])
            return
        self.committed += outcome is ExportOutcome.COMMITTED
        self.guarded += guarded

    async def tidy(self) -> None:
        """What another process does, with other settings than who exports."""
        repository = Repository(self.store)
        rules: dict[str, Any] = self.chance.choice(({"keep_last": 1}, {"keep_last": 2}, {"memory_bytes": 300}, {}))
        with suppress(SidecarError):
            if rules:
                done = await forget(repository, MEMORY, Retention(grace="0s", **rules))
                self.collected += done.collected.objects
            else:
                self.collected += (await collect(repository, MEMORY, grace=0)).objects

    async def run(self) -> None:
        await self.begin()

        async def repeat(what: Any) -> None:
            for _ in range(EXPORTS):
                await what()

        await asyncio.gather(*map(repeat, (self.export, self.export, self.tidy, self.tidy)))


def _open_none(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("no sandbox is needed")


@pytest.mark.parametrize("seeds", [range(QUICK), pytest.param(range(QUICK, MANY), marks=pytest.mark.slow)], ids=str)
def test_the_head_never_names_a_pack_that_is_not_there(seeds: range, tmp_path: Path) -> None:
    place = tmp_path / "pack"
    place.write_bytes(CONTENTS)
    committed = guarded = collected = 0
    for seed in seeds:
        world = World(seed, place)
        asyncio.run(world.run())
        assert not world.store.lost, (seed, world.store.lost)
        committed, guarded = committed + world.committed, guarded + world.guarded
        collected += world.collected
    assert min(committed, guarded, collected) > len(seeds), "nothing raced"
