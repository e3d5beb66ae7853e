"""Export an attached sandbox, as long as this service owns it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from sidecar.engine import ExportRequest
from sidecar.errors import SidecarError
from sidecar.host.values import dataclass
from sidecar.ids import parse_snapshot_time
from sidecar.receipts import ExportReceipt
from sidecar.service.attachments.attachment import Attachment, Attachments
from sidecar.service.attachments.leases import Lease, LeaseLost
from sidecar.service.attachments.stillness import Stillness
from sidecar.service.core import Sidecar
from sidecar.service.operations import NotWanted, Operation
from sidecar.service.sandboxes import SandboxTarget
from sidecar.store.manifest import Manifest
from sidecar.store.repository import Repository

KEPT_ALIVE = 15.0
"""The margin for prolonging in exports by the service. It is short because a checkpoint must not keep a sandbox from
ending: it is prolonged only if it would end during the export."""
CHECKPOINT, SHUTDOWN, DETACHED = "checkpoint", "shutdown", "detached"
LABELS = (CHECKPOINT, SHUTDOWN, DETACHED)
"""The labels of snapshots that the service made automatically."""
MOST_LOOKED_AT = 20
"""How many of a memory's newest snapshots are read when a sandbox is gone."""


class ConversationClosed(NotWanted):
    """The caller exported or detached the sandbox before the checkpoint's turn came."""

    code = "conversation-closed"
    default_hint = "Nothing to do."


class TakenOver(LeaseLost):
    """Another service has it."""


@dataclass(frozen=True, slots=True)
class AttachmentSaver:
    """Exports attached sandboxes as operations of the service."""

    sidecar: Sidecar
    attachments: Attachments
    lease: Lease
    stillness: Stillness

    async def save(self, attachment: Attachment, current: Callable[[], Attachment | None], why: str) -> ExportReceipt:
        """Export a sandbox under the label ``why``, with the attachment as it is (``current``) when the operation
        starts.

        Raise a ``SidecarError`` if the export failed, ``ConversationClosed`` if its caller has exported it in the
        meantime, and ``LeaseLost`` if this service no longer owns it.
        """

        async def work(operation: Operation) -> ExportReceipt:
            now = current()
            if now is None or not now.looked_after:
                raise ConversationClosed(f"{attachment.sandbox} is not looked after any more.")
            return await self._export_attached(operation, now, why)

        operation = self.sidecar.operations.start(
            Operation(
                "export",
                attachment.memory,
                attachment.sandbox,
                attachment.conversation,
                told=attachment.problem_code,
                why=why,
            ),
            work,
            ours=True,
        )
        receipt = await operation.result()
        assert isinstance(receipt, ExportReceipt)
        return receipt

    async def _export_attached(self, operation: Operation, attachment: Attachment, why: str) -> ExportReceipt:
        """Export the sandbox, with the ownership checked before and just before the head moves; unless a look tells that
        nothing changed in it since an export that found nothing new."""
        if self.lease.held and (still := await self.stillness.find(attachment)) is not None:
            return still
        engine = self.sidecar.engine
        timing = replace(engine.timing, keep_alive=KEPT_ALIVE)
        request = build_export_request(attachment, why)

        async def check_right() -> None:
            await self._check_ours(attachment)

        # Checked before the export, and again by the engine just before the head moves.
        await check_right()
        async with self.sidecar.sandboxes.use(SandboxTarget(attachment.sandbox, user=attachment.user)) as sandbox:
            ours = replace(engine, progress=operation, timing=timing, check_right=check_right, reached=operation.intend)
            # The quotas of the token that attached it hold for checkpoints too.
            ours = self.sidecar.admission.narrow_engine(ours, self.sidecar.find_named(attachment.by))
            stamp = await sandbox.stamp(attachment.projects)
            receipt = await self.sidecar.export_from(sandbox, request, ours)
            await self.stillness.note(attachment, sandbox, stamp, receipt)
            return receipt

    async def _check_ours(self, attachment: Attachment) -> None:
        """Raise unless the store still has this service as the owner, of the same generation, and its lease is valid."""
        held = await self.attachments.find(*attachment.place)
        there = held.attachment if held else None
        if there is None or not there.looked_after:
            raise ConversationClosed(f"{attachment.sandbox} was detached, or exported by its caller, meanwhile.")
        # The generation grows with every owner, so it also tells if this service lost the sandbox and took it over
        # again since.
        if (there.owner, there.generation) != (attachment.owner, attachment.generation):
            raise TakenOver(f"Another service looks after {attachment.sandbox} now.")
        if not self.lease.held:
            raise LeaseLost("This service could not say that it lives for too long to go on.")


def build_export_request(attachment: Attachment, label: str) -> ExportRequest:
    """Return the request to export an attached sandbox as it was attached."""
    return ExportRequest(
        memory=attachment.memory,
        layouts=tuple(attachment.layouts),
        projects=None if attachment.projects is None else tuple(attachment.projects),
        conversation=attachment.conversation,
        label=label,
    )


async def was_exported_last(repository: Repository, attachment: Attachment) -> bool:
    """Whether the caller exported a sandbox that is gone last, although no service recorded it: by the command line,
    through a service of an earlier version, or through one that died before it could."""
    with contextlib.suppress(SidecarError):
        ids = (await repository.list_snapshot_ids(attachment.memory))[:MOST_LOOKED_AT]
        ids = [one for one in ids if parse_snapshot_time(one).isoformat(timespec="milliseconds") >= attachment.attached]
        manifests = await repository.manifests(attachment.memory, ids)
        for snapshot in ids:
            manifest = manifests.get(snapshot)
            if isinstance(manifest, Manifest) and manifest.sandbox == attachment.sandbox:
                return manifest.label not in LABELS
    return False
