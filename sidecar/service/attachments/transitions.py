"""Compute the new state of an attachment after something has happened to its sandbox. Nothing is written here."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from sidecar.ids import parse_snapshot_time
from sidecar.receipts import ExportOutcome, ExportReceipt, RestoreOutcome, RestoreReceipt
from sidecar.service.attachments.attachment import IDLE, OPEN, Attachment, AttachmentKey, CareOptions, format_now
from sidecar.service.attachments.trouble import SaveProblem, find_save_problem


def apply_opening(
    place: AttachmentKey,
    care: CareOptions,
    before: Attachment | None,
    restored: RestoreReceipt | None,
    *,
    owner: str,
    every: float,
) -> Attachment:
    """Return an attachment that begins or continues, by a restore or by a call to attach. ``every`` is the service's
    own setting."""
    memory, sandbox = place
    base = before if before is not None and before.looked_after else None
    # A restore only decides about the conversation; the other settings of an existing attachment continue to apply.
    settings = None if care.lasting else base
    mine = Attachment(
        memory=memory,
        sandbox=sandbox,
        layouts=list(care.layouts or (settings.layouts if settings else ())),
        projects=care.projects if care.projects is not None or settings is None else settings.projects,
        checkpoint_every=care.checkpoint_every or (settings.checkpoint_every if settings else every),
        conversation=care.conversation or (base.conversation if base and base.state == OPEN else ""),
        user=care.user or (settings.user if settings else ""),
        by=care.by,
        lasting=care.lasting or (base is not None and base.lasting),
        attached=_choose_time_after(restored),
        changed=format_now(),
        generation=before.generation + 1 if before else 1,
        owner=owner,
    )
    if restored is not None and restored.outcome is RestoreOutcome.COMPLETE and restored.snapshot is not None:
        # A sandbox that was left as it is may have changed since its snapshot was begun; one that was just restored, since
        # the restore put the memory in place: its agent may have waited for that.
        begun = parse_snapshot_time(restored.snapshot).isoformat(timespec="milliseconds")
        return replace(mine, saved=begun if restored.kept else _find_begin(restored), snapshot=restored.snapshot)
    if base is not None:
        return replace(mine, saved=base.saved, snapshot=base.snapshot, problem=base.problem, hint=base.hint)
    return mine


def _choose_time_after(restored: RestoreReceipt | None) -> str:
    """Return the present time, or a time just after the restored snapshot if the clock is behind that of its maker. Where
    there was nothing to restore, the time when that began: the agent may have waited for it, and have written since."""
    if restored is not None and restored.outcome is RestoreOutcome.EMPTY:
        return _find_begin(restored)
    moments = [datetime.now(UTC)]
    if restored is not None and restored.snapshot is not None:
        moments.append(parse_snapshot_time(restored.snapshot) + timedelta(milliseconds=1))
    return max(moments).isoformat(timespec="milliseconds")


def apply_export(attachment: Attachment, receipt: ExportReceipt) -> Attachment:
    """Return the attachment after its caller's export, which closes the conversation. If nothing was stored it stays
    open, to be exported again."""
    trouble = find_save_problem(receipt)
    after = _mark_saved(attachment, receipt) if trouble is None else apply_problem(attachment, trouble)
    return after.change_state(IDLE) if trouble is None or receipt.snapshot is not None else after


def apply_checkpoint(attachment: Attachment, receipt: ExportReceipt) -> Attachment:
    """Return the attachment after an export by the service. New contents since its caller's export mean that it is in
    use again."""
    trouble = find_save_problem(receipt)
    after = _mark_saved(attachment, receipt) if trouble is None else apply_problem(attachment, trouble)
    in_use = attachment.state == IDLE and receipt.outcome is ExportOutcome.COMMITTED
    return after.change_state(OPEN) if in_use else after


def apply_problem(attachment: Attachment, trouble: SaveProblem) -> Attachment:
    """Return the attachment with the problem recorded."""
    return replace(attachment, problem=trouble.words, hint=trouble.hint)


def _mark_saved(attachment: Attachment, receipt: ExportReceipt) -> Attachment:
    fine = replace(attachment, problem="", hint="")
    if not receipt.is_saved:
        return fine
    # Changes made while the export ran may not be in it, so the time when it began counts.
    return replace(fine, saved=_find_begin(receipt), snapshot=receipt.snapshot or "")


def _find_begin(receipt: ExportReceipt | RestoreReceipt) -> str:
    """Return when an export or restore that has just ended began."""
    began = datetime.now(UTC) - timedelta(milliseconds=receipt.duration_ms)
    return began.isoformat(timespec="milliseconds")
