"""Check that a store still contains what was written: every object's existence, size and hash, as a stream."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from io import BytesIO

from sidecar.errors import ObjectMissing, ObjectRefused, SnapshotDamaged
from sidecar.format import index
from sidecar.format.index import count_files, merge_indexes
from sidecar.host.values import dataclass
from sidecar.host.work import NoProgress, Progress
from sidecar.ids import MemoryKeys
from sidecar.store.manifest import Manifest, digest_tree, rebuild_head
from sidecar.store.repository import HeadState, Repository
from sidecar.store.reviews import Reviews, read_reviews_or_none

NO_CURE = (
    "No snapshot is whole. Put the objects back that a copy of the store still has, or save what a sandbox still has with"
    " `memory-sidecar export {memory} --force --sandbox REF`."
)
LOST_PIN = "It is pinned, and its manifest is gone."


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotReport:
    """Whether one snapshot is intact, and the problem if not."""

    snapshot: str
    ok: bool
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What ``verify_memory`` found. ``ok`` means that the head and every snapshot are intact."""

    memory: str
    ok: bool
    head: str
    head_problem: str = ""
    damaged: int = 0
    """How many are damaged: snapshots, and the head itself."""
    cure: str = ""
    """The suggested command, if something is wrong with the head."""
    snapshots: list[SnapshotReport] = field(default_factory=list)
    objects: int = 0
    bytes: int = 0


class _Objects:
    """Reads each object once, however many snapshots share it."""

    def __init__(self, repository: Repository, progress: Progress) -> None:
        self._store = repository.store
        self._progress = progress
        self._found: dict[str, tuple[int, str]] = {}
        self.bytes = 0

    async def check(self, key: str, size: int, sha256: str, keep: bool = False) -> bytes:
        """Raise ``SnapshotDamaged`` unless the object exists and is intact; return its bytes if ``keep``."""
        kept = bytearray()
        if key not in self._found or keep:
            digest, length = hashlib.sha256(), 0
            try:
                async for chunk in self._store.stream(key):
                    digest.update(chunk)
                    length += len(chunk)
                    self._progress.advance(len(chunk))
                    if keep and length <= size:
                        kept += chunk
            except ObjectMissing:
                length = -1
            except ObjectRefused:
                length = 0
            self.bytes += max(length, 0) if key not in self._found else 0
            self._found[key] = (length, digest.hexdigest())
        if self._found[key][0] < 0:
            raise SnapshotDamaged(f"{key} is missing.")
        if self._found[key] != (size, sha256):
            raise SnapshotDamaged(f"{key} is damaged.")
        return bytes(kept)

    @property
    def count(self) -> int:
        return len(self._found)


async def check_snapshot(repository: Repository, manifest: Manifest) -> None:
    """Read every byte of one snapshot. Raise ``SnapshotDamaged``."""
    await _check_objects(manifest, _Objects(repository, NoProgress()))


