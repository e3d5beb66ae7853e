"""Turn a checked export into a snapshot: build its manifest, store its packs, and move the head to it.

Packs are folded into one when a snapshot would need more than ``MOST_PACKS``.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from sidecar.engine.core import Engine, gather
from sidecar.engine.exports.arrival import ReceivedPack
from sidecar.engine.exports.coverage import collect_rules, format_of
from sidecar.engine.guards import list_objections
from sidecar.engine.limits import list_hot_files
from sidecar.engine.privacy import count_scrubbed, redact
from sidecar.engine.quota import RoomFound, check_room
from sidecar.errors import BadAnswer, BaseCollected, LimitExceeded, SnapshotDamaged, SnapshotNotFound, SwapLost
from sidecar.format.index import Entry, Index, count_files
from sidecar.format.protocol import ExportAnswer
from sidecar.host.spool import Spool
from sidecar.ids import MemoryKeys, parse_snapshot_time
from sidecar.layouts import choose_layouts
from sidecar.policy.retention import SAFE_PART, Retention, SnapshotFacts
from sidecar.receipts import ExportOutcome, Reason
from sidecar.store.fetch import fetch_entries
from sidecar.store.manifest import Database, Head, Manifest, SnapshotRoot, digest_tree
from sidecar.store.marks import hold_packs
from sidecar.store.repository import HeadState, Survey

if TYPE_CHECKING:
    from sidecar.engine.exports.run import ExportRequest
import asyncio
import hashlib
import io
from pathlib import Path

from sidecar.format import index
from sidecar.host.threads import run_in_thread
from sidecar.ids import make_pack_id
from sidecar.ports import Store
from sidecar.store.arrival import check_pack
from sidecar.store.fetch import fetch_packs
from sidecar.store.fold import MOST_PACKS, PackFile, do_deltas_outweigh, find_first_to_fold, fold_deltas, fold_to_full
from sidecar.store.manifest import Pack

MOST_FENCED = 10
"""How often one export retries the swap of the head after another service has fenced it (see ``advance_head``)."""


@dataclass(frozen=True, slots=True)
class CheckedExport:
    """A checked export on top of the snapshot that it is based on. ``base`` is ``None`` for a full export; ``arrived``
    is ``None`` if nothing changed."""

    base: Manifest | None
    base_entries: dict[str, Entry]
    base_indexes: list[Index] = field(default_factory=list)
    """The indexes of the base's packs, from which its entries are put together."""
    arrived: ReceivedPack | None = None
    read: float = 0.0
    """When the base was read, by ``time.monotonic``."""

    @property
    def received_pack(self) -> ReceivedPack:
        """The received pack. Only valid if something changed."""
        assert self.arrived is not None
        return self.arrived

    @property
    def unchanged(self) -> Manifest:
        """The base of an export in which nothing changed. Raise ``BadAnswer`` if there is none."""
        if self.base is None:
            raise BadAnswer("The sandbox says nothing changed, but not since when.")
        return self.base


def build_manifest(
    engine: Engine,
    grown: CheckedExport,
    answer: ExportAnswer,
    snapshot: str,
    sandbox: str,
    parent: str,
    request: ExportRequest,
    policy: str,
    earlier: Manifest | None,
) -> Manifest:
    """Build the manifest of a new snapshot, without its packs, which are not stored yet.

    ``policy`` is the privacy policy that was sent to the sandbox. ``earlier`` is the snapshot that the sandbox had
    before, if it is known.
    """
    entries = grown.received_pack.entries
    files, size = count_files(entries)
    roots = _list_roots(grown, answer)
    return Manifest(
        memory=request.memory,
        snapshot=snapshot,
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        packs=[],
        roots=roots,
        files=files,
        bytes=size,
        tree=digest_tree(entries),
        parent=parent,
        origin=request.origin,
        sandbox=sandbox,
        conversation=request.conversation,
        label=request.label,
        databases=_list_databases(grown, answer),
        projects=answer.projects or (grown.base.projects if grown.base else []),
        keyed=_merge_project_folders(grown, answer),
        versions=_merge_versions(grown, answer),
        hot_bytes=sum(
            entry.size for entry in list_hot_files(entries, {root.name: root.layout for root in roots}, engine.layouts)
        ),
        dropped=answer.dropped_files,
        dropped_bytes=answer.dropped_bytes,
        scrubbed=count_scrubbed(grown.base or earlier, entries, answer),
        privacy=answer.policy if answer.policy == policy else "",
        covered=collect_rules(choose_layouts(request.layouts, engine.layouts), roots, grown.base),
        home="" if request.adopt else redact(answer.home),
        user="" if request.adopt else redact(answer.user),
        format=format_of(roots, entries.values(), request.projects, answer, grown.base),
    )


def _list_roots(grown: CheckedExport, answer: ExportAnswer) -> list[SnapshotRoot]:
    """Return the roots that were found, and those of the base that were not part of the request and so stay as they
    were."""
    found = [SnapshotRoot(name=root.name, layout=root.layout, hint=root.hint) for root in answer.roots]
    names = {root.name for root in found}
    others = [root for root in grown.base.roots if root.name not in names] if grown.base else []
    return found + [root for root in others if _has_folder(grown, root.name)]


