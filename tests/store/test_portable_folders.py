"""A memory's folder in a store: it keeps the one it has, a new one has a name that every server takes, and never two."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sidecar.errors import KeyRefused, ObjectMissing, SwapLost
from sidecar.format.checksums import decode_checksummed
from sidecar.ids import MemoryKeys, build_memory_key, build_portable_folder, is_plain_id, parse_portable_folder
from sidecar.ports import ObjectInfo, StoredObject
from sidecar.store.folder_names import SIGNPOST, PortableStore
from sidecar.store.manifest import Head
from tests.parts.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "acme/agent-7"
KEYS = MemoryKeys.of(MEMORY)
OLD, NEW = f"memories/{build_memory_key(MEMORY)}/", f"memories/{build_portable_folder(build_memory_key(MEMORY))}/"


class Strict(MemoryStore):
    """Takes no ``~``, not even to look for."""

    async def get(self, key: str) -> StoredObject | None:
        _check(key)
        return await super().get(key)

    async def put(self, key: str, source: bytes | Path) -> int:
        _check(key)
        return await super().put(key, source)


class StrictToWrite(MemoryStore):
    """Takes no ``~``, and says so only to who writes."""

    async def put(self, key: str, source: bytes | Path) -> int:
        _check(key)
        return await super().put(key, source)


class Slow(MemoryStore):
    """Lets others go first, at random."""

    async def get(self, key: str) -> StoredObject | None:
        await asyncio.sleep(random.random() / 1000)
        return await super().get(key)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        await asyncio.sleep(random.random() / 1000)
        async for info in super().list(prefix):
            yield info


def _check(key: str) -> None:
    if "~" in key:
        raise KeyRefused(f"no object is called {key}")


def _head(store: MemoryStore, key: str = f"{OLD}head.json") -> bytes | None:
    found = store.objects.get(key)
    return found[0] if found else None


async def _keys(store: PortableStore, prefix: str = "memories/") -> list[str]:
    return [info.key async for info in store.list(prefix)]


@pytest.mark.parametrize("memory", ["a/b", "🧠", "~", "Ünïcode näme", "x" * 200, "A", "a" * 64, "-x/y", "_a_", "a b"])
def test_the_portable_form_is_told_from_every_plain_id_and_turned_back(memory: str) -> None:
    name = build_portable_folder(build_memory_key(memory))
    assert re.fullmatch(r"[a-z0-9._-]+", name)
    assert not is_plain_id(name)
    assert parse_portable_folder(name) == build_memory_key(memory)
    assert len(name) < 100


@pytest.mark.parametrize("name", ["conductor", "a_b", "_x", "a.b-c", "_a_b", "a" * 63])
def test_other_names_stay_as_they_are(name: str) -> None:
    assert (build_portable_folder(name), parse_portable_folder(name)) == ("", name)


async def test_a_new_memory_is_in_the_portable_folder_and_called_as_ever() -> None:
    below = MemoryStore()
    store = PortableStore(below)
    await store.put(KEYS.pack("1", "gz"), b"pack")
    await store.swap(KEYS.snapshot("s"), b"{}", expected=None)
    await store.swap(KEYS.head, b"head", expected=None)
    assert {key for key in below.objects if not key.startswith(NEW)} == {f"{OLD}head.json"}
    assert await _keys(store) == [KEYS.head, KEYS.pack("1", "gz"), KEYS.snapshot("s")]
    again = PortableStore(below)
    assert (await again.get(KEYS.head) or pytest.fail("lost")).data == b"head"
    assert await again.folders("memories/", most=10) == [build_memory_key(MEMORY)]
    assert b"".join([chunk async for chunk in again.stream(KEYS.pack("1", "gz"))]) == b"pack"


def test_what_stands_in_the_old_place_is_of_a_format_that_earlier_versions_refuse() -> None:
    assert decode_checksummed(SIGNPOST)["format"] == 2
    with pytest.raises(Exception, match="in a format this version does not know"):
        Head.decode(SIGNPOST, MEMORY)
    smallest = Head(memory="🧠", snapshot="", generation=0, created="", files=0, bytes=0, history=[]).encode()
    assert len(SIGNPOST) < len(smallest), "a listing tells the two by their size"


@pytest.mark.parametrize("left", ["head.json", "snapshots/s.json", "calls/x"])
async def test_a_memory_from_before_keeps_its_folder_for_writes_too(left: str) -> None:
    below = MemoryStore()
    await below.put(f"{OLD}{left}", b"from before")
    store = PortableStore(below)
    await store.put(KEYS.pack("1", "gz"), b"pack")
    found = await store.get(KEYS.head)
    await store.swap(KEYS.head, b"head", expected=found.version if found else None)
    await store.copy(KEYS.head, KEYS.witness(1))
    await store.put(KEYS.clock, b"")
    assert {key.startswith(OLD) for key in below.objects} == {True}
    await store.delete([KEYS.clock, KEYS.head])
    assert _head(below) is None


@pytest.mark.parametrize("kind", [Strict, StrictToWrite])
async def test_where_no_tilde_is_taken_everything_works_without(kind: type[MemoryStore]) -> None:
    below = kind()
    store = PortableStore(below)
    assert await store.get(KEYS.head) is None
    assert await _keys(store, KEYS.prefix) == []
    await store.put(KEYS.pack("1", "gz"), b"pack")
    version = await store.swap(KEYS.head, b"1", expected=None)
    await store.swap(KEYS.head, b"2", expected=version)
    assert {key.startswith(NEW) for key in below.objects} == {True}
    again = PortableStore(below)
    assert (await again.get(KEYS.head) or pytest.fail("lost")).data == b"2"
    with pytest.raises(ObjectMissing):
        [chunk async for chunk in again.stream(KEYS.pack("2", "gz"))]
    assert await again.get("attachments/a~b.json") is None
    await again.delete(["attachments/a~b.json", KEYS.pack("1", "gz")])
    assert await _keys(again, KEYS.prefix) == [KEYS.head]
    assert await again.purge(KEYS.prefix) == 1
    assert below.objects == {}


async def test_a_tilde_in_the_way_of_a_plain_memory_is_never_an_empty_store() -> None:
    class Everything(MemoryStore):
        async def get(self, key: str) -> StoredObject | None:
            raise KeyRefused("the prefix of this store has a ~")

    with pytest.raises(KeyRefused):
        await PortableStore(Everything()).get(MemoryKeys.of("conductor").head)
    with pytest.raises(KeyRefused):
        await PortableStore(Everything()).get(KEYS.head)


async def test_of_an_earlier_and_a_new_version_that_begin_a_memory_at_once_one_finds_the_other() -> None:
    for seed in range(100):
        random.seed(seed)
        below = Slow()

        async def earlier(below: MemoryStore = below) -> bool:
            if await below.get(f"{OLD}head.json") is not None:
                return False
            await below.put(f"{OLD}snapshots/old.json", b"old")
            await asyncio.sleep(random.random() / 1000)
            try:
                await below.swap(f"{OLD}head.json", b"earlier", expected=None)
            except SwapLost:
                return False
            return True

        async def new(store: PortableStore) -> bool:
            if await store.get(KEYS.head) is not None:
                return False
            await store.put(KEYS.snapshot("new"), b"new")
            try:
                await store.swap(KEYS.head, b"new", expected=None)
            except SwapLost:
                return False
            return True

        won = await asyncio.gather(earlier(), new(PortableStore(below)), new(PortableStore(below)))
        heads = {_head(below), _head(below, f"{NEW}head.json")} - {None, SIGNPOST}
        assert (sum(won), len(heads)) == (1, 1), f"seed {seed}: two heads"
        # Whoever lost has a snapshot beside the head, wherever it was written.
        later = PortableStore(below)
        assert (await later.get(KEYS.head) or pytest.fail("lost")).data in heads
        for key in await _keys(later, KEYS.snapshots):
            assert (await later.get(key) or pytest.fail("lost")).data in (b"old", b"new")
        assert {key.split("/")[3] for key in below.objects if "/snapshots/" in key} == {
            key.split("/")[3] for key in await _keys(later, KEYS.snapshots)
        }


async def test_the_first_objects_of_a_memory_that_are_written_at_once_are_all_in_the_new_folder() -> None:
    for seed in range(60):
        random.seed(seed)
        below = Slow()
        stores = PortableStore(below), PortableStore(below)  # of two processes
        await asyncio.gather(
            *(
                store.put(KEYS.pack(f"{number} {name}", "gz"), b"1")
                for number, store in enumerate(stores)
                for name in "abc"
            )
        )
        await stores[0].swap(KEYS.head, b"head", expected=None)
        assert {key for key in below.objects if not key.startswith(NEW)} == {f"{OLD}head.json"}, f"seed {seed}"


async def test_what_an_earlier_version_writes_beside_a_signpost_is_found() -> None:
    below = MemoryStore()
    store = PortableStore(below)
    await store.swap(KEYS.head, b"head", expected=None)
    await below.put(f"{OLD}snapshots/theirs.json", b"diverged")
    await below.put(f"{OLD}packs/theirs.tar.gz", b"pack")
    await below.put(f"{OLD}refusals.json", b"1")
    for seen in (store, PortableStore(below)):
        assert await _keys(seen, KEYS.snapshots) == [KEYS.snapshot("theirs")]
        assert (await seen.get(KEYS.snapshot("theirs")) or pytest.fail("lost")).data == b"diverged"
        assert b"".join([chunk async for chunk in seen.stream(KEYS.pack("theirs", "gz"))]) == b"pack"
        assert await seen.folders(KEYS.prefix, most=9) == ["packs", "snapshots"]
        await seen.copy(KEYS.pack("theirs", "gz"), KEYS.pack("copy", "gz"))
    # What is there is swapped where it is.
    await _keys(store, KEYS.prefix)
    found = await store.get(KEYS.refusals)
    assert found is not None
    await store.swap(KEYS.refusals, b"2", expected=found.version)
    assert (await store.get(KEYS.refusals) or pytest.fail("lost")).data == b"2"
    await store.delete([KEYS.snapshot("theirs")])
    assert await _keys(store, KEYS.snapshots) == []
    assert await store.purge(KEYS.prefix) == 4
    assert below.objects == {}


async def test_a_head_that_an_earlier_version_forced_gives_way_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    below = MemoryStore()
    store = PortableStore(below)
    version = await store.swap(KEYS.head, b"ours", expected=None)
    await below.put(f"{OLD}snapshots/forced.json", b"forced")
    await below.put(f"{OLD}head.json", b"forced")
    for seen in (store, PortableStore(below)):
        assert (await seen.get(KEYS.head) or pytest.fail("lost")).data == b"ours"
    await store.swap(KEYS.head, b"ours too", expected=version)
    assert _head(below) == SIGNPOST
    assert "earlier version of the sidecar had made a head of its own" in caplog.text
    assert await _keys(store, KEYS.snapshots) == [KEYS.snapshot("forced")], "beside the head"


async def test_a_deleted_memory_that_is_begun_anew_is_found_by_those_who_knew_it() -> None:
    below = MemoryStore()
    await below.put(f"{OLD}head.json", b"from before")
    knew, other = PortableStore(below), PortableStore(below)
    assert await knew.get(KEYS.head) is not None
    await other.delete([KEYS.head])
    assert await other.purge(KEYS.prefix) == 0
    await other.swap(KEYS.head, b"anew", expected=None)
    with pytest.raises(SwapLost):
        await knew.swap(KEYS.head, b"late", expected=None)
    assert (await knew.get(KEYS.head) or pytest.fail("lost")).data == b"anew"
    assert _head(below) == SIGNPOST


async def test_deleting_leaves_the_signpost_until_all_is_gone() -> None:
    below = MemoryStore()
    store = PortableStore(below)
    await store.put(KEYS.snapshot("s"), b"1")
    await store.swap(KEYS.head, b"head", expected=None)
    await store.delete([KEYS.head])
    assert _head(below) == SIGNPOST, "no earlier version begins it while it goes"
    assert await store.get(KEYS.head) is None
    assert await store.purge(KEYS.prefix) == 1
    assert below.objects == {}


async def test_a_claim_that_nothing_came_of_is_no_memory() -> None:
    below = MemoryStore()
    await below.put(f"{OLD}head.json", SIGNPOST)
    store = PortableStore(below)
    assert await store.get(KEYS.head) is None
    assert await _keys(store) == await _keys(store, KEYS.prefix) == []


async def test_listings_are_in_the_order_of_what_keys_are_called() -> None:
    class Streamed(MemoryStore):
        async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
            async for info in super().list(prefix):
                yield info

    store = PortableStore(Streamed())
    ids = ["conductor", "7/b", "a/b", "zz/top", "agent-1", "9"]
    for memory in ids:
        await store.swap(MemoryKeys.of(memory).head, memory.encode(), expected=None)
    assert await _keys(store) == sorted(MemoryKeys.of(memory).head for memory in ids)
    assert json.dumps(await _keys(store)).count("_") == 0
