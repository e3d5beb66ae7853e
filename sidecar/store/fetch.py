"""Fetch a snapshot from the store, every object checked by size and hash before it is used."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable
from io import BytesIO

from sidecar.errors import ObjectMissing, SnapshotDamaged
from sidecar.format import index
from sidecar.format.index import merge_indexes
from sidecar.host.files import Spool, SpooledFile
from sidecar.host.values import dataclass
from sidecar.ids import MemoryKeys
from sidecar.ports import Store
from sidecar.store.fold import PackFile
from sidecar.store.manifest import Manifest, Pack
from sidecar.store.recall import Recalled

AT_ONCE = 16
"""How many objects of a snapshot are fetched at a time."""


@dataclass(frozen=True, slots=True)
class FetchedSnapshot:
    """A snapshot on the sidecar's disk: its entries, and each pack with its index, in order."""

    manifest: Manifest
    entries: dict[str, index.Entry]
    indexes: list[index.Index]
    packs: list[SpooledFile]
    index_files: list[SpooledFile]

    def list_pack_files(self) -> list[PackFile]:
        """Return the packs with their indexes, to unpack or fold."""
        packs = zip(self.packs, self.manifest.packs, self.indexes, strict=True)
        return [PackFile(file.path, pack.codec, pack_index) for file, pack, pack_index in packs]


async def fetch_entries(
    store: Store, manifest: Manifest, spool: Spool, recalled: Recalled | None = None
) -> tuple[dict[str, index.Entry], list[index.Index], list[SpooledFile]]:
    """Return a snapshot's entries, from the indexes of its packs. Raise ``SnapshotDamaged``."""
    keys = MemoryKeys.of(manifest.memory)
    wanted = [_Wanted(keys.index(pack.id), pack.index_bytes, pack.index_sha256) for pack in manifest.packs]
    files = await _fetch_all(store, wanted, spool, recalled)
    try:
        indexes = [await asyncio.to_thread(_read_index, file) for file in files]
        return merge_indexes(indexes), indexes, files
    except ValueError as problem:
        raise SnapshotDamaged(f"An index of snapshot {manifest.snapshot} is damaged: {problem}.") from None


async def fetch(store: Store, manifest: Manifest, spool: Spool, recalled: Recalled | None = None) -> FetchedSnapshot:
    """Fetch a whole snapshot. Raise ``SnapshotDamaged``, naming the object that is missing or different."""
    entries = asyncio.ensure_future(fetch_entries(store, manifest, spool, recalled))
    packs = asyncio.ensure_future(fetch_packs(store, manifest.memory, manifest.packs, spool, recalled))
    try:
        found, indexes, index_files = await entries
        return FetchedSnapshot(manifest, found, indexes, await packs, index_files)
    finally:
        for task in (entries, packs):
            task.cancel()
        await asyncio.gather(entries, packs, return_exceptions=True)


async def fetch_packs(
    store: Store, memory: str, packs: Iterable[Pack], spool: Spool, recalled: Recalled | None = None
) -> list[SpooledFile]:
    """Fetch packs without their indexes. Raise ``SnapshotDamaged``."""
    keys = MemoryKeys.of(memory)
    wanted = [_Wanted(keys.pack(pack.id, pack.codec), pack.bytes, pack.sha256) for pack in packs]
    return await _fetch_all(store, wanted, spool, recalled)


async def fetch_pack(store: Store, memory: str, pack: Pack, spool: Spool) -> tuple[SpooledFile, SpooledFile]:
    """Fetch a pack and its index. Raise ``SnapshotDamaged``."""
    keys = MemoryKeys.of(memory)
    wanted = [
        _Wanted(keys.pack(pack.id, pack.codec), pack.bytes, pack.sha256),
        _Wanted(keys.index(pack.id), pack.index_bytes, pack.index_sha256),
    ]
    files = await _fetch_all(store, wanted, spool, None)
    return files[0], files[1]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """An object, as its manifest says it is."""

    key: str
    size: int
    sha256: str


async def _fetch_all(
    store: Store, wanted: Iterable[_Wanted], spool: Spool, recalled: Recalled | None
) -> list[SpooledFile]:
    """Fetch several objects at once. If one is damaged, the others are not waited for."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def fetch_one(one: _Wanted) -> SpooledFile:
        async with turns:
            return await _fetch(store, one, spool, recalled)

    tasks = [asyncio.ensure_future(fetch_one(one)) for one in wanted]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _fetch(store: Store, wanted: _Wanted, spool: Spool, recalled: Recalled | None) -> SpooledFile:
    """Fetch one object and compare its size and hash. Raise ``SnapshotDamaged``."""
    data = recalled.find(wanted.key) if recalled is not None else None
    if data is not None and hashlib.sha256(data).hexdigest() == wanted.sha256:
        return await spool.take(_yield_once(data), most=wanted.size)
    try:
        got = await spool.take(store.stream(wanted.key), most=wanted.size)
    except ObjectMissing:
        raise SnapshotDamaged(f"{wanted.key} is missing from the store.") from None
    if (got.size, got.sha256) != (wanted.size, wanted.sha256):
        raise SnapshotDamaged(f"{wanted.key} is damaged: its size or hash is not what the manifest says.")
    if recalled is not None and recalled.may_keep(got.size):
        recalled.keep(wanted.key, await asyncio.to_thread(got.path.read_bytes))
    return got


async def _yield_once(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _read_index(file: SpooledFile) -> index.Index:
    return index.read(BytesIO(file.path.read_bytes()))
