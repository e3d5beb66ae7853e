"""Export an attached sandbox, for as long as it is ours to export."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sidecar.engine import ExportRequest, export
from sidecar.receipts import ExportReceipt
from sidecar.service.attachments import Attachment, Attachments
from sidecar.service.leases import Lease, LeaseLost
from sidecar.service.operations import Operation, Receipt
from sidecar.service.sidecar import Sidecar

KEPT_ALIVE = 15.0
"""An export before the end must not keep a sandbox from ending: it is prolonged only when it would end under our hands."""


@dataclass(frozen=True, slots=True)
class Saving:
    sidecar: Sidecar
    attachments: Attachments
    lease: Lease

    async def save(self, attachment: Attachment, why: str) -> Receipt:
        """Export it under the label ``why``. Raise a ``SidecarError`` when it is not saved, or no longer ours."""
        operation = self.sidecar.operations.start(
            Operation("export", attachment.memory, attachment.sandbox),
            lambda started: self._export(started, attachment, why),
            ours=True,
        )
        return await operation.result()

    async def _export(self, operation: Operation, attachment: Attachment, why: str) -> ExportReceipt:
        engine = self.sidecar.engine
        timing = replace(engine.timing, keep_alive=KEPT_ALIVE)
        request = ExportRequest(
            memory=attachment.memory,
            layouts=tuple(attachment.layouts),
            projects=None if attachment.projects is None else tuple(attachment.projects),
            label=why,
        )

        async def fence() -> None:
            await self._check_ours(attachment)

        await fence()
        async with self.sidecar.sandboxes.use(attachment.sandbox) as sandbox:
            return await export(replace(engine, progress=operation, timing=timing, fence=fence), sandbox, request)

    async def _check_ours(self, attachment: Attachment) -> None:
        held = await self.attachments.find(attachment.memory)
        there = held.attachment if held else None
        if there is None or (there.owner, there.generation) != (attachment.owner, attachment.generation):
            raise LeaseLost(f"Another service looks after {attachment.sandbox} now.")
        if not self.lease.held:
            raise LeaseLost("This service could not say that it lives for too long to go on.")
