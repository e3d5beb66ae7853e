"""Fetch a snapshot from the store, every object checked by size and hash before it is used."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
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
    store: Store, manifest: Manifest, spool: Spool
) -> tuple[dict[str, index.Entry], list[index.Index], list[SpooledFile]]:
    """Return a snapshot's entries, from the indexes of its packs. Raise ``SnapshotDamaged``."""
    keys = MemoryKeys.of(manifest.memory)
    files = await asyncio.gather(
        *(_fetch(store, keys.index(pack.id), pack.index_bytes, pack.index_sha256, spool) for pack in manifest.packs)
    )
    try:
        indexes = [await asyncio.to_thread(_read_index, file) for file in files]
        return merge_indexes(indexes), indexes, list(files)
    except ValueError as problem:
        raise SnapshotDamaged(f"An index of snapshot {manifest.snapshot} is damaged: {problem}.") from None


async def fetch(store: Store, manifest: Manifest, spool: Spool) -> FetchedSnapshot:
    """Fetch a whole snapshot. Raise ``SnapshotDamaged``, naming the object that is missing or different."""
    entries, indexes, index_files = await fetch_entries(store, manifest, spool)
    packs = await fetch_packs(store, manifest.memory, manifest.packs, spool)
    return FetchedSnapshot(manifest, entries, indexes, packs, index_files)


async def fetch_packs(store: Store, memory: str, packs: Iterable[Pack], spool: Spool) -> list[SpooledFile]:
    """Fetch packs without their indexes. Raise ``SnapshotDamaged``."""
    keys = MemoryKeys.of(memory)
    return [await _fetch(store, keys.pack(pack.id, pack.codec), pack.bytes, pack.sha256, spool) for pack in packs]


async def fetch_pack(store: Store, memory: str, pack: Pack, spool: Spool) -> tuple[SpooledFile, SpooledFile]:
    """Fetch a pack and its index. Raise ``SnapshotDamaged``."""
    index_key = MemoryKeys.of(memory).index(pack.id)
    packs = await fetch_packs(store, memory, [pack], spool)
    return packs[0], await _fetch(store, index_key, pack.index_bytes, pack.index_sha256, spool)


def check_sizes(manifest: Manifest, sizes: Mapping[str, int]) -> None:
    """Raise ``SnapshotDamaged`` unless every object of a snapshot is listed with its size."""
    keys = MemoryKeys.of(manifest.memory)
    for pack in manifest.packs:
        for key, size in zip((keys.pack(pack.id, pack.codec), keys.index(pack.id)), pack.in_store, strict=True):
            if sizes.get(key) != size:
                raise SnapshotDamaged(f"Snapshot {manifest.snapshot} cannot be used: {key} is missing or cut short.")


async def _fetch(store: Store, key: str, size: int, sha256: str, spool: Spool) -> SpooledFile:
    """Fetch one object and compare its size and hash. Raise ``SnapshotDamaged``."""
    try:
        got = await spool.take(store.stream(key), most=size)
    except ObjectMissing:
        raise SnapshotDamaged(f"{key} is missing from the store.") from None
    if (got.size, got.sha256) != (size, sha256):
        raise SnapshotDamaged(f"{key} is damaged: its size or hash is not what the manifest says.")
    return got


def _read_index(file: SpooledFile) -> index.Index:
    return index.read(BytesIO(file.path.read_bytes()))
