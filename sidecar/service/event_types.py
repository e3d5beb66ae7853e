"""Every type of event that a service publishes, with a sentence on what it means.

Webhooks select among these, docs/reference/events.md lists them, and a test finds a ``publish`` of any other.
"""

from __future__ import annotations

from sidecar.receipts import ExportOutcome, RestoreOutcome

ACCEPTED = "guard.accepted"
DELETED = "memory.deleted"
REVIEW_ACCEPTED = "review.accepted"
REVIEW_DECLINED = "review.declined"

EVENTS = {
    "access.refused": "Calls had no valid token (401) or no right (403): how many since the last such event, from where.",
    "access.tokens-refused": "The file of named tokens cannot be used. The tokens that it had last count.",
    f"export.{ExportOutcome.COMMITTED}": "An export was stored and is the head now.",
    f"export.{ExportOutcome.UNCHANGED}": "An export found nothing new and stored nothing.",
    f"export.{ExportOutcome.DIVERGED}": "An export was stored beside the head: its sandbox did not start from the head.",
    f"export.{ExportOutcome.REJECTED}": "A guard or a limit kept an export from becoming the head.",
    f"export.{ExportOutcome.PENDING}": "An export was stored beside the head, and waits for a review.",
    "export.failed": "An export failed. The head did not move.",
    f"restore.{RestoreOutcome.COMPLETE}": "A restore put the memory in place, or found it there already.",
    f"restore.{RestoreOutcome.INCOMPLETE}": "A restore was not done. The sandbox is as it was.",
    f"restore.{RestoreOutcome.EMPTY}": "There was no snapshot to restore yet.",
    "restore.failed": "A restore failed.",
    "attachment.attached": "A sandbox was attached.",
    "attachment.detached": "A sandbox was detached.",
    "attachment.taken-over": "This service took over a sandbox from a service that no longer runs.",
    "attachment.token-ended": "A sandbox is looked after although the token that attached it is no longer good.",
    "attachment.unsaved": "The service stops, and a sandbox it looks after is not saved.",
    "drill.passed": "A snapshot was brought back whole into a scratch sandbox.",
    "drill.failed": "A snapshot could not be brought back whole into a scratch sandbox.",
    ACCEPTED: "A snapshot became the head although guards objected: it came repeatedly, or a person accepted it (`by`).",
    "memory.forked": "A memory was begun with a copy of a snapshot of another one (`origin`).",
    "memory.moved": "A memory is in a new sandbox; the old one (`former`) was ended or detached.",
    "memory.rolled-back": "A caller made another snapshot the head (`snapshot`; before: `replaced`).",
    DELETED: "A caller deleted a memory.",
    "index.updated": "A memory's rows for search were brought up to date.",
    "index.incomplete": "Part of a memory cannot be searched; `problem` says why.",
    "index.down": "The database for search cannot be used. It is tried again until it can.",
    "index.recovered": "The database for search can be used again.",
    REVIEW_ACCEPTED: "A person accepted a snapshot that waited (`by`, `because`). It is the head now.",
    REVIEW_DECLINED: "A person declined a snapshot (`by`, `because`). It never becomes the head.",
    "retention.forgot": "Retention rules removed snapshots, or packs that no snapshot needs.",
    "sandbox.ended": "A sandbox ended after its conversation was exported. Nothing is lost.",
    "sandbox.lost": "A sandbox ended within a conversation. What it wrote in its last `unsaved_seconds` may be lost.",
    "sandbox.missing": "A memory that is to have a living sandbox (`[[start]]`) has none: it could not be created, or not yet.",
    "sandbox.noticed": "A sandbox names its memory (`[[watch]]`) and has it; as a reader if another one does (`beside`).",
    "sandbox.not-restored": "A sandbox names a memory (`[[watch]]`) and does not have it: it may not, or the restore failed.",
    "sandbox.started": "A sandbox was created for a memory that is to have one, and the memory restored into it.",
    "service.unfinished": "The service stopped before an export or a restore was done.",
}

FORGOT = "retention.forgot"
HEAD_CHANGES = frozenset(
    {f"export.{ExportOutcome.COMMITTED}", ACCEPTED, REVIEW_ACCEPTED, "memory.forked", "memory.rolled-back", DELETED}
)
"""Events after which a memory has another head, or none."""
