"""The service's answers other than receipts. Unknown fields, which a newer service may add, are ignored."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from sidecar.receipts import ExportReceipt, Reason, RestoreReceipt


class Memory(Struct, frozen=True, kw_only=True):
    """A memory, its head and how many snapshots it has."""

    memory: str
    head: str | None
    snapshots: int
    created: str | None = None
    """When the head was made."""
    files: int = 0
    bytes: int = 0
    stored_bytes: int = 0
    """What all its snapshots need in the store together."""
    problem: str = ""


class Snapshot(Struct, frozen=True, kw_only=True):
    snapshot: str
    standing: str
    """"head", "earlier head", "diverged", "rejected" or "damaged" (whatever it was before; ``problem`` says what is wrong)."""
    created: str = ""
    parent: str = ""
    label: str = ""
    conversation: str = ""
    sandbox: str = ""
    origin: str = ""
    rejected: str = ""
    problem: str = ""
    files: int = 0
    bytes: int = 0
    packs: int = 0
    stored_bytes: int = 0
    """What its packs need in the store; some may be those of other snapshots too."""
    pinned: bool = False
    """No retention rule may take it."""
    pinned_because: str = ""
    """Why the sidecar pinned it by itself; empty when a person did."""
    dropped: int = 0
    """How many files a size limit left out."""
    scrubbed: int = 0
    """How many private passages and credentials were taken out before it was stored."""


class Entry(Struct, frozen=True, kw_only=True):
    """A file, folder or link of a snapshot."""

    path: str
    type: str
    mode: int
    size: int
    mtime: int
    digest: str
    block: int
    target: str
    database: bool


class SnapshotContents(Snapshot, frozen=True, kw_only=True):
    """A snapshot and every entry in it."""

    memory: str
    entries: list[Entry]


class Size(Struct, frozen=True, kw_only=True):
    path: str
    size: int


class Change(Struct, frozen=True, kw_only=True):
    path: str
    old_size: int
    new_size: int


class Difference(Struct, frozen=True, kw_only=True):
    """What changed from one snapshot to another."""

    memory: str
    from_: str = field(name="from")
    to: str
    added: list[Size]
    removed: list[Size]
    changed: list[Change]


class Forked(Struct, frozen=True, kw_only=True):
    """A new memory, its first snapshot, and where that came from."""

    memory: str
    snapshot: str
    origin: str


class Head(Struct, frozen=True, kw_only=True):
    memory: str
    head: str
    previous: str | None


class Acceptance(Struct, frozen=True, kw_only=True):
    """A snapshot that stood beside the head is the head now."""

    memory: str
    head: str
    previous: str | None
    """The head that it replaced; ``None`` when there was none that could be read."""
    standing: str
    """What it was: "rejected" or "diverged"."""
    reason: Reason
    """Why it was not the head."""
    pinned: bool
    """The one that it replaced is pinned."""


class Deleted(Struct, frozen=True, kw_only=True):
    memory: str
    removed: int


class Pinned(Struct, frozen=True, kw_only=True):
    memory: str
    snapshot: str
    pinned: bool


class Fate(Struct, frozen=True, kw_only=True):
    """What becomes of a snapshot under the retention rules, and why."""

    snapshot: str
    keep: bool
    reason: str
    created: str = ""
    label: str = ""
    pinned: bool = False
    bytes: int = 0
    """That no other snapshot needs."""


class Forgotten(Struct, frozen=True, kw_only=True):
    """What retention did to a memory; in a dry run, what it would do."""

    memory: str
    dry_run: bool
    kept: int
    forgotten: int
    snapshots: list[Fate] = []
    problem: str = ""


class Attachment(Struct, frozen=True, kw_only=True):
    """A sandbox the sidecar looks after."""

    memory: str
    sandbox: str
    layouts: list[str] = []
    projects: list[str] | None = None
    checkpoint_every: float = 300.0
    conversation: str = ""
    """The id of the conversation that is open, or was last."""
    lasting: bool = True
    """It is looked after until it is detached; otherwise until its caller has exported it."""
    attached: str = ""
    owner: str = ""
    """The service that looks after it."""
    state: str = "open"
    """"open"; "idle": its caller has exported it since; "lost": the sandbox is gone, and what it had not saved with it;
    "ended": gone, after its export."""
    changed: str = ""
    """Since when it is in that state."""
    saved: str = ""
    """When the head last had all of it. "": never yet."""
    snapshot: str = ""
    """The head at that time."""
    problem: str = ""
    """Why the head does not have what the sandbox has, if the last export said so or failed."""
    hint: str = ""
    """What to do about it."""
    user: str = ""
    """As whom it is exported; "": as whoever its provider takes."""
    by: str = ""
    """The named token by which it was attached, if it was by one."""
    note: str = ""
    """What else there is to know: that the token is no longer good, for one."""


class Attached(Struct, frozen=True, kw_only=True):
    """An attachment, with what was restored before it began or exported when it ended."""

    attachment: Attachment
    restored: RestoreReceipt | None = None
    exported: ExportReceipt | None = None


class Overview(Struct, frozen=True, kw_only=True):
    """All attachments on one store, and which service answered."""

    attachments: list[Attachment]
    store: str = ""
    service: str = ""
    """Its id in the store."""


class Hit(Struct, frozen=True, kw_only=True):
    """A record of a memory that a search found."""

    memory: str
    kind: str
    """"session", "observation", "summary", "prompt", "learning", "decision" or "section"."""
    key: str
    title: str
    snippet: str
    """Where in its text, the words between ``**``."""
    project: str = ""
    session: str = ""
    at: str | None = None
    path: str = ""
    snapshot: str = ""
    """The snapshot that was searched."""
    indexed: str = ""
    score: float = 0.0


class Found(Struct, frozen=True, kw_only=True):
    """What a search found, the best first."""

    query: str
    hits: list[Hit]
    more: bool = False
    behind: list[str] = []
    """Memories among the hits whose head is newer than what was searched."""
    unindexed: list[str] = []
    """Where nothing was found: memories that are not indexed yet, so that they were not searched."""


class Problem(Struct, frozen=True, kw_only=True):
    """``application/problem+json`` as the service writes it."""

    status: int = 0
    title: str = ""
    detail: str = ""
    code: str = ""
    hint: str = ""
    retryable: bool = False


class Operation(Struct, frozen=True, kw_only=True):
    """The state of an export or a restore; with its receipt, or the problem it failed with, once it has ended."""

    id: str
    kind: str
    memory: str
    sandbox: str
    state: str
    """"queued", "running", "done" or "failed"."""
    doing: str = ""
    done_bytes: int = 0
    total_bytes: int | None = None
    created: float = 0.0
    finished: float | None = None
    exported: ExportReceipt | None = None
    restored: RestoreReceipt | None = None
    problem: Problem | None = None


class Event(Struct, frozen=True, kw_only=True):
    """``type`` is a type such as "export.committed"; gaps in ``number`` tell that events were missed."""

    number: int
    type: str
    at: str
    memory: str = ""
    sandbox: str = ""
    details: dict[str, Any] = {}
