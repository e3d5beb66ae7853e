"""Attachments of several services on one store: none is lost between two keys, and many are no trouble for callers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.audit.trail import Trail
from sidecar.ids import build_attachment_key
from sidecar.receipts import ExportReceipt
from sidecar.service.attachments import schedule
from sidecar.service.attachments.attachment import Attachment, Attachments, CareOptions, format_now
from sidecar.service.attachments.keeper import Keeper
from sidecar.service.core import Sidecar
from sidecar.service.events import Events
from sidecar.service.jobs.scheduler import Jobs
from sidecar.service.operations import Operation, Operations, TooBusy
from sidecar.service.settings import Service
from tests.parts.homes import empty_home, engine_at, write

pytestmark = pytest.mark.usefixtures("forked_programs")


def keeper_at(store: Path) -> Keeper:
    return Keeper(Sidecar(engine_at(store), Service()), Jobs())


async def test_one_on_its_way_from_one_key_to_another_is_not_removed_by_another_service(tmp_path: Path) -> None:
    ours, theirs = keeper_at(tmp_path / "store"), keeper_at(tmp_path / "store")
    await ours.renew_and_look_around()
    attached = await ours.look_after(("me", "local:/ours"), CareOptions(lasting=True))
    rows = Attachments(engine_at(tmp_path / "store").repository.store)
    held = await rows.find(*attached.place)
    assert held is not None
    # Half of a move: it is under both keys, and the next thing that happens is that the first is removed.
    await rows.add(replace(attached, lasting=False))
    await theirs.renew_and_look_around()
    await rows.remove(held)
    assert [one.place for one in await theirs.find_all()] == [attached.place]


async def test_one_under_two_keys_is_under_one_again_once_its_owner_looks_around(tmp_path: Path) -> None:
    keeper = keeper_at(tmp_path / "store")
    attached = await keeper.look_after(("me", "local:/ours"), CareOptions(lasting=True))
    rows = Attachments(engine_at(tmp_path / "store").repository.store)
    await rows.add(replace(attached, lasting=False))
    await keeper.renew_and_look_around()
    assert not list((tmp_path / "store/conversations").glob("[!.]*"))
    assert (tmp_path / "store" / build_attachment_key("me")).exists()
    assert [one.place for one in keeper.attachments] == [attached.place]


async def test_one_that_is_opened_again_is_not_forgotten_though_it_was_to_be(tmp_path: Path) -> None:
    rows = Attachments(engine_at(tmp_path / "store").repository.store)
    long_ago = "2026-01-01T00:00:00.000+00:00"
    idle = await rows.add(
        Attachment(memory="me", sandbox="local:/it", lasting=False, state="idle", attached=long_ago, changed=long_ago)
    )
    opened = await rows.write(replace(idle.attachment, state="open", changed=format_now()), idle)
    assert not await rows.remove_if_same(idle)
    assert await rows.remove_if_same(opened)


async def test_many_that_nobody_looks_after_are_all_taken_over(
    tmp_path: Path,
) -> None:
    engine = engine_at(tmp_path / "store")
    rows = Attachments(engine.repository.store)
    for number in range(60):
        await rows.add(
            Attachment(memory=f"m{number}", sandbox="local:/it", lasting=False, owner="dead", attached=format_now())
        )
    keeper = keeper_at(tmp_path / "store")
    await keeper.renew_and_look_around()
    assert len(keeper.looked_after) == 60
    assert {one.owner for one in await keeper.find_all()} == {keeper.lease.instance}


async def test_what_the_service_does_of_itself_does_not_refuse_callers() -> None:
    operations, go = Operations(Events(), Trail(), concurrency=1, queue=1), asyncio.Event()

    async def work(operation: Operation) -> ExportReceipt:
        await go.wait()
        raise AssertionError

    for number in range(10):
        operations.start(Operation("export", f"ours{number}", "local:/it"), work, ours=True)
    for number in range(2):
        operations.start(Operation("export", f"theirs{number}", "local:/it"), work)
    with pytest.raises(TooBusy):
        operations.start(Operation("export", "one more", "local:/it"), work)
    go.set()
    assert await operations.drain(30) == []


async def test_an_export_that_failed_for_the_moment_is_tried_again_before_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that was held up when it took over could not say that it lives; the next checkpoint is an hour away."""
    monkeypatch.setattr(schedule, "RETRY_SECONDS", 0.05)
    home, jobs = empty_home(tmp_path / "home"), Jobs()
    write(home / "MEMORY.md", b"# remembered\n")
    engine = engine_at(tmp_path / "store")
    keeper = Keeper(Sidecar(engine, Service()), jobs)
    place = ("me", f"local:{home}")
    await keeper.look_after(place, CareOptions(checkpoint_every=3600))
    jobs.start()
    try:
        keeper._schedule.export_soon(place)  # the lease was never renewed
        while not [one for one in keeper._sidecar.operations._known.values() if one.state == "failed"]:
            await asyncio.sleep(0.02)
        assert await engine.repository.list_snapshot_ids("me") == []
        await keeper.lease.renew()
        async with asyncio.timeout(30):
            while not await engine.repository.list_snapshot_ids("me"):
                await asyncio.sleep(0.02)
    finally:
        jobs.stop()
