"""Save what a restore would replace and no snapshot has: an ordinary export, stored beside the head of the memory it is of."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from sidecar.engine.core import CountedSandbox, Engine
from sidecar.engine.exports.run import ExportRequest
from sidecar.engine.exports.steps import export
from sidecar.engine.privacy import redact
from sidecar.engine.sandbox.dialogue import UnsavedMemory
from sidecar.errors import BadMemoryId, NotSavedFirst, ProgramFailed, SandboxError, SidecarError
from sidecar.ids import build_memory_key, is_plain_id
from sidecar.ports import Sandbox
from sidecar.receipts import ExportOutcome
from sidecar.store.folders import find_memory
from sidecar.store.manifest import Manifest

ORIGIN = "saved-first"
MOST = 5
"""So many memories are saved before one restore."""
KEPT = "What was here and in no snapshot ({paths}) is kept as {snapshot}{of}, beside the head."
_KEY = re.compile(r"[a-z0-9._-]{1,63}(~[0-9a-f]{32})?\Z")


@dataclass(slots=True)
class StoreFacts:
    """What a sandbox is told of the store, so that it can say what of its memory is in no snapshot."""

    stored: dict[str, list[str]] = field(default_factory=dict)
    """The snapshots of each memory, by its key, as far as somebody has looked."""
    unusable: list[str] = field(default_factory=list)
    """Those that are known to be damaged: what they have must be saved again."""
    heads: list[str] = field(default_factory=list)
    """Those of the memory's own that are or were its head."""
    keep: list[str] = field(default_factory=list)
    """A sandbox whose newest one of ``heads`` is among these is left as it is, whatever came after that."""
    saved: bool = False
    """All that can be saved is: what is not is set aside."""
    store: str = ""
    """The store's id, if it has one."""


@dataclass(frozen=True, slots=True)
class SavedFirst:
    """A snapshot that was made first."""

    memory: str
    snapshot: str
    packed_bytes: int
    words: str


@dataclass(frozen=True, slots=True)
class SaveFirst:
    """What is saved before one restore: out of this sandbox, before ``manifest`` is placed there."""

    engine: Engine
    sandbox: Sandbox
    counted: CountedSandbox
    manifest: Manifest
    projects: tuple[str, ...] | None
    standing: StoreFacts

    async def save(self, rows: list[UnsavedMemory]) -> list[SavedFirst]:
        """Save what the sandbox says no snapshot has, and note in ``standing`` what is stored now.

        Raise ``NotSavedFirst`` when something could not be saved.
        """
        repository, stored, saved = self.engine.repository, self.standing.stored, []
        self.engine.progress.step("saving what is there")
        if len(rows) > MOST:
            raise NotSavedFirst(f"{len(rows)} memories in this sandbox have something that no snapshot has.")
        for row in rows:
            memory = await self._find_owner(row)
            if memory is None:
                # Its memory is in another store, and this is a copy of the sandbox it was in: it can be set aside only.
                stored[row.key] = []
                continue
            ids = await repository.list_snapshot_ids(memory)
            # No more than the sandbox has named itself: it may be another memory's.
            stored[row.key] = [snapshot for snapshot in row.lineage if snapshot in ids]
            if not row.unchanged or row.unchanged not in ids:
                saved += await self._export_beside(memory, row, ids)
        self.standing.saved = True
        self.engine.progress.about(self.manifest.snapshot)
        return saved

    async def _export_beside(self, memory: str, row: UnsavedMemory, ids: Sequence[str]) -> list[SavedFirst]:
        repository, stored = self.engine.repository, self.standing.stored
        snapshot, _ = await repository.make_next_id(memory, await repository.head(memory), ids)
        layouts = {root.layout for root in self.manifest.roots}
        request = ExportRequest(
            memory=memory,
            layouts=tuple(layouts.intersection(row.layouts) or layouts),
            projects=self._choose_projects(row),
            origin=ORIGIN,
            beside=True,
            snapshot=snapshot,
        )
        try:
            receipt = await export(self.engine, self.sandbox, request)
        except SidecarError as problem:
            if isinstance(problem, SandboxError) and not isinstance(problem, ProgramFailed):
                raise  # nothing at all can be done there
            raise NotSavedFirst(
                f"{_describe_unsaved(row)} could not be saved: {problem.message} [{problem.code}]"
            ) from None
        self.counted.add(receipt.trips, receipt.transferred_bytes)
        if receipt.snapshot is None:
            why = f"{receipt.reason.message} [{receipt.reason.code}]" if receipt.reason else "nothing was kept."
            raise NotSavedFirst(f"{_describe_unsaved(row)} could not be saved: {why}")
        # The sandbox has noted the new id, also where the store has all of it under another.
        stored[row.key] = [snapshot, receipt.snapshot, *stored[row.key]]
        if receipt.outcome is ExportOutcome.UNCHANGED:
            return []
        of = "" if memory == self.manifest.memory else f" of {memory}"
        words = KEPT.format(paths=_join_paths(row), snapshot=receipt.snapshot, of=of)
        return [SavedFirst(memory, receipt.snapshot, receipt.packed_bytes, words)]

    async def _find_owner(self, row: UnsavedMemory) -> str | None:
        """The memory that something belongs to; ``None`` when it can only be set aside.

        A sandbox could name any memory: only one that knows a snapshot of it has anything saved as that memory's.
        """
        repository, name, known = self.engine.repository, "", False
        if row.key == build_memory_key(self.manifest.memory):
            return self.manifest.memory
        if _KEY.match(row.key):
            name = row.memory or (row.key if is_plain_id(row.key) else await find_memory(repository.store, row.key))
        with contextlib.suppress(BadMemoryId):
            known = build_memory_key(name) == row.key and not set(row.lineage).isdisjoint(
                await repository.list_snapshot_ids(name)
            )
        if known:
            return name
        if row.sandbox and row.sandbox != self.counted.ref:
            return None
        raise NotSavedFirst(
            f"{_describe_unsaved(row)} is of the memory {name or row.key!r}, which this store does not know."
        )

    def _choose_projects(self, row: UnsavedMemory) -> tuple[str, ...] | None:
        """Those that were named, else those that the sandbox names; on a machine of ours only if they are in its home."""
        if self.projects is not None and row.key == build_memory_key(self.manifest.memory):
            return self.projects
        ours = self.counted.ground(None) is not None
        named = [name for name in row.projects or () if not ours or (name[:1] == "~" and ".." not in name.split("/"))]
        return tuple(named) or None


def _describe_unsaved(row: UnsavedMemory) -> str:
    return f"What is here and in no snapshot ({_join_paths(row)})"


def _join_paths(row: UnsavedMemory) -> str:
    more = row.files - len(row.paths)
    return ", ".join(map(redact, row.paths)) + (f" and {more:,} more" if more > 0 else "")
