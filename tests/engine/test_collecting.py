"""Retention beside running exports: whatever the order of things, what was acknowledged can be restored."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from adapters.sandboxes.local import open_local
from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine.heads import rollback
from sidecar.errors import BaseCollected, StoreUnreachable
from sidecar.host.work import NoProgress
from sidecar.ids import MemoryKeys
from sidecar.policy.retention import Retention
from sidecar.receipts import ExportOutcome, ExportReceipt, RestoreOutcome
from sidecar.store.garbage import collect
from sidecar.store.pins import pin
from sidecar.store.repository import Repository
from sidecar.store.retention import forget
from sidecar.store.verification import verify_memory
from sidecar.wiring import open_sandbox, open_store
from tests.parts.commands import ended, start
from tests.parts.homes import empty_home, write
from tests.parts.s3_servers import S3Server

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "m"
KEYS = MemoryKeys.of(MEMORY)
ALL = Retention()
ONE = Retention(keep_last=1, grace="0s")
Hook = Callable[[], Awaitable[Any]]


class Paused:
    """A store in which something else happens first, or right after, the first time that a call is made."""

    def __init__(self, store: Any, call: str, prefix: str, hook: Hook, *, after: bool = False, always: bool = False):
        self._store, self._call, self._prefix, self._hook = store, call, prefix, hook
        self._after, self._always = after, always
        self.paused = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name != self._call:
            return found

        async def called(key: Any, *args: Any, **more: Any) -> Any:
            key = key if isinstance(key, str) else [*key]
            if not str(key if isinstance(key, str) else next(iter(key), "")).startswith(self._prefix):
                return await found(key, *args, **more)
            self.paused += 1
            meant = self._always or self.paused == 1
            if meant and not self._after:
                await self._hook()
            answer = await found(key, *args, **more)
            if meant and self._after:
                await self._hook()
            return answer

        return called


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path, credentials_of: Callable[[S3Server], None]) -> str:
    if request.param == "file":
        return f"file:{tmp_path}/store"
    weed: S3Server = request.getfixturevalue("weed")
    credentials_of(weed)
    return f"s3://{weed.make_bucket(f'keep-{uuid4().hex[:8]}')}/p?endpoint={weed.endpoint}"


def engine_on(url: str, retention: Retention = ALL) -> Engine:
    return Engine(open_sandbox=open_sandbox, repository=Repository(open_store(url)), retention=retention)


def home_with(place: Path, text: str) -> Path:
    home = empty_home(place)
    write(home / "MEMORY.md", text.encode() * 20)
    return home


async def exported(engine: Engine, home: Path, word: str = "", **more: Any) -> ExportReceipt:
    if word:
        with (home / "MEMORY.md").open("a") as file:
            file.write(f"{word}\n")
    return await export(engine, open_local(str(home)), ExportRequest(memory=MEMORY, **more))


async def assert_restorable(engine: Engine, snapshot: str, text: str, place: Path) -> None:
    home = empty_home(place)
    receipt = await restore(engine, open_local(str(home)), RestoreRequest(memory=MEMORY, snapshot=snapshot))
    assert (receipt.outcome, receipt.warnings) == (RestoreOutcome.COMPLETE, [])
    assert text in (home / "MEMORY.md").read_text()


async def assert_all_whole(engine: Engine) -> None:
    report = await verify_memory(engine.repository, MEMORY, engine.progress)
    assert report.ok, report


async def overtaken(url: str, tmp_path: Path) -> Path:
    """A sandbox that builds on a snapshot of which, since another sandbox's export, nothing is needed. Return its home."""
    engine = engine_on(url)
    home = home_with(tmp_path / "late", "first")
    await exported(engine, home)
    other = home_with(tmp_path / "other", "second")
    assert (await exported(engine, other, force=True)).outcome is ExportOutcome.COMMITTED
    return home


def other_process(url: str) -> Hook:
    """Forget and collect without any grace period, in another process."""

    async def forgotten() -> None:
        process = await asyncio.to_thread(start, "forget", MEMORY, "--keep-last=1", "--grace=0", store=url)
        ran = await asyncio.to_thread(ended, process)
        assert ran.code == 0, ran

    return forgotten


