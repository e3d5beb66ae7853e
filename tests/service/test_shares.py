"""Several services on one store share the sandboxes that are looked after."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.service.attachments.attachment import CareOptions, StoredAttachment, format_now
from sidecar.service.attachments.checkpoints import TakenOver
from sidecar.service.attachments.keeper import Keeper, compute_share
from sidecar.service.attachments.transitions import apply_problem
from sidecar.service.attachments.trouble import SaveProblem
from sidecar.service.core import Sidecar
from sidecar.service.jobs.scheduler import Jobs
from sidecar.service.settings import Service
from tests.parts.homes import empty_home, engine_at, write

pytestmark = pytest.mark.usefixtures("forked_programs")

COUNT = 60
LEASE = 2.0
SNAPSHOT = "20260101T000000000Z-00000000"


def keeper_at(store: Path) -> Keeper:
    return Keeper(Sidecar(engine_at(store), Service(lease=LEASE)), Jobs())


async def attach(keeper: Keeper, count: int) -> None:
    for number in range(count):
        place = (f"m{number}", f"local:/sandbox{number}")
        await keeper.look_after(place, CareOptions(lasting=True))
        # As after an export: only what was saved is handed over.
        await keeper._ledger.note(place, lambda one: replace(one, saved=format_now(), snapshot=SNAPSHOT))


def owned(*keepers: Keeper) -> Counter[str]:
    return Counter(place[0] for keeper in keepers for place in (one.place for one in keeper.looked_after))


async def look(*keepers: Keeper) -> None:
    await asyncio.gather(*(keeper.renew_and_look_around() for keeper in keepers))


def are_even(*keepers: Keeper) -> bool:
    share = compute_share(COUNT, len(keepers))
    return all(abs(len(keeper.looked_after) - share) <= max(1, share * 0.2) for keeper in keepers)


def have_all(*keepers: Keeper) -> bool:
    counts = owned(*keepers)
    return len(counts) == COUNT and set(counts.values()) == {1}


async def settle(*keepers: Keeper) -> None:
    """Let them look until they share evenly."""
    deadline = time.monotonic() + 60
    while not (have_all(*keepers) and are_even(*keepers)):
        assert time.monotonic() < deadline, [len(keeper.looked_after) for keeper in keepers]
        await look(*keepers)


async def test_services_that_come_get_their_share_and_those_that_die_lose_it(tmp_path: Path) -> None:
    first, second, third = (keeper_at(tmp_path / "store") for _ in range(3))
    await look(first)
    await attach(first, COUNT)
    await settle(first, second)
    await settle(first, second, third)
    # The second is killed: it says nothing any more, and still believes in what it has.
    killed = time.monotonic()
    while not (have_all(first, third) and are_even(first, third)):
        assert time.monotonic() - killed < 60
        await look(first, third)
        await asyncio.sleep(LEASE / 10)
    # A fourth comes and leaves in order.
    fourth = keeper_at(tmp_path / "store")
    await settle(first, third, fourth)
    await fourth._let_go(set(), with_callers=False)
    await fourth.lease.release()
    await settle(first, third)


async def test_few_stay_where_they_are(tmp_path: Path) -> None:
    first, second = keeper_at(tmp_path / "store"), keeper_at(tmp_path / "store")
    await look(first)
    await attach(first, 3)
    for _ in range(4):
        await look(first, second)
    assert (len(first.looked_after), len(second.looked_after)) == (3, 0)


async def test_what_is_not_saved_is_not_handed_over(tmp_path: Path) -> None:
    first, second = keeper_at(tmp_path / "store"), keeper_at(tmp_path / "store")
    await look(first)
    await attach(first, 10)
    for one in first.looked_after:
        await first._ledger.note(
            one.place, lambda row: apply_problem(row, SaveProblem("export-failed", "It failed.", ""))
        )
    for _ in range(4):
        await look(first, second)
    assert len(first.looked_after) == 10


async def test_an_export_that_runs_while_its_sandbox_is_handed_over_moves_no_head(tmp_path: Path) -> None:
    keeper = keeper_at(tmp_path / "store")
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"# Memory\n")
    place = ("m", f"local:{home}")
    await look(keeper)
    await keeper.look_after(place, CareOptions(lasting=True))
    attachment = keeper.looked_after[0]
    assert await keeper._ledger.release(place)
    with pytest.raises(TakenOver):
        await keeper._saving._check_ours(attachment)


async def test_what_others_note_at_checkpoints_is_read_when_asked_for_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = keeper_at(tmp_path / "store"), keeper_at(tmp_path / "store")
    await look(first)
    await attach(first, 3)
    await look(first, second)
    read: list[str] = []
    reading = second._attachments._read

    async def counted(key: str) -> StoredAttachment | None:
        read.append(key)
        return await reading(key)

    monkeypatch.setattr(second._attachments, "_read", counted)
    saved = format_now()
    for one in first.looked_after:
        await first._ledger.note(one.place, lambda row: replace(row, saved=saved))
    await look(second)
    assert not read
    assert {one.saved for one in await second.find_all()} == {saved}
    # One that is let go is seen at once.
    gone = first.looked_after[0].place
    assert await first._ledger.release(gone)
    await look(second)
    assert [one.place for one in second.looked_after] == [gone]


async def test_what_a_service_that_died_had_is_read_before_it_is_taken(tmp_path: Path) -> None:
    first, second, third = (keeper_at(tmp_path / "store") for _ in range(3))
    await look(first)
    await attach(first, 1)
    await look(first, second, third)
    place = first.looked_after[0].place
    # It goes from the first to the third, and the object keeps its size: the second need not notice.
    held = first._ledger.held(place)
    assert held is not None
    await third._attachments.take(held, third.lease.instance)
    await first.lease.release()
    await look(second)
    assert not second.looked_after
    await third.lease.release()
    for _ in range(2):
        await look(second)
    assert [one.place for one in second.looked_after] == [place]
