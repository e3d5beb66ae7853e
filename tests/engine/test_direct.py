"""Straight between sandbox and bucket: the same snapshots in fewer trips, whatever a sandbox or a bucket does in between."""

from __future__ import annotations

import asyncio
import logging
import traceback
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from emulators import Fault
from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine.core import Timing
from sidecar.errors import SidecarError
from sidecar.host.work import NoProgress
from sidecar.ids import MemoryKeys
from sidecar.ports import CommandResult, Link, Store
from sidecar.receipts import ExportReceipt, RestoreReceipt
from sidecar.store.fold import MOST_PACKS
from sidecar.store.manifest import Pack
from sidecar.store.repository import Repository
from sidecar.store.verification import verify_memory
from sidecar.wiring import open_sandbox, open_store
from tests.parts.forgery import framed
from tests.parts.homes import forget_caches, titles, told, tree, without_cache
from tests.parts.memories import (
    Box,
    Hook,
    Name,
    Provider,
    Watched,
    damage_database,
    engine_on,
    grow,
    grow_large,
    manifests_of,
    plain_home,
    shell_tools,
    strays,
)
from tests.parts.s3_servers import S3Server, free_port
from tests.parts.sent import request_in

MEMORY = "conductor"
SECRET_SIGNS = ("x-amz-", "signature=", "%2faws4_request")

Become = Callable[[S3Server], None]
Open = Callable[[Name], Provider]


@pytest.fixture(scope="session")
def bucket(weed: S3Server) -> str:
    return weed.make_bucket(f"direct-{uuid.uuid4().hex}")


@pytest.fixture
def url(weed: S3Server, bucket: str, credentials_of: Become) -> str:
    credentials_of(weed)
    return f"s3://{bucket}/{uuid.uuid4().hex}?endpoint={weed.endpoint}"


@pytest.fixture
def engine(url: str) -> Engine:
    return engine_on(url, direct=True)


@pytest.fixture
def local(open_provider: Open) -> Provider:
    return open_provider("local")


