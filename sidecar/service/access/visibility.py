"""What a caller that may not see all memories is shown of receipts, rows and events.

Its own operations never learn of other memories (``Engine.view``). But a snapshot, an attachment or an operation of a
memory that it may read can have been made by somebody else, with words that name other memories: which one the sandbox
held, what an id looks like, whose files were saved first, what a memory was forked from.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sidecar.models.answers import Event, Snapshot
from sidecar.program.notes import OTHER_MEMORY
from sidecar.receipts import ExportReceipt, Reason, RestoreReceipt
from sidecar.service.access.grants import Caller, Verb
from sidecar.service.attachments.attachment import Attachment
from sidecar.service.operations import Operation, Receipt

NAMING = frozenset({OTHER_MEMORY, "unsaved", "memory-not-found"})
"""Codes whose messages name other memories."""
HIDDEN = "The rest is not for this token."
ANOTHER = "fork of another memory"
SHOWN_DETAILS = frozenset(
    {
        *("operation", "conversation", "snapshot", "files", "bytes", "packed_bytes", "seconds", "saved", "kept"),
        *("read_only", "unsaved_seconds", "last_saved", "snapshots", "objects", "generation", "state", "by", "verb"),
        *("reasons", "refusals", "since", "replaced", "pinned", "records", "written", "removed", "set_aside"),
    }
)
"""The details of events that name no memory and hold no words."""
_FORK = re.compile(r"fork of (.+) at \S+\Z", re.DOTALL)


def veil_reason(caller: Caller, reason: Reason) -> Reason:
    """Return a reason without a message that may name other memories."""
    return replace(reason, message=HIDDEN) if caller.restricted and reason.code in NAMING else reason


def veil_export(caller: Caller, receipt: ExportReceipt, *, own: bool = True) -> ExportReceipt:
    """Return the receipt of an export as a caller may see it; ``own``: it is of the caller's own call."""
    if not caller.restricted:
        return receipt
    warnings = receipt.warnings if own else []
    reason = veil_reason(caller, receipt.reason) if receipt.reason else None
    return replace(receipt, reason=reason, warnings=warnings)


def veil_restore(caller: Caller, receipt: RestoreReceipt, *, own: bool = True) -> RestoreReceipt:
    """Return the receipt of a restore as a caller may see it; ``own``: it is of the caller's own call."""
    if not caller.restricted or own:
        return receipt
    if receipt.saved_first_memory and not caller.sees(receipt.saved_first_memory):
        receipt = replace(receipt, saved_first=None, saved_first_memory="")
    reason = veil_reason(caller, receipt.reason) if receipt.reason else None
    return replace(receipt, reason=reason, warnings=[], brief=None)


def veil_receipt(caller: Caller, receipt: Receipt, *, own: bool = True) -> Receipt:
    """Return any receipt as a caller may see it."""
    if isinstance(receipt, ExportReceipt):
        return veil_export(caller, receipt, own=own)
    return veil_restore(caller, receipt, own=own)


def may_see_operation(caller: Caller, operation: Operation) -> bool:
    """Whether a caller may look at an operation: its own, or one on a memory that it may read."""
    own = bool(caller.id) and operation.caller.id == caller.id
    return caller.covers(operation.memory) and (own or caller.has_any([Verb.READ]))


def veil_row(caller: Caller, row: Snapshot) -> Snapshot:
    """Return a snapshot's row as a caller may see it."""
    if not caller.restricted:
        return row
    code, colon, _ = row.rejected.partition(": ")
    origin = _FORK.match(row.origin)
    return replace(
        row,
        rejected=f"{code}: {HIDDEN}" if colon and code in NAMING else row.rejected,
        origin=ANOTHER if origin and not caller.sees(origin[1]) else row.origin,
    )


def veil_attachment(caller: Caller, attachment: Attachment) -> Attachment:
    """Return an attachment as a caller may see it."""
    if not caller.restricted:
        return attachment
    named = any(code in attachment.problem_code for code in NAMING)
    return replace(
        attachment,
        problem=f"{attachment.problem_code}: {HIDDEN}" if named else attachment.problem,
        by=attachment.by if attachment.by == caller.name else "",
    )


class EventVeil:
    """The events of a service as callers may see them. For one that may not see all, an event's number says nothing of
    how many others there were."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def show(self, caller: Caller, event: Event) -> Event | None:
        """Return an event for a caller; ``None`` if it is not for it."""
        if not caller.restricted:
            return event
        if not event.memory or not caller.sees(event.memory):
            return None
        details = {name: value for name, value in event.details.items() if name in SHOWN_DETAILS}
        if (first := event.details.get("saved_first")) and not event.details.get("saved_first_memory"):
            details["saved_first"] = first
        for name in ("reason", "error"):
            if isinstance(told := event.details.get(name), dict):
                details[name] = _shorten(told)
        return replace(event, number=self._mask(event.number), details=details)

    def find_number(self, caller: Caller, shown: int | None, events: Iterable[Event]) -> int | None:
        """Return the number of the event after which a caller wants to go on, which it was shown as ``shown``."""
        if shown is None or not caller.restricted:
            return shown
        return next((event.number for event in events if self._mask(event.number) == shown), 0)

    def _mask(self, number: int) -> int:
        """Return a number in the place of another, small enough for JavaScript."""
        return int.from_bytes(hmac.digest(self._key, str(number).encode(), hashlib.sha256)[:6])


def _shorten(told: dict[str, Any]) -> dict[str, Any]:
    """Return a reason or an error of an event without its words, which may name other memories."""
    code = str(told.get("code", ""))
    return {"code": code, "message": f"{code.replace('-', ' ').capitalize()}.", "hint": "Its receipt says more."}
