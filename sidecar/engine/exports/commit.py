"""Turn a checked export into a snapshot: build its manifest, plan and store its packs, and move the head to it.

A manifest also records the capture rules that its snapshot was made by, so that a later one can tell which files it has
only because its layouts cover more. Packs are folded into one when a snapshot would need more than ``MOST_PACKS``.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from sidecar.engine.core import Engine, gather
from sidecar.engine.exports.arrival import CheckedExport
from sidecar.engine.exports.decision import Verdict
from sidecar.engine.exports.gate import note_pending
from sidecar.engine.exports.run import ExportRun
from sidecar.engine.limits import RoomFound, check_room, list_hot_files
from sidecar.engine.sandbox.dialogue import redact
from sidecar.errors import BaseCollected, LimitExceeded, SidecarError, SwapLost
from sidecar.format import index
from sidecar.format.index import DIR, FILE, Entry, Index, count_files
from sidecar.format.patterns import Rules
from sidecar.format.protocol import ExportAnswer
from sidecar.format.roots import get_stem, split_number, strip_below
from sidecar.host.values import dataclass
from sidecar.host.work import run_in_thread
from sidecar.ids import MemoryKeys, make_pack_id, parse_snapshot_time
from sidecar.layouts import CoveredRules, Layout, choose_layouts, load_built_in
from sidecar.layouts.earlier_rules import EARLIER, PROJECTS
from sidecar.policy.retention import SAFE_PART, Retention, SnapshotFacts
from sidecar.ports import Store
from sidecar.program.privacy.scrub import MOST_PATHS
from sidecar.receipts import Accepted, ExportOutcome, Learned
from sidecar.store.fetch import fetch_packs
from sidecar.store.fold import MOST_PACKS, PackFile, do_deltas_outweigh, find_first_to_fold, fold_deltas, fold_to_full
from sidecar.store.intake import check_pack
from sidecar.store.manifest import FORMAT, RAISED, REVIEWED, Database, Head, Manifest, Pack, SnapshotRoot, digest_tree
from sidecar.store.marks import hold_packs, is_guarded_by_swap
from sidecar.store.pins import drop_automatic_pins, pin_automatically
from sidecar.store.recall import LARGEST
from sidecar.store.repository import HeadState

MOST_FENCED = 10
"""How often one export retries the swap of the head after another service has fenced it (see ``advance_head``)."""
MOST_SHOWN = 5
OTHERS = ""


def build_manifest(run: ExportRun, checked: CheckedExport, head: Manifest | None) -> Manifest:
    """Build the manifest of a new snapshot, without its packs, which are not stored yet. ``head`` is the one that it
    may replace."""
    engine, request, answer, base, entries = run.engine, run.request, checked.answer, checked.base, checked.entries
    files, size = count_files(entries)
    roots, parent = _list_roots(checked), run.parent(answer)
    layout_of = {root.name: root.layout for root in roots}
    earlier = head if head is not None and head.snapshot == parent else None
    policy = run.privacy.for_sandbox([], engine.layouts).policy  # as it was sent to the sandbox
    return Manifest(
        memory=request.memory,
        snapshot=run.snapshot,
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        packs=[],
        roots=roots,
        files=files,
        bytes=size,
        tree=digest_tree(entries),
        parent=parent,
        origin=request.origin,
        sandbox=run.sandbox.ref,
        conversation=request.conversation,
        label=run.label(answer),
        databases=_list_databases(checked),
        projects=answer.projects or (base.projects if base else []),
        keyed=_merge_project_folders(checked),
        versions=_merge_versions(checked),
        hot_bytes=sum(entry.size for entry in list_hot_files(entries, layout_of, engine.layouts)),
        dropped=answer.dropped_files,
        dropped_bytes=answer.dropped_bytes,
        scrubbed=_count_scrubbed(base or earlier, entries, answer),
        privacy=answer.policy if answer.policy == policy else "",
        covered=_collect_rules(choose_layouts(request.layouts, engine.layouts), roots, base),
        home="" if request.adopt else redact(answer.home),
        user="" if request.adopt else redact(answer.user),
        format=_choose_format(run, checked, roots),
    )


def _list_roots(checked: CheckedExport) -> list[SnapshotRoot]:
    """Return the roots that were found, and those of the base that were not part of the request and so stay as they
    were."""
    found = [SnapshotRoot(name=root.name, layout=root.layout, hint=root.hint) for root in checked.answer.roots]
    names = {root.name for root in found}
    others = [root for root in checked.base.roots if root.name not in names] if checked.base else []
    return found + [root for root in others if _has_folder(checked, root.name)]


def _list_databases(checked: CheckedExport) -> list[Database]:
    """Return the facts about each database: from this export or, if it did not change, from the base."""
    known = {row.path: row for row in checked.base.databases} if checked.base else {}
    read = {row.path: row for row in checked.answer.databases if row.method != "unchanged"}
    known.update((path, Database(path=path, check=row.check, schema=row.schema)) for path, row in read.items())
    return [known[path] for path, entry in checked.entries.items() if entry.database and path in known]


def _merge_project_folders(checked: CheckedExport) -> dict[str, str]:
    """Return the folders named after projects: from this export or, where it names none, from the base."""
    known = {**(checked.base.keyed if checked.base else {}), **checked.answer.keyed}
    return {path: hint for path, hint in known.items() if _has_folder(checked, path)}


def _merge_versions(checked: CheckedExport) -> dict[str, str]:
    """Return, by root, the version of the program that the root belongs to; if it cannot be read any more, the last
    known one."""
    seen = {
        **(checked.base.versions if checked.base else {}),
        **{root: v for root, v in checked.answer.versions.items() if v},
    }
    return {root: version for root, version in seen.items() if _has_folder(checked, root)}


def _has_folder(checked: CheckedExport, folder: str) -> bool:
    return any(path.startswith(f"{folder}/") for path in checked.entries)


def _count_scrubbed(
    earlier: Manifest | None, entries: Mapping[str, Entry], answer: ExportAnswer
) -> dict[str, tuple[int, int]]:
    """Return, for each file of a new snapshot, how many private passages and credentials are missing from it. Files
    that this export removed nothing from keep the counts of the ``earlier`` snapshot, because those passages are
    probably still missing. Counts beyond the most paths are summed up under the empty path."""
    known = dict(earlier.scrubbed) if earlier else {}
    others = known.pop(OTHERS, (0, 0))
    others = answer.taken_more if any(answer.taken_more) else others
    known = {path: counts for path, counts in {**known, **answer.taken}.items() if path in entries}
    for path in list(known)[MOST_PATHS:]:
        private, credentials = known.pop(path)
        others = others[0] + private, others[1] + credentials
    return known | ({OTHERS: others} if any(others) else {})


def _collect_rules(
    asked: Iterable[Layout], roots: Collection[SnapshotRoot], base: Manifest | None
) -> dict[str, CoveredRules]:
    """Return the rules for each root of the layouts of an export. Roots that are not in the snapshot have empty rules.
    Roots of layouts that were not exported keep the base's rules, as they keep its files."""
    used = {spec for root in roots for spec in (root.name, split_number(root.name)[0])}
    rules = {
        spec.name: layout.covered(spec) if spec.name in used else CoveredRules()
        for layout in asked
        for spec in layout.roots
    }
    return {**(base.rules if base else {}), **rules}


