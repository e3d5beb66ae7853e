"""What every store promises, asked of each adapter on the real thing below it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import sys
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import adapters
from adapters.stores.urls import open_store
from sidecar.errors import KeyRefused, ObjectMissing, SwapLost
from sidecar.ports import Link, Store
from sidecar.store.encryption.encrypted_store import EncryptedStore
from sidecar.store.encryption.given_keys import GivenKeys
from sidecar.store.encryption.signed_store import SignedStore
from sidecar.wiring import open_repository
from tests.parts.keys import BOTH, ENCRYPTED, SIGNED
from tests.parts.keys import environment as environment_with
from tests.parts.s3_servers import S3Server
from tests.parts.supabase import refused_by_supabase

PROJECT = Path(adapters.__file__).parents[1]
MIB = 1 << 20
AWKWARD = [
    "a b/x",
    "a!/x",
    "a+b/x",
    "a-b/x",
    "a.b/x",
    "a/x",
    "a/x-y",
    "a/x/y",
    "a=b/x",
    "aB/x",
    "ab/x",
    "a~b/x",
    "aé/ü",
]


@dataclass(frozen=True)
class Place:
    """A store under test, and what a test needs to do behind its back."""

    url: str
    store: Store
    leave_unfinished: Callable[[str], None]
    given: GivenKeys
    """The keys, of one that seals or signs."""
    refuses: Callable[[str], bool]
    """Whether the server takes no object of that name."""
    unfinished: int = 1
    """How many unfinished uploads it lists of one that there is: MinIO does only when asked by its whole name."""

    def opened_again(self) -> Store:
        return _opened(self.url, self.given)

    @property
    def wraps(self) -> bool:
        return self.given.encrypts or self.given.signs


def _opened(url: str, given: GivenKeys) -> Store:
    return open_repository(url, given).store if given.encrypts or given.signs else open_store(url)


GIVEN = {"sealed": ENCRYPTED, "signed": SIGNED, "sealed and signed": BOTH, "sealed on S3": BOTH}


MADE = ("minio", "versitygw", "s3proxy")
"""Servers for a make target of their own."""
SERVERS = {"seaweedfs": "weed", "supabase": "supabase_server", **{name: f"{name}_server" for name in MADE}}
ALONE = ("supabase", "s3proxy")
"""Servers that do not decide between writers: one process at a time."""


def nothing_refused(name: str) -> bool:
    return False


LIKE_OTHERS = ("volume", "moto", *(name for name in GIVEN if name != "sealed and signed"))
"""These share nearly all of their code with one that is always tested."""
MORE = [pytest.param(name, marks=pytest.mark.slow) for name in LIKE_OTHERS]
MORE += [pytest.param(name, marks=[pytest.mark.servers, pytest.mark.xdist_group(name)]) for name in MADE]


@pytest.fixture(params=["file", "seaweedfs", "supabase", "sealed and signed", *MORE])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    given = GIVEN.get(request.param, GivenKeys())
    if request.param in ("file", "volume", "sealed", "signed", "sealed and signed"):
        root = tmp_path / "disk"
        if request.param == "volume":
            request.getfixturevalue("mount")(root, size="200m")
        url = f"{request.param}:{root}" if not given.encrypts and not given.signs else f"file:{root}"
        leave = _temp_file_in(root)
    else:
        server = request.getfixturevalue(SERVERS.get(request.param, "moto_server"))
        request.getfixturevalue("credentials_of")(server)
        prefix = uuid.uuid4().hex
        url = f"s3://{_bucket(server)}/{prefix}?endpoint={server.endpoint}&region=us-east-1"
        url += "&single-writer=true" if request.param in ALONE else ""
        leave = _upload_begun_in(server, prefix)
    store = _opened(url, given)
    await store.prepare()
    refuses = refused_by_supabase if request.param == "supabase" else nothing_refused
    yield Place(url, store, _at_the_hidden_name(store, leave), given, refuses, int(request.param != "minio"))
    await store.close()


def _at_the_hidden_name(store: Store, leave: Callable[[str], None]) -> Callable[[str], None]:
    """Behind the back of a store that hides names is below its hidden names."""

    def leave_there(key: str) -> None:
        sealed = store.inner if isinstance(store, SignedStore) else None
        state = sealed.opening.state if isinstance(sealed, EncryptedStore) else None
        leave(state.names.hide(key) if state else key)

    return leave_there


_BUCKETS: dict[str, str] = {}


def _bucket(server: S3Server) -> str:
    if server.endpoint not in _BUCKETS:
        _BUCKETS[server.endpoint] = server.make_bucket("contract")
    return _BUCKETS[server.endpoint]


def _temp_file_in(root: Path) -> Callable[[str], None]:
    def leave(key: str) -> None:
        folder = (root / key).parent
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".tmp-0123456789abcdef").write_bytes(b"half")

    return leave


def _upload_begun_in(server: S3Server, prefix: str) -> Callable[[str], None]:
    def leave(key: str) -> None:
        at = {"Bucket": _bucket(server), "Key": f"{prefix}/{key}"}
        begun = server.client.create_multipart_upload(**at)
        server.client.upload_part(**at, UploadId=begun["UploadId"], PartNumber=1, Body=b"half")

    return leave


async def _keys(store: Store, prefix: str) -> list[str]:
    return [info.key async for info in store.list(prefix)]


async def _read(store: Store, key: str) -> bytes:
    return b"".join([chunk async for chunk in store.stream(key)])


async def test_preparing_again_changes_nothing(place: Place) -> None:
    await place.store.put("memories/m/x", b"1")
    await place.store.prepare()
    await place.opened_again().prepare()
    assert await _keys(place.store, "memories/") == ["memories/m/x"]


async def test_what_is_not_there(place: Place) -> None:
    store = place.store
    assert await store.get("memories/none") is None
    assert await _keys(store, "memories/none/") == []
    with pytest.raises(ObjectMissing):
        await _read(store, "memories/none")
    with pytest.raises(ObjectMissing):
        await store.copy("memories/none", "memories/copy")
    assert await store.get("memories/copy") is None
    await store.delete(["memories/none", "memories/nor/this"])
    assert await store.purge("memories/none/") == 0
    assert await store.sweep("memories/none/", older_than=time.time()) == 0


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 9000])
async def test_bytes_come_back_as_they_went(place: Place, data: bytes) -> None:
    await place.store.put("memories/m/x", data)
    stored = await place.store.get("memories/m/x")
    assert stored is not None
    assert stored.data == data
    assert await _read(place.opened_again(), "memories/m/x") == data


@pytest.mark.parametrize("size", [0, 3 * MIB + 1, 40 * MIB + 7])
async def test_a_file_comes_back_as_it_went_in_small_chunks(place: Place, tmp_path: Path, size: int) -> None:
    source = tmp_path / "source"
    source.write_bytes(random.Random(size).randbytes(size))
    taken = await place.store.put("memories/m/packs/p", source)
    digest, largest = hashlib.sha256(), 0
    async for chunk in place.store.stream("memories/m/packs/p"):
        digest.update(chunk)
        largest = max(largest, len(chunk))
    assert digest.hexdigest() == hashlib.sha256(source.read_bytes()).hexdigest()
    assert largest <= MIB
    assert [info.size async for info in place.store.list("memories/m/")] == [taken]
    assert taken == size if not place.given.encrypts else size < taken <= place.store.room(size)


async def test_put_replaces(place: Place) -> None:
    await place.store.put("memories/m/x", b"old")
    await place.store.put("memories/m/x", b"new")
    assert await _read(place.store, "memories/m/x") == b"new"
    assert len(await _keys(place.store, "memories/")) == 1


async def test_a_stream_left_early_harms_nothing(place: Place) -> None:
    await place.store.put("memories/m/x", b"x" * 5 * MIB)
    async for _ in place.store.stream("memories/m/x"):
        break
    assert len(await _read(place.store, "memories/m/x")) == 5 * MIB


@pytest.mark.parametrize("place", ["file", "volume", "seaweedfs"], indirect=True)
async def test_an_object_is_seen_whole_or_not_at_all(place: Place, tmp_path: Path) -> None:
    # Not on moto, which closes an object's buffer when it is overwritten, also under a reader: no judge of this.
    size = 6 * MIB
    sources = []
    for letter in b"AB":
        source = tmp_path / chr(letter)
        source.write_bytes(bytes([letter]) * size)
        sources.append(source)
    key, done, seen = "memories/m/x", asyncio.Event(), set()

    async def watch() -> None:
        reader = place.opened_again()
        while not done.is_set():
            found = await reader.get(key)
            if found is not None:
                seen.add((len(found.data), *set(found.data)))
            seen.update({(info.size,) async for info in reader.list("memories/m/")})
        await reader.close()

    watching = asyncio.create_task(watch())
    for turn in range(8):
        await place.store.put(key, sources[turn % 2])
    done.set()
    await watching
    assert seen <= {(size, ord("A")), (size, ord("B")), (size,)}
    assert seen


async def test_swap_takes_the_version_that_get_gave(place: Place) -> None:
    store, key = place.store, "memories/m/head"
    first = await store.swap(key, b"1", expected=None)
    read = await store.get(key)
    assert read is not None
    assert (read.data, read.version) == (b"1", first)
    second = await place.opened_again().swap(key, b"2", expected=read.version)
    assert second != first
    for stale in (None, first, "no-such-version"):
        with pytest.raises(SwapLost):
            await store.swap(key, b"3", expected=stale)
    assert await _read(store, key) == b"2"


async def test_swap_of_what_was_deleted_is_refused(place: Place) -> None:
    key = "memories/m/head"
    version = await place.store.swap(key, b"1", expected=None)
    await place.store.delete([key])
    with pytest.raises(SwapLost):
        await place.store.swap(key, b"2", expected=version)
    assert await place.store.get(key) is None
    assert await _keys(place.store, "memories/") == []
    await place.store.swap(key, b"3", expected=None)


@pytest.mark.parametrize("exists", [False, True])
async def test_of_sixteen_racing_swaps_one_wins(place: Place, exists: bool) -> None:
    for turn in range(3):
        key = f"memories/m{turn}/head"
        expected = await place.store.swap(key, b"before", expected=None) if exists else None

        async def race(who: int, key: str = key, expected: str | None = expected) -> bytes | None:
            data = f"racer {who}".encode()
            try:
                await place.store.swap(key, data, expected=expected)
            except SwapLost:
                return None
            return data

        winners = [data for data in await asyncio.gather(*map(race, range(16))) if data]
        assert len(winners) == 1
        assert await _read(place.store, key) == winners[0]


_COUNTER = """
import asyncio, sys
from sidecar.errors import SwapLost
from sidecar.store.encryption.given_keys import read_given_keys
from sidecar.store.encryption.settings import Encryption, Signing
from sidecar.wiring import open_repository