@pytest.fixture(autouse=True)
def no_secrets_in_logs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No link ever gets into a log, in any test here."""
    for name in ("sidecar", "adapters"):
        caplog.set_level(logging.DEBUG, name)
    yield
    ours = [record for record in caplog.get_records("call") if record.name.split(".")[0] in ("sidecar", "adapters")]
    _no_link_in(*(record.getMessage() for record in ours), *(str(record.exc_info) for record in ours))


def _no_link_in(*texts: object) -> None:
    for text in map(str, texts):
        assert not [sign for sign in SECRET_SIGNS if sign in text.lower()], text


def _large(box: Box) -> Box:
    plain_home(box.home)
    grow_large(box.home)
    return box


async def _export(engine: Engine, sandbox: Watched, memory: str = MEMORY, **asked: Any) -> ExportReceipt:
    receipt = await export(engine, sandbox, ExportRequest(memory=memory, **asked))
    _no_link_in(receipt)
    assert "://" not in str(told(receipt))
    return replace(receipt, warnings=told(receipt))


async def _committed(engine: Engine, sandbox: Watched, memory: str = MEMORY) -> ExportReceipt:
    receipt = await _export(engine, sandbox, memory)
    assert receipt.outcome == "committed", receipt
    return receipt


async def _restore(engine: Engine, sandbox: Watched, memory: str = MEMORY, **asked: Any) -> RestoreReceipt:
    receipt = await restore(engine, sandbox, RestoreRequest(memory=memory, **asked))
    _no_link_in(receipt)
    assert "://" not in str(receipt.warnings)
    assert receipt.outcome == "complete", receipt
    return receipt


async def _refusal(engine: Engine, sandbox: Watched) -> SidecarError:
    with pytest.raises(SidecarError) as refused:
        await export(engine, sandbox, ExportRequest(memory=MEMORY))
    _no_link_in(refused.value, refused.value.hint, *traceback.format_exception(refused.value))
    return refused.value


def _holds(box: Box) -> object:
    return without_cache(tree(box.home))


def _relayed(receipt: ExportReceipt | RestoreReceipt) -> list[str]:
    return [warning for warning in receipt.warnings if "went through the sidecar instead" in warning]


# What it saves


@pytest.mark.parametrize("name", ["local", "e2b", "daytona"])
async def test_a_large_pack_goes_to_the_bucket_and_back_without_the_sidecar_carrying_it(
    engine: Engine, open_provider: Open, name: Name
) -> None:
    provider = open_provider(name)
    box, other = _large(provider.box()), provider.box()
    control = {"control": 1} if provider.emulator else {}
    receipt = await _committed(engine, box.open())
    first = 3 if provider.emulator else 2  # the program is not there yet
    assert receipt.trips == {"command": first, **control} == provider.asked()
    assert (receipt.kind, receipt.warnings) == ("full", [])
    assert receipt.transferred_bytes > receipt.packed_bytes > 2 << 20
    assert await strays(engine, MEMORY) == set(), "what was parked is gone, what the manifest names is there"
    assert (await verify_memory(engine.repository, MEMORY, NoProgress())).ok
    assert await box.is_clean(), box.left_behind()

    provider.clear()
    restored = await _restore(engine, other.open())
    assert restored.trips == {"command": 1, **control} == provider.asked()
    assert (restored.files, restored.warnings) == (receipt.files, [])
    assert restored.transferred_bytes > receipt.packed_bytes * 0.9
    assert _holds(other) == _holds(box)
    assert await other.is_clean(), other.left_behind()

    grow(other.home)
    later = await _committed(engine, other.open())
    assert (later.kind, later.parent, later.trips["command"]) == ("delta", receipt.snapshot, 1)


async def test_a_small_delta_still_comes_with_the_answer(engine: Engine, local: Provider) -> None:
    box = _large(local.box())
    await _committed(engine, box.open())
    grow(box.home)
    receipt = await _committed(engine, box.open())
    assert (receipt.kind, receipt.trips) == ("delta", {"command": 1})
    other = local.box()
    assert (await _restore(engine, other.open())).trips == {"command": 1}
    assert _holds(other) == _holds(box)


async def test_what_went_directly_can_be_had_through_the_sidecar_and_the_other_way_round(
    engine: Engine, local: Provider
) -> None:
    box, other, last = _large(local.box()), local.box(), local.box()
    await _committed(engine, box.open())
    carried = replace(engine, direct=False)
    assert (await _restore(carried, other.open())).trips == {"upload": 1, "command": 1}
    assert _holds(other) == _holds(box)
    grow_large(other.home, 2)
    assert (await _committed(carried, other.open())).trips == {"command": 1, "download": 1}
    assert (await _restore(engine, last.open())).trips == {"command": 1}
    assert _holds(last) == _holds(other)


async def test_the_export_that_folds_leaves_nothing_but_what_the_manifests_name(
    engine: Engine, local: Provider
) -> None:
    engine = replace(engine, inline_bytes=0)
    box, other = local.box(), local.box()
    plain_home(box.home)
    grow_large(box.home, 0, 100_000)
    for number in range(1, MOST_PACKS + 2):
        grow_large(box.home, number, 3_000)
        receipt = await _committed(engine, box.open())
        assert receipt.trips == {"command": 2}
        assert await strays(engine, MEMORY) == set()
    packs = [len(manifest.packs) for manifest in await manifests_of(engine, MEMORY)]
    assert packs[:MOST_PACKS] == list(range(1, MOST_PACKS + 1)) and packs[-1] <= MOST_PACKS
    await _restore(engine, other.open())
    assert _holds(other) == _holds(box)
    assert (await verify_memory(engine.repository, MEMORY, NoProgress())).ok


async def test_two_sandboxes_at_once_do_not_get_in_each_others_way(engine: Engine, local: Provider) -> None:
    boxes = [_large(local.box()) for _ in range(2)]
    for number, box in enumerate(boxes):
        grow(box.home, f"box {number}")
    receipts = await asyncio.gather(
        *(_committed(engine, box.open(), f"m-{number}") for number, box in enumerate(boxes))
    )
    assert [receipt.trips for receipt in receipts] == [{"command": 2}] * 2
    targets = [local.box() for _ in boxes]
    await asyncio.gather(*(_restore(engine, box.open(), f"m-{number}") for number, box in enumerate(targets)))
    assert [_holds(box) for box in targets] == [_holds(box) for box in boxes]


async def test_of_two_sandboxes_that_export_one_memory_at_once_one_becomes_the_head_and_both_are_kept(
    engine: Engine, local: Provider
) -> None:
    first = _large(local.box())
    await _committed(engine, first.open())
    second = local.box()
    await _restore(engine, second.open())
    for number, box in enumerate((first, second)):
        grow_large(box.home, 10 + number)
    receipts = await asyncio.gather(*(_export(engine, box.open()) for box in (first, second)))
    assert sorted(receipt.outcome for receipt in receipts) == ["committed", "diverged"]
    assert await strays(engine, MEMORY) == set()
    for receipt, box in zip(receipts, (first, second), strict=True):
        await _restore(engine, (target := local.box()).open(), snapshot=receipt.snapshot)
        assert _holds(target) == _holds(box)


# When it cannot be


async def test_a_store_on_a_disk_just_relays_and_says_nothing(tmp_path: Path, local: Provider) -> None:
    engine = engine_on(f"file:{tmp_path / 'store'}", direct=True)
    box, other = _large(local.box()), local.box()
    receipt = await _committed(engine, box.open())
    assert (receipt.trips, receipt.warnings) == ({"command": 1, "download": 1}, [])
    restored = await _restore(engine, other.open())
    assert (restored.trips["upload"], restored.warnings) == (1, [])
    assert _holds(other) == _holds(box)


async def test_a_first_start_is_empty_directly_too(engine: Engine, local: Provider) -> None:
    receipt = await restore(engine, local.box().open(), RestoreRequest(memory=MEMORY))
    assert receipt.outcome == "empty" and f"There is no memory {MEMORY!r} in s3://" in receipt.warnings[0]


async def test_a_bucket_that_a_sandbox_cannot_reach_is_relayed_and_the_receipt_warns(url: str, local: Provider) -> None:
    engine = engine_on(f"{url}&sandbox-endpoint=http://127.0.0.1:{free_port()}", direct=True)
    box, other = _large(local.box()), local.box()
    receipt = await _committed(engine, box.open())
    assert receipt.trips == {"command": 2, "download": 1}
    assert _relayed(receipt) == receipt.warnings != []
    restored = await _restore(engine, other.open())
    assert restored.trips["upload"] == 1
    assert _relayed(restored) == restored.warnings != []
    assert _holds(other) == _holds(box)
    assert await strays(engine, MEMORY) == set()
    for each in (box, other):
        assert await each.is_clean(within=15), each.left_behind()


def _late(what: str) -> Hook:
    """Let a link pass its time before it is used."""

    async def act(request: dict[str, Any]) -> None:
        if request.get("do") == what and (what == "send" or "links" in request):
            await asyncio.sleep(2.2)

    return act


async def test_a_link_that_has_expired_is_relayed_and_the_receipt_warns(engine: Engine, local: Provider) -> None:
    engine = replace(engine, timing=Timing(direct=1))
    box, other = _large(local.box()), local.box()
    receipt = await _committed(engine, box.open(before=_late("send")))
    assert receipt.trips == {"command": 2, "download": 1}
    assert _relayed(receipt) == receipt.warnings != []
    restored = await _restore(engine, other.open(before=_late("restore")))
    assert restored.trips["upload"] == 1
    assert _relayed(restored) == restored.warnings != []
    assert _holds(other) == _holds(box)
    assert await strays(engine, MEMORY) == set()


async def test_a_sandbox_without_python_is_relayed(engine: Engine, local: Provider, tmp_path: Path) -> None:
    tools = shell_tools(tmp_path / "tools")
    box, other = _large(local.box(tools=tools)), local.box(tools=tools)
    receipt = await _committed(engine, box.open())
    assert receipt.trips["download"] == 1
    restored = await _restore(engine, other.open())
    assert restored.trips["upload"] == 2
    for warnings in (receipt.warnings, restored.warnings):
        assert [warning for warning in warnings if "no usable python3" in warning]
    assert titles(other.home) == titles(box.home)
    assert await strays(engine, MEMORY) == set()
    for each in (box, other):
        assert await each.is_clean(), each.left_behind()


@pytest.mark.parametrize("where", ["disk", "unreachable"])
async def test_a_restore_that_is_relayed_costs_no_command_more_than_was_asked_in_vain(
    url: str, tmp_path: Path, local: Provider, where: str
) -> None:
    aside = f"{url}&sandbox-endpoint=http://127.0.0.1:{free_port()}"
    engine = engine_on(aside if where == "unreachable" else f"file:{tmp_path / 'store'}", direct=True)
    box = local.box()
    plain_home(box.home)
    await _committed(engine, box.open())
    receipt = await _restore(engine, sandbox := local.box().open())
    assert [command["do"] for command in sandbox.commands].count("tidy") == 0
    assert receipt.trips == {"upload": 1, "command": 1 if where == "disk" else 2}


async def test_a_relayed_export_that_is_tried_again_warns_once(url: str, open_provider: Open) -> None:
    provider = open_provider("e2b")
    engine = engine_on(f"{url}&sandbox-endpoint=http://127.0.0.1:{free_port()}", direct=True)
    provider.server.faults.add(Fault("download", "cut", after=100_000))
    receipt = await _committed(engine, _large(provider.box()).open())
    assert receipt.trips["download"] == 2
    assert len(_relayed(receipt)) == len(receipt.warnings) == 1


async def test_a_direct_restore_that_finds_a_damaged_database_leaves_the_sandbox_as_it_was(
    engine: Engine, local: Provider
) -> None:
    box, other = _large(local.box()), local.box()
    damage_database(box.home)
    damaged = await _export(engine, box.open())
    assert damaged.outcome == "rejected"
    assert await strays(engine, MEMORY) == set()
    plain_home(other.home, rows=3)
    before = _holds(other)
    receipt = await restore(engine, other.open(), RestoreRequest(memory=MEMORY, snapshot=str(damaged.snapshot)))
    assert (receipt.outcome, receipt.reason and receipt.reason.code) == ("incomplete", "database-damaged")
    assert receipt.trips == {"command": 1}
    assert _holds(other) == before
    assert await other.is_clean(), other.left_behind()


# A sandbox that lies


def _forging(at: str) -> Hook:
    """Between saying what it has and sending it, the sandbox puts other bytes into its bundle."""

    def act(request: dict[str, Any]) -> None:
        if request.get("do") == "send":
            path, parts = Path(request["path"]), request["parts"]
            data = bytearray(path.read_bytes())
            data[{"pack": parts[0]["bytes"] // 2, "index": parts[1]["start"] + parts[1]["bytes"] // 2}[at]] ^= 1
            path.write_bytes(data)

    return act


@pytest.mark.parametrize("at", ["pack", "index"])
async def test_other_bytes_than_a_sandbox_said_are_refused_and_nothing_of_them_is_kept(
    engine: Engine, local: Provider, at: str
) -> None:
    box, other = _large(local.box()), local.box()
    first = await _committed(engine, box.open())
    held = _holds(box)
    grow_large(box.home, 2)
    problem = await _refusal(engine, box.open(before=_forging(at)))
    assert problem.code == "digest-mismatch"
    assert (await engine.repository.head(MEMORY)).snapshot == first.snapshot
    assert len(await engine.repository.list_snapshot_ids(MEMORY)) == 1
    await _restore(engine, other.open())
    assert _holds(other) == held
    assert await box.is_clean(within=15), box.left_behind()
    assert await strays(engine, MEMORY) == set()


class Boasting(Watched):
    """It says that it sent its pack to the bucket, and sent nothing."""

    async def run(self, command: str, **how: Any) -> CommandResult:
        request = request_in(command, how.get("environment"))
        if request["do"] != "send":
            return await super().run(command, **how)
        said = {"status": "sent", "memory": request["memory"], "snapshot": request["snapshot"]}
        return CommandResult(0, framed(request["nonce"], said))


async def test_a_sandbox_that_only_says_it_has_sent_its_pack_is_not_believed(engine: Engine, local: Provider) -> None:
    box = _large(local.box())
    await _committed(engine, box.open())
    grow_large(box.home, 2)
    receipt = await export(engine, Boasting(box.open()), ExportRequest(memory=MEMORY))
    assert receipt.outcome == "committed" and receipt.trips["download"] == 1, "fetched instead"
    assert "not there" in receipt.warnings[0]
    assert await strays(engine, MEMORY) == set()
    assert await box.is_clean(), box.left_behind()


class Spied:
    """A store that remembers which links it gave out, and lets somebody act after each copy or before it."""

    def __init__(self, store: Store, before_copy: Callable[[Spied], None] | None = None) -> None:
        self._store = store
        self._before_copy = before_copy
        self.to_put: dict[str, Link] = {}
        self.after_copy: Callable[[Spied], None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def link_to_put(self, key: str, **about: Any) -> Link | None:
        link = await self._store.link_to_put(key, **about)
        if link is not None:
            self.to_put[key] = link
        return link

    async def copy(self, source: str, target: str) -> None:
        if self._before_copy:
            await asyncio.to_thread(self._before_copy, self)
        await self._store.copy(source, target)
        if self.after_copy:
            await asyncio.to_thread(self.after_copy, self)

    def overwrite(self) -> None:
        """Use every link again, with other bytes of the same length: a server that compares nothing takes them."""
        for link in self.to_put.values():
            body = b"x" * int(link.headers["Content-Length"])
            request = urllib.request.Request(link.url, data=body, headers=dict(link.headers), method="PUT")
            with urllib.request.urlopen(request, timeout=20) as answer:
                assert answer.status == 200, "this server compares: it is no test"
        self.to_put.clear()


@pytest.fixture
def credulous(moto_server: S3Server, credentials_of: Become, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A bucket whose server compares no checksum with anything. What it logs, in this process, is the server's business."""
    monkeypatch.setattr(logging.getLogger("werkzeug"), "disabled", True)
    credentials_of(moto_server)
    bucket = moto_server.make_bucket(f"b-{uuid.uuid4().hex}")
    return open_store(f"s3://{bucket}/p?endpoint={moto_server.endpoint}")


