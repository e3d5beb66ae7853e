"""Keys are changed: everything is sealed and signed anew, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyrage
import pytest

from adapters.sandboxes.local import open_local
from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.errors import KeyNeeded, NotSigned, StoreUnreachable, UsageError
from sidecar.host.work import NoProgress
from sidecar.ids import STORE_ID, MemoryKeys, build_attachment_key, build_instance_key, build_outbox_prefix
from sidecar.policy.retention import Retention
from sidecar.ports import Store
from sidecar.receipts import ExportOutcome, RestoreOutcome
from sidecar.store.encryption import passphrase
from sidecar.store.encryption.check import check_store
from sidecar.store.encryption.given_keys import GivenKeys
from sidecar.store.encryption.passphrase import IDENTITY
from sidecar.store.encryption.rekey import RekeyReport, rekey
from sidecar.store.pins import pin
from sidecar.store.repository import Repository
from sidecar.store.retention import forget
from sidecar.store.verification import verify_memory
from sidecar.wiring import build_repository, open_sandbox, open_store
from tests.parts.homes import claude_mem_home, empty_home, forget_caches, memory_tree, observe, run_cli
from tests.parts.keys import (
    BOTH,
    ENCRYPTED,
    ONE,
    OTHER,
    OTHER_SIGNING,
    SIGNED,
    SIGNING,
    engine_with,
    environment,
    public_key,
    quickly_sealed,
    recipient,
)

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "conductor"
KEYS = MemoryKeys.of(MEMORY)
NEW = GivenKeys(identities=(OTHER,), signing_key=OTHER_SIGNING)
ROTATING = GivenKeys(
    identities=(OTHER, ONE),
    recipients=(recipient(OTHER),),
    signing_key=OTHER_SIGNING,
    trusted=(public_key(SIGNING),),
)


async def memories(store: Path, given: GivenKeys, home: Path) -> list[str]:
    """A full snapshot and a delta on it, and another full one; return their ids."""
    claude_mem_home(empty_home(home), 5)
    engine, made = engine_with(store, given), []
    for turn in range(3):
        observe(home, 1, f"turn {turn}")
        if turn == 2:
            forget_caches(home)
        request = ExportRequest(memory=MEMORY, force=turn == 2)
        receipt = await export(engine, open_local(str(home)), request)
        assert receipt.outcome is ExportOutcome.COMMITTED
        made.append(receipt.snapshot or "")
    await pin(engine.repository, MEMORY, made[0])
    return made


async def rekeyed(store: Path, given: GivenKeys, *, trust_unsigned: bool = False) -> RekeyReport:
    under = open_store(f"file:{store}")
    return await rekey(build_repository(under, given, trust_unsigned=trust_unsigned), "", NoProgress())


async def whole(repository: Repository, snapshots: Iterable[str]) -> None:
    report = await verify_memory(repository, MEMORY, NoProgress())
    assert report.ok, report
    assert sorted(row.snapshot for row in report.snapshots) == sorted(snapshots)


def sealed_for(store: Path, identity: str) -> set[str]:
    """The objects that an identity opens, as they lie on the disk."""
    keys, found = [pyrage.x25519.Identity.from_str(identity)], set()
    for path in store.rglob("*"):
        if path.is_file() and path.stat().st_size:
            try:
                pyrage.decrypt(path.read_bytes(), keys)
                found.add(str(path.relative_to(store)))
            except pyrage.DecryptError:
                continue
    return found


async def test_after_a_rotation_the_old_key_opens_nothing_that_is_needed(tmp_path: Path) -> None:
    store, home = tmp_path / "store", tmp_path / "home"
    made = await memories(store, BOTH, home)
    before = engine_with(store, BOTH)
    await before.repository.head(MEMORY)
    others = {
        STORE_ID: b"0a" * 16,
        build_attachment_key(MEMORY): b"{}",
        f"{build_outbox_prefix('http://hook')}1.json": b"{}",
    }
    others[build_instance_key("host-that-died")] = b"{}"
    for key, data in others.items():
        await before.repository.store.put(key, data)
    report = await rekeyed(store, ROTATING)
    assert report.finished, report
    assert (report.memories[0].packs, report.memories[0].snapshots) == (3, 3)
    await whole(engine_with(store, NEW).repository, made)
    with pytest.raises(KeyNeeded):
        await engine_with(store, BOTH).repository.memories()
    for key, data in others.items():
        stored = await engine_with(store, NEW).repository.store.get(key)
        assert (stored.data if stored else None) == data
    assert await check_store(engine_with(store, NEW).repository) == []
    # Who had the old key and goes on is told so, and takes nothing for damaged.
    for attempt in (
        restore(before, open_local(str(home)), RestoreRequest(memory=MEMORY)),
        before.repository.head(MEMORY),
    ):
        with pytest.raises(KeyNeeded):
            await attempt
    assert not [*store.rglob("damaged/*")]
    again = await rekeyed(store, ROTATING)
    assert (again.finished, again.memories[0].packs) == (True, 0), "what is done is not done again"
    await forget(engine_with(store, NEW).repository, MEMORY, Retention(grace="0s"))
    assert sealed_for(store, ONE) == set(), "old packs went the ordinary way"
    engine = engine_with(store, NEW)
    observe(home, 1, "afterwards")
    receipt = await export(engine, open_local(str(home)), ExportRequest(memory=MEMORY))
    assert (receipt.outcome, receipt.kind, receipt.warnings) == (ExportOutcome.COMMITTED, "delta", [])
    assert (await engine.repository.survey(MEMORY)).pinned == {made[0]}


async def test_a_plain_store_becomes_an_encrypted_one(tmp_path: Path) -> None:
    store = tmp_path / "store"
    made = await memories(store, GivenKeys(), tmp_path / "home")
    refused = await rekeyed(store, BOTH)
    assert not refused.finished
    assert all("is not signed" in problem for problem in refused.memories[0].problems if "napshot" in problem)
    report = await rekeyed(store, BOTH, trust_unsigned=True)
    assert (report.finished, report.readable_names) == (True, [MEMORY])
    await whole(engine_with(store, BOTH).repository, made)
    await forget(engine_with(store, BOTH).repository, MEMORY, Retention(grace="0s"))
    plain = [path for path in store.rglob("*") if path.is_file() and path.stat().st_size]
    assert all(path.read_bytes().startswith(b"age-encryption.org/v1\n") for path in plain)


async def test_a_readable_folder_does_not_take_the_place_of_a_hidden_memory(tmp_path: Path) -> None:
    """Be it planted, or of a sidecar without keys that was slow to notice."""
    store, home = tmp_path / "store", empty_home(tmp_path / "new")
    made = await memories(store, BOTH, tmp_path / "home")
    await memories(tmp_path / "other", GivenKeys(), tmp_path / "theirs")
    shutil.copytree(tmp_path / "other" / "memories", store / "memories", dirs_exist_ok=True)
    report = await rekeyed(store, BOTH)
    assert (report.finished, report.readable_names) == (False, [])
    assert f"memories/{MEMORY} was written without keys" in report.problems[0]
    await whole(engine_with(store, BOTH).repository, made)
    back = await restore(engine_with(store, BOTH), open_local(str(home)), RestoreRequest(memory=MEMORY))
    assert (back.outcome, back.snapshot) == (RestoreOutcome.COMPLETE, made[-1])
    shutil.rmtree(store / KEYS.prefix)
    assert (await rekeyed(store, BOTH)).finished


async def test_memories_that_are_not_believed_are_not_overlooked(tmp_path: Path) -> None:
    home, store = claude_mem_home(empty_home(tmp_path / "home"), 2), tmp_path / "store"
    for memory in ("plain-id", "acme/agent-7"):
        await export(engine_with(store, GivenKeys()), open_local(str(home)), ExportRequest(memory=memory))
    assert await engine_with(store, SIGNED).repository.memories() == ["plain-id"]
    report = await rekeyed(store, SIGNED)
    assert not report.finished
    assert "acme-agent-7~" in report.problems[0]
    assert (await rekeyed(store, SIGNED, trust_unsigned=True)).finished
    assert await engine_with(store, SIGNED).repository.memories() == ["acme/agent-7", "plain-id"]


@pytest.mark.slow
async def test_a_store_is_signed_only_when_told_to(tmp_path: Path) -> None:
    store = tmp_path / "store"
    made = await memories(store, GivenKeys(), tmp_path / "home")
    with pytest.raises(NotSigned):
        await engine_with(store, SIGNED).repository.manifest(MEMORY, made[0])
    assert not (await rekeyed(store, SIGNED)).finished
    with pytest.raises(NotSigned):
        await engine_with(store, SIGNED).repository.manifest(MEMORY, made[0])
    assert (await rekeyed(store, SIGNED, trust_unsigned=True)).finished
    await whole(engine_with(store, SIGNED).repository, made)


class Failing:
    """A store whose n-th write, and every later one, does not happen; or happens, and its answer is lost."""

    def __init__(self, store: Store, good: int, *, lost: bool) -> None:
        self._store, self._good, self._lost = store, good, lost
        self.writes = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in ("put", "swap", "delete", "copy"):
            return found

        async def write(*args: Any, **more: Any) -> Any:
            self.writes += 1
            if self.writes < self._good:
                return await found(*args, **more)
            if self.writes == self._good and self._lost:
                await found(*args, **more)
            raise StoreUnreachable("It died.")

        return write


async def crashed_at(template: Path, folder: Path, made: list[str], good: int, *, lost: bool) -> bool:
    """Let it die at one write, look at every snapshot, and let it finish. Return whether it died."""
    shutil.copytree(template, folder)
    failing: Any = Failing(open_store(f"file:{folder}"), good, lost=lost)
    try:
        await rekey(build_repository(failing, ROTATING), "", NoProgress())
        return False
    except StoreUnreachable:
        pass
    await whole(build_repository(open_store(f"file:{folder}"), ROTATING), made)
    assert (await rekeyed(folder, ROTATING)).finished
    await whole(engine_with(folder, NEW).repository, made)
    shutil.rmtree(folder)
    return True


async def crashed_everywhere(tmp_path: Path, step: int, ways: Iterable[bool] = (False, True)) -> None:
    template = tmp_path / "store"
    made = await memories(template, BOTH, tmp_path / "home")
    for lost in ways:
        good = 1 + lost
        while await crashed_at(template, tmp_path / f"{good}-{lost}", made, good, lost=lost):
            good += step
        assert good > 15


async def test_a_crash_at_some_writes_loses_nothing(tmp_path: Path) -> None:
    await crashed_everywhere(tmp_path, 11, [True])


@pytest.mark.slow
async def test_a_crash_at_any_write_loses_nothing(tmp_path: Path) -> None:
    await crashed_everywhere(tmp_path, 1)


class Hooked:
    """A store in which something else happens before the first swap under a prefix."""

    def __init__(self, store: Store, suffix: str, hook: Callable[[], Any]) -> None:
        self._store, self._suffix, self._hook = store, suffix, hook
        self.happened = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def swap(self, key: str, data: bytes, *, expected: str | None) -> str:
        if self._suffix in key and not self.happened:
            self.happened = True
            await self._hook()
        return await self._store.swap(key, data, expected=expected)


@pytest.mark.parametrize("moment", ["/snapshots/", pytest.param("/head.json", marks=pytest.mark.slow)])
async def test_an_export_meanwhile_is_safe(tmp_path: Path, moment: str) -> None:
    store, home = tmp_path / "store", tmp_path / "home"
    made = await memories(store, BOTH, home)
    observe(home, 1, "meanwhile")

    async def exported() -> None:
        receipt = await export(engine_with(store, ROTATING), open_local(str(home)), ExportRequest(memory=MEMORY))
        assert receipt.outcome is ExportOutcome.COMMITTED
        made.append(receipt.snapshot or "")

    hooked: Any = Hooked(open_store(f"file:{store}"), moment, exported)
    assert (await rekey(build_repository(hooked, ROTATING), "", NoProgress())).finished
    assert hooked.happened
    await whole(engine_with(store, NEW).repository, made)
    other = empty_home(tmp_path / "other")
    back = await restore(engine_with(store, NEW), open_local(str(other)), RestoreRequest(memory=MEMORY))
    assert (back.outcome, back.snapshot, back.warnings) == (RestoreOutcome.COMPLETE, made[-1], [])
    assert memory_tree(other / ".claude-mem") == memory_tree(home / ".claude-mem")


async def test_a_rekey_in_the_middle_of_an_export_does_not_cost_it_the_head(tmp_path: Path) -> None:
    store, home = tmp_path / "store", tmp_path / "home"
    made = await memories(store, BOTH, home)
    observe(home, 1, "meanwhile")
    hooked: Any = Hooked(open_store(f"file:{store}"), "/head.json", lambda: rekeyed(store, ROTATING))
    engine = Engine(open_sandbox=open_sandbox, repository=build_repository(hooked, ROTATING))
    receipt = await export(engine, open_local(str(home)), ExportRequest(memory=MEMORY))
    assert hooked.happened
    assert (receipt.outcome, receipt.head) == (ExportOutcome.COMMITTED, receipt.snapshot)
    await whole(engine_with(store, ROTATING).repository, [*made, receipt.snapshot or ""])


@pytest.mark.slow
async def test_a_damaged_pack_is_told_and_the_rest_is_done(tmp_path: Path) -> None:
    store = tmp_path / "store"
    made = await memories(store, BOTH, tmp_path / "home")
    manifest = await engine_with(store, BOTH).repository.manifest(MEMORY, made[-1])
    pack = next(store.rglob(f"{manifest.packs[0].id}.tar.*"))
    pack.write_bytes(pack.read_bytes()[:-1])
    report = await rekeyed(store, ROTATING)
    assert not report.finished
    assert made[-1] in report.memories[0].problems[0]
    assert report.memories[0].packs == 2
    other = empty_home(tmp_path / "other")
    back = await restore(engine_with(store, ROTATING), open_local(str(other)), RestoreRequest(memory=MEMORY))
    assert (back.outcome, back.snapshot, back.wanted) == (RestoreOutcome.COMPLETE, made[-2], made[-1])


async def test_a_passphrase_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passphrase, "_encrypt", quickly_sealed)
    store = tmp_path / "store"
    old, new = GivenKeys(passphrase="old words"), GivenKeys(passphrase="new words")
    made = await memories(store, old, tmp_path / "home")
    both = replace(new, previous_passphrase="old words")
    with pytest.raises(KeyNeeded):
        await engine_with(store, new).repository.memories()
    await whole(engine_with(store, both).repository, made)
    before = (store / IDENTITY).read_bytes()
    assert (await rekeyed(store, both)).finished
    assert (store / IDENTITY).read_bytes() != before
    await whole(engine_with(store, new).repository, made)
    with pytest.raises(KeyNeeded):
        await engine_with(store, old).repository.memories()
    # And to a key.
    key = GivenKeys(identities=(ONE,), recipients=(recipient(ONE),), previous_passphrase="new words")
    assert (await rekeyed(store, key)).finished
    await whole(engine_with(store, ENCRYPTED).repository, made)
    assert not (store / IDENTITY).exists()
    # And back: also before anybody has written.
    back = GivenKeys(passphrase="last words", identities=(ONE,))
    await whole(engine_with(store, back).repository, made)
    assert not (store / IDENTITY).exists()
    assert (await rekeyed(store, back)).finished
    await whole(engine_with(store, GivenKeys(passphrase="last words")).repository, made)


def test_the_command_says_what_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    made = asyncio.run(memories(store, GivenKeys(), tmp_path / "home"))
    for name, value in environment(BOTH).items():
        monkeypatch.setenv(name, value)
    refused = run_cli("rekey", store=store)
    assert (refused.code, refused.document["ok"]) == (1, False)
    ran = run_cli("rekey", "--trust-unsigned", store=store)
    assert (ran.code, ran.document["finished"], ran.document["readable_names"]) == (0, True, [MEMORY])
    assert run_cli("log", MEMORY, store=store).document["head"] == made[-1]
    one = run_cli("rekey", MEMORY, store=store)
    assert (one.code, one.document["finished"], one.document["ok"]) == (0, False, True)
    assert run_cli("rekey", "nobody", store=store).error == "memory-not-found"


def test_without_keys_there_is_nothing_to_seal_with(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        asyncio.run(rekeyed(tmp_path / "store", GivenKeys()))
