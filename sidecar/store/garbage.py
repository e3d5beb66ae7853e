"""Garbage collection: remove what no snapshot refers to.

That is packs of forgotten snapshots and of exports that died, notes about snapshots that no longer exist, answers to
calls that will not be repeated, and unfinished writes. Ages are measured by the store's clock alone.
``sidecar.store.marks`` explains why no running export loses a pack.
"""

from __future__ import annotations

import time
from dataclasses import field

from sidecar.errors import SnapshotDamaged
from sidecar.host.values import dataclass
from sidecar.host.work import gather_few
from sidecar.ids import MemoryKeys
from sidecar.models.answers import Collected
from sidecar.ports import ObjectInfo
from sidecar.store.marks import Mark, Marks, State, may_be_under_way
from sidecar.store.repository import PARALLEL_READS, Repository

GRACE_SECONDS = 24 * 3600.0
CALL_SECONDS = 7 * 24 * 3600.0
CLAIM_SECONDS = 3600.0
"""A collector deletes a pack that it has claimed within half of this time, or not at all."""
UNREADABLE = "A manifest cannot be read, or that of the head is gone, and may refer to any pack: none was collected."


@dataclass(frozen=True, slots=True)
class _Inventory:
    """Everything a memory has in the store, from one listing, and the store's time then."""

    now: float
    head: float | None = None
    """When the head was written."""
    packs: dict[str, list[ObjectInfo]] = field(default_factory=dict)
    """The objects of each pack: the pack itself and its index."""
    marks: dict[str, float] = field(default_factory=dict)
    """Each marked pack, and since when."""
    notes: list[ObjectInfo] = field(default_factory=list)
    calls: list[ObjectInfo] = field(default_factory=list)
    snapshots: set[str] = field(default_factory=set)


async def collect(
    repository: Repository,
    memory: str,
    *,
    grace: float = GRACE_SECONDS,
    calls: float = CALL_SECONDS,
    dry_run: bool = False,
) -> Collected:
    """Remove objects of a memory that have not been needed for ``grace`` seconds, and answers older than ``calls``
    seconds.

    While a manifest cannot be read, or the head's is missing, no pack is collected: it may refer to any of them.
    """
    keys = MemoryKeys.of(memory)
    if not dry_run:
        await repository.store.prepare()
    stock = await _take_inventory(repository, keys, dry_run)
    notes = await _list_old_notes(repository, memory, stock, grace, calls)
    needed = await _list_needed(repository, memory)
    unneeded = [
        pack
        for pack, objects in stock.packs.items()
        if needed is not None and pack not in needed and all(stock.now - info.modified >= grace for info in objects)
    ]
    if dry_run:
        gone = [pack for pack in unneeded if grace <= 0 or stock.now - stock.marks.get(pack, stock.now) >= grace]
    else:
        gone = await _collect_packs(repository, memory, stock, needed or set(), unneeded, grace)
        await repository.store.delete([*notes, keys.clock])
    unfinished = 0 if dry_run else await repository.store.sweep(keys.prefix, older_than=stock.now - grace)
    waiting = [pack for pack in unneeded if pack not in gone]
    return Collected(
        objects=sum(len(stock.packs[pack]) for pack in gone),
        bytes=sum(info.size for pack in gone for info in stock.packs[pack]),
        unfinished=unfinished,
        waiting=len(waiting),
        waiting_bytes=sum(info.size for pack in waiting for info in stock.packs[pack]),
        notes=len(notes),
        problem=UNREADABLE if needed is None else "",
    )


async def _collect_packs(
    repository: Repository, memory: str, stock: _Inventory, needed: set[str], unneeded: list[str], grace: float
) -> list[str]:
    """Mark packs that are not needed, unmark those that are, and delete those that waited long enough. Return the
    deleted ones."""
    marks, began = Marks(repository.store, MemoryKeys.of(memory)), time.monotonic()
    marked = [pack for pack in stock.marks if pack in needed]
    await gather_few(lambda pack: _keep_marked(marks, pack, stock), marked, PARALLEL_READS)
    claims = await gather_few(lambda pack: _claim(marks, pack, stock, grace), unneeded, PARALLEL_READS)
    claimed = [claim for claim in claims if claim]
    gone = await _delete_claimed(repository, memory, marks, stock, claimed, began) if claimed else []
    # A mark without a pack was left by a collector that died, or written by one that was late.
    await marks.remove(
        pack for pack, since in stock.marks.items() if pack not in stock.packs and stock.now - since >= CLAIM_SECONDS
    )
    return gone


