"""Marks: how a pack is taken away without ever being taken from under an export.

An export reads its base, and later writes a manifest that names packs of that base. Meanwhile somebody else may have
forgotten the base, and a collector may be about to delete those packs. Each pack nobody needs gets a mark, a tiny object
that is only ever changed by compare-and-swap:

    none ──► waiting ──(the grace period is over)──► going ──► deleted: first the pack, then its mark
                ▲  │
                └──┴──► kept: something refers to the pack after all

A collector makes the mark ``going``, *then* reads every manifest, and deletes the pack only if none of them names it. An
export writes its manifest, *then* looks at the marks of its packs (``hold_packs``): where it finds ``waiting`` it makes it
``kept``, and where it finds ``going``, or cannot swap, or a pack is not there, it takes its manifest back and fails.

Why no pack that a snapshot needs is deleted: say a collector deletes one that a new manifest names. It did not see that
manifest, so it read before the manifest was written, so the mark was ``going`` before, and stays so until the pack is deleted
(nobody else touches a fresh ``going``; a collector that could not delete within half an hour of its claim gives up).
So the export that then looks sees ``going``, or, the pack being deleted before its mark, sees that it is not there; and fails.

The grace period plays no part in this. It is for those who only read (a restore, a link that a sandbox has), and for
exports to end well: a pack is not marked before it is as old as the grace period itself, and an export does not commit on
a base that it read longer ago than half of it. By then a pack it relies on may be ``waiting``, but not yet ``going``.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from sidecar.errors import BaseCollected, ObjectRefused, SwapLost
from sidecar.ids import MemoryKeys
from sidecar.ports import Store
from sidecar.store.manifest import Manifest

LOG = logging.getLogger("sidecar")


class State(StrEnum):
    WAITING = "waiting"
    KEPT = "kept"
    GOING = "going"


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark as it was read; ``version`` is what a swap must still find."""

    state: State
    version: str


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of one memory's packs."""

    store: Store
    keys: MemoryKeys

    async def find(self, pack: str) -> Mark | None:
        try:
            stored = await self.store.get(self.keys.mark(pack))
        except ObjectRefused as refused:
            # Nobody is told what to do by it: a collector begins anew, and who needs the pack goes on.
            LOG.warning("Ignored: %s", refused.message)
            return Mark(State.KEPT, refused.version or "")
        if stored is None:
            return None
        word = stored.data.decode("ascii", "replace").partition(" ")[0]
        # What cannot be read is taken for the one that makes everybody careful.
        return Mark(State(word) if word in list(State) else State.GOING, stored.version)

    async def change(self, pack: str, before: Mark | None, state: State) -> Mark | None:
        """Swap a mark; ``None`` when somebody else was faster."""
        # Never the same twice: a swap must not mistake one for another.
        data = f"{state} {secrets.token_hex(4)}".encode()
        try:
            version = await self.store.swap(
                self.keys.mark(pack), data, expected=before.version if before is not None else None
            )
        except SwapLost:
            return None
        return Mark(state, version)

    async def remove(self, packs: Iterable[str]) -> None:
        """Only when the packs themselves are deleted."""
        await self.store.delete([self.keys.mark(pack) for pack in packs])


async def hold_packs(store: Store, manifest: Manifest) -> None:
    """Make sure that every pack of a manifest which is in the store already stays.

    Raise ``BaseCollected`` when one is gone or about to go: then the manifest must not stay either.
    """
    keys = MemoryKeys.of(manifest.memory)
    marks = Marks(store, keys)
    named = {pack.id: pack for pack in manifest.packs}
    # In this order: a pack is deleted before its mark.
    marked = [info.key[len(keys.marks) :] async for info in store.list(keys.marks)]
    await asyncio.gather(*(_keep_pack(marks, pack) for pack in marked if pack in named))
    there = {info.key: info.size async for info in store.list(keys.packs)}
    for pack in named.values():
        if (there.get(keys.pack(pack.id, pack.codec)), there.get(keys.index(pack.id))) != pack.in_store:
            raise BaseCollected(f"Pack {pack.id}, which this snapshot needs, was collected while it was made.")


async def _keep_pack(marks: Marks, pack: str) -> None:
    while (mark := await marks.find(pack)) is not None and mark.state is not State.KEPT:
        if mark.state is State.GOING:
            raise BaseCollected(f"Pack {pack}, which this snapshot needs, is being collected.")
        if await marks.change(pack, mark, State.KEPT):
            return
