"""Diagnose the heads of a store within seconds, and name the remedy for each damaged one.

``verify`` reads every byte of every snapshot. This module reads only the heads, and for large ones it only compares the
sizes of their objects with a listing.
"""

from __future__ import annotations

from sidecar.errors import SnapshotDamaged
from sidecar.host.values import dataclass
from sidecar.host.work import gather_few
from sidecar.ids import MemoryKeys
from sidecar.store.encryption.encrypted_store import EncryptedStore
from sidecar.store.encryption.signed_store import SignedStore
from sidecar.store.manifest import Manifest, check_sizes
from sidecar.store.repository import PARALLEL_READS, HeadState, Repository, Survey
from sidecar.store.verification import check_snapshot

MOST_READ = 256 << 20
"""How many bytes of packs are read at most, over all heads together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedHead:
    """A head that cannot be restored, and why."""

    memory: str
    why: str
    whole: str = ""
    """The best snapshot that seems undamaged, to roll back to. Empty if there is none."""

    @property
    def cure(self) -> str:
        """What a person can do about it, as a sentence."""
        if self.whole:
            return f"`memory-sidecar rollback {self.memory} {self.whole}` makes the newest whole snapshot the head."
        return (
            f"No snapshot of {self.memory} is whole: put the store back from a copy, or export a sandbox that has it."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadReport:
    """The result of ``inspect_heads``."""

    damaged: list[DamagedHead]
    unread: int
    """For this many heads only the sizes were compared, because reading them would take too long."""


async def inspect_heads(repository: Repository) -> HeadReport:
    """Find the memories whose heads cannot be restored."""
    look = _HeadInspector(repository)
    found = await gather_few(look.at, await repository.memories(), PARALLEL_READS)
    return HeadReport(damaged=[damage for damage in found if damage is not None], unread=look.unread)


class _HeadInspector:
    """Checks heads within one budget of bytes to read; once it is used up, only sizes are compared."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._left = MOST_READ
        self.unread = 0

    async def at(self, memory: str) -> DamagedHead | None:
        """Return the damage of a memory's head, with the best snapshot to roll back to; ``None`` if the head is fine."""
        # The head is read before the listing: packs that this head needs were stored before it, so the listing has
        # them.
        state = await self._repository.head(memory)
        survey = await self._repository.survey(memory)
        why = await self._find_head_problem(memory, survey, state)
        if not why:
            return None
        async for snapshot in self._repository.iterate_candidates(memory):
            if snapshot != state.snapshot and not await self._find_snapshot_problem(memory, survey, snapshot):
                return DamagedHead(memory=memory, why=why, whole=snapshot)
        return DamagedHead(memory=memory, why=why)

    async def _find_head_problem(self, memory: str, survey: Survey, state: HeadState) -> str:
        if state.snapshot:
            return await self._find_snapshot_problem(memory, survey, state.snapshot)
        if state.problem or state.version is not None:
            return state.problem
        return "The head is missing." if await self._repository.has_eligible(memory, survey.snapshots) else ""

    async def _find_snapshot_problem(self, memory: str, survey: Survey, snapshot: str) -> str:
        """Return what is wrong with a snapshot, or an empty string if nothing seems to be."""
        manifest = (await self._repository.manifests(memory, [snapshot])).get(snapshot)
        if manifest is None:
            return f"Snapshot {snapshot} has no manifest."
        try:
            if isinstance(manifest, SnapshotDamaged):
                raise manifest
            check_sizes(manifest, survey.sizes)
            if manifest.packed_bytes > self._left:
                self.unread += 1
            else:
                self._left -= manifest.packed_bytes
                await check_snapshot(self._repository, manifest)
        except SnapshotDamaged as damage:
            return damage.message
        noted = await self._repository.read_damage(memory, survey.damaged & {snapshot})
        return noted.get(snapshot, "")


async def count_unencrypted_snapshots(repository: Repository) -> dict[str, int]:
    """Count, by memory, the snapshots that are stored unencrypted in a store that has encryption keys. Return an empty
    mapping if the store does not encrypt."""
    store = repository.store
    sealed = store.inner if isinstance(store, SignedStore) else None
    if not isinstance(sealed, EncryptedStore) or not sealed.encrypts:
        return {}
    state = await sealed.opening.open_to_read()
    counts: dict[str, int] = {}
    for memory in await repository.memories():
        prefix = MemoryKeys.of(memory).prefix
        if state is not None and state.names.hide(prefix) != prefix:
            continue  # its name is encrypted, so it was begun after there were keys
        manifests = await repository.manifests(memory, await repository.list_snapshot_ids(memory))
        plain = [
            one for one in manifests.values() if isinstance(one, Manifest) and not all(p.sealed for p in one.packs)
        ]
        counts |= {memory: len(plain)} if plain else {}
    return counts