async def verify_memory(repository: Repository, memory: str, progress: Progress) -> MemoryReport:
    """Check every snapshot of a memory. Damage is reported, never raised."""
    state = await repository.head(memory)
    pinned = await repository.pinned(memory)
    ids = await repository.list_snapshot_ids(memory)
    manifests = await repository.manifests(memory, ids)
    objects = _Objects(repository, progress)
    packs = {pack.id: pack.bytes for m in manifests.values() if isinstance(m, Manifest) for pack in m.packs}
    progress.step(f"verifying {memory}", sum(packs.values()))
    reports = []
    found: dict[str, SnapshotDamaged] = {}
    for snapshot in ids:
        manifest = manifests.get(snapshot)
        if manifest is None:
            continue
        try:
            if isinstance(manifest, SnapshotDamaged):
                raise manifest
            await _check_objects(manifest, objects)
            reports.append(SnapshotReport(snapshot=snapshot, ok=True))
        except SnapshotDamaged as damage:
            reports.append(SnapshotReport(snapshot=snapshot, ok=False, problem=damage.message))
            found[snapshot] = damage
    await _remember(repository, memory, reports, found)
    reports += [SnapshotReport(snapshot=one, ok=False, problem=LOST_PIN) for one in sorted(pinned - {*ids})]
    if state.notice:  # an export that was under way may have ended
        state = replace(state, notice=(await repository.head(memory)).notice)
    reviews = await read_reviews_or_none(repository.store, memory)
    trouble = state.trouble(manifests, reviews.accepted)
    head_problem, bad = trouble or state.notice, [report.snapshot for report in reports if not report.ok]
    if state.snapshot in bad and not head_problem:
        head_problem = f"The head is {state.snapshot}, which is damaged."
    whole = [report.snapshot for report in reports if report.ok]
    return MemoryReport(
        memory=memory,
        ok=not head_problem and not bad,
        head=state.snapshot,
        head_problem=head_problem,
        damaged=len(bad) + bool(trouble and state.snapshot not in bad),
        cure=_suggest_cure(state, reviews, manifests, whole).format(memory=memory)
        if trouble or state.snapshot in bad
        else "",
        snapshots=reports,
        objects=objects.count + len(ids) + (1 if state.version else 0),
        bytes=objects.bytes,
    )


def _suggest_cure(
    state: HeadState, reviews: Reviews, manifests: Mapping[str, Manifest | SnapshotDamaged], whole: Sequence[str]
) -> str:
    """Return the suggested command if something is wrong with the head, given the intact snapshots, newest first, with
    ``{memory}`` in the place of the memory."""
    readable = [manifest for manifest in manifests.values() if isinstance(manifest, Manifest)]
    head = state.head or rebuild_head(reviews.leave_out_unaccepted(manifests), reviews.accepted, reviews.replaced)
    refused = {one.snapshot for one in readable if one.rejected or reviews.is_unaccepted(one)}
    # Prefer what was the head to what never was, and take a refused one only if there is nothing else.
    past = [snapshot for snapshot, _ in head.history if snapshot in whole] if head else []
    best = next(iter([*past, *(one for one in whole if one not in refused), *whole]), "")
    if not best:
        return NO_CURE
    rollback = f"`memory-sidecar rollback {{memory}} {best}` makes the newest good snapshot the head"
    mended = " So does the next export of a sandbox that was restored from this memory, with what it has."
    return f"{rollback}.{'' if state.problem else mended}"


async def _remember(
    repository: Repository, memory: str, reports: list[SnapshotReport], found: dict[str, SnapshotDamaged]
) -> None:
    """Record for later exports which snapshots not to build on, and which are intact after all."""
    marked = (await repository.survey(memory)).damaged
    for report in reports:
        if not report.ok and report.snapshot not in marked:
            await repository.mark_damaged(memory, report.snapshot, found[report.snapshot])
    await repository.clear_damaged(memory, marked & {report.snapshot for report in reports if report.ok})


async def _check_objects(manifest: Manifest, objects: _Objects) -> None:
    """Check the objects of one snapshot, and that its indexes add up to the manifest. Raise ``SnapshotDamaged``."""
    keys = MemoryKeys.of(manifest.memory)
    texts = []
    for pack in manifest.packs:
        texts.append(await objects.check(keys.index(pack.id), pack.index_bytes, pack.index_sha256, keep=True))
        await objects.check(keys.pack(pack.id, pack.codec), pack.bytes, pack.sha256)
    try:
        entries = merge_indexes(index.read(BytesIO(text)) for text in texts)
    except ValueError as problem:
        raise SnapshotDamaged(f"The indexes do not fit together: {problem}.") from None
    if digest_tree(entries) != manifest.tree or count_files(entries) != (manifest.files, manifest.bytes):
        raise SnapshotDamaged("The indexes do not add up to what the manifest says.")
