"""Listing finds what is new and what is gone with bounded requests, and of several services one lists."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sidecar.errors import MemoryNotWatched, SandboxDenied, SwapLost
from sidecar.ids import NOTICED
from sidecar.ports import RUNNING, ListedSandbox, SandboxPage
from sidecar.service.attachments.keeper import Keeper
from sidecar.service.attachments.leases import Lease
from sidecar.service.core import Sidecar
from sidecar.service.jobs.scheduler import Jobs
from sidecar.service.settings import Service, Watch
from sidecar.service.starts import Starts
from sidecar.service.watch import listing, watch
from sidecar.service.watch.listing import Listing
from sidecar.service.watch.records import ATTACHED, ListingClaim, Notice, Notices, Writers
from sidecar.service.watch.selection import find_memory
from sidecar.service.watch.watch import Watcher
from tests.parts.homes import engine_at


class Account:
    """A provider with many sandboxes, of which it lists so many with each request."""

    def __init__(self, count: int = 0, page: int = 100) -> None:
        self.sandboxes = [self._make(number) for number in range(count)]
        self.page, self.requests, self.problem = page, 0, ""
        self.looked: list[str] = []

    def _make(self, number: int) -> ListedSandbox:
        return ListedSandbox(ref=f"e2b:i{number}", state=RUNNING, metadata={"memory": f"acme/{number}"})

    def add(self, count: int = 1) -> list[str]:
        first = 1 + max((int(one.ref[5:]) for one in self.sandboxes), default=-1)
        new = [self._make(number) for number in range(first, first + count)]
        self.sandboxes += new
        return [one.ref for one in new]

    async def list(self, page: str = "") -> SandboxPage:
        self.requests += 1
        if self.problem:
            raise SandboxDenied(self.problem)
        begin = int(page or 0)
        found = self.sandboxes[::-1][begin : begin + self.page]
        return SandboxPage(found, str(begin + self.page) if begin + self.page < len(self.sandboxes) else "")

    async def look(self, ref: str) -> ListedSandbox | None:
        self.looked.append(ref)
        return next((one for one in self.sandboxes if one.ref == ref), None)


async def take(walk: Listing, requests: int) -> set[str]:
    found: set[str] = set()
    for _ in range(requests):
        found |= {one.ref for one in (await walk.list_next())[0]}
    return found


async def test_what_is_new_is_found_with_the_next_requests_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    account = Account(1000)
    walk = Listing(account)  # type: ignore[arg-type]
    assert len(await take(walk, 19)) == 1000, "all of them first, by turns with the newest"
    assert not walk.walking
    new = set(account.add(3))
    assert new <= await take(walk, 1), "and then the newest alone"
    assert len(await take(walk, 5)) == 100
    burst = set(account.add(150))
    assert burst <= await take(walk, 2), "more than a page has"
    monkeypatch.setattr(listing, "WALK_SECONDS", -1.0)
    await take(walk, 30)
    while walk.walking:
        await walk.list_next()
    assert len(await take(walk, 24)) == 1153


async def test_new_ones_are_found_while_all_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    account = Account(500, page=10)
    walk = Listing(account)  # type: ignore[arg-type]
    await take(walk, 7)
    assert walk.walking and set(account.add()) <= await take(walk, 2)


async def test_what_two_walks_do_not_find_is_gone() -> None:
    account = Account(5)
    walk = Listing(account)  # type: ignore[arg-type]
    await walk.list_next()
    ended = account.sandboxes.pop(2)
    assert (await walk.list_next())[1] and not walk.gone, "one that is missed once may only have changed its page"
    await walk.list_next()
    assert walk.gone == {ended.ref} and ended.ref not in walk.known
    await walk.list_next()
    assert not walk.gone


# The service


class Lonely:
    """A service without HTTP that watches one account, and plans what it would look at."""

    def __init__(self, tmp_path: Path, account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = engine_at(tmp_path / "store", open_provider=lambda name, **how: account)
        self.sidecar = Sidecar(engine, Service())
        self.keeper = Keeper(self.sidecar, Jobs())
        self.planned: list[str] = []
        tables = [Watch(provider="e2b", memories=["acme/*"])]
        self.watcher = Watcher(Starts(self.sidecar, self.keeper), self.keeper, self.sidecar, Jobs(), tables)
        monkeypatch.setattr(self.watcher, "_plan", lambda ref, named, seconds: self.planned.append(ref))

    @property
    def provider(self) -> Any:
        return self.watcher._providers["e2b"]


@pytest.fixture
def lonely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Account], Lonely]:
    return lambda account: Lonely(tmp_path, account, monkeypatch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The watch's clock, for a test to set."""
    now = [1000.0]

    class Time:
        time = staticmethod(time.time)
        monotonic = staticmethod(lambda: now[0])

    monkeypatch.setattr(watch, "time", Time)
    return now


