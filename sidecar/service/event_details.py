"""What the ``details`` of an event hold, by its type, for the OpenAPI document.

``sidecar.service.event_types`` says what each type means. A test compares these with what is published.
"""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict

from sidecar.models.answers import AttachmentState
from sidecar.receipts import Reason, SetAside
from sidecar.service.event_types import ACCEPTED, DELETED, REVIEW_ACCEPTED, REVIEW_DECLINED


class ErrorDetails(TypedDict):
    """An error as events tell it."""

    code: str
    message: str
    hint: str
    retryable: bool


class _ReceiptDetails(TypedDict):
    operation: str
    conversation: str
    snapshot: str | None
    files: int
    bytes: int
    packed_bytes: int
    seconds: float
    warnings: list[str]
    reason: NotRequired[Reason]


class ExportDetails(_ReceiptDetails):
    """An export that has ended with a receipt."""

    saved: bool
    hint: NotRequired[str]


class RestoreDetails(_ReceiptDetails):
    """A restore that has ended with a receipt."""

    wanted: NotRequired[str]
    kept: NotRequired[bool]
    saved_first: NotRequired[str]
    saved_first_memory: NotRequired[str]
    set_aside: NotRequired[SetAside]
    read_only: NotRequired[bool]


class FailureDetails(TypedDict):
    """An export or a restore that has ended without a receipt."""

    operation: str
    conversation: str
    seconds: float
    error: ErrorDetails


class PlainDetails(TypedDict):
    """Nothing but what every event has."""


class TakeoverDetails(TypedDict):
    """A sandbox that this service took over."""

    conversation: str
    former: str
    generation: int


class UnsavedDetails(TypedDict):
    """A sandbox that is not saved while the service stops."""

    conversation: str
    state: AttachmentState
    problem: str
    last_saved: str


class DrillDetails(TypedDict):
    """A snapshot that was restored into a scratch sandbox."""

    snapshot: str
    files: int
    bytes: int
    problem: str


class AcceptanceDetails(TypedDict):
    """A snapshot that became the head although guards objected."""

    by: str
    snapshot: str | None
    reasons: list[str]
    replaced: str | None
    pinned: bool
    operation: NotRequired[str]
    conversation: NotRequired[str]
    since: NotRequired[str]
    refusals: NotRequired[int]


class ReviewAcceptanceDetails(TypedDict):
    """A snapshot that a person accepted in a review."""

    snapshot: str
    replaced: str | None
    pinned: bool
    by: str
    because: str
    included: list[str]


class ReviewDeclineDetails(TypedDict):
    """A snapshot that a person declined."""

    snapshot: str
    by: str
    because: str


class RefusedCallsDetails(TypedDict):
    """Calls without a valid token or the right: how many by status since the last such event, and from where."""

    refused: dict[str, int]
    peers: list[str]
    caller: str


class TokenFileDetails(TypedDict):
    """Why the file of named tokens cannot be used."""

    error: ErrorDetails


class TokenEndDetails(TypedDict):
    """A sandbox that is looked after although its token is no longer good."""

    by: str
    note: str


class ForkDetails(TypedDict):
    """A memory that was begun with a copy of a snapshot of another one."""

    snapshot: str
    origin: str


class RollbackDetails(TypedDict):
    """A head that a caller moved to another snapshot."""

    snapshot: str
    replaced: str | None


class DeletionDetails(TypedDict):
    """How much was removed with a memory."""

    objects: int


class IndexUpdateDetails(TypedDict):
    """A memory whose rows for search were brought up to date."""

    snapshot: str
    records: int
    written: int
    removed: int


class IndexGapDetails(TypedDict):
    """A memory of which a part cannot be searched."""

    snapshot: str
    problem: str


class IndexFailureDetails(TypedDict):
    """Why the database for search cannot be used."""

    error: ErrorDetails


class RetentionDetails(TypedDict):
    """How much retention removed."""

    snapshots: int
    objects: int
    bytes: int


class SandboxEndDetails(TypedDict):
    """A sandbox that ended after its export."""

    conversation: str
    last_saved: str


class SandboxLossDetails(TypedDict):
    """A sandbox that ended within a conversation."""

    conversation: str
    last_saved: str
    snapshot: str | None
    unsaved_seconds: float
    error: ErrorDetails


class MoveDetails(TypedDict):
    """A memory that is in a new sandbox."""

    former: str
    former_state: str


class MissingDetails(TypedDict):
    """A sandbox that should be there and is not."""

    on: str
    since: str
    problem: str
    next: str
    failures: int


class StartedDetails(TypedDict):
    """A sandbox that was created because a memory is to have one."""

    snapshot: str | None
    missing_seconds: float


class NoticedDetails(TypedDict):
    """A sandbox that named its memory and has it."""

    via: str
    outcome: str
    snapshot: str | None
    reader: bool
    beside: str
    seconds: float


class NotRestoredDetails(TypedDict):
    """A sandbox that names a memory and does not have it."""

    via: str
    failures: int
    error: ErrorDetails


class UnfinishedDetails(TypedDict):
    """An export or a restore that was not done when the service stopped."""

    operation: str
    verb: str


DETAILS: dict[type, tuple[str, ...]] = {
    ExportDetails: ("export.committed", "export.unchanged", "export.diverged", "export.rejected", "export.pending"),
    RestoreDetails: ("restore.complete", "restore.incomplete", "restore.empty"),
    FailureDetails: ("export.failed", "restore.failed"),
    PlainDetails: ("attachment.attached", "attachment.detached", "index.recovered"),
    TakeoverDetails: ("attachment.taken-over",),
    UnsavedDetails: ("attachment.unsaved",),
    DrillDetails: ("drill.passed", "drill.failed"),
    AcceptanceDetails: (ACCEPTED,),
    ReviewAcceptanceDetails: (REVIEW_ACCEPTED,),
    ReviewDeclineDetails: (REVIEW_DECLINED,),
    RefusedCallsDetails: ("access.refused",),
    TokenFileDetails: ("access.tokens-refused",),
    TokenEndDetails: ("attachment.token-ended",),
    ForkDetails: ("memory.forked",),
    RollbackDetails: ("memory.rolled-back",),
    DeletionDetails: (DELETED,),
    IndexUpdateDetails: ("index.updated",),
    IndexGapDetails: ("index.incomplete",),
    IndexFailureDetails: ("index.down",),
    RetentionDetails: ("retention.forgot",),
    SandboxEndDetails: ("sandbox.ended",),
    SandboxLossDetails: ("sandbox.lost",),
    MoveDetails: ("memory.moved",),
    MissingDetails: ("sandbox.missing",),
    StartedDetails: ("sandbox.started",),
    NoticedDetails: ("sandbox.noticed",),
    NotRestoredDetails: ("sandbox.not-restored",),
    UnfinishedDetails: ("service.unfinished",),
}
"""The types of events that have such details."""