def _list_databases(grown: CheckedExport, answer: ExportAnswer) -> list[Database]:
    """Return the facts about each database: from this export or, if it did not change, from the base."""
    known = {row.path: row for row in grown.base.databases} if grown.base else {}
    read = {row.path: row for row in answer.databases if row.method != "unchanged"}
    known.update((path, Database(path=path, check=row.check, schema=row.schema)) for path, row in read.items())
    return [known[path] for path, entry in grown.received_pack.entries.items() if entry.database and path in known]


def _merge_project_folders(grown: CheckedExport, answer: ExportAnswer) -> dict[str, str]:
    """Return the folders named after projects: from this export or, where it names none, from the base."""
    known = {**(grown.base.keyed if grown.base else {}), **answer.keyed}
    return {path: hint for path, hint in known.items() if _has_folder(grown, path)}


def _merge_versions(grown: CheckedExport, answer: ExportAnswer) -> dict[str, str]:
    """Return, by root, the version of the program that the root belongs to; if it cannot be read any more, the last
    known one."""
    seen = {**(grown.base.versions if grown.base else {}), **{root: v for root, v in answer.versions.items() if v}}
    return {root: version for root, version in seen.items() if _has_folder(grown, root)}


def _has_folder(grown: CheckedExport, folder: str) -> bool:
    return any(path.startswith(f"{folder}/") for path in grown.received_pack.entries)


async def find_replaced_head(engine: Engine, state: HeadState, survey: Survey, grown: CheckedExport) -> Manifest | None:
    """Return the manifest of the head that an export may replace; ``None`` if there is no head or it is damaged."""
    if state.head is None or state.snapshot in survey.damaged:
        return None
    if grown.base is not None and grown.base.snapshot == state.snapshot:
        return grown.base
    try:
        return await engine.repository.manifest(state.head.memory, state.snapshot)
    except (SnapshotDamaged, SnapshotNotFound):
        return None


async def judge_export(
    engine: Engine,
    manifest: Manifest,
    entries: dict[str, Entry],
    grown: CheckedExport,
    head: Manifest | None,
    scratch: Spool,
    allow: Collection[str],
    trimmed: Collection[str] = (),
) -> list[Reason]:
    """Return the guards' reasons against replacing the head by this snapshot. A head that cannot be read is not
    compared with."""
    head_entries: dict[str, Entry] = {}
    if head is not None and head is grown.base:
        head_entries = grown.base_entries
    elif head is not None:
        try:
            head_entries, _, _ = await fetch_entries(engine.repository.store, head, scratch)
        except SnapshotDamaged:
            head = None
    return list_objections(manifest, entries, head, head_entries, engine.layouts, engine.guards, allow, trimmed)


async def plan_packs(
    engine: Engine,
    manifest: Manifest,
    grown: CheckedExport,
    state: HeadState,
    survey: Survey,
    scratch: Spool,
    *,
    moves: bool,
    grew: bool,
) -> tuple[Manifest, PlannedPacks, RoomFound]:
    """Return the manifest with its packs, the planned packs, and the room for them in the store. Nothing is written
    yet.

    If the packs of the head leave no room for one more, and this snapshot is based on the head and will replace it, it
    is planned as one full pack that needs none of them: they can be removed once the head has moved. Raise
    ``LimitExceeded``.
    """
    keep = {state.snapshot, *([grown.base.snapshot] if grown.base else [])} - {""}
    pack, indexes = grown.received_pack.pack, grown.base_indexes
    packs = await prepare_packs(engine, grown.base, indexes, pack, scratch)
    manifest = replace(manifest, packs=packs.packs)
    try:
        return manifest, packs, await _measure_room(engine, manifest, packs, state, survey, keep, moves=moves)
    except LimitExceeded:
        # A second plan helps only if the head and the base need not be kept: they are superseded by this snapshot.
        if not (moves and grew and keep):
            raise
        if len(packs.packs) > 1:
            packs = await prepare_packs(engine, grown.base, indexes, pack, scratch, whole=True)
            manifest = replace(manifest, packs=packs.packs)
        return manifest, packs, await _measure_room(engine, manifest, packs, state, survey, set(), moves=moves)


async def _measure_room(
    engine: Engine,
    manifest: Manifest,
    packs: PlannedPacks,
    state: HeadState,
    survey: Survey,
    keep: set[str],
    *,
    moves: bool,
) -> RoomFound:
    """Check the room for a planned snapshot: its packs, its manifest and the growth of the head. Raise
    ``LimitExceeded``."""
    store = engine.repository.store
    growth = store.room(len(Head.at(manifest, datetime.now(UTC), state.head, state.store_id).encode()))
    growth *= 1 if engine.repository.witnesses is None else 2
    growth -= survey.sizes.get(MemoryKeys.of(manifest.memory).head, 0)
    coming = SnapshotFacts(
        id=manifest.snapshot,
        time=parse_snapshot_time(manifest.snapshot),
        is_head=moves and not keep,
        beside=not moves,
        bytes=store.room(len(manifest.encode())),
        packs={**{pack.id: sum(pack.in_store) for pack in packs.packs[:-1]}, packs.packs[-1].id: packs.room(store)},
    )
    added = packs.room(store) + coming.bytes + growth
    return await check_room(engine, manifest.memory, coming, added, growth, sum(survey.sizes.values()), keep)