def _choose_format(run: ExportRun, checked: CheckedExport, roots: Collection[SnapshotRoot]) -> int:
    """Return the format number of a snapshot: the raised one if the version before layouts could learn would drop files
    of it.

    That version had other rules. Of projects it looked only at those that were named, or else at the home and the
    working folder. Layouts of a config file are the same for both versions.
    """
    ours = {root.name: root for root in roots if root.layout in load_built_in()}
    rules = {
        name: _Known(EARLIER[get_stem(name, EARLIER)])
        for name, root in ours.items()
        if get_stem(name, EARLIER) in EARLIER and _was_looked_for(root, run.request.projects, checked)
    }
    covered = _list_covered(checked)
    for path, kind, *_ in checked.entries.values():
        root, _, relative = path.partition("/")
        if (
            kind != DIR
            and root in ours
            and (root not in rules or (path not in covered and not rules[root].has(relative)))
        ):
            return RAISED
    return FORMAT


def _list_covered(checked: CheckedExport) -> Collection[str]:
    """Return the files of the base, if by its format that version would keep them all: its rules are no others today."""
    base = checked.base
    if base is None or base.format != FORMAT or any(root.layout not in load_built_in() for root in base.roots):
        return ()
    return {path for path, (_, kind, *_) in checked.base_entries.items() if kind != DIR}


