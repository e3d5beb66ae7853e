"""The disk store against crashes, full disks, missing mounts and other processes."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import BinaryIO

import pytest

import adapters
from adapters.stores import disk_files
from adapters.stores.disk import DiskStore
from sidecar.errors import ObjectMissing, StoreDenied, StoreFull, StoreMissing, StoreUnreachable, StoreUnsafe, SwapLost
from sidecar.ports import Store
from tests.parts.mounts import unmount

PROJECT = Path(adapters.__file__).parents[1]
MIB = 1 << 20
Mount = Callable[..., Path]


def _file_store(root: Path) -> DiskStore:
    return DiskStore(root, url=f"file:{root}")


def _volume(root: Path, prefix: str = "") -> DiskStore:
    return DiskStore(root, url=f"volume:{root}", mount_required=True, prefix=prefix)


async def _keys(store: Store, prefix: str = "") -> list[str]:
    return [info.key async for info in store.list(prefix)]


def _everything(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def _in_a_process(script: str, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    return subprocess.Popen([sys.executable, "-c", script, *arguments], env=environment, stdout=subprocess.PIPE)


_PUT_AND_DIE = """
import asyncio, os, sys
from pathlib import Path
from adapters.stores.disk import DiskStore
root, step = Path(sys.argv[1]), sys.argv[2]
setattr(os, step, lambda *_: os._exit(9))
Path.replace = lambda *_: os._exit(9)
asyncio.run(DiskStore(root, url="file:").put("memories/m/x", b"new" * 100_000))
"""


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("before", [None, b"old"])
async def test_a_crash_half_way_leaves_what_was_there(tmp_path: Path, step: str, before: bytes | None) -> None:
    store = _file_store(tmp_path)
    if before is not None:
        await store.put("memories/m/x", before)
    (tmp_path / "memories/m").mkdir(parents=True, exist_ok=True)
    assert _in_a_process(_PUT_AND_DIE, str(tmp_path), step).wait(30) == 9
    found = await store.get("memories/m/x")
    assert (found.data if found else None) == before
    assert await _keys(store) == (["memories/m/x"] if before else [])
    assert await store.sweep("memories/", older_than=time.time() + 1) == 1
    assert await store.sweep("memories/", older_than=time.time() + 1) == 0


_PUT_FOR_EVER = """
import asyncio, itertools, sys
from pathlib import Path
from adapters.stores.disk import DiskStore
async def main():
    store = DiskStore(Path(sys.argv[1]), url="file:")
    for turn in itertools.count():
        await store.put(f"memories/m/{turn % 5}", bytes([turn % 251]) * (1 << 20))
        print(turn, flush=True)
