"""Every change of a memory is told in one place: to listeners, webhooks, metrics and search alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.engine import ExportRequest
from sidecar.engine.archives.tarballs import download
from sidecar.engine.reviews import Word
from sidecar.policy.retention import Retention
from sidecar.search.upkeep import IndexResult
from sidecar.service.attachments.keeper import Keeper
from sidecar.service.core import Sidecar
from sidecar.service.jobs.index import IndexMetrics, IndexUpdater
from sidecar.service.jobs.scheduler import Jobs
from sidecar.service.sandboxes import SandboxTarget
from sidecar.service.settings import Service
from tests.parts.homes import empty_home, engine_at
from tests.parts.memories import grow, plain_home

pytestmark = pytest.mark.usefixtures("forked_programs")


class Asked:
    """An index that notes which memories it is asked to bring up to date."""

    embedded = False

    def __init__(self) -> None:
        self.memories: list[str] = []

    async def behind(self) -> list[str]:
        return []

    async def catch_up(self, memories: Sequence[str]) -> AsyncIterator[IndexResult]:
        for memory in memories:
            self.memories.append(memory)
            yield IndexResult(memory=memory, state="current")


class Told:
    """A service, and what was told since it was last asked: the events, and what search was asked to look at."""

    def __init__(self, store: Path) -> None:
        self.sidecar = Sidecar(engine_at(store), Service())
        Keeper(self.sidecar, Jobs())
        self._events: list[tuple[str, str]] = []
        self.sidecar.events.subscribe(lambda event: self._events.append((event.type, event.memory)))
        self._index = Asked()
        metrics = IndexMetrics(self.sidecar.metrics.registry)
        self._updater = IndexUpdater(self._index, self.sidecar.events, metrics, 3600.0)  # type: ignore[arg-type]
        self._updater.start()

    async def since(self) -> tuple[list[tuple[str, str]], list[str]]:
        async with asyncio.timeout(10):
            await self._updater._rest.wait()
        events, memories = self._events[:], self._index.memories[:]
        self._events.clear()
        self._index.memories.clear()
        return events, memories

    def metrics(self) -> str:
        return self.sidecar.metrics.text(running=0, waiting=0, attached=0, at_risk=0).decode()


async def test_every_change_is_told_to_all_who_have_to_know(tmp_path: Path) -> None:
    home, archive = plain_home(empty_home(tmp_path / "home")), tmp_path / "home.tar.gz"
    told = Told(tmp_path / "store")
    sidecar = told.sidecar
    await asyncio.sleep(0)

    async def export(**how: bool) -> str:
        grow(home)
        request = ExportRequest(memory="me", **how)  # type: ignore[arg-type]
        operation = await sidecar.start_export(request, SandboxTarget(f"local:{home}"))
        return (await operation.result()).snapshot or ""

    first = await export()
    assert await told.since() == ([("export.committed", "me")], ["me"])
    beside = await export(beside=True)
    assert await told.since() == ([("export.diverged", "me")], [])
    await sidecar.accept("me", beside, Word(by="kim"))
    assert await told.since() == ([("guard.accepted", "me")], ["me"])
    await sidecar.rollback("me", first)
    assert await told.since() == ([("memory.rolled-back", "me")], ["me"])
    await sidecar.fork("me", "new", "latest")
    assert await told.since() == ([("memory.forked", "new")], ["new"])
    with archive.open("w+b") as file:
        await download(sidecar.engine, "me", beside, file, "gz")
    await sidecar.start_import(archive, ExportRequest(memory="me")).result()
    assert await told.since() == ([("export.committed", "me")], ["me"])
    sidecar.engine = replace(sidecar.engine, retention=Retention(keep_last=1))
    assert (await sidecar.forget("me", dry_run=True)).forgotten == 1 and await told.since() == ([], [])
    await sidecar.forget("me", dry_run=False)
    assert await told.since() == ([("retention.forgot", "me")], [])
    assert "memory_sidecar_snapshots_forgotten_total 1.0" in told.metrics()
    assert 'memories_by_age{up_to="+Inf"} 1.0' in told.metrics()
    await sidecar.delete("me")
    assert await told.since() == ([("memory.deleted", "me")], ["me"])
    assert 'memories_by_age{up_to="+Inf"} 0.0' in told.metrics()
    await told._updater.close(1)