@pytest.mark.parametrize(
    ("call", "prefix", "after"),
    [
        ("put", KEYS.packs, False),
        ("put", KEYS.packs, True),
        ("swap", KEYS.snapshots, False),
        ("swap", KEYS.snapshots, True),
        ("swap", KEYS.head, False),
    ],
)
async def test_a_base_collected_while_an_export_runs_is_not_built_on(
    url: str, tmp_path: Path, call: str, prefix: str, after: bool
) -> None:
    home = await overtaken(url, tmp_path)
    store = open_store(url)
    paused: Any = Paused(store, call, prefix, other_process(url), after=after)
    force = prefix == KEYS.head  # only then would it get there
    receipt = await exported(
        Engine(open_sandbox=open_sandbox, repository=Repository(paused)), home, "late work", force=force
    )
    assert paused.paused, "nothing happened in between"
    assert receipt.outcome is (ExportOutcome.COMMITTED if force else ExportOutcome.DIVERGED)
    engine = engine_on(url)
    assert receipt.snapshot is not None
    await assert_restorable(engine, receipt.snapshot, "late work", tmp_path / "check")
    await assert_all_whole(engine)
    # A manifest that another process can see keeps its packs; one that comes later is begun anew.
    visible = (call, prefix, after) in [("swap", KEYS.snapshots, True), ("swap", KEYS.head, False)]
    assert any("begun anew" in warning for warning in receipt.warnings) is not visible


@pytest.mark.parametrize(
    ("call", "prefix", "after", "too_late"),
    [("swap", KEYS.marks, False, False), ("swap", KEYS.marks, True, False), ("delete", KEYS.packs, False, True)],
)
async def test_an_export_that_commits_while_a_collector_makes_up_its_mind_keeps_its_packs_or_is_begun_anew(
    url: str, tmp_path: Path, call: str, prefix: str, after: bool, too_late: bool
) -> None:
    home = await overtaken(url, tmp_path)
    base_read, decided = asyncio.Event(), asyncio.Event()

    async def wait_for_the_collector() -> None:
        base_read.set()
        await decided.wait()

    exporting: Any = Paused(open_store(url), "put", KEYS.packs, wait_for_the_collector, always=True)
    late = asyncio.create_task(
        exported(Engine(open_sandbox=open_sandbox, repository=Repository(exporting)), home, "late work")
    )
    await asyncio.wait_for(base_read.wait(), 60)

    async def let_it_commit() -> None:
        decided.set()
        await asyncio.wait({late}, timeout=60)

    collecting: Any = Paused(open_store(url), call, prefix, let_it_commit, after=after)
    done = await forget(Repository(collecting), MEMORY, ONE)
    assert done.forgotten == 1 and collecting.paused
    receipt = await late
    assert receipt.outcome is ExportOutcome.DIVERGED
    assert any("begun anew" in warning for warning in receipt.warnings) is too_late
    assert done.collected.objects == (2 if too_late else 0)
    assert receipt.snapshot is not None
    await assert_restorable(engine_on(url), receipt.snapshot, "late work", tmp_path / "check")
    await assert_all_whole(engine_on(url))


def pausing_engine(store: Any) -> Engine:
    return Engine(open_sandbox=open_sandbox, repository=Repository(store))


@pytest.mark.parametrize(("after", "anew"), [(False, True), (True, False)])
async def test_an_export_that_leaves_it_to_its_swap_loses_that_to_who_collected_its_pack(
    url: str, tmp_path: Path, after: bool, anew: bool
) -> None:
    """It does not look for its pack. Whoever takes a young one away writes the head again."""
    home = home_with(tmp_path / "home", "first")
    await exported(engine_on(url), home)
    paused: Any = Paused(open_store(url), "swap", KEYS.snapshots, other_process(url), after=after)
    receipt = await exported(pausing_engine(paused), home, "late work")
    assert paused.paused and receipt.outcome is ExportOutcome.COMMITTED
    assert any("begun anew" in warning for warning in receipt.warnings) is anew
    engine = engine_on(url)
    assert (await engine.repository.head(MEMORY)).snapshot == receipt.snapshot
    await assert_restorable(engine, receipt.snapshot or "", "late work", tmp_path / "check")
    await assert_all_whole(engine)


@pytest.mark.parametrize(
    ("call", "prefix", "after", "too_late"),
    [
        ("swap", KEYS.marks, False, False),
        ("swap", KEYS.marks, True, False),
        ("swap", KEYS.head, False, False),
        ("swap", KEYS.head, True, True),
        ("delete", KEYS.packs, False, True),
    ],
)
async def test_a_head_that_moves_while_a_collector_makes_up_its_mind_has_its_packs(
    url: str, tmp_path: Path, call: str, prefix: str, after: bool, too_late: bool
) -> None:
    home = home_with(tmp_path / "home", "first")
    await exported(engine_on(url), home)
    stored, decided = asyncio.Event(), asyncio.Event()

    async def wait_for_the_collector() -> None:
        stored.set()
        await decided.wait()

    exporting: Any = Paused(open_store(url), "swap", KEYS.snapshots, wait_for_the_collector)
    late = asyncio.create_task(exported(pausing_engine(exporting), home, "late work"))
    await asyncio.wait_for(stored.wait(), 60)

    async def let_it_commit() -> None:
        decided.set()
        await asyncio.wait({late}, timeout=60)

    collecting: Any = Paused(open_store(url), call, prefix, let_it_commit, after=after)
    done = await forget(Repository(collecting), MEMORY, ONE)
    receipt = await late
    assert collecting.paused and receipt.outcome is ExportOutcome.COMMITTED
    assert any("begun anew" in warning for warning in receipt.warnings) is too_late
    assert done.collected.objects == (2 if too_late else 0)
    await assert_restorable(engine_on(url), receipt.snapshot or "", "late work", tmp_path / "check")
    await assert_all_whole(engine_on(url))


