"""When a service looks at what can be searched, and what it makes of trouble: with a scripted index, and no database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from prometheus_client import CollectorRegistry

from sidecar.errors import SearchUnreachable
from sidecar.search.upkeep import IndexResult
from sidecar.service.events import Events
from sidecar.service.jobs.index import IndexMetrics, IndexUpdater

pytestmark = pytest.mark.usefixtures("forked_programs")


class Scripted:
    """An index that notes what it is asked, and does as told."""

    embedded = False
    caught_up: asyncio.Event | None = None

    def __init__(self) -> None:
        self.in_use = asyncio.Event()
        self.begun = False
        self.looks = 0
        self.asked: list[str] = []
        self.behind_now: list[str] = []
        self.down = False
        self.problem = ""
        self.retryable = False
        self.broken: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()

    async def is_begun(self) -> bool:
        return self.begun

    async def behind(self) -> list[str]:
        self.looks += 1
        if self.down:
            raise SearchUnreachable("away")
        return self.behind_now

    async def catch_up(self, memories: Sequence[str]) -> AsyncIterator[IndexResult]:
        for memory in memories:
            if self.down:
                raise SearchUnreachable("away")
            self.asked.append(memory)
            await self.gate.wait()
            if memory in self.broken:
                raise RuntimeError("a mistake")
            state = "failed" if self.problem else "written"
            yield IndexResult(memory=memory, state=state, problem=self.problem, retryable=self.retryable)


class Watch:
    def __init__(self, every: float = 3600.0, index: Scripted | None = None) -> None:
        self.index, self.events, self.types = index or Scripted(), Events(), []  # type: ignore[var-annotated]
        self.events.subscribe(lambda event: self.types.append(event.type))
        self.registry = CollectorRegistry()
        self.indexing = IndexUpdater(self.index, self.events, IndexMetrics(self.registry), every)  # type: ignore[arg-type]
        self.indexing.start()

    def figure(self, name: str) -> float:
        return self.registry.get_sample_value(f"memory_sidecar_index_{name}") or 0.0


async def until(true: object) -> None:
    async with asyncio.timeout(10):
        while not true():  # type: ignore[operator]
            await asyncio.sleep(0.005)


async def test_everything_is_looked_at_first_and_then_what_is_told() -> None:
    watch = Watch()
    watch.index.behind_now = ["a", "b"]
    await until(lambda: watch.index.asked == ["a", "b"])
    watch.events.publish("export.committed", memory="c")
    watch.events.publish("export.unchanged", memory="d")
    watch.events.publish("retention.forgot", memory="f")
    watch.indexing.update_soon("e")
    await until(lambda: watch.index.asked == ["a", "b", "c", "f", "e"])
    assert watch.index.looks == 1
    await until(lambda: watch.figure("behind") == 0)
    await watch.indexing.close(1)


async def test_what_changes_while_it_is_read_is_read_again() -> None:
    watch = Watch()
    await until(lambda: watch.index.looks == 1)
    watch.index.gate.clear()
    watch.indexing.update_soon("a")
    await until(lambda: watch.index.asked == ["a"])
    watch.indexing.update_soon("a")
    assert watch.figure("behind") == 1
    watch.index.gate.set()
    await until(lambda: watch.index.asked == ["a", "a"])
    await watch.indexing.close(1)


async def test_trouble_is_told_once_and_everything_is_looked_at_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.service.jobs.index.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("sidecar.service.jobs.index.LONGEST_PAUSE", 0.02)
    watch = Watch()
    watch.index.down = True
    await until(lambda: watch.figure("failures_total") >= 3)
    watch.indexing.update_soon("a")
    watch.index.behind_now = ["a", "b"]
    watch.index.down = False
    await until(lambda: set(watch.index.asked) >= {"a", "b"})
    await until(lambda: "index.recovered" in watch.types)
    assert watch.types.count("index.down") == watch.types.count("index.recovered") == 1
    await watch.indexing.close(1)


async def test_a_memory_that_cannot_be_read_is_told_of_once() -> None:
    watch = Watch(every=1.0)
    watch.index.problem = "damaged"
    watch.index.behind_now = ["a"]
    await until(lambda: watch.index.looks == 2)
    assert watch.types.count("index.incomplete") == 1 and "index.down" not in watch.types
    await watch.indexing.close(1)


async def test_a_memory_that_failed_is_behind_until_it_goes_well() -> None:
    watch = Watch(every=0.2)
    watch.index.problem = "damaged"
    watch.index.behind_now = ["a"]
    await until(lambda: watch.index.looks >= 2 and watch.index.asked)
    watch.indexing.update_soon("b")
    await until(lambda: "b" in watch.index.asked)
    await until(lambda: watch.figure("behind") >= 1)
    assert watch.figure("last_success_timestamp_seconds") == 0
    watch.index.problem, watch.index.behind_now = "", []
    await until(lambda: watch.figure("behind") == 0 and watch.figure("last_success_timestamp_seconds"))
    await watch.indexing.close(1)


async def test_what_may_go_well_in_a_moment_is_tried_again_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.service.jobs.index.LONGEST_PAUSE", 0.02)
    watch = Watch()
    watch.index.problem, watch.index.retryable = "busy", True
    watch.index.behind_now = ["a"]
    await until(lambda: watch.index.looks >= 3)
    assert "index.down" not in watch.types
    await watch.indexing.close(1)


async def test_a_mistake_with_one_memory_keeps_no_other_from_its_turn() -> None:
    watch = Watch()
    watch.index.broken = {"a"}
    watch.index.behind_now = ["a", "b"]
    await until(lambda: watch.index.asked == ["a", "b"])
    await until(lambda: watch.figure("behind") == 1)
    assert watch.types == ["index.incomplete", "index.updated"]
    await watch.indexing.close(1)


async def test_at_the_end_what_was_just_told_is_still_done_and_trouble_is_not_waited_for() -> None:
    watch = Watch()
    await until(lambda: watch.index.looks == 1)
    watch.indexing.update_soon("a")
    await watch.indexing.close(5)
    assert watch.index.asked == ["a"]
    watch = Watch()
    watch.index.down = True
    await until(lambda: watch.figure("failures_total") == 1)
    watch.indexing.update_soon("a")
    async with asyncio.timeout(2):
        await watch.indexing.close(60)
    assert watch.index.asked == []


async def test_an_index_on_this_machine_waits_for_its_first_search() -> None:
    index = Scripted()
    index.embedded = True
    watch = Watch(index=index)
    watch.index.behind_now = ["a"]
    watch.events.publish("export.committed", memory="b")
    await asyncio.sleep(0.1)
    assert (index.looks, index.asked) == (0, [])
    assert index.caught_up is not None and not index.caught_up.is_set()
    index.in_use.set()
    await until(lambda: set(index.asked) == {"a", "b"})
    await until(index.caught_up.is_set)
    await watch.indexing.close(5)


async def test_an_index_that_was_searched_before_is_kept_from_the_start() -> None:
    index = Scripted()
    index.embedded = index.begun = True
    index.behind_now = ["a"]
    watch = Watch(index=index)
    await until(lambda: index.asked == ["a"])
    await watch.indexing.close(5)


async def test_who_never_searched_does_not_wait_at_the_end() -> None:
    index = Scripted()
    index.embedded = True
    watch = Watch(index=index)
    watch.events.publish("export.committed", memory="b")
    async with asyncio.timeout(5):
        await watch.indexing.close(60)
    assert index.asked == []