async def _take_inventory(repository: Repository, keys: MemoryKeys, dry_run: bool) -> _Inventory:
    """List everything of a memory. The time comes from a clock object that is written for this purpose."""
    if not dry_run:
        await repository.store.put(keys.clock, b"")
    found = [info async for info in repository.store.list(keys.prefix)]
    # Another collector may have removed the clock object; then the newest time of all objects is not later than now.
    times = [info.modified for info in found if info.key == keys.clock] or [info.modified for info in found]
    head = next((info.modified for info in found if info.key == keys.head), None)
    stock = _Inventory(time.time() if dry_run else max(times, default=0.0), head)
    for info in found:
        if info.key.startswith(keys.packs):
            stock.packs.setdefault(keys.parse_pack_id(info.key), []).append(info)
        elif info.key.startswith(keys.marks):
            stock.marks[info.key[len(keys.marks) :]] = info.modified
        elif info.key.startswith((keys.damaged, keys.pins)):
            stock.notes.append(info)
        elif info.key.startswith(keys.calls):
            stock.calls.append(info)
        elif info.key.startswith(keys.snapshots):
            stock.snapshots.add(info.key[len(keys.snapshots) :].removesuffix(".json"))
    return stock


async def _list_old_notes(
    repository: Repository, memory: str, stock: _Inventory, grace: float, calls: float
) -> list[str]:
    """Return the keys of notes about snapshots that no longer exist, and of answers to old calls. A note that the
    head's manifest is missing stays."""
    about = [(info, info.key.rpartition("/")[2]) for info in stock.notes]
    gone = [(info, name) for info, name in about if name not in stock.snapshots and stock.now - info.modified >= grace]
    head = (await repository.head(memory)).snapshot if gone else ""
    old = [info.key for info in stock.calls if stock.now - info.modified >= calls]
    return [info.key for info, name in gone if name != head] + old


async def _list_needed(repository: Repository, memory: str) -> set[str] | None:
    """Return the packs that any snapshot refers to; ``None`` if that cannot be known."""
    head = (await repository.head(memory)).snapshot
    manifests = await repository.manifests(memory, await repository.list_snapshot_ids(memory))
    if any(isinstance(manifest, SnapshotDamaged) for manifest in manifests.values()) or (
        head and head not in manifests
    ):
        return None
    return {
        pack.id
        for manifest in manifests.values()
        if not isinstance(manifest, SnapshotDamaged)
        for pack in manifest.packs
    }


async def _keep_marked(marks: Marks, pack: str, stock: _Inventory) -> None:
    """Set the mark of a pack that a snapshot refers to to ``kept``."""
    mark = await marks.find(pack)
    if mark is not None and mark.state is not State.KEPT and not _was_claimed_lately(mark, pack, stock):
        await marks.change(pack, mark, State.KEPT)


async def _claim(marks: Marks, pack: str, stock: _Inventory, grace: float) -> tuple[str, Mark] | None:
    """Make sure that a pack has a mark; once the mark is old enough, claim the pack by setting it to ``going``."""
    mark = await marks.find(pack)
    if mark is None or mark.state is State.KEPT:
        mark = await marks.change(pack, mark, State.WAITING)
        if mark is None or grace > 0:
            return None
    elif _was_claimed_lately(mark, pack, stock) or stock.now - stock.marks.get(pack, stock.now) < grace:
        return None
    claim = await marks.change(pack, mark, State.GOING)
    return (pack, claim) if claim else None


def _was_claimed_lately(mark: Mark, pack: str, stock: _Inventory) -> bool:
    """Return whether another collector claimed it recently: that one may still delete it, after reading manifests that
    are outdated now."""
    return mark.state is State.GOING and stock.now - stock.marks.get(pack, stock.now) < CLAIM_SECONDS


async def _delete_claimed(
    repository: Repository, memory: str, marks: Marks, stock: _Inventory, claimed: list[tuple[str, Mark]], began: float
) -> list[str]:
    """Delete the claimed packs that still no manifest refers to; return them."""
    # The manifests must be read after the claim, and after the fence: see ``sidecar.store.marks``.
    if any(may_be_under_way(info.modified, stock.head) for pack, _ in claimed for info in stock.packs[pack]):
        await repository.fence(memory)
    needed = await _list_needed(repository, memory)
    if needed is None or time.monotonic() - began > CLAIM_SECONDS / 2:
        return []
    for pack, claim in claimed:
        if pack in needed:
            await marks.change(pack, claim, State.KEPT)
    going = [pack for pack, _ in claimed if pack not in needed]
    await repository.store.delete(info.key for pack in going for info in stock.packs[pack])
    await marks.remove(going)
    return going
