"""The answers that are not receipts. The service sends every field; a client ignores those that it does not know, which
a later service may add."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, field
from typing import Annotated, Any, ClassVar, Literal, get_args

from sidecar.host.values import dataclass
from sidecar.receipts import ExportReceipt, Reason, RestoreOutcome, RestoreReceipt
from sidecar.schema import OneOf

Standing = Annotated[
    str, OneOf("head", "earlier head", "diverged", "rejected", "pending", "accepted", "declined", "damaged")
]
EntryType = Annotated[str, OneOf("file", "dir", "link")]
AttachmentState = Annotated[str, OneOf("open", "idle", "lost", "ended")]
OperationState = Annotated[str, OneOf("queued", "running", "done", "failed")]
RecordKind = Literal[
    "session", "observation", "summary", "prompt", "learning", "decision", "section",
    "task", "work", "criterion", "rating", "entity",
]  # fmt: skip
RECORD_KINDS: tuple[str, ...] = get_args(RecordKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many records of a kind were added, changed and removed."""

    added: int = 0
    changed: int = 0
    removed: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            added=self.added + other.added, changed=self.changed + other.changed, removed=self.removed + other.removed
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A memory, its head and how many snapshots it has."""

    memory: str
    head: str | None
    """The snapshot that a restore takes by default; null while there is none that can be read."""
    snapshots: int
    """How many there are."""
    created: str | None = None
    """When the head was made."""
    files: int = 0
    """Of the head."""
    bytes: int = 0
    """Of the head, unpacked."""
    stored_bytes: int = 0
    """What all its snapshots need in the store together."""
    problem: str = ""
    """What is wrong with the head, if it cannot be read."""
    pending: int = 0
    """How many snapshots wait for a review."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memories:
    """The memories of a store, or a page of them."""

    store: str
    """The store's URL."""
    memories: list[Memory]
    next: str | None = None
    """Where the next page begins; null on the last one."""
    may_change: bool = True
    """Whether the token that asks may move their heads: roll back, accept and decline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """What a person decided about a snapshot."""

    decision: Annotated[str, OneOf("accepted", "declined")]
    by: str = ""
    """Who: the name of a token, or of a user; "" of one long ago."""
    at: str = ""
    """When."""
    because: str = ""
    """Why, in that person's words."""
    within: str = ""
    """The later snapshot that was accepted with all that it grew out of; "" if it was this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A snapshot, and how it stands to the head. "accepted": as a part of a later one, or the head did not move yet."""

    snapshot: str
    standing: Standing
    """"damaged": whatever it was before; ``problem`` says what is wrong."""
    created: str = ""
    parent: str = ""
    """The snapshot that its sandbox started from; "" for a first one."""
    label: str = ""
    conversation: str = ""
    sandbox: str = ""
    origin: str = ""
    """How it came about: an export, a tarball, a fork."""
    rejected: str = ""
    """Why a guard objected to it: a code and a sentence."""
    pending: str = ""
    """What a review would see: what it changes, as the export told it; "" if none was asked for."""
    review: Review | None = None
    """What was decided; null if nothing was."""
    problem: str = ""
    files: int = 0
    bytes: int = 0
    packs: int = 0
    stored_bytes: int = 0
    """What its packs need in the store; some may be those of other snapshots too."""
    pinned: bool = False
    """No retention rule may take it."""
    pinned_because: str = ""
    """Why the sidecar pinned it by itself; "" when a person did."""
    dropped: int = 0
    """How many files a size limit left out."""
    scrubbed: int = 0
    """How many private passages and credentials were taken out before it was stored."""
    changes: dict[str, Counts] | None = None
    """By kind of record, what it has that its parent had not; null if that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """A memory's snapshots, newest first."""

    memory: str
    head: str | None
    problem: str = ""
    """What is wrong with the head, if it cannot be read."""
    snapshots: list[Snapshot]
    next: str | None = None
    """Where the next page begins; null on the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file, folder or link of a snapshot."""

    path: str
    """Below the name of its root: ``claude-mem/claude-mem.db``."""
    type: EntryType
    mode: int
    size: int
    mtime: int
    """In nanoseconds since 1970."""
    digest: str
    block: int
    """The size of the blocks by which changes are found."""
    target: str
    """Where a link leads."""
    database: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotContents(Snapshot):
    """A snapshot and every entry in it."""

    memory: str
    entries: list[Entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A path that only one of two snapshots has."""

    path: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A path whose contents differ between two snapshots."""

    path: str
    old_size: int
    new_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What changed from one snapshot to another."""

    # "from" is a word of Python, so the field has an underscore that is not sent.
    __pydantic_config__: ClassVar[dict[str, Callable[[str], str]]] = {"alias_generator": lambda name: name.rstrip("_")}

    memory: str
    from_: str
    """The earlier snapshot."""
    to: str
    added: list[Size]
    removed: list[Size]
    changed: list[Change]

    def as_dict(self) -> dict[str, Any]:
        return {name.rstrip("_"): value for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """A new memory, its first snapshot, and where that came from."""

    memory: str
    snapshot: str
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A memory's head after it was moved."""

    memory: str
    head: str
    previous: str | None
    """The head before; null when there was none that could be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """A snapshot that stood beside the head is the head now."""

    memory: str
    head: str
    previous: str | None
    """The head that it replaced; null when there was none that could be read."""
    standing: Annotated[str, OneOf("rejected", "diverged", "pending")]
    """What it was."""
    reason: Reason
    """Why it was not the head."""
    pinned: bool
    """The one that it replaced is pinned; not needed where it waited and grew out of that one."""
    by: str = ""
    """Who accepted it."""
    because: str = ""
    """Why, in that person's words."""
    included: list[str] = field(default_factory=list)
    """The snapshots that it grew out of and that waited too, newest first: they are accepted with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """A snapshot that will never become the head."""

    memory: str
    snapshot: str
    head: str | None
    """The head, which is as it was; null when there is none that can be read."""
    by: str = ""
    """Who declined it."""
    because: str = ""
    """Why, in that person's words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleted:
    """A memory that is no more."""

    memory: str
    removed: int
    """How many objects it had in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """Whether a snapshot is kept whatever the retention rules say."""

    memory: str
    snapshot: str
    pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What becomes of a snapshot under the retention rules, and why."""

    snapshot: str
    keep: bool
    reason: str
    created: str = ""
    label: str = ""
    pinned: bool = False
    bytes: int = 0
    """Bytes that no other snapshot needs."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection removed, and what still waits."""

    objects: int = 0
    """Objects removed; in a dry run, those that would be."""
    bytes: int = 0
    unfinished: int = 0
    """Uploads that were begun long ago, and given up."""
    waiting: int = 0
    """Packs that no snapshot needs, and whose grace period is not over."""
    waiting_bytes: int = 0
    notes: int = 0
    """Notes about snapshots that no longer exist, and answers to old calls."""
    problem: str = ""
    """Why no pack was collected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """What retention did to a memory; in a dry run, what it would do."""

    memory: str
    dry_run: bool
    kept: int
    forgotten: int
    snapshots: list[Fate] = field(default_factory=list)
    """Newest first."""
    collected: Collected = Collected()
    over_bytes: int = 0
    """By how much what has to stay exceeds the memory's byte limit."""
    problem: str = ""
    """Why nothing was forgotten, or no pack collected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """A sandbox the sidecar looks after between restore and export."""

    memory: str
    sandbox: str
    layouts: list[str] = field(default_factory=list)
    projects: list[str] | None = None
    checkpoint_every: float = 300.0
    """Seconds between two exports."""
    conversation: str = ""
    """The id of the conversation that is open, or was last."""
    lasting: bool = True
    """It is looked after until it is detached; otherwise until its caller has exported it."""
    attached: str = ""
    """Since when."""
    generation: int = 1
    """Grows with each owner: an owner of an earlier one has lost it."""
    owner: str = ""
    """The service that looks after it; "" while none does."""
    state: AttachmentState = "open"
    """"open"; "idle": its caller has exported it since; "lost": the sandbox is gone, and what it had not saved with it;
    "ended": gone, after its export."""
    changed: str = ""
    """Since when it is in that state."""
    saved: str = ""
    """When the head last had all of it: exported, found unchanged, or restored. "": never yet."""
    snapshot: str = ""
    """The head at that time."""
    problem: str = ""
    """Why the head does not have what the sandbox has, if the last export said so or failed: a code and a sentence."""
    hint: str = ""
    """What to do about it."""
    user: str = ""
    """As whom it is exported; "": as whoever its provider takes."""
    by: str = ""
    """The named token whose holder attached it or opened the conversation; "": none, it was an administrator."""
    note: str = ""
    """What else there is to know: that the token is no longer good, for one."""

    @property
    def place(self) -> tuple[str, str]:
        """What it is kept under: its memory and its sandbox."""
        return self.memory, self.sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """An attachment, with what was restored before it began or exported when it ended."""

    attachment: Attachment
    restored: RestoreReceipt | None = None
    exported: ExportReceipt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A memory that is in a new sandbox."""

    attachment: Attachment
    """The new one: ``attachment.sandbox`` is its reference."""
    former: str
    """The sandbox that it was in."""
    former_state: Annotated[str, OneOf("ended", "detached")]
    """What became of that."""
    restored: RestoreReceipt | None = None
    exported: ExportReceipt | None = None
    """The last export of the old one that found something new, or the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingSandbox:
    """A memory that is to have a living sandbox (``[[start]]`` in the config) and has none."""

    memory: str
    on: str
    """Where it is to be created."""
    since: str
    problem: str = ""
    """Why the last attempt failed, or why there is none."""
    next: str = ""
    """No attempt before this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticedSandbox:
    """A sandbox that names a memory (``[[watch]]`` in the config) and is not looked after."""

    memory: str
    """Empty: it names one that it may not have."""
    sandbox: str
    state: Annotated[str, OneOf("reader", "refused", "failed", "restoring")]
    """"reader": another living sandbox has the memory, so it was restored read-only."""
    problem: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookAnswer:
    """What became of a provider's webhook."""

    accepted: bool
    """The sandbox is looked at. False: it came before, or is about no sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxStanding:
    """Whether the memory of a sandbox is in place."""

    sandbox: str
    in_place: bool
    """It was restored into it, or there is nothing to restore yet."""
    memory: str = ""
    """Empty: it is not known to have any."""
    state: Annotated[
        str, OneOf("", "open", "idle", "lost", "ended", "reader", "restored", "restoring", "failed", "asleep")
    ] = ""
    """That of its attachment; else "reader": restored read-only, "restored": by its caller, "restoring", "failed", or
    "asleep": paused or stopped, so nothing can be said. Empty: nothing is known of it."""
    snapshot: str | None = None
    """What was restored, or the head when it was last saved."""
    problem: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """All attachments on one store, and which service answered."""

    attachments: list[Attachment]
    store: str = ""
    """The store's URL."""
    service: str = ""
    """The service that answers, as it calls itself in the store (``owner`` of what it looks after)."""
    missing: list[MissingSandbox] = field(default_factory=list)
    """What the service that answers is to create and could not yet."""
    noticed: list[NoticedSandbox] = field(default_factory=list)
    """Sandboxes that name a memory and are not looked after, as far as the service that answers saw."""
    next: str | None = None
    """Where the next page of ``attachments`` begins; null on the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A record of a memory that a search found."""

    memory: str
    kind: Annotated[str, OneOf(*RECORD_KINDS)]
    key: str
    """With its kind, what tells it from the other records of its memory."""
    title: str
    snippet: str
    """Where in its text, the words between ``**``."""
    project: str = ""
    session: str = ""
    at: str | None = None
    """When it was written down, by the program that did; ISO, in UTC."""
    path: str = ""
    """The file it is in, inside the snapshot."""
    snapshot: str = ""
    """The snapshot that was searched: newer ones were not."""
    indexed: str = ""
    """When the index was updated to it."""
    score: float = 0.0
    first: str = ""
    """In a search of the past: the oldest snapshot that has it as it is here."""
    since: str | None = None
    """When that was made; ISO, in UTC."""
    last: str = ""
    """The newest snapshot that has it; empty if the memory still knows it."""
    until: str | None = None
    """When the next one was made, which does not have it any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found, the best first."""

    query: str
    hits: list[Hit]
    more: bool = False
    """There are more: ask again with a larger ``offset``."""
    behind: list[str] = field(default_factory=list)
    """Memories among the hits whose head is newer than what was searched."""
    unindexed: list[str] = field(default_factory=list)
    """Where nothing was found: memories that are not indexed yet, so that they were not searched."""
    without_past: list[str] = field(default_factory=list)
    """In a search of the past: memories of which only the present could be searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What went wrong. ``code`` is stable; ``retryable`` says whether the same request can succeed later."""

    status: int
    title: str
    detail: str
    """What happened, in a sentence."""
    code: str
    hint: str = ""
    """What to do about it."""
    retryable: bool = False
    type: str = "about:blank"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRestore:
    """What came of a restore into one of several sandboxes: a receipt, or a problem."""

    sandbox: str
    """As it was named."""
    receipt: RestoreReceipt | None = None
    problem: Problem | None = None

    @property
    def is_in_place(self) -> bool:
        """Whether the sandbox has what was asked for; true also if there is no snapshot yet."""
        return self.receipt is not None and self.receipt.outcome is not RestoreOutcome.INCOMPLETE


@dataclass(frozen=True, slots=True, kw_only=True)
class Restores:
    """What came of a restore into several sandboxes."""

    memory: str
    complete: bool
    """Whether every sandbox has what was asked for."""
    sandboxes: list[SandboxRestore]
    """In the order in which they were named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Where an export or a restore stands; with its receipt, or what it failed with, once it has ended."""

    id: str
    kind: Annotated[str, OneOf("export", "restore")]
    memory: str
    sandbox: str
    state: OperationState
    doing: str = ""
    """What it does now."""
    done_bytes: int = 0
    """Of what it does now."""
    total_bytes: int | None = None
    """Of what it does now, if that is known."""
    created: float = 0.0
    """In seconds since 1970."""
    finished: float | None = None
    """In seconds since 1970."""
    problem: Problem | None = None

    @property
    def exported(self) -> ExportReceipt | None:
        """The receipt, if this is an export and has ended well."""
        return None

    @property
    def restored(self) -> RestoreReceipt | None:
        """The receipt, if this is a restore and has ended well."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOperation(Operation):
    """Where an export stands."""

    kind: Literal["export"] = "export"
    receipt: ExportReceipt | None = None

    @property
    def exported(self) -> ExportReceipt | None:
        """The receipt, if it has ended well."""
        return self.receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOperation(Operation):
    """Where a restore stands."""

    kind: Literal["restore"] = "restore"
    receipt: RestoreReceipt | None = None

    @property
    def restored(self) -> RestoreReceipt | None:
        """The receipt, if it has ended well."""
        return self.receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened. docs/reference/events.md lists the types, and what each has in ``details``."""

    number: int
    """Grows by one with each event of a process: a gap tells that events were missed."""
    type: str
    at: str
    """When it happened; ISO, in UTC."""
    memory: str = ""
    """What it is about; "" where that does not apply."""
    sandbox: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether the service can do its work."""

    status: Annotated[str, OneOf("ok", "not ready")]
    version: str
    checks: dict[str, str]
    """By what was looked at: "ok", or what is wrong."""