async def count(url, times):
    store = open_repository(url, read_given_keys(Encryption(), Signing())).store
    while times:
        head = await store.get("memories/m/head")
        tally, who = (head.data.split()[0], head.version) if head else (b"0", None)
        try:
            await store.swap("memories/m/head", b"%d %s" % (int(tally) + 1, sys.argv[2].encode()), expected=who)
        except SwapLost:
            continue
        times -= 1
    await store.close()

asyncio.run(count(sys.argv[1], 20))
"""


async def test_two_processes_lose_no_swap(place: Place) -> None:
    if "single-writer" in place.url:
        await place.store.close()  # which lets others write
        environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
        command = [sys.executable, "-c", _COUNTER, place.url]
        first = await asyncio.create_subprocess_exec(*command, "one", env=environment)
        assert await first.wait() == 0
        await place.store.prepare()
        second = await asyncio.create_subprocess_exec(*command, "two", env=environment, stderr=asyncio.subprocess.PIPE)
        _, said = await second.communicate()
        assert (second.returncode, b"SecondWriter" in said) == (1, True), "it stops, and says why"
        assert (await _read(place.store, "memories/m/head")).split()[0] == b"20"
        return
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), **environment_with(place.given)}
    # Each says who it is: on S3 bytes that equal our own would pass for our own.
    counters = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", _COUNTER, place.url, who, env=environment)
        for who in ("left", "right")
    ]
    try:
        assert await asyncio.wait_for(asyncio.gather(*(counter.wait() for counter in counters)), 60) == [0, 0]
    finally:
        for counter in counters:
            if counter.returncode is None:
                counter.kill()
    assert (await _read(place.store, "memories/m/head")).split()[0] == b"40"


async def test_listing_is_in_key_order_and_says_size_and_time(place: Place) -> None:
    before = time.time()
    keys = [f"memories/{name}" for name in AWKWARD if name != "a/x" and not place.refuses(name)]
    for number, key in enumerate(random.Random(1).sample(keys, len(keys))):
        await place.store.put(key, b"x" * number)
    listed = [info async for info in place.store.list("memories/")]
    assert [info.key for info in listed] == sorted(keys)
    if not place.wraps:
        assert sorted(info.size for info in listed) == list(range(len(keys)))
    assert all(before - 3 < info.modified < time.time() + 3 for info in listed)


async def test_no_folder_is_missed_where_many_are_listed_in_pieces(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapters.stores.s3.PIECE", 2)
    monkeypatch.setattr("adapters.stores.s3_objects.PAGE", 2)
    names = {"a", "a-", "a-b", "a-b-c", "a.b", "a0", "ab", "ab-", "b", "b-c", "b.c", "bc", "c"}

    async def listed() -> list[str]:
        return [*await place.store.folders("memories/", most=1000)]

    for name in names:
        await place.store.put(f"memories/{name}/head.json", b"x")
    assert await listed() == sorted(names)
    assert await listed() == sorted(names)  # from here on in pieces
    new = {"a-a", "a--", "b--", "d", "d-", "0", "a."}
    for name in new:
        await place.store.put(f"memories/{name}/head.json", b"x")
    wanted = sorted(names | new)
    assert await listed() == wanted
    keys = sorted(f"memories/{one}/head.json" for one in wanted)
    assert [info.key async for info in place.store.list("memories/")] == keys
    assert await listed() == wanted


async def test_folders_are_what_comes_next_in_keys(place: Place) -> None:
    assert await place.store.folders("memories/", most=10) == []
    odd = "_a_1" if place.refuses("a~1") else "a~1"
    for name in ("b/head.json", f"{odd}/packs/x", f"{odd}/packs/y", "a-b/snapshots/1.json"):
        await place.store.put(f"memories/{name}", b"1")
    await place.store.put("memories-not/x/y", b"1")
    place.leave_unfinished("memories/half/made")
    assert await place.store.folders("memories/", most=10) == sorted(["a-b", odd, "b"])
    assert len(await place.store.folders("memories/", most=2)) == 2
    assert await place.store.folders(f"memories/{odd}/", most=10) == ["packs"]


async def test_a_whole_key_lists_its_object(place: Place) -> None:
    await place.store.put("memories/a/x.json", b"1")
    await place.store.put("memories/a/y.json", b"1")
    assert await _keys(place.store, "memories/a/x.json") == ["memories/a/x.json"]


async def test_a_prefix_does_not_catch_its_neighbours(place: Place) -> None:
    beside = "memories/a_b/x" if place.refuses("a~b") else "memories/a~b/x"
    for key in ("memories/a/x", beside, "memories/ab/x", "memory/x"):
        await place.store.put(key, b"1")
    assert await _keys(place.store, "memories/a/") == ["memories/a/x"]
    assert await place.store.purge("memories/a/") == 1
    assert await _keys(place.store, "memories/") == sorted(["memories/ab/x", beside])


@pytest.mark.parametrize(
    "name", ["a~b/x", "with blank/x", "ü/日本", "100%/a+b=c&d;e", "%2e%2e/x", "-/--x", "a/.hidden"]
)
async def test_any_name_keeps_its_object(place: Place, name: str) -> None:
    key = f"memories/{name}"
    if place.refuses(name):
        with pytest.raises(KeyRefused, match="takes no object of the name"):
            await place.store.put(key, b"1")
        return
    await place.store.put(key, b"1")
    await place.store.copy(key, f"{key}-copy")
    assert await _keys(place.store, "memories/") == [key, f"{key}-copy"]
    assert await _read(place.store, key) == await _read(place.store, f"{key}-copy") == b"1"
    await place.store.delete([key])
    assert await _keys(place.store, "memories/") == [f"{key}-copy"]


async def test_a_copy_does_not_depend_on_its_source(place: Place) -> None:
    await place.store.put("memories/a/x", b"original")
    await place.store.copy("memories/a/x", "memories/b/x")
    await place.store.put("memories/a/x", b"changed")
    assert await _read(place.store, "memories/b/x") == b"original"
    await place.store.delete(["memories/a/x"])
    assert await _read(place.store, "memories/b/x") == b"original"


async def test_delete_takes_only_what_it_was_told(place: Place) -> None:
    for name in "abc":
        await place.store.put(f"memories/{name}/x", b"1")
    await place.store.delete(f"memories/{name}/x" for name in "ac")
    assert await _keys(place.store, "memories/") == ["memories/b/x"]


async def test_what_is_unfinished_is_not_listed_and_is_swept(place: Place) -> None:
    await place.store.put("memories/m/x", b"1")
    place.leave_unfinished("memories/m/packs/half")
    place.leave_unfinished("memories/other/half")
    assert await _keys(place.store, "memories/") == ["memories/m/x"]
    assert await place.store.sweep("memories/m/", older_than=time.time() + 60) == place.unfinished
    assert await place.store.sweep("memories/m/", older_than=time.time() + 60) == 0
    assert await place.store.sweep("memories/", older_than=time.time() + 60) == place.unfinished
    assert await _read(place.store, "memories/m/x") == b"1"


async def test_purge_leaves_nothing_below_and_all_beside(place: Place) -> None:
    await place.store.put("memories/m/packs/p", b"1")
    await place.store.swap("memories/m/head", b"2", expected=None)
    place.leave_unfinished("memories/m/packs/half")
    await place.store.put("memories/n/x", b"3")
    assert await place.store.purge("memories/m/") == 2 + place.unfinished
    assert await _keys(place.store, "memories/") == ["memories/n/x"]
    assert await place.store.sweep("memories/m/", older_than=time.time() + 60) == 0
    await place.store.swap("memories/m/head", b"again", expected=None)


async def test_links_lead_to_the_object_or_there_are_none(place: Place) -> None:
    data, key = b"x" * 1000, "memories/m/packs/p"
    sha256 = hashlib.sha256(data).hexdigest()
    up = await place.store.link_to_put(key, size=len(data), sha256=sha256, seconds=60)
    down = await place.store.link_to_get(key, seconds=60)
    if not place.url.startswith("s3:") or place.given.encrypts:
        assert (up, down) == (None, None)
        return
    assert up is not None
    assert down is not None
    assert (up.method, down.method) == ("PUT", "GET")
    assert await asyncio.to_thread(_followed, up, data) == b""
    assert await _read(place.store, key) == data
    assert await asyncio.to_thread(_followed, down, None) == data


def _followed(link: Link, body: bytes | None) -> bytes:
    asked = urllib.request.Request(link.url, data=body, headers=dict(link.headers), method=link.method)
    with urllib.request.urlopen(asked, timeout=20) as answer:
        return bytes(answer.read())


async def test_a_closed_store_opens_again(place: Place) -> None:
    await place.store.put("memories/m/x", b"1")
    await place.store.close()
    assert await _read(place.store, "memories/m/x") == b"1"
