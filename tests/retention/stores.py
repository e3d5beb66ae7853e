"""Memories written straight into a store: a head, manifests and packs, without any sandbox."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from sidecar.ids import MemoryKeys
from sidecar.ports import Store
from sidecar.store.manifest import Head, Manifest, Pack

CONTENTS = b"p" * 100


def packs_of(names: Iterable[str]) -> list[Pack]:
    return [
        Pack(
            id=name,
            kind="full" if not number else "delta",
            codec="gz",
            bytes=len(CONTENTS),
            sha256="0" * 64,
            index_bytes=len(CONTENTS),
            index_sha256="0" * 64,
        )
        for number, name in enumerate(names)
    ]


def manifest_of(
    memory: str, snapshot: str, created: datetime, packs: Iterable[str], label: str = "", rejected: str = ""
) -> Manifest:
    return Manifest(
        memory=memory,
        snapshot=snapshot,
        created=created.isoformat(timespec="milliseconds"),
        packs=packs_of(packs),
        roots=[],
        files=1,
        bytes=1,
        tree="0" * 64,
        label=label,
        rejected=rejected,
    )


async def put_packs(store: Store, memory: str, names: Iterable[str]) -> None:
    keys = MemoryKeys.of(memory)
    for name in names:
        await store.put(keys.pack(name, "gz"), CONTENTS)
        await store.put(keys.index(name), CONTENTS)


async def put_snapshots(store: Store, manifests: Iterable[Manifest]) -> None:
    for manifest in manifests:
        await store.put(MemoryKeys.of(manifest.memory).snapshot(manifest.snapshot), manifest.encode())


async def put_head(store: Store, memory: str, history: Sequence[tuple[str, datetime]], generation: int = 1) -> None:
    """The first of the history is the head."""
    head = Head(
        memory=memory,
        snapshot=history[0][0],
        generation=generation,
        created=history[0][1].isoformat(),
        files=1,
        bytes=1,
        history=[(snapshot, since.isoformat(timespec="seconds")) for snapshot, since in history],
    )
    await store.put(MemoryKeys.of(memory).head, head.encode())


async def packs_in(store: Store, memory: str) -> set[str]:
    keys = MemoryKeys.of(memory)
    return {keys.parse_pack_id(info.key) async for info in store.list(keys.packs)}


async def marks_in(store: Store, memory: str) -> set[str]:
    keys = MemoryKeys.of(memory)
    return {info.key[len(keys.marks) :] async for info in store.list(keys.marks)}
