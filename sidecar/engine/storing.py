"""Write a checked pack to the store, folding when a snapshot would need more packs than a handful."""

from __future__ import annotations

import asyncio
import hashlib
import io
from dataclasses import dataclass, replace
from pathlib import Path

from sidecar.engine.parts import Engine
from sidecar.ids import MemoryKeys, make_pack_id
from sidecar.inside import index
from sidecar.inside.index import Index
from sidecar.ports import Store
from sidecar.snapshots.arrival import check_pack
from sidecar.snapshots.fetch import fetch_packs
from sidecar.snapshots.fold import (
    MOST_PACKS,
    PackFile,
    do_deltas_outweigh,
    find_first_to_fold,
    fold_deltas,
    fold_to_full,
)
from sidecar.snapshots.manifest import Manifest, Pack
from sidecar.spool import Spool
from sidecar.threads import run_in_thread


@dataclass(frozen=True, slots=True)
class PlannedPacks:
    """A snapshot's packs, the last of which is still to be stored, as it is here."""

    packs: list[Pack]
    file: PackFile
    index: bytes

    def room(self, store: Store) -> int:
        """The most that the store gains by them."""
        return store.room(self.packs[-1].bytes) + store.room(self.packs[-1].index_bytes)


async def prepare_packs(
    engine: Engine, base: Manifest | None, indexes: list[Index], new: PackFile, spool: Spool, *, whole: bool = False
) -> PlannedPacks:
    """What storing ``new`` on top of the packs of ``base``, which have these indexes, comes to. Nothing is written yet.

    ``whole``: as one full pack, that needs none of those.
    """
    below = base.packs if base is not None and new.index.kind == "delta" else []
    if base is not None and below and (whole or len(below) >= MOST_PACKS):
        engine.progress.step("folding packs")
        below, new = await _fold_packs(engine, base, indexes, new, spool, whole=whole)
    text = io.BytesIO()
    await run_in_thread(index.write, text, new.index)
    data = text.getvalue()
    size, digest = await run_in_thread(_measure_file, new.path)
    pack = Pack(
        id=new.stored or make_pack_id(),
        kind=new.index.kind,
        codec=new.codec,
        bytes=size,
        sha256=digest,
        index_bytes=len(data),
        index_sha256=hashlib.sha256(data).hexdigest(),
    )
    return PlannedPacks([*below, pack], new, data)


async def _fold_packs(
    engine: Engine, base: Manifest, indexes: list[Index], new: PackFile, spool: Spool, *, whole: bool
) -> tuple[list[Pack], PackFile]:
    """Fold ``new`` with some or all packs of its base; return the packs that stay below, and the fold."""
    store = engine.repository.store
    sizes = [*(pack.bytes for pack in base.packs[1:]), new.path.stat().st_size]
    start = 0 if whole or do_deltas_outweigh(base.packs[0].bytes, sum(sizes)) else 1 + find_first_to_fold(sizes)
    files = await fetch_packs(store, base.memory, base.packs[start:], spool)
    fetched = zip(files, base.packs[start:], indexes[start:], strict=True)
    packs = [*(PackFile(file.path, pack.codec, pack_index) for file, pack, pack_index in fetched), new]
    folder, target = spool.new(), spool.new()
    if start == 0:
        folded = await run_in_thread(fold_to_full, packs, folder, target)
    else:
        folded = await run_in_thread(fold_deltas, indexes[:start], packs, folder, target)
    await run_in_thread(check_pack, folded.path, folded.codec, folded.index)
    return base.packs[:start], folded


async def store_packs(engine: Engine, memory: str, measured: PlannedPacks) -> list[Pack]:
    """Write the new pack and its index under their fresh name; only the index, when the pack is there already.

    Return all packs, the new one as it is in the store.
    """
    keys, pack, store = MemoryKeys.of(memory), measured.packs[-1], engine.repository.store
    engine.progress.step("storing", pack.bytes)
    if measured.file.stored:
        await store.put(keys.index(pack.id), measured.index)
        return measured.packs
    stored, stored_index = await asyncio.gather(
        store.put(keys.pack(pack.id, pack.codec), measured.file.path),
        store.put(keys.index(pack.id), measured.index),
    )
    return [*measured.packs[:-1], note_stored_size(pack, store, stored, stored_index)]


def note_stored_size(pack: Pack, store: Store, stored: int, stored_index: int) -> Pack:
    """A pack with what it and its index take in a store that seals."""
    if not store.seal:
        return pack
    return replace(pack, stored_bytes=stored, stored_index_bytes=stored_index, sealed=store.seal)


def _measure_file(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return path.stat().st_size, digest
