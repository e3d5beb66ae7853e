"""Before a restore, save what it would replace and no snapshot has: an ordinary export, stored beside the head of the
memory that the files belong to."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence

from sidecar.engine.core import View
from sidecar.engine.restores.run import RestoreRun, SavedFirst
from sidecar.engine.sandbox.dialogue import redact
from sidecar.errors import BadMemoryId, NotSavedFirst, ProgramFailed, SandboxError, SidecarError
from sidecar.format.protocol import UnsavedMemory
from sidecar.host.values import dataclass
from sidecar.ids import build_memory_key, is_plain_id
from sidecar.receipts import ExportOutcome
from sidecar.store.folders import find_memory

ORIGIN = "saved-first"
MOST = 5
"""How many memories are saved before one restore at most."""
KEPT = "What was here and in no snapshot ({paths}) is kept as {snapshot}{of}, beside the head."
_KEY = re.compile(r"[a-z0-9._-]{1,63}(~[0-9a-f]{32})?\Z")


@dataclass(frozen=True, slots=True)
class SaveFirst:
    """Saves what one restore would replace in a sandbox, before its snapshot is placed there."""

    run: RestoreRun

    async def save(self, rows: list[UnsavedMemory]) -> list[SavedFirst]:
        """Save what the sandbox reports as unsaved, and record in ``run.standing`` what is stored now.

        Return the snapshots made. Raise ``NotSavedFirst`` if something could not be saved.
        """
        engine, stored, saved = self.run.engine, self.run.standing.stored, []
        engine.progress.step("saving what is there")
        if len(rows) > MOST:
            raise NotSavedFirst(f"{len(rows)} memories in this sandbox have something that no snapshot has.")
        for row in rows:
            memory = await self._find_owner(row)
            if memory is None:
                # Its memory is in another store, and this sandbox is a copy of the one it was in: the files can only be
                # set aside.
                stored[row.key] = []
                continue
            ids = await engine.repository.list_snapshot_ids(memory)
            # Send back only snapshots that the sandbox named itself: the memory may be one that the sandbox should not
            # learn about.
            stored[row.key] = [snapshot for snapshot in row.lineage if snapshot in ids]
            if not row.unchanged or row.unchanged not in ids:
                saved += await self._export_beside(memory, row, ids)
        self.run.standing.saved = True
        engine.progress.about(self.run.snapshot)
        return saved

    async def _export_beside(self, memory: str, row: UnsavedMemory, ids: Sequence[str]) -> list[SavedFirst]:
        """Export one memory beside its head. Raise ``NotSavedFirst`` if that fails, or a ``SandboxError`` if the
        sandbox is unusable."""
        repository, stored = self.run.engine.repository, self.run.standing.stored
        snapshot, _ = await repository.make_next_id(memory, await repository.head(memory), ids)
        layouts = {root.layout for root in self.run.chosen.roots}
        from sidecar.engine.exports.run import ExportRequest  # late: most sandboxes have nothing to save
        from sidecar.engine.exports.steps import export

        request = ExportRequest(
            memory=memory,
            layouts=tuple(layouts.intersection(row.layouts) or layouts),
            projects=self._choose_projects(row),
            origin=ORIGIN,
            beside=True,
            snapshot=snapshot,
        )
        try:
            receipt = await export(self.run.engine, self.run.target, request)
        except SidecarError as problem:
            if isinstance(problem, SandboxError) and not isinstance(problem, ProgramFailed):
                raise  # the sandbox cannot be used at all
            raise NotSavedFirst(
                f"{_describe_unsaved(row)} could not be saved: {problem.message} [{problem.code}]"
            ) from None
        self.run.sandbox.add(receipt.trips, receipt.transferred_bytes)
        if receipt.snapshot is None:
            why = f"{receipt.reason.message} [{receipt.reason.code}]" if receipt.reason else "nothing was kept."
            raise NotSavedFirst(f"{_describe_unsaved(row)} could not be saved: {why}")
        # The sandbox has recorded the new id in its notes, even if the store already has the same contents under
        # another id.
        stored[row.key] = [snapshot, receipt.snapshot, *stored[row.key]]
        if receipt.outcome is ExportOutcome.UNCHANGED:
            return []
        of = "" if memory == self.run.request.memory else f" of {memory}"
        words = KEPT.format(paths=_join_paths(row), snapshot=receipt.snapshot, of=of)
        return [SavedFirst(memory, receipt.snapshot, receipt.packed_bytes, words)]

    async def _find_owner(self, row: UnsavedMemory) -> str | None:
        """Return the memory that the files belong to; ``None`` if they can only be set aside.

        A sandbox could name any memory, so files are saved to a memory only if the sandbox also knows one of its
        snapshots. Raise ``NotSavedFirst`` for a memory that this store does not have.
        """
        repository, view, name, known = self.run.engine.repository, self.run.engine.view, "", False
        if row.key == build_memory_key(self.run.request.memory):
            return self.run.request.memory
        if view is not None and not _is_seen(row, view):
            raise NotSavedFirst(f"{_describe_unsaved(row)} is of a memory that this token is not for.")
        if _KEY.match(row.key):
            name = row.memory or (row.key if is_plain_id(row.key) else await find_memory(repository.store, row.key))
        with contextlib.suppress(BadMemoryId):
            known = build_memory_key(name) == row.key and not set(row.lineage).isdisjoint(
                await repository.list_snapshot_ids(name)
            )
        if known:
            return name
        if row.sandbox and row.sandbox != self.run.sandbox.ref:
            return None
        raise NotSavedFirst(
            f"{_describe_unsaved(row)} is of the memory {name or row.key!r}, which this store does not know."
        )

    def _choose_projects(self, row: UnsavedMemory) -> tuple[str, ...] | None:
        """Return the projects of the request, or else those that the sandbox names. For a folder of this machine, only
        those in its home are used: the sandbox's notes must not lead to other folders."""
        request = self.run.request
        if request.projects is not None and row.key == build_memory_key(request.memory):
            return request.projects
        ours = self.run.sandbox.ground(None) is not None
        named = [name for name in row.projects or () if not ours or (name[:1] == "~" and ".." not in name.split("/"))]
        return tuple(named) or None


def _is_seen(row: UnsavedMemory, view: View) -> bool:
    """Whether the files belong to a memory that the caller may see; the store is not asked for a name that the sandbox
    does not tell."""
    try:
        return build_memory_key(row.memory or row.key) == row.key and view.sees(row.memory or row.key)
    except BadMemoryId:
        return False


def _describe_unsaved(row: UnsavedMemory) -> str:
    return f"What is here and in no snapshot ({_join_paths(row)})"


def _join_paths(row: UnsavedMemory) -> str:
    more = row.files - len(row.paths)
    return ", ".join(map(redact, row.paths)) + (f" and {more:,} more" if more > 0 else "")
