"""The request bodies, and the answers that are not receipts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from sidecar.engine.queries import ChangeRow, EntryRow, MemoryRow, SizeRow, SnapshotRow
from sidecar.policy.limits import REASONS
from sidecar.receipts import ExportReceipt, RestoreReceipt
from sidecar.search.port import Hit
from sidecar.service.api.problems import Problem
from sidecar.store.retention import Forgot

Name = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Text = Annotated[str, StringConstraints(max_length=1000)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ExportBody(Body):
    """Export a sandbox's memory."""

    sandbox: Name = Field(examples=["e2b:i3x9k2", "daytona:agent-7", "local:/home/agent"])
    layouts: list[Name] = Field(default=[], max_length=100, description="Default: whatever is there.")
    projects: list[Name] | None = Field(default=None, max_length=100, description="Project folders in the sandbox.")
    conversation: Text = Field(default="", description="Kept with the snapshot.")
    label: Text = Field(default="", description="Kept with the snapshot.")
    force: bool = Field(default=False, description="Move the head whatever the guards say. A limit is no guard.")
    allow: list[Name] = Field(
        default=[],
        max_length=10,
        description=f"Guards that are not to object: {', '.join(REASONS)}.",
        examples=[["shrunk"]],
    )
    wake: bool = Field(default=False, description="Start the sandbox if it is paused or stopped.")
    user: Text = Field(
        default="", description="Work in the sandbox as this user. Default: as whoever its provider takes."
    )


class RestoreBody(Body):
    """Restore a memory into a sandbox."""

    sandbox: Name = Field(examples=["e2b:i3x9k2"])
    snapshot: Name = Field(default="latest", examples=["latest", "@2026-11-16T10:00Z"])
    mode: Literal["replace", "seed"] = "replace"
    projects: list[Name] | None = Field(default=None, max_length=100)
    conversation: Text = Field(default="", description="The conversation that it opens: kept with its snapshots.")
    withhold_projects: bool | None = Field(
        default=None, description="Leave out projects whose folders are not there yet. Default: as [restore] says."
    )
    must_exist: bool = Field(default=False, description="A memory that is not there is an error, not a first start.")
    force: bool = Field(default=False, description="Restore even a database that SQLite finds damaged.")
    read_only: bool = Field(
        default=False, description="Restore it to be read: what this sandbox exports later is stored beside the head."
    )
    discard: bool = Field(
        default=False, description="Replace what no snapshot has without saving it first or setting it aside."
    )
    wake: bool = Field(default=False, description="Start the sandbox if it is paused or stopped.")
    user: Text = Field(
        default="", description="Work in the sandbox as this user. Default: as whoever its provider takes."
    )
    attach: bool = Field(
        default=True, description="Open a conversation: the sandbox is looked after until its next export."
    )
    layouts: list[Name] = Field(
        default=[],
        max_length=100,
        description="What the conversation's checkpoints export. Default: whatever is there.",
    )
    checkpoint_every: float | None = Field(
        default=None, ge=1, le=86400, description="Seconds between the conversation's checkpoints."
    )


class ForkBody(Body):
    memory: Name = Field(description="The id of the new memory.", examples=["acme/agent-8"])
    snapshot: Name = "latest"


class HeadBody(Body):
    snapshot: Name = Field(description="The snapshot to make the head.")


class AcceptanceBody(Body):
    """Make a snapshot the head that a guard rejected, or that has diverged."""

    snapshot: Text = Field(default="", description="Default: the newest that was rejected since the head was made.")


class ForgetBody(Body):
    """Apply the configured rules to a memory."""

    dry_run: bool = Field(default=False, description="Only say what stays and what would go.", examples=[True])


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetAnswer(Forgot):
    dry_run: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PinAnswer:
    memory: str
    snapshot: str
    pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoriesAnswer:
    store: str
    memories: list[MemoryRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotsAnswer:
    memory: str
    head: str | None
    snapshots: list[SnapshotRow]
    problem: str = ""
    """What is wrong with the head, if it cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotAnswer(SnapshotRow):
    memory: str
    entries: list[EntryRow]


class DiffAnswer(BaseModel):
    memory: str
    from_: str = Field(alias="from")
    to: str
    added: list[SizeRow]
    removed: list[SizeRow]
    changed: list[ChangeRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkAnswer:
    memory: str
    snapshot: str
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAnswer:
    memory: str
    head: str
    previous: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteAnswer:
    memory: str
    removed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationAnswer:
    """Where an operation stands."""

    id: str
    kind: str
    memory: str
    sandbox: str
    state: str
    """"queued", "running", "done" or "failed"."""
    doing: str
    done_bytes: int
    total_bytes: int | None
    created: float
    finished: float | None
    receipt: ExportReceipt | RestoreReceipt | None = None
    problem: Problem | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchAnswer:
    query: str
    hits: list[Hit]
    """The best first."""
    more: bool
    """There are more: ask again with a larger ``offset``."""
    behind: list[str]
    """Memories among the hits whose head is newer than what was searched."""
    unindexed: list[str] = field(default_factory=list)
    """Where nothing was found: memories that are not indexed yet, so that they were not searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    status: str
    version: str
    checks: dict[str, str]