def _was_looked_for(root: SnapshotRoot, named: Collection[str] | None, checked: CheckedExport) -> bool:
    """Whether the earlier version would have looked at this root at all."""
    answer, base, stem = checked.answer, checked.base, get_stem(root.name, EARLIER)
    if stem not in PROJECTS:
        return True
    if named is not None:
        # Roots of layouts that were not exported stay as the base has them, so the base's format decides.
        return base is None or base.format == FORMAT or any(found.name == root.name for found in answer.roots)
    folder = strip_below(root.hint, ".cm") if stem == "cm" else root.hint
    return folder in {"~", *answer.projects}


def _compile_rules(covered: CoveredRules) -> Rules:
    return Rules({"keep": list(covered.keep), "databases": [], "never": list(covered.left), "secrets": []})


class _Known:
    """Tells whether rules cover a file. The decision about each folder is cached."""

    def __init__(self, covered: CoveredRules) -> None:
        self._covered = covered
        self._folders = {"": True}

    @cached_property
    def _rules(self) -> Rules:
        return _compile_rules(self._covered)

    def has(self, relative: str) -> bool:
        return self._rules.takes(relative) and self._is_open(relative.rpartition("/")[0])

    def _is_open(self, folder: str) -> bool:
        if folder not in self._folders:
            self._folders[folder] = not self._rules.leaves_out(folder) and self._is_open(folder.rpartition("/")[0])
        return self._folders[folder]


