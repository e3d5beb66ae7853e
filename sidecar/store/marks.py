"""Marks: how a pack is removed in two phases, so that it is never taken away from a running export.

An export reads its base, and later writes a manifest that names packs of that base. In between, another process may
have forgotten the base, and a collector may be about to delete those packs. So each pack that no snapshot needs gets a
mark, a tiny object that is only changed by compare-and-swap:

    none ──► waiting ──(the grace period is over)──► going ──► deleted: first the pack, then its mark
                ▲  │
                └──┴──► kept: a snapshot refers to the pack after all

A collector sets the mark to ``going``, *then* reads every manifest, and deletes the pack only if none of them names it.
An export writes its manifest, *then* reads the marks of its packs (``hold_packs``): it changes ``waiting`` to ``kept``;
if it finds ``going``, or cannot swap, or a pack is missing, it removes its manifest again and fails.

Why no pack that a snapshot needs is deleted: suppose a collector deletes one that a new manifest names. It did not see
that manifest, so it read before the manifest was written. So the mark was ``going`` before that, and stays ``going``
until the pack is deleted (no other process changes a fresh ``going``, and a collector that could not delete within half
an hour of its claim gives up). So the export, which reads the marks after writing its manifest, finds ``going``, or,
because the pack is deleted before its mark, finds the pack missing; and it fails.

Packs of the head need not be looked for, if the new snapshot is to replace that head by compare-and-swap: when that
succeeds, they were those of the head all the time, from before the export read its base. A collector that read the
manifests in that time found the head's. One that read them before that, and found none that named the pack, had marked
it before the head's own manifest was written; whoever made that snapshot the head has found the mark, or the pack
missing, or did not have to look, as follows.

An ordinary export looks for nothing at all (``is_guarded_by_swap``): it stores one pack, names it and packs of the
head, and swaps the head. Here the collector sees to it that the swap fails where it has to. If it has claimed a pack
that was stored after the head was written, as the listing shows in which it saw the pack, it writes the head again
(``Repository.fence``). Then it reads the manifests, the head first, and deletes nothing unless the manifest of that
head is among them. Suppose that an export swaps the head, and its new pack was claimed:
- If the swap came before the collector read the head, the manifest was there when the collector read the manifests.
- If it came later, and the export had read the head after the collector did, its pack was not listed; nor can it have
  been claimed. The packs that it took over are those of the head that the collector found, or of one that grew out of
  it in the same way.
- If it came later, and the export had read the head before that, the head was the same from then until the swap. So its
  pack was stored after the head was written, and the fence came in between: the swap fails.
An export that loses its swap to a fence looks for its packs like any other, and only then swaps again.

(Collectors of earlier versions do not fence. They do not claim a pack that is younger than their grace period either,
so an export that took longer, as far as it can know, looks for its packs.)

The grace period plays no other part in this argument. It is for readers (a restore, a link that a sandbox has), and lets
exports succeed: a pack is not marked before it is as old as the grace period, and an export does not commit on a base
that it read longer ago than half of it. By then a pack it relies on may be ``waiting``, but not yet ``going``.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Collection, Iterable
from enum import StrEnum

from sidecar.errors import BaseCollected, ObjectRefused, SwapLost
from sidecar.host.values import dataclass
from sidecar.ids import MemoryKeys
from sidecar.policy.retention import SAFE_PART
from sidecar.ports import Store
from sidecar.store.manifest import Manifest, Pack

LOG = logging.getLogger("sidecar")
QUICK_SECONDS = 300.0
"""An export that needs longer than this from its pack to its manifest looks for its packs in any case."""
CLOCKS_DIFFER = 300.0
"""By how many seconds the times that a store gives to two objects may be wrong."""


class State(StrEnum):
    """The state of a mark; see the drawing above."""

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
        """Return the mark of a pack, or ``None``."""
        try:
            stored = await self.store.get(self.keys.mark(pack))
        except ObjectRefused as refused:
            # A mark that is refused (not signed, say) must not cause anything: the collector starts again with a new
            # mark, and an export that needs the pack continues.
            LOG.warning("Ignored: %s", refused.message)
            return Mark(State.KEPT, refused.version or "")
        if stored is None:
            return None
        word = stored.data.decode("ascii", "replace").partition(" ")[0]
        # A mark that cannot be read is taken for ``going``, the state in which exports do not rely on the pack.
        return Mark(State(word) if word in list(State) else State.GOING, stored.version)

    async def change(self, pack: str, before: Mark | None, state: State) -> Mark | None:
        """Swap a mark; return ``None`` if another process changed it first."""
        # A random part, so that two marks of the same state have different versions and a swap cannot confuse them.
        data = f"{state} {secrets.token_hex(4)}".encode()
        try:
            version = await self.store.swap(
                self.keys.mark(pack), data, expected=before.version if before is not None else None
            )
        except SwapLost:
            return None
        return Mark(state, version)

    async def remove(self, packs: Iterable[str]) -> None:
        """Remove marks, after their packs were deleted."""
        await self.store.delete([self.keys.mark(pack) for pack in packs])


def is_guarded_by_swap(took: float, grace: float) -> bool:
    """Whether an ordinary export can leave it to the swap of the head to find out that its new pack was claimed.
    ``took``: the seconds from before it was stored until the manifest that names it was there; ``grace``: the grace
    period of collectors, as far as it is known here."""
    return took < min(QUICK_SECONDS, grace * SAFE_PART)


def may_be_under_way(pack: float, head: float | None) -> bool:
    """Whether an export may be about to swap the head for a snapshot with a pack of which a collector knows no manifest:
    not if the pack was stored (``pack``) before the head was written (``head``; ``None``: there is none to swap)."""
    return head is not None and pack > head - CLOCKS_DIFFER


async def hold_packs(store: Store, manifest: Manifest, *, held: Collection[str] = ()) -> None:
    """Make sure that every pack of a manifest that is already in the store stays there.

    Raise ``BaseCollected`` if a pack is deleted or about to be: then the caller must remove the manifest. ``held``: packs
    of a snapshot that is the head from before the manifest was written until the head is swapped for it, or the swap
    fails. They need not be looked for (see above).
    """
    keys = MemoryKeys.of(manifest.memory)
    marks = Marks(store, keys)
    named = {pack.id: pack for pack in manifest.packs}
    # Marks are read before the packs are listed, because a pack is deleted before its mark.
    marked = [info.key[len(keys.marks) :] async for info in store.list(keys.marks)]
    await asyncio.gather(*(_keep_pack(marks, pack) for pack in marked if pack in named))

    async def look(pack: Pack) -> None:
        there = {info.key: info.size async for info in store.list(keys.start_of(pack.id))}
        if (there.get(keys.pack(pack.id, pack.codec)), there.get(keys.index(pack.id))) != pack.in_store:
            raise BaseCollected(f"Pack {pack.id}, which this snapshot needs, was collected while it was made.")

    await asyncio.gather(*(look(pack) for name, pack in named.items() if name not in held))


async def _keep_pack(marks: Marks, pack: str) -> None:
    """Change a pack's mark to ``kept``. Raise BaseCollected if it is ``going``."""
    while (mark := await marks.find(pack)) is not None and mark.state is not State.KEPT:
        if mark.state is State.GOING:
            raise BaseCollected(f"Pack {pack}, which this snapshot needs, is being collected.")
        if await marks.change(pack, mark, State.KEPT):
            return