async def test_a_provider_is_asked_less_than_once_a_second_whatever_there_is_to_list(
    lonely: Callable[[Account], Lonely], clock: list[float]
) -> None:
    account = Account(2000)
    service = lonely(account)
    await service.keeper.lease.renew()
    for tick in range(600):  # a minute of attempts, ten a second
        clock[0] = 1000 + tick / 10
        if tick % 60 == 0:
            await service.keeper.lease.renew()
        if tick % 20 == 0:
            account.add(7)
        await service.watcher.list_one()
    assert 50 <= account.requests <= 60
    assert len(set(service.planned)) == len(account.sandboxes)


async def test_a_provider_that_cannot_be_listed_is_asked_more_and_more_rarely_and_it_is_said_once(
    lonely: Callable[[Account], Lonely], clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    account = Account(1)
    account.problem = "no such key"
    service = lonely(account)
    for _ in range(300):
        clock[0] += 1
        await service.keeper.lease.renew()
        await service.watcher.list_one()
    assert 5 < account.requests < 12
    assert service.watcher.problem == "e2b: sandbox-denied"
    account.problem = ""
    for _ in range(70):
        clock[0] += 1
        await service.keeper.lease.renew()
        await service.watcher.list_one()
    assert service.watcher.problem == "" and service.planned


async def test_of_several_services_one_lists_until_it_dies(tmp_path: Path) -> None:
    store = engine_at(tmp_path / "store").repository.store
    leases = [Lease(store, 30.0) for _ in range(3)]
    for lease in leases:
        await lease.renew()
    claims = [ListingClaim(store, lease, "d" * 64) for lease in leases]
    assert [await claim.take() for claim in claims] == [True, False, False]
    assert [await claim.take() for claim in claims] == [True, False, False]
    await leases[0].release()
    assert [await claim.take() for claim in claims] == [False, True, False]
    other = ListingClaim(store, leases[2], "e" * 64)
    assert await other.take(), "other tables are listed by whoever has them"


async def test_what_is_known_of_sandboxes_that_are_gone_is_removed(tmp_path: Path) -> None:
    store = engine_at(tmp_path / "store").repository.store
    notices = Notices(store)
    for number in range(3):
        await notices.write(Notice(sandbox=f"e2b:i{number}", memory="m", state=ATTACHED), None)
    await notices.write(Notice(sandbox="daytona:i0", memory="m", state=ATTACHED), None)
    assert await notices.remove_others("e2b", {"e2b:i1"}, 0.0) == 0, "what was just written may be newer than the list"
    assert await notices.remove_others("e2b", {"e2b:i1"}, time.time() + 60) == 2
    assert [info.key.split("/")[1] async for info in store.list(NOTICED)] == ["daytona", "e2b"]
    assert await notices.read("e2b:i1") is not None and await notices.read("e2b:i0") is None


async def test_of_two_that_claim_at_once_one_wins(tmp_path: Path) -> None:
    store = engine_at(tmp_path / "store").repository.store
    writers, notices = Writers(store), Notices(store)
    _, version = await writers.read("m")
    await writers.claim("m", "e2b:i1", version)
    with pytest.raises(SwapLost):
        await writers.claim("m", "e2b:i2", version)
    await writers.release("m", "e2b:i2")
    assert (await writers.read("m"))[0] == "e2b:i1"
    notice = Notice(sandbox="e2b:i1", memory="m", state=ATTACHED)
    held = await notices.write(notice, None)
    for before in (None, replace(held, version="another")):
        with pytest.raises(SwapLost):
            await notices.write(notice, before)


# What a sandbox names


@pytest.mark.parametrize(
    ("metadata", "found"),
    [
        ({"memory": "acme/a"}, "acme/a"),
        ({"memory": "acme/a/b"}, "acme/a/b"),
        ({"memory": "conductor"}, "conductor"),
        ({"memory": ""}, None),
        ({"Memory": "conductor"}, None),
        ({}, None),
        ({"memory": 7}, None),
        ({"memory": None}, None),
        ({"agent": "globex/x"}, "globex/x"),
        ({"memory": "globex/x", "agent": "globex/x"}, "globex/x"),
    ],
)
def test_a_name_counts_as_it_is_written(metadata: dict[str, Any], found: str | None) -> None:
    tables = [
        Watch(provider="e2b", memories=["acme/*", "conductor"]),
        Watch(provider="e2b", memories=["globex/*"], memory_from="metadata.agent"),
    ]
    named = find_memory(tables, ListedSandbox(ref="e2b:i1", state=RUNNING, metadata=metadata))
    assert (named.memory if named else None) == found
    made = ListedSandbox(ref="e2b:i1", state=RUNNING, metadata=metadata, plan="a" * 40)
    assert find_memory(tables, made) is None


@pytest.mark.parametrize(
    "name",
    [
        "acme",
        "acme/",
        "/acme/a",
        "acme//a",
        "acme/../b",
        "acme/a\x00",
        "ACME/a",
        "globex/x",
        "acme/\u202ea",
        "*",
        "a" * 201,
    ],
)
def test_a_name_that_no_table_allows_is_refused(name: str) -> None:
    with pytest.raises(MemoryNotWatched) as refused:
        find_memory(
            [Watch(provider="e2b", memories=["acme/*"])],
            ListedSandbox(ref="e2b:i1", state=RUNNING, metadata={"memory": name}),
        )
    assert len(refused.value.message) < 600 and refused.value.message.isprintable()