def find_learned(checked: CheckedExport) -> Learned | None:
    """Return the files that are new in a snapshot only because the rules of its base did not cover them; ``None`` if
    there are none."""
    base, entries = checked.base, checked.entries
    come = [path for path in entries if path not in checked.base_entries and entries[path].type == FILE]
    if base is None or not come:
        return None
    rules = {name: _compile_rules(covered) for name, covered in base.rules.items()}
    found = {root.name for root in base.roots}
    new = []
    for path in come:
        entry = entries[path]
        root, _, relative = path.partition("/")
        stem = get_stem(root, rules)
        searched = bool(base.covered) or root in found or stem not in PROJECTS
        if stem not in rules or not searched or (rules[stem].patterns and not rules[stem].allows(relative, False)):
            new.append(entry)
    if not new:
        return None
    paths = [redact(path) for path in sorted(entry.path for entry in new)[:MOST_SHOWN]]
    return Learned(files=len(new), bytes=sum(entry.size for entry in new), paths=paths)


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A snapshot that is in the store; the head does not name it yet."""

    manifest: Manifest
    added: int
    """How many bytes the store gained."""
    room: RoomFound
    accepted: Accepted | None
    guarded: bool = False
    """Its packs were not looked for, since the swap of the head guards them (``is_guarded_by_swap``)."""


async def store_snapshot(
    run: ExportRun, checked: CheckedExport, manifest: Manifest, verdict: Verdict
) -> StoredSnapshot:
    """Commit the snapshot if there is room for it. Raise ``LimitExceeded`` if there is none.

    A pack that the sandbox wrote directly to the store is removed from ``run.unused`` before the commit: from then
    on a manifest may name it, so it must stay whatever happens, unless it was folded into another pack.
    """
    # A rejected or diverged snapshot is stored too, beside the head; it just does not move the head.
    if verdict.reason is not None and verdict.is_pending:
        # Before anything says that it waits: earlier versions, which do not know what that means, refuse this head.
        run.state = await run.engine.repository.raise_head(manifest.memory)
        manifest = replace(manifest, pending=verdict.reason.message, format=REVIEWED)
        await note_pending(run.engine.repository, manifest, run.survey)
    elif verdict.reason is not None:
        manifest = replace(manifest, rejected=f"{verdict.reason.code}: {verdict.reason.message}")
    if verdict.moves and run.state.head is not None:
        manifest = replace(manifest, generation=run.state.head.generation + 1)
    run.state = await run.engine.repository.begin(run.state)
    pack, accepted = checked.received_pack.pack, verdict.accepted
    key = MemoryKeys.of(manifest.memory).pack(pack.stored, pack.codec)
    manifest, packs, room = await plan_packs(run, checked, manifest, moves=verdict.moves)
    if accepted is not None:  # pinned before the commit: from then on the head may move to it
        accepted = await keep_replaced(run, manifest, accepted, room.going)
    run.unused.discard(key)
    try:
        head = run.state.head if verdict.moves else None
        manifest, added, guarded = await commit(run.engine, manifest, packs, checked, head)
    except BaseCollected:
        run.unused |= {key} if pack.stored else set()
        raise
    if pack.stored and pack.stored not in {named.id for named in manifest.packs}:
        run.unused.add(key)
    return StoredSnapshot(manifest, added, room, accepted, guarded)


async def keep_replaced(run: ExportRun, manifest: Manifest, accepted: Accepted, going: Collection[str]) -> Accepted:
    """Pin the head that an accepted snapshot will replace, unless it is in ``going``: to be removed, as there is no
    room for both."""
    if accepted.replaced in going:
        return accepted
    why = ", ".join(dict.fromkeys(reason.code for reason in accepted.reasons))
    repository = run.engine.repository
    await repository.store.prepare()
    run.pinned = await pin_automatically(repository, manifest.memory, accepted.replaced, manifest.snapshot, why)
    return replace(accepted, pinned=run.pinned or accepted.replaced in await repository.pinned(manifest.memory))


@dataclass(frozen=True, slots=True)
class PlannedPacks:
    """The packs of a snapshot. The last one is not stored yet; ``file`` and ``index`` are its contents."""

    packs: list[Pack]
    file: PackFile
    index: bytes

    def room(self, store: Store) -> int:
        """Return how many bytes the store gains by the new pack at most."""
        return store.room(self.packs[-1].bytes) + store.room(self.packs[-1].index_bytes)


async def plan_packs(
    run: ExportRun, checked: CheckedExport, manifest: Manifest, *, moves: bool
) -> tuple[Manifest, PlannedPacks, RoomFound]:
    """Return the manifest with its packs, the planned packs, and the room for them in the store. Nothing is written
    yet.

    If the packs of the head leave no room for one more, and this snapshot is based on the head and will replace it, it
    is planned as one full pack that needs none of them: they can be removed once the head has moved. Raise
    ``LimitExceeded``.
    """
    keep = {run.state.snapshot, *([checked.base.snapshot] if checked.base else [])} - {""}
    packs = await prepare_packs(run, checked)
    manifest = replace(manifest, packs=packs.packs)
    try:
        return manifest, packs, await _measure_room(run, manifest, packs, keep, moves=moves)
    except LimitExceeded:
        # A second plan helps only if the head and the base need not be kept: they are superseded by this snapshot.
        if not (moves and keep) or run.request.force or run.request.adopt:
            raise
        if len(packs.packs) > 1:
            packs = await prepare_packs(run, checked, whole=True)
            manifest = replace(manifest, packs=packs.packs)
        return manifest, packs, await _measure_room(run, manifest, packs, set(), moves=moves)


async def _measure_room(
    run: ExportRun, manifest: Manifest, packs: PlannedPacks, keep: set[str], *, moves: bool
) -> RoomFound:
    """Check the room for a planned snapshot: its packs, its manifest and the growth of the head. Raise
    ``LimitExceeded``."""
    repository, store, state = run.engine.repository, run.engine.repository.store, run.state
    growth = store.room(len(Head.at(manifest, datetime.now(UTC), state.head, state.store_id).encode()))
    growth *= 1 if repository.witnesses is None else 2
    growth -= run.survey.sizes.get(MemoryKeys.of(manifest.memory).head, 0)
    coming = SnapshotFacts(
        id=manifest.snapshot,
        time=parse_snapshot_time(manifest.snapshot),
        is_head=moves and not keep,
        beside=not moves,
        bytes=store.room(len(manifest.encode())),
        packs={**{pack.id: sum(pack.in_store) for pack in packs.packs[:-1]}, packs.packs[-1].id: packs.room(store)},
    )
    added = packs.room(store) + coming.bytes + growth
    return await check_room(run, coming, added, growth, keep)


async def prepare_packs(run: ExportRun, checked: CheckedExport, *, whole: bool = False) -> PlannedPacks:
    """Plan how to store the received pack on top of the packs of its base. Nothing is written yet. With ``whole``, fold
    everything into one full pack that needs none of the base's packs."""
    base, new = checked.base, checked.received_pack.pack
    below = base.packs if base is not None and new.index.kind == "delta" else []
    if base is not None and below and (whole or len(below) >= MOST_PACKS):
        run.engine.progress.step("folding packs")
        below, new = await _fold_packs(run, base, checked.base_indexes, new, whole=whole)
    written, measured = run_in_thread(_write_index, new.index), run_in_thread(_measure_file, new.path)
    data, (size, digest) = await gather(written, measured)
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
    run: ExportRun, base: Manifest, indexes: list[Index], new: PackFile, *, whole: bool
) -> tuple[list[Pack], PackFile]:
    """Fold ``new`` with some or all packs of its base. Return the packs that stay below it, and the folded pack."""
    store, spool = run.engine.repository.store, run.scratch
    sizes = [*(pack.bytes for pack in base.packs[1:]), new.path.stat().st_size]
    start = 0 if whole or do_deltas_outweigh(base.packs[0].bytes, sum(sizes)) else 1 + find_first_to_fold(sizes)
    files = await fetch_packs(store, base.memory, base.packs[start:], spool, run.recalled)
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
    recall = engine.repository.recall
    recall.keep(keys.index(pack.id), measured.index)
    if measured.file.stored:
        await store.put(keys.index(pack.id), measured.index)
        return measured.packs
    if pack.bytes <= LARGEST:
        recall.keep(keys.pack(pack.id, pack.codec), await asyncio.to_thread(measured.file.path.read_bytes))
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


