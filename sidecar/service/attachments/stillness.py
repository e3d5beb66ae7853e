"""Stillness: a sandbox in which nothing has changed since an export that found nothing new need not be exported again.

Only folders of this machine can be looked at without a command in the sandbox (``Sandbox.stamp``). The store is asked as
in an export: what else could make one do something is then seen too.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from dataclasses import replace

from sidecar.errors import SidecarError, SnapshotError
from sidecar.host.values import dataclass
from sidecar.ids import MemoryKeys
from sidecar.ports import Sandbox
from sidecar.receipts import ExportOutcome, ExportReceipt
from sidecar.service.attachments.attachment import Attachment, AttachmentKey
from sidecar.service.sandboxes import Sandboxes, SandboxTarget
from sidecar.store.repository import Repository

MOST_KNOWN = 5000
"""Of so many sandboxes the last export is remembered."""
TRUSTED_SECONDS = 1800.0
"""After so long a sandbox is exported all the same."""


@dataclass(frozen=True, slots=True)
class _Rest:
    """A sandbox as an export found it, with nothing new in it."""

    stamp: str
    care: tuple[object, ...]
    receipt: ExportReceipt
    since: float


class Stillness:
    """The sandboxes of this service in which nothing was new."""

    def __init__(self, sandboxes: Sandboxes, repository: Repository) -> None:
        self._sandboxes = sandboxes
        self._repository = repository
        self._known: OrderedDict[AttachmentKey, _Rest] = OrderedDict()

    async def find(self, attachment: Attachment) -> ExportReceipt | None:
        """Return the receipt that an export would give that finds nothing new; ``None`` if one has to tell. Raise a
        ``StoreError``."""
        rest, began = self._known.pop(attachment.place, None), time.monotonic()
        if rest is None or rest.care != _describe_care(attachment) or began - rest.since > TRUSTED_SECONDS:
            return None
        with contextlib.suppress(SidecarError):  # what is wrong with the sandbox an export will report
            async with self._sandboxes.use(_target(attachment)) as sandbox:
                if await sandbox.stamp(attachment.projects) != rest.stamp:
                    return None
        if not await self._is_head(attachment.memory, rest.receipt.snapshot or ""):
            return None
        self._known[attachment.place] = rest
        took = round((time.monotonic() - began) * 1000)
        return replace(rest.receipt, conversation=attachment.conversation, duration_ms=took)

    async def _is_head(self, memory: str, snapshot: str) -> bool:
        """Whether a snapshot is the head, and an export would have nothing to do in the store: all of it is there, it is not
        marked as damaged, and no refusal is counted that it would clear."""
        state, survey = await self._repository.open(memory)
        if state.snapshot != snapshot or state.problem or state.notice or snapshot in survey.damaged:
            return False
        if MemoryKeys.of(memory).refusals in survey.sizes:
            return False
        try:
            manifest = await self._repository.manifest(memory, snapshot, survey)
            await self._repository.check_present(manifest, survey)
        except SnapshotError:
            return False
        return True

    async def note(self, attachment: Attachment, sandbox: Sandbox, stamp: str, receipt: ExportReceipt) -> None:
        """Remember an export of a sandbox that had this ``stamp`` before, if nothing was new."""
        if not stamp or receipt.outcome is not ExportOutcome.UNCHANGED or not receipt.is_saved:
            return
        with contextlib.suppress(SidecarError):
            head = await self._repository.manifest(attachment.memory, receipt.snapshot or "")
            roots = [root.hint for root in head.roots]
            # With the roots: if one is not in the home or a project, what changes there is not looked at.
            if await sandbox.stamp([*(attachment.projects or ()), *roots]) != stamp:
                return
            told = replace(receipt, round_trips=0, transferred_bytes=0)
            self._known[attachment.place] = _Rest(stamp, _describe_care(attachment), told, time.monotonic())
            while len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)


def _target(attachment: Attachment) -> SandboxTarget:
    return SandboxTarget(attachment.sandbox, user=attachment.user)


def _describe_care(attachment: Attachment) -> tuple[object, ...]:
    """Return what an export depends on, beside the sandbox and the store."""
    projects = None if attachment.projects is None else tuple(attachment.projects)
    return tuple(attachment.layouts), projects, attachment.user
