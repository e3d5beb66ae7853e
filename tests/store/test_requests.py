"""What the store is asked: counted at a real S3 server, and the same however long a memory's history is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest

from adapters.sandboxes.local import open_local
from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine.heads import fork
from sidecar.host.work import gather_few
from sidecar.ids import MemoryKeys, make_snapshot_id, parse_snapshot_time
from sidecar.policy.retention import Retention
from sidecar.receipts import ExportOutcome, RestoreOutcome
from sidecar.store.fold import MOST_PACKS
from sidecar.store.repository import Repository
from sidecar.store.retention import forget_due
from sidecar.wiring import open_sandbox, open_store
from tests.parts.far_s3 import FarServer, far_server
from tests.parts.homes import empty_home, write
from tests.parts.s3_servers import S3Server
from tests.parts.services import serving, until

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "m"
KEYS = MemoryKeys.of(MEMORY)


@pytest.fixture
def far(weed: S3Server, credentials_of: Callable[[S3Server], None]) -> Iterator[FarServer]:
    credentials_of(weed)
    with far_server(weed.endpoint, delay=0) as server:
        yield server


@pytest.fixture
def url(weed: S3Server, far: FarServer) -> str:
    return f"s3://{weed.make_bucket(f'ask-{uuid4().hex[:8]}')}/p?endpoint={far.endpoint}"


def engine_on(url: str) -> Engine:
    return Engine(open_sandbox=open_sandbox, repository=Repository(open_store(url)))


class Conversations:
    """One home that is exported after each of its conversations."""

    def __init__(self, engine: Engine, home: Path, memory: str = MEMORY) -> None:
        self.engine, self.home, self.count, self.memory = engine, empty_home(home), 0, memory
        write(self.home / "MEMORY.md", b"# It begins\n" * 2000)

    async def export(self, expect: ExportOutcome, *, changed: bool = True) -> None:
        if changed:
            self.count += 1
            with (self.home / "MEMORY.md").open("a") as file:
                file.write(f"- conversation {self.count}\n")
        receipt = await export(self.engine, open_local(str(self.home)), ExportRequest(memory=self.memory))
        assert receipt.outcome is expect, receipt


async def test_a_warm_export_asks_at_most_eight_times_and_a_restore_five(
    url: str, far: FarServer, tmp_path: Path
) -> None:
    engine = engine_on(url)
    home = Conversations(engine, tmp_path / "home")
    for number in range(MOST_PACKS + 3):
        far.forget()
        await home.export(ExportOutcome.COMMITTED)
        # The second finds out that listings name versions; a fold fetches the packs that it folds at most once.
        # Now and then unfinished uploads are looked for.
        asked = [one for one in far.requests if "uploads" not in one.path]
        assert len(asked) <= 8 or number < 2, far.told()
        far.forget()
        await home.export(ExportOutcome.UNCHANGED, changed=False)
        assert far.count <= (2 if number else 4), far.told()
        far.forget()
        fresh = empty_home(tmp_path / f"fresh{number}")
        receipt = await restore(engine, open_local(str(fresh)), RestoreRequest(memory=MEMORY))
        assert receipt.outcome is RestoreOutcome.COMPLETE
        assert far.count <= 5, far.told()
        assert (fresh / "MEMORY.md").read_bytes() == (home.home / "MEMORY.md").read_bytes()


@pytest.mark.parametrize(("memory", "most"), [("m", 5), ("acme/agent-7", 7)])
async def test_of_the_requests_of_a_warm_export_at_most_four_follow_on_each_other(
    weed: S3Server, credentials_of: Callable[[S3Server], None], tmp_path: Path, memory: str, most: int
) -> None:
    """An id that is no plain name has two folders: that of earlier versions is looked at too, at the same time."""
    credentials_of(weed)
    seen = []
    with far_server(weed.endpoint, delay=0.1) as far:
        engine = engine_on(f"s3://{weed.make_bucket(f'ask-{uuid4().hex[:8]}')}/p?endpoint={far.endpoint}")
        home = Conversations(engine, tmp_path / "home", memory)
        for number in range(5):
            far.forget()
            await home.export(ExportOutcome.COMMITTED)
            asked = [one for one in far.requests if "uploads" not in one.path]
            assert len(asked) <= most or number < 2, far.told()
            seen.append(far.in_a_row)
    # The listing; the pack and its index; the manifest; the head. Two that are sent at once may look as if one followed
    # on the other, on a busy machine; what really follows on each other always looks so.
    assert min(seen) == 4, seen


async def test_another_process_reads_each_object_once(url: str, far: FarServer, tmp_path: Path) -> None:
    home = Conversations(engine_on(url), tmp_path / "home")
    for _ in range(4):
        await home.export(ExportOutcome.COMMITTED)
    far.forget()
    receipt = await restore(engine_on(url), open_local(str(empty_home(tmp_path / "a"))), RestoreRequest(memory=MEMORY))
    assert receipt.outcome is RestoreOutcome.COMPLETE
    assert far.count <= 3 + 2 * 4, far.told()
    home.engine = engine_on(url)
    far.forget()
    await home.export(ExportOutcome.UNCHANGED, changed=False)
    assert far.count <= 3, far.told()


async def test_what_another_process_changed_is_read_again(url: str, far: FarServer, tmp_path: Path) -> None:
    ours, theirs = Conversations(engine_on(url), tmp_path / "ours"), engine_on(url)
    for _ in range(3):
        await ours.export(ExportOutcome.COMMITTED)
    other = empty_home(tmp_path / "theirs")
    assert (
        await restore(theirs, open_local(str(other)), RestoreRequest(memory=MEMORY))
    ).outcome is RestoreOutcome.COMPLETE
    write(other / "MEMORY.md", b"# Theirs\n" * 2000)
    made = await export(theirs, open_local(str(other)), ExportRequest(memory=MEMORY))
    assert made.outcome is ExportOutcome.COMMITTED
    await ours.export(ExportOutcome.DIVERGED)
    fresh = empty_home(tmp_path / "fresh")
    receipt = await restore(ours.engine, open_local(str(fresh)), RestoreRequest(memory=MEMORY))
    assert (receipt.snapshot, (fresh / "MEMORY.md").read_bytes()[:8]) == (made.snapshot, b"# Theirs")


async def test_a_pack_that_was_damaged_since_is_noticed(url: str, weed: S3Server, tmp_path: Path) -> None:
    home = Conversations(engine_on(url), tmp_path / "home")
    for _ in range(3):
        await home.export(ExportOutcome.COMMITTED)
    store = home.engine.repository.store
    key = next(info.key for info in [one async for one in store.list(KEYS.packs)] if info.key.endswith(".index.gz"))
    stored = await store.get(key)
    assert stored is not None
    await store.put(key, bytes(reversed(stored.data)))
    receipt = await export(home.engine, open_local(str(home.home)), ExportRequest(memory=MEMORY))
    assert receipt.outcome is ExportOutcome.UNCHANGED  # it has no use for the index
    (home.home / "MEMORY.md").write_bytes(b"# Changed\n" * 3000)
    receipt = await export(home.engine, open_local(str(home.home)), ExportRequest(memory=MEMORY))
    assert receipt.outcome is ExportOutcome.COMMITTED
    assert receipt.kind == "full"


@pytest.mark.parametrize("place", ["s3", "file"])
async def test_an_export_does_not_ask_more_the_longer_the_history_is(
    place: str, far: FarServer, url: str, tmp_path: Path
) -> None:
    engine = engine_on(url if place == "s3" else f"file:{tmp_path}/store")
    home = Conversations(engine, tmp_path / "home")
    for _ in range(3):
        await home.export(ExportOutcome.COMMITTED)
    far.forget()
    await home.export(ExportOutcome.COMMITTED)
    few = far.count
    store, state = engine.repository.store, await engine.repository.head(MEMORY)
    before = parse_snapshot_time(state.head.history[-1][0]) if state.head else None
    assert before is not None
    manifest = await engine.repository.manifest(MEMORY, state.snapshot)
    old = [make_snapshot_id(before - timedelta(minutes=minutes)) for minutes in range(1, 1200)]
    await gather_few(lambda one: store.put(KEYS.snapshot(one), manifest.encode()), old, 8)
    for _ in range(3):
        far.forget()
        await home.export(ExportOutcome.COMMITTED)
    assert sum("uploads" not in one.path for one in far.requests) <= few * 1.1, far.told()
    far.forget()
    fresh = empty_home(tmp_path / "fresh")
    receipt = await restore(engine, open_local(str(fresh)), RestoreRequest(memory=MEMORY))
    assert receipt.outcome is RestoreOutcome.COMPLETE
    assert far.count <= 5, far.told()


async def test_an_idle_service_does_not_ask_about_each_memory(
    far: FarServer, url: str, weed: S3Server, tmp_path: Path
) -> None:
    engine = engine_on(url)
    home = Conversations(engine, tmp_path / "home")
    await home.export(ExportOutcome.COMMITTED)
    store = engine.repository.store
    for number in range(20):
        await fork(engine.repository, MEMORY, f"m{number}")
    with serving(url, tmp_path / "log", lease=2, more='[retention]\nevery = "1s"\n') as service:
        until(lambda: "memories_by_age" in service.http.get("/metrics").text)
        far.forget()
        until(lambda: sum("instances/" in str(one) for one in far.requests) > 10)
        asked = [one for one in far.requests if "memories/m" in one.path or "memories%2Fm" in one.path]
        assert not asked, far.told()
    await store.close()


async def test_only_memories_of_which_something_may_be_due_are_looked_at(
    far: FarServer, url: str, tmp_path: Path
) -> None:
    engine = engine_on(url)
    home = Conversations(engine, tmp_path / "home")
    await home.export(ExportOutcome.COMMITTED)
    await home.export(ExportOutcome.COMMITTED)
    await fork(engine.repository, MEMORY, "idle")
    store = engine.repository.store
    await store.delete([MemoryKeys.of("idle").snapshot("20000101T000000000Z-00000000")])
    done, _ = await forget_due(engine.repository, Retention())
    assert [one.memory for one in done] == ["idle"]  # a copy of two packs has one snapshot
    done, _ = await forget_due(engine.repository, Retention(keep_last=1))
    assert {one.memory: one.forgotten for one in done} == {"idle": 0, MEMORY: 1}
    await store.put(KEYS.pack("0" * 24, "gz"), b"left by an export that died")
    await store.put(KEYS.pack("1" * 24, "gz"), b"left by an export that died")
    done, _ = await forget_due(engine.repository, Retention(grace="0s"))
    assert {one.memory: one.collected.objects for one in done if one.collected}[MEMORY] == 2