asyncio.run(main())
"""


async def test_a_writer_killed_at_any_moment_leaves_only_whole_objects(tmp_path: Path) -> None:
    store, chance = _file_store(tmp_path), random.Random(7)
    for _ in range(6):
        writer = _in_a_process(_PUT_FOR_EVER, str(tmp_path))
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(chance.uniform(0, 0.1))
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        for info in [info async for info in store.list("memories/")]:
            found = await store.get(info.key)
            assert found is not None
            assert info.size == len(found.data) == MIB
            assert len(set(found.data)) == 1


async def test_what_is_written_is_synced_before_it_is_named_and_its_folders_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noting_fsync(descriptor: int) -> None:
        done.append(Path(f"/dev/fd/{descriptor}").resolve().name)
        fsync(descriptor)

    def noting_replace(self: Path, target: Path) -> Path:
        done.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(Path, "replace", noting_replace)
    await _file_store(tmp_path / "root").put("a/b/x", b"1")
    renamed = done.index("rename")
    assert done[renamed - 1].startswith(".tmp-")
    assert done[renamed + 1 :] == ["b", "a", "root"]
    assert {"root", "a", tmp_path.name} <= set(done[:renamed]), "each new folder is synced into its parent"


@pytest.mark.parametrize("from_file", [False, True])
async def test_a_full_disk_is_said_and_nothing_is_left(tmp_path: Path, mount: Mount, from_file: bool) -> None:
    root = mount(tmp_path / "tiny", size="1m")
    source = tmp_path / "source"
    source.write_bytes(b"x" * 4 * MIB)
    store = _file_store(root)
    await store.put("memories/m/x", b"old")
    with pytest.raises(StoreFull) as full:
        await store.put("memories/m/x", source if from_file else source.read_bytes())
    assert str(root) in full.value.message
    assert (await store.get("memories/m/x") or pytest.fail("lost")).data == b"old"
    assert _everything(root) == ["memories", "memories/m", "memories/m/x"]


async def test_a_full_disk_does_not_move_the_head(tmp_path: Path, mount: Mount) -> None:
    store = _file_store(mount(tmp_path / "tiny", size="1m"))
    version = await store.swap("memories/m/head", b"old", expected=None)
    with pytest.raises(StoreFull):
        await store.swap("memories/m/head", b"x" * 2 * MIB, expected=version)
    assert await store.swap("memories/m/head", b"new", expected=version)


async def _stream(store: Store) -> None:
    async for _ in store.stream("k/x"):
        pass


EVERY_ENTRY: dict[str, Callable[[Store], Awaitable[object]]] = {
    "prepare": lambda store: store.prepare(),
    "get": lambda store: store.get("k/x"),
    "put": lambda store: store.put("k/x", b"1"),
    "swap": lambda store: store.swap("k/x", b"1", expected=None),
    "stream": _stream,
    "list": lambda store: _keys(store),
    "copy": lambda store: store.copy("k/x", "k/y"),
    "delete": lambda store: store.delete(["k/x"]),
    "sweep": lambda store: store.sweep("", older_than=0),
    "purge": lambda store: store.purge("k/"),
}


@pytest.mark.parametrize("entry", EVERY_ENTRY)
@pytest.mark.parametrize("there", [False, True])
async def test_a_volume_that_is_not_mounted_is_refused(tmp_path: Path, entry: str, there: bool) -> None:
    root = tmp_path / "data"
    if there:
        root.mkdir()
    with pytest.raises(StoreMissing, match=f"No volume is mounted at {root}") as refused:
        await EVERY_ENTRY[entry](_volume(root))
    assert f"file:{root}" in refused.value.hint
    assert _everything(tmp_path) == (["data"] if there else [])


async def test_a_volume_that_goes_away_is_refused_from_then_on(tmp_path: Path, mount: Mount) -> None:
    root = mount(tmp_path / "data")
    store = _volume(root, prefix="memories")
    await store.prepare()
    await store.put("m/x", b"1")
    assert (root / "memories/m/x").read_bytes() == b"1"
    unmount(root)
    for entry in ("get", "put", "list"):
        with pytest.raises(StoreMissing):
            await EVERY_ENTRY[entry](store)
    assert _everything(tmp_path) == ["data"]


async def test_a_folder_bound_from_the_same_disk_is_a_volume(tmp_path: Path, mount: Mount) -> None:
    (tmp_path / "kept").mkdir()
    store = _volume(mount(tmp_path / "kept", tmp_path / "with blank"))
    await store.prepare()
    await store.put("k/x", b"1")
    assert (tmp_path / "kept/k/x").read_bytes() == b"1"


async def test_the_prefix_itself_need_not_be_a_mount_but_its_volume_must(tmp_path: Path, mount: Mount) -> None:
    root = mount(tmp_path / "data")
    (root / "inner").mkdir()
    with pytest.raises(StoreMissing):
        await _volume(root / "inner").prepare()
    await _volume(root, prefix="inner").prepare()


async def test_a_disk_mounted_read_only_is_denied(tmp_path: Path, mount: Mount) -> None:
    store = _volume(mount(tmp_path / "data", read_only=True))
    with pytest.raises(StoreDenied):
        await store.prepare()
    with pytest.raises(StoreDenied):
        await store.put("k/x", b"1")
    assert await _keys(store) == []


async def test_the_lost_and_found_of_a_volume_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir(mode=0o700)
    (tmp_path / "lost+found/#12").write_bytes(b"")
    store = _file_store(tmp_path)
    assert await _keys(store) == []
    assert await store.purge("") == 0
    assert _everything(tmp_path) == ["lost+found", "lost+found/#12"]


@pytest.mark.parametrize("entry", EVERY_ENTRY)
async def test_a_root_that_is_a_file_is_named(tmp_path: Path, entry: str) -> None:
    root = tmp_path / "root"
    root.write_bytes(b"mine")
    with pytest.raises(StoreMissing, match="is a file") as refused:
        await EVERY_ENTRY[entry](_file_store(root))
    assert refused.value.hint
    assert root.read_bytes() == b"mine"


async def test_a_root_that_is_not_there_is_empty_until_prepared(tmp_path: Path) -> None:
    store = _file_store(tmp_path / "a/b")
    assert await _keys(store) == []
    assert await store.get("k/x") is None
    assert await store.purge("") == await store.sweep("", older_than=0) == 0
    assert not (tmp_path / "a").exists()
    await store.prepare()
    assert _everything(tmp_path) == ["a", "a/b"]


@pytest.mark.parametrize(
    "key", ["", "/etc/x", "../x", "a/../../x", "a/./x", "a//x", "a/", ".tmp-1", "a/.lock-x", "a\0b"]
)
async def test_a_key_that_could_lead_out_or_hide_is_a_bug_of_the_caller(tmp_path: Path, key: str) -> None:
    store = _file_store(tmp_path / "root")
    with pytest.raises(ValueError, match="not a key"):
        await store.put(key, b"1")
    with pytest.raises(ValueError, match="not a key"):
        await store.delete([key])
    assert _everything(tmp_path) == []


async def test_a_byte_flipped_in_place_is_not_flipped_in_the_copy(tmp_path: Path) -> None:
    store = _file_store(tmp_path)
    await store.put("a/x", b"x" * 3 * MIB)
    await store.copy("a/x", "b/x")
    with (tmp_path / "a/x").open("r+b") as file:
        file.write(b"!")
    assert (await store.get("b/x") or pytest.fail("lost")).data == b"x" * 3 * MIB
    assert (tmp_path / "b/x").stat().st_ino != (tmp_path / "a/x").stat().st_ino


async def test_delete_and_purge_leave_no_folder_and_no_lock_behind(tmp_path: Path) -> None:
    store = _file_store(tmp_path)
    for memory in ("m", "n"):
        await store.swap(f"memories/{memory}/head", b"1", expected=None)
        await store.put(f"memories/{memory}/packs/p", b"1")
    await store.delete(["memories/m/packs/p", "memories/m/head"])
    assert not (tmp_path / "memories/m").exists()
    (tmp_path / "memories/n/empty/folders").mkdir(parents=True)
    await store.purge("memories/n/")
    assert _everything(tmp_path) == []


async def test_a_swap_that_cannot_win_leaves_no_lock_behind(tmp_path: Path) -> None:
    with pytest.raises(SwapLost):
        await _file_store(tmp_path).swap("memories/m/head", b"1", expected="0" * 64)
    assert _everything(tmp_path) == []


async def test_sweep_spares_writes_under_way(tmp_path: Path) -> None:
    for age, name in ((7200, "old"), (60, "new")):
        (tmp_path / f".tmp-{name}").write_bytes(b"half")
        os.utime(tmp_path / f".tmp-{name}", (time.time() - age,) * 2)
    assert await _file_store(tmp_path).sweep("", older_than=time.time() - 3600) == 1
    assert _everything(tmp_path) == [".tmp-new"]


async def test_a_swap_waits_for_the_lock_of_another_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _file_store(tmp_path)
    version = await store.swap("m/head", b"1", expected=None)
    with (tmp_path / "m/.lock-head").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = asyncio.create_task(store.swap("m/head", b"2", expected=version))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        fcntl.flock(lock, fcntl.LOCK_UN)
        version = await asyncio.wait_for(waiting, 5)
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr(disk_files, "LOCK_PATIENCE", 0.2)
        with pytest.raises(StoreUnreachable, match="locked by another"):
            await store.swap("m/head", b"3", expected=version)


def test_a_lock_deleted_while_it_is_taken_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, flock = tmp_path / ".lock-head", fcntl.flock
    deleted: list[Path] = []

    def deleting_flock(file: BinaryIO, how: int) -> None:
        if not deleted:
            lock.unlink()
            deleted.append(lock)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", deleting_flock)
    with disk_files.hold_lock(lock, disk_files.PRIVATE), lock.open("ab") as other, pytest.raises(BlockingIOError):
        flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


async def test_a_filesystem_without_locks_is_unsafe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(StoreUnsafe):
        await _file_store(tmp_path).prepare()
    assert _everything(tmp_path) == []


async def test_writes_survive_deletes_that_empty_their_folder(tmp_path: Path) -> None:
    store = _file_store(tmp_path)

    async def write_and_delete(who: int) -> None:
        for turn in range(40):
            await store.put(f"memories/m/{who}-{turn}", b"1")
            await store.swap(f"memories/m/head-{who}-{turn}", b"1", expected=None)
            await store.delete([f"memories/m/{who}-{turn}", f"memories/m/head-{who}-{turn}"])

    await asyncio.gather(*map(write_and_delete, range(6)))
    assert _everything(tmp_path) == []


async def test_an_object_read_as_a_folder_is_missing(tmp_path: Path) -> None:
    store = _file_store(tmp_path)
    await store.put("a/x", b"1")
    assert await store.get("a") is None
    assert await store.get("a/x/y") is None
    with pytest.raises(ObjectMissing):
        await store.copy("a/x/y", "b")