async def commit(engine: Engine, manifest: Manifest, packs: PlannedPacks, grown: CheckedExport) -> tuple[Manifest, int]:
    """Store the packs, then the manifest that makes them a snapshot. Return the manifest, and how many bytes the store
    gained.

    Raise ``BaseCollected`` if a pack that the snapshot needs was removed in the meantime; then no snapshot was made.
    """
    await engine.repository.store.prepare()
    manifest = replace(manifest, packs=await store_packs(engine, manifest.memory, packs))
    if len(manifest.packs) > 1:
        _check_age(grown, engine.retention)
    # The order matters: packs before the manifest, so that a manifest in the store is always complete. Only then are
    # older packs that it needs kept from collection (``hold_packs``): a collection that listed the manifests before
    # this one existed may have marked or deleted some of them, which is noticed there, and then the manifest is deleted
    # again.
    await engine.repository.commit(manifest)
    try:
        _, size = await gather(
            hold_packs(engine.repository.store, manifest), _measure_stored_manifest(engine, manifest)
        )
    except BaseCollected:
        await engine.repository.store.delete([MemoryKeys.of(manifest.memory).snapshot(manifest.snapshot)])
        raise
    added = sum(manifest.packs[-1].in_store) + size
    engine.use.add(added)
    return manifest, added


async def _measure_stored_manifest(engine: Engine, manifest: Manifest) -> int:
    """Return the size of a manifest in the store. A store that encrypts or signs is listed, since its objects are
    larger."""
    store, size = engine.repository.store, len(manifest.encode())
    if store.room(size) == size:
        return size
    key = MemoryKeys.of(manifest.memory).snapshot(manifest.snapshot)
    return sum([info.size async for info in store.list(key)])


def _check_age(grown: CheckedExport, retention: Retention) -> None:
    """Raise ``BaseCollected`` if the base was read so long ago that a garbage collection may already have marked packs
    of it."""
    took = time.monotonic() - grown.read
    if took > retention.grace_seconds * SAFE_PART:
        raise BaseCollected(
            f"The export took {took:.0f} s, more than half of the grace period ({retention.grace}) after which packs may go.",
            hint="Raise [retention] grace, or find out what took so long; the head did not move.",
        )


async def advance_head(
    engine: Engine, manifest: Manifest, state: HeadState, *, moves: bool
) -> tuple[ExportOutcome, HeadState]:
    """Move the head to a stored snapshot by compare-and-swap. Return ``DIVERGED`` if it may not move, or another writer
    was faster."""
    if not moves:
        return ExportOutcome.DIVERGED, state
    await engine.repository.store.prepare()
    engine.progress.step("moving the head")
    for _ in range(MOST_FENCED):
        # Checked before every attempt, since the ownership of the sandbox may be lost at any time.
        if engine.fence is not None:
            await engine.fence()
        try:
            return ExportOutcome.COMMITTED, HeadState(await engine.repository.move_head(state, manifest))
        except SwapLost:
            there = await engine.repository.head(manifest.memory)
            if there.head is None or there.snapshot != state.snapshot:
                return ExportOutcome.DIVERGED, there
            # The head names the same snapshot and was only rewritten (``Repository.fence``): a service that takes a
            # sandbox over does that, so that the swap of the earlier owner fails. ``engine.fence`` raises if this
            # service is that earlier owner; otherwise the swap can be tried again on top of the rewritten head.
            state = there
    return ExportOutcome.DIVERGED, state


@dataclass(frozen=True, slots=True)
class PlannedPacks:
    """The packs of a snapshot. The last one is not stored yet; ``file`` and ``index`` are its contents."""

    packs: list[Pack]
    file: PackFile
    index: bytes

    def room(self, store: Store) -> int:
        """Return how many bytes the store gains by the new pack at most."""
        return store.room(self.packs[-1].bytes) + store.room(self.packs[-1].index_bytes)


async def prepare_packs(
    engine: Engine, base: Manifest | None, indexes: list[Index], new: PackFile, spool: Spool, *, whole: bool = False
) -> PlannedPacks:
    """Plan how to store ``new`` on top of the packs of ``base``, whose indexes are ``indexes``. Nothing is written yet.
    With ``whole``, fold everything into one full pack that needs none of the base's packs."""
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
    """Fold ``new`` with some or all packs of its base. Return the packs that stay below it, and the folded pack."""
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
    """Write the new pack and its index under their new id; only the index if the sandbox wrote the pack already. Return
    all packs, the new one with its size in the store."""
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
    """Return the pack with the sizes that it and its index have in a store that encrypts; unchanged for other stores."""
    if not store.seal:
        return pack
    return replace(pack, stored_bytes=stored, stored_index_bytes=stored_index, sealed=store.seal)


def _measure_file(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return path.stat().st_size, digest