async def test_a_snapshot_that_is_forgotten_before_it_is_the_head_is_put_back(url: str, tmp_path: Path) -> None:
    home = home_with(tmp_path / "home", "first")
    await exported(engine_on(url), home)

    async def make_room() -> None:
        done = await forget(Repository(open_store(url)), MEMORY, Retention(memory_bytes=1))
        assert done.forgotten == 1

    paused: Any = Paused(open_store(url), "swap", KEYS.head, make_room)
    receipt = await exported(pausing_engine(paused), home, "late work")
    assert paused.paused > 1 and receipt.outcome is ExportOutcome.COMMITTED
    await assert_restorable(engine_on(url), receipt.snapshot or "", "late work", tmp_path / "check")
    await assert_all_whole(engine_on(url))


@pytest.mark.parametrize("always", [False, True])
async def test_an_export_that_took_longer_than_half_the_grace_period_does_not_commit(
    tmp_path: Path, always: bool
) -> None:
    url = f"file:{tmp_path}/store"
    home = home_with(tmp_path / "home", "first")
    first = await exported(engine_on(url), home)
    slow: Any = Paused(open_store(url), "put", KEYS.packs, lambda: asyncio.sleep(0.6), always=always)
    engine = Engine(open_sandbox=open_sandbox, repository=Repository(slow), retention=Retention(grace="1s"))
    if always:
        with pytest.raises(BaseCollected, match="more than half of the grace period") as refused:
            await exported(engine, home, "more")
        assert refused.value.retryable and "grace" in refused.value.hint
        assert (await engine.repository.head(MEMORY)).snapshot == first.snapshot
        assert await engine.repository.list_snapshot_ids(MEMORY) == [first.snapshot]
    else:
        receipt = await exported(engine, home, "more")
        assert receipt.outcome is ExportOutcome.COMMITTED and "begun anew" in receipt.warnings[0]


async def test_packs_wait_for_the_grace_period_and_one_needed_again_stays(url: str, tmp_path: Path) -> None:
    home = await overtaken(url, tmp_path)
    engine = engine_on(url)
    repository, store = engine.repository, engine.repository.store
    old = (await repository.list_snapshot_ids(MEMORY))[-1]
    manifest = await repository.manifest(MEMORY, old)
    retention = replace(ONE, grace="1s")
    await asyncio.sleep(2.1)  # S3 tells times in whole seconds
    done = await forget(repository, MEMORY, retention)
    assert (done.forgotten, done.collected.objects, done.collected.waiting) == (1, 0, 1)
    # An export that was under way brings it back into use.
    await store.put(KEYS.snapshot(old), manifest.encode())
    await pin(repository, MEMORY, old)
    await asyncio.sleep(2.1)
    done = await forget(repository, MEMORY, retention)
    assert (done.forgotten, done.collected.objects, done.collected.waiting) == (0, 0, 0)
    await assert_restorable(engine, old, "first", tmp_path / "check")
    # Once more nobody needs it: it waits anew, and goes.
    await store.delete([KEYS.snapshot(old), KEYS.pin(old)])
    assert (await forget(repository, MEMORY, retention)).collected.waiting == 1
    await asyncio.sleep(2.1)
    assert (await forget(repository, MEMORY, retention)).collected.objects == 2
    left = {info.key async for info in store.list(KEYS.prefix)}
    assert not [key for key in left if key.startswith((KEYS.marks, KEYS.pins, KEYS.clock))]
    await assert_all_whole(engine)
    assert (await exported(engine, home, "goes on")).outcome is ExportOutcome.DIVERGED


async def take(repository: Repository, what: str, snapshot: str) -> None:
    await (rollback if what == "head" else pin)(repository, MEMORY, snapshot)