def _spied(store: Store, **hooks: Any) -> tuple[Engine, Spied]:
    spied = Spied(store, **hooks)
    return Engine(open_sandbox=open_sandbox, repository=Repository(spied), direct=True), spied


async def test_a_link_never_named_a_key_that_a_manifest_names(credulous: Store, local: Provider) -> None:
    """A link may be used again while it lasts; whatever is put by it then, no snapshot has it."""
    engine, spied = _spied(credulous)
    box, other = _large(local.box()), local.box()
    assert (await _committed(engine, box.open())).trips == {"command": 2}
    linked = set(spied.to_put)
    assert len(linked) == 2
    spied.overwrite()
    keys = MemoryKeys.of(MEMORY)
    (manifest,) = await manifests_of(engine, MEMORY)
    named = {key for pack in manifest.packs for key in (keys.pack(pack.id, pack.codec), keys.index(pack.id))}
    assert not named & linked
    await _restore(engine, other.open())
    assert _holds(other) == _holds(box)
    assert (await verify_memory(engine.repository, MEMORY, NoProgress())).ok


async def test_a_pack_put_after_the_copy_is_not_what_is_stored(credulous: Store, local: Provider) -> None:
    engine, spied = _spied(credulous)
    spied.after_copy = _overwrite_the_pack
    box, other = _large(local.box()), local.box()
    await _committed(engine, box.open())
    await _restore(engine, other.open())
    assert _holds(other) == _holds(box)
    assert await strays(engine, MEMORY) == set()