def _write_index(packed: Index) -> bytes:
    text = io.BytesIO()
    index.write(text, packed)
    return text.getvalue()


def _measure_file(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return path.stat().st_size, digest


async def commit(
    engine: Engine, manifest: Manifest, packs: PlannedPacks, checked: CheckedExport, head: Head | None = None
) -> tuple[Manifest, int, bool]:
    """Store the packs, then the manifest that makes them a snapshot. Return the manifest, how many bytes the store
    gained, and whether it is left to the swap of the head to guard its packs. ``head``: what it will replace by
    compare-and-swap, or not at all.

    Raise ``BaseCollected`` if a pack that the snapshot needs was removed in the meantime; then no snapshot was made.
    """
    await engine.repository.store.prepare()
    began = time.monotonic()
    manifest = replace(manifest, packs=await store_packs(engine, manifest.memory, packs))
    if len(manifest.packs) > 1:
        _check_age(checked, engine.retention)
    # The order matters: packs before the manifest, so that a manifest in the store is always complete. Only then are
    # older packs that it needs kept from collection (``hold_packs``): a collection that listed the manifests before
    # this one existed may have marked or deleted some of them, which is noticed there, and then the manifest is deleted
    # again.
    await engine.repository.commit(manifest)
    base = checked.base
    held = (
        [pack.id for pack in base.packs]
        if base is not None and head is not None and base.snapshot == head.snapshot
        else []
    )
    guarded = (
        head is not None
        and manifest.snapshot > head.newest  # no rule of retention takes the latest
        and {pack.id for pack in manifest.packs[:-1]} <= {*held}
        and not packs.file.stored
        and _is_plain(engine, manifest.memory)
        and is_guarded_by_swap(time.monotonic() - began, engine.retention.grace_seconds)
    )
    try:
        if not guarded:
            await hold_packs(engine.repository.store, manifest, held=held)
    except BaseCollected:
        await engine.repository.store.delete([MemoryKeys.of(manifest.memory).snapshot(manifest.snapshot)])
        raise
    size = await _measure_stored_manifest(engine, manifest)
    keys, new = MemoryKeys.of(manifest.memory), manifest.packs[-1]
    for key, length in zip((keys.pack(new.id, new.codec), keys.index(new.id)), new.in_store, strict=True):
        engine.repository.recall.note_seen(key, length)
    added = sum(new.in_store) + size
    engine.use.add(added)
    return manifest, added, guarded


def _is_plain(engine: Engine, memory: str) -> bool:
    """Whether nothing here calls for more care than the swap of a head: no signatures, and no limit of bytes, for which
    a snapshot may have to go that was stored a moment ago."""
    limits, retention = engine.limits, engine.retention
    most = limits.memory_bytes or limits.store_bytes or retention.store_bytes
    return engine.repository.witnesses is None and not (most or retention.build_policy_for(memory).most_bytes)


async def _measure_stored_manifest(engine: Engine, manifest: Manifest) -> int:
    """Return the size of a manifest in the store. A store that encrypts or signs is listed, since its objects are
    larger."""
    store, size = engine.repository.store, len(manifest.encode())
    if store.room(size) == size:
        return size
    key = MemoryKeys.of(manifest.memory).snapshot(manifest.snapshot)
    return sum([info.size async for info in store.list(key)])


def _check_age(checked: CheckedExport, retention: Retention) -> None:
    """Raise ``BaseCollected`` if the base was read so long ago that a garbage collection may already have marked packs
    of it."""
    took = time.monotonic() - checked.read
    if took > retention.grace_seconds * SAFE_PART:
        raise BaseCollected(
            f"The export took {took:.0f} s, more than half of the grace period ({retention.grace}) after which packs may go.",
            hint="Raise [retention] grace, or find out what took so long; the head did not move.",
        )


async def settle_head(run: ExportRun, manifest: Manifest, *, moves: bool, guarded: bool = False) -> ExportOutcome:
    """Move the head to a stored snapshot, if it may move, and remove the pins and the count of refusals that are now
    obsolete. ``run.state`` is the new head afterwards. Raise ``BaseCollected``; the snapshot is removed then."""
    repository, before = run.engine.repository, run.state.snapshot
    try:
        outcome, run.state = await advance_head(run.engine, manifest, run.state, moves=moves, guarded=guarded)
        committed = outcome is ExportOutcome.COMMITTED
        if not committed:
            # Another head may not need the packs of the one before, which were not looked for (``commit``).
            await hold_packs(repository.store, manifest)
    except BaseCollected:
        await repository.store.delete([MemoryKeys.of(manifest.memory).snapshot(manifest.snapshot)])
        raise
    try:
        if run.pinned:
            # After a lost swap, remove the pin that was just made; otherwise (``None``) all automatic pins but the
            # newest few.
            unused = None if committed else [before]
            await drop_automatic_pins(repository, manifest.memory, unused)
        if committed and MemoryKeys.of(manifest.memory).refusals in run.survey.sizes:
            await repository.store.delete([MemoryKeys.of(manifest.memory).refusals])
    except SidecarError as problem:
        run.warnings.append(f"Pins that are not needed any more could not be removed: {problem.message}")
    return outcome


async def advance_head(
    engine: Engine, manifest: Manifest, state: HeadState, *, moves: bool, guarded: bool = False
) -> tuple[ExportOutcome, HeadState]:
    """Move the head to a stored snapshot by compare-and-swap. Return ``DIVERGED`` if it may not move, or another writer
    was faster. Raise ``BaseCollected`` if the head was written again and a pack was claimed.

    ``guarded``: its packs and its manifest were not looked for, so the first swap alone may be made without it."""
    if not moves:
        return ExportOutcome.DIVERGED, state
    await engine.repository.store.prepare()
    engine.progress.step("moving the head")
    for _ in range(MOST_FENCED):
        # Checked before every attempt, since the ownership of the sandbox may be lost at any time.
        if engine.check_right is not None:
            await engine.check_right()
        try:
            head = await engine.repository.move_head(state, manifest, keep=not guarded)
            return ExportOutcome.COMMITTED, HeadState(head)
        except SwapLost:
            there = await engine.repository.head(manifest.memory)
            if there.head is None or there.snapshot != state.snapshot:
                return ExportOutcome.DIVERGED, there
            if there.head.format == REVIEWED:
                # Somebody declined a snapshot meanwhile, perhaps one that this one grew out of. The next export asks.
                return ExportOutcome.DIVERGED, there
            # The head names the same snapshot and was only rewritten (``Repository.fence``): a service that takes a
            # sandbox over does that, so that the swap of the earlier owner fails, and ``engine.check_right`` raises if this
            # service is that earlier owner; or somebody removes packs or snapshots. If none of this one, the swap can be
            # tried again on top of the rewritten head.
            await engine.repository.keep(manifest)  # before its packs, as when it was stored
            await hold_packs(engine.repository.store, manifest)
            guarded, state = False, there
    return ExportOutcome.DIVERGED, state