@pytest.mark.parametrize("what", ["head", "pin"])
@pytest.mark.parametrize("after", [False, True])
async def test_what_becomes_head_or_is_pinned_while_it_is_forgotten_stays(
    url: str, tmp_path: Path, what: str, after: bool
) -> None:
    await overtaken(url, tmp_path)
    engine = engine_on(url)
    old = (await engine.repository.list_snapshot_ids(MEMORY))[-1]
    forgetting: Any = Paused(open_store(url), "delete", KEYS.snapshots, lambda: take(engine.repository, what, old))
    # Who comes after the deletion has read the manifest before it.
    late: Any = Paused(
        open_store(url),
        *(("swap", KEYS.head) if what == "head" else ("put", KEYS.pins)),
        lambda: forget(engine.repository, MEMORY, replace(ONE, grace="24h")),
    )
    if after:
        await take(Repository(late), what, old)
    else:
        await forget(Repository(forgetting), MEMORY, replace(ONE, grace="24h"))
    assert (late if after else forgetting).paused
    await assert_restorable(engine, old, "first", tmp_path / "check")


async def test_the_rules_are_applied_after_each_export_and_trouble_there_is_only_a_warning(tmp_path: Path) -> None:
    url, told = f"file:{tmp_path}/store", []
    home = home_with(tmp_path / "home", "first")
    rules = Retention(keep_last=2, keep_labelled=["keep*"])
    engine = replace(engine_on(url, rules), forgot=lambda memory, count: told.append((memory, count)))
    made = [await exported(engine, home, f"day {day}", label="keep me" if day == 1 else "") for day in range(6)]
    assert {receipt.round_trips for receipt in made} == {1}
    kept = await engine.repository.list_snapshot_ids(MEMORY)
    assert kept == [made[5].snapshot, made[4].snapshot, made[1].snapshot]
    assert told == [(MEMORY, 1)] * 3
    await assert_all_whole(engine)

    async def broken() -> None:
        raise StoreUnreachable("The store is not there just now.")

    store: Any = Paused(open_store(url), "delete", KEYS.snapshots, broken)
    receipt = await exported(replace(engine, repository=Repository(store)), home, "day 7")
    assert receipt.outcome is ExportOutcome.COMMITTED
    assert receipt.warnings == ["Old snapshots or left-overs could not be removed: The store is not there just now."]


async def test_while_a_manifest_cannot_be_read_it_stays_and_no_pack_goes(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/store"
    await overtaken(url, tmp_path)
    engine = engine_on(url)
    old = (await engine.repository.list_snapshot_ids(MEMORY))[-1]
    good = await engine.repository.manifest(MEMORY, old)
    await engine.repository.store.put(KEYS.snapshot(old), b"{")
    packs = [info async for info in engine.repository.store.list(KEYS.packs)]
    done = await forget(engine.repository, MEMORY, ONE)
    assert "cannot be read" in done.problem and "cannot be read" in done.collected.problem
    assert [(fate.keep, fate.reason) for fate in done.snapshots] == [(True, "head"), (True, "unreadable manifest")]
    assert [info async for info in engine.repository.store.list(KEYS.packs)] == packs
    await engine.repository.store.put(KEYS.snapshot(old), good.encode())
    await engine.repository.store.put(KEYS.head, b"{")
    done = await forget(engine.repository, MEMORY, ONE)
    assert done.forgotten == 0 and "head cannot be read" in done.problem


async def test_packs_stay_while_the_manifest_of_the_head_is_gone(url: str, tmp_path: Path) -> None:
    """It may be put back from a copy of the store."""
    await overtaken(url, tmp_path)
    repository = engine_on(url).repository
    head = (await repository.head(MEMORY)).snapshot
    manifest = await repository.manifest(MEMORY, head)
    await repository.store.delete([KEYS.snapshot(head)])
    done = await collect(repository, MEMORY, grace=0)
    assert (done.objects, "that of the head is gone" in done.problem) == (0, True)
    await repository.store.put(KEYS.snapshot(head), manifest.encode())
    assert (await verify_memory(repository, MEMORY, NoProgress())).ok


async def test_old_calls_and_notes_about_what_is_gone_are_collected(url: str, tmp_path: Path) -> None:
    await overtaken(url, tmp_path)
    engine = engine_on(url)
    store, ids = engine.repository.store, await engine.repository.list_snapshot_ids(MEMORY)
    gone = "20200101T000000000Z-00000000"
    notes = [KEYS.damage(gone), KEYS.pin(gone), KEYS.damage(ids[1]), KEYS.call("a"), KEYS.mark("0" * 24)]
    for key in notes:
        await store.put(key, b"x")
    kept = await collect(engine.repository, MEMORY)
    assert kept.notes == 0 and len([key async for key in store.list(KEYS.calls)]) == 1
    done = await collect(engine.repository, MEMORY, grace=0, calls=0)
    assert done.notes == 3
    left = {info.key async for info in store.list(KEYS.prefix)}
    assert left & set(notes) == {KEYS.damage(ids[1]), KEYS.mark("0" * 24)}
