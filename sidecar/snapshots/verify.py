"""Check that what a store holds is still what was put there: every object's existence, size and hash, streaming."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from io import BytesIO

from sidecar.errors import ObjectMissing, ObjectRefused, SnapshotDamaged
from sidecar.ids import Keys
from sidecar.inside import index
from sidecar.inside.layers import count_files, layered
from sidecar.progress import Progress
from sidecar.repository import Repository
from sidecar.snapshots.manifest import Manifest, tree_digest

LOST_PIN = "It is pinned, and its manifest is gone."


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotReport:
    snapshot: str
    ok: bool
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What ``verify`` found. ``ok`` means: the head and every snapshot are whole."""

    memory: str
    ok: bool
    head: str
    head_problem: str = ""
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
        """Raise ``SnapshotDamaged`` unless the object is there and whole; return its bytes when ``keep`` asks for them."""
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


async def verify(repository: Repository, memory: str, progress: Progress) -> MemoryReport:
    """Check every snapshot of a memory. Damage is reported, never raised."""
    state = await repository.head(memory)
    pinned = await repository.pinned(memory)
    ids = await repository.snapshot_ids(memory)
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
            await _check(manifest, objects)
            reports.append(SnapshotReport(snapshot=snapshot, ok=True))
        except SnapshotDamaged as damage:
            reports.append(SnapshotReport(snapshot=snapshot, ok=False, problem=damage.message))
            found[snapshot] = damage
    await _remember(repository, memory, reports, found)
    reports += [SnapshotReport(snapshot=one, ok=False, problem=LOST_PIN) for one in sorted(pinned - {*ids})]
    if state.notice:  # an export that was under way may have ended
        state = replace(state, notice=(await repository.head(memory)).notice)
    head_problem = state.problem or state.notice
    if state.head is None and state.version is None and await repository.any_eligible(memory, ids):
        head_problem = "The head is missing; a restore takes the newest snapshot. Set it with `rollback`."
    if state.snapshot and state.snapshot not in ids:
        head_problem = f"The head names snapshot {state.snapshot}, which has no manifest."
    return MemoryReport(
        memory=memory,
        ok=not head_problem and all(report.ok for report in reports),
        head=state.snapshot,
        head_problem=head_problem,
        snapshots=reports,
        objects=objects.count + len(ids) + (1 if state.version else 0),
        bytes=objects.bytes,
    )


async def _remember(
    repository: Repository, memory: str, reports: list[SnapshotReport], found: dict[str, SnapshotDamaged]
) -> None:
    """Tell later exports which snapshots not to build on, and which are whole after all."""
    marked = (await repository.survey(memory)).damaged
    for report in reports:
        if not report.ok and report.snapshot not in marked:
            await repository.mark_damaged(memory, report.snapshot, found[report.snapshot])
    await repository.clear_damaged(memory, marked & {report.snapshot for report in reports if report.ok})


async def _check(manifest: Manifest, objects: _Objects) -> None:
    keys = Keys.of(manifest.memory)
    texts = []
    for pack in manifest.packs:
        texts.append(await objects.check(keys.index(pack.id), pack.index_bytes, pack.index_sha256, keep=True))
        await objects.check(keys.pack(pack.id, pack.codec), pack.bytes, pack.sha256)
    try:
        entries = layered(index.read(BytesIO(text)) for text in texts)
    except ValueError as problem:
        raise SnapshotDamaged(f"The indexes do not fit together: {problem}.") from None
    if tree_digest(entries) != manifest.tree or count_files(entries) != (manifest.files, manifest.bytes):
        raise SnapshotDamaged("The indexes do not add up to what the manifest says.")
