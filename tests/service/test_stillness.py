"""A sandbox in which nothing changed is not exported again; whatever else could make an export do something is noticed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from adapters.sandboxes import stamps
from adapters.sandboxes.local import LocalSandbox, open_local
from sidecar.engine import ExportRequest, RestoreRequest, export, restore
from sidecar.ids import MemoryKeys
from sidecar.receipts import ExportOutcome, ExportReceipt
from sidecar.service.attachments import stillness
from sidecar.service.attachments.attachment import CareOptions
from sidecar.service.attachments.checkpoints import CHECKPOINT
from sidecar.service.attachments.keeper import Keeper
from sidecar.service.attachments.leases import LeaseLost
from sidecar.service.attachments.schedule import GONE
from sidecar.service.core import Sidecar
from sidecar.service.jobs.scheduler import Jobs
from sidecar.service.settings import Service
from tests.parts.homes import empty_home, engine_at, write

pytestmark = pytest.mark.usefixtures("forked_programs")

TICK = 0.15


class Scene:
    """A service in this process, and a home that it looks after."""

    def __init__(self, tmp_path: Path) -> None:
        self.store = tmp_path / "store"
        self.engine = engine_at(self.store)
        self.home = empty_home(tmp_path / "home")
        write(self.home / "MEMORY.md", b"# It begins\n")
        self.place = ("m", f"local:{self.home}")
        self.commands = 0
        self.keeper = Keeper(Sidecar(self.engine, Service(lease=60)), Jobs())

    async def checkpoint(self) -> ExportReceipt:
        await asyncio.sleep(2 * TICK)  # what just changed has no stamp
        return await self.keeper.save(self.place, CHECKPOINT)

    async def asks(self, expect: ExportOutcome = ExportOutcome.UNCHANGED) -> bool:
        """Whether a checkpoint, which ends as expected, ran anything in the sandbox."""
        before = self.commands
        receipt = await self.checkpoint()
        assert receipt.outcome is expect, receipt
        return self.commands > before


@pytest.fixture
async def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    """It is at rest: its checkpoints need no command any more."""
    monkeypatch.setattr(stamps, "TICK_NS", int(TICK * 1e9))
    scene, run = Scene(tmp_path), LocalSandbox.run

    async def counted(self: LocalSandbox, command: str, **how: Any) -> Any:
        scene.commands += 1
        return await run(self, command, **how)

    monkeypatch.setattr(LocalSandbox, "run", counted)
    await scene.keeper.lease.renew()
    await scene.keeper.look_after(scene.place, CareOptions(lasting=True))
    assert await scene.asks(ExportOutcome.COMMITTED)
    for _ in range(3):
        await scene.checkpoint()
    assert not await scene.asks()
    yield scene


async def test_a_sandbox_at_rest_is_saved_again_and_again_without_a_command(scene: Scene) -> None:
    before = scene.keeper.looked_after[0].saved
    receipt = await scene.checkpoint()
    assert receipt.is_saved and receipt.round_trips == 0 and receipt.files == 1
    stored = await scene.keeper.find(*scene.place)
    assert stored.saved > before


async def test_a_change_is_exported(scene: Scene) -> None:
    status = (scene.home / "MEMORY.md").stat()
    write(scene.home / "MEMORY.md", b"# It BEGINS\n")
    os.utime(scene.home / "MEMORY.md", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert await scene.asks(ExportOutcome.COMMITTED)


async def test_a_project_elsewhere_is_looked_at_too(scene: Scene, tmp_path: Path) -> None:
    project = tmp_path / "project"
    write(project / "MEMORY.md", b"# A project\n")
    await scene.keeper.look_after(scene.place, CareOptions(lasting=True, projects=[str(scene.home), str(project)]))
    assert await scene.asks(ExportOutcome.COMMITTED)
    for _ in range(3):
        await scene.checkpoint()
    assert not await scene.asks()
    write(project / "MEMORY.md", b"# Another\n")
    assert await scene.asks(ExportOutcome.COMMITTED)


async def test_a_head_that_was_moved_is_noticed(scene: Scene, tmp_path: Path) -> None:
    other = empty_home(tmp_path / "other")
    await restore(scene.engine, open_local(str(other)), RestoreRequest(memory="m"))
    write(other / "MEMORY.md", b"# Theirs\n")
    theirs = await export(scene.engine, open_local(str(other)), ExportRequest(memory="m"))
    assert theirs.outcome is ExportOutcome.COMMITTED
    receipt = await scene.checkpoint()
    assert not receipt.is_saved and receipt.head == theirs.snapshot
    assert scene.keeper.looked_after[0].problem_code == "behind"


async def test_a_head_that_lost_its_pack_is_stored_again(scene: Scene) -> None:
    packs = scene.store / MemoryKeys.of("m").packs
    for pack in packs.iterdir():
        pack.unlink()
    assert await scene.asks(ExportOutcome.COMMITTED)


async def test_a_snapshot_that_is_marked_as_damaged_is_stored_again(scene: Scene) -> None:
    snapshot = scene.keeper.looked_after[0].snapshot
    await scene.engine.repository.store.put(MemoryKeys.of("m").damage(snapshot), b"It is damaged.")
    assert await scene.asks(ExportOutcome.COMMITTED)


async def test_a_sandbox_that_is_gone_is_noticed(scene: Scene) -> None:
    (scene.home / "MEMORY.md").unlink()
    for place in sorted(scene.home.rglob("*"), reverse=True):
        place.rmdir() if place.is_dir() else place.unlink()
    scene.home.rmdir()
    with pytest.raises(GONE):
        await scene.checkpoint()


async def test_a_service_without_its_lease_says_nothing(scene: Scene) -> None:
    scene.keeper.lease._renewed = float("-inf")
    with pytest.raises(LeaseLost):
        await scene.checkpoint()


async def test_what_another_service_took_over_is_not_said_to_be_saved(scene: Scene) -> None:
    held = await scene.keeper._attachments.find(*scene.place)
    assert held is not None
    taken = await scene.keeper._attachments.take(held, "another")
    await scene.checkpoint()
    stored = await scene.keeper._attachments.find(*scene.place)
    assert stored is not None and stored.version == taken.version
    assert not scene.keeper.looked_after


async def test_after_a_while_it_is_exported_all_the_same(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stillness, "TRUSTED_SECONDS", 0.0)
    assert await scene.asks()