def _overwrite_the_pack(spied: Spied) -> None:
    spied.to_put = {key: link for key, link in spied.to_put.items() if ".tar." in key}
    spied.overwrite()


async def test_a_pack_put_before_the_copy_is_refused_and_nothing_of_it_is_kept(
    credulous: Store, local: Provider
) -> None:
    engine, _ = _spied(credulous, before_copy=Spied.overwrite)
    box = _large(local.box())
    problem = await _refusal(engine, box.open())
    assert problem.code == "digest-mismatch"
    assert await engine.repository.memories() == []
    assert await strays(engine, MEMORY) == set()


# A bucket that lost something


async def _damage(engine: Engine, pack: Pack, how: str) -> None:
    keys, store = MemoryKeys.of(MEMORY), engine.repository.store
    key = keys.index(pack.id) if how == "index flipped" else keys.pack(pack.id, pack.codec)
    if how == "manifest flipped":
        key = keys.snapshot((await engine.repository.head(MEMORY)).snapshot)
    if how == "pack deleted":
        await store.delete([key])
        return
    data = bytearray(b"".join([chunk async for chunk in store.stream(key)]))
    data[len(data) // 2] ^= 1
    await store.put(key, bytes(data))


@pytest.mark.parametrize("how", ["pack flipped", "pack deleted", "index flipped", "manifest flipped"])
async def test_a_snapshot_damaged_in_the_bucket_gives_way_to_the_newest_good_one_loudly(
    engine: Engine, local: Provider, how: str
) -> None:
    box, other = _large(local.box()), local.box()
    good = await _committed(engine, box.open())
    held = _holds(box)
    grow_large(box.home, 2)
    newest = await _committed(engine, box.open())
    await _damage(engine, (await manifests_of(engine, MEMORY))[-1].packs[-1], how)
    plain_home(other.home, rows=3)
    receipt = await _restore(engine, other.open())
    assert (receipt.snapshot, receipt.wanted) == (good.snapshot, newest.snapshot)
    assert [warning for warning in receipt.warnings if f"Restored {good.snapshot} instead of" in warning]
    assert _holds(other) == held
    assert await other.is_clean(), other.left_behind()


async def test_a_snapshot_of_which_nothing_can_be_read_leaves_the_sandbox_as_it_was(
    engine: Engine, local: Provider
) -> None:
    box, other = _large(local.box()), local.box()
    await _committed(engine, box.open())
    await _damage(engine, (await manifests_of(engine, MEMORY))[-1].packs[-1], "pack flipped")
    plain_home(other.home, rows=3)
    before = _holds(other)
    with pytest.raises(SidecarError) as refused:
        await restore(engine, other.open(), RestoreRequest(memory=MEMORY))
    assert refused.value.code == "snapshot-damaged"
    _no_link_in(refused.value, *traceback.format_exception(refused.value))
    assert _holds(other) == before
    assert await other.is_clean(), other.left_behind()


# What an export that stores nothing leaves


async def test_a_full_export_that_brings_nothing_new_leaves_nothing_in_the_bucket(
    engine: Engine, local: Provider
) -> None:
    box = _large(local.box())
    first = await _committed(engine, box.open())
    forget_caches(box.home)
    receipt = await _export(engine, box.open())
    assert (receipt.outcome, receipt.snapshot, receipt.packed_bytes) == ("unchanged", first.snapshot, 0)
    assert await strays(engine, MEMORY) == set()
