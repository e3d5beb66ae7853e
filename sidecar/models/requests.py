"""The bodies of requests. What is not listed here is refused, and what has a default need not be sent."""

from __future__ import annotations

from dataclasses import MISSING, field, fields
from typing import Annotated, Any, ClassVar, Literal

from sidecar.host.values import dataclass
from sidecar.schema import Check, Schema

Name = Annotated[str, Check(min_length=1, max_length=1000)]
Names = Annotated[list[Name], Check(max_length=100)]
Text = Annotated[str, Check(max_length=1000)]
Flag = Annotated[bool, Check(strict=True)]
Seconds = Annotated[float, Check(strict=True, ge=1, le=86400)]
SandboxRef = Annotated[Name, Schema(examples=["e2b:i3x9k2", "daytona:agent-7", "local:/home/agent"])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """What all bodies have in common: a field that is not declared is refused."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def as_dict(self) -> dict[str, Any]:
        """Return what has to be sent: a service of an earlier version may not know a field that is as by default."""
        given = {}
        for entry in fields(self):
            default = entry.default if entry.default_factory is MISSING else entry.default_factory()
            if (value := getattr(self, entry.name)) != default:
                given[entry.name] = value.as_dict() if isinstance(value, Body) else value
        return given


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportBody(Body):
    """Export a sandbox's memory."""

    sandbox: SandboxRef
    """The sandbox: its provider and its id there."""
    layouts: Names = field(default_factory=list)
    """Which layouts to export. Default: whatever is there."""
    projects: Names | None = None
    """Project folders in the sandbox. Default: those that are found."""
    conversation: Text = ""
    """Kept with the snapshot."""
    label: Text = ""
    """Kept with the snapshot."""
    force: Flag = False
    """Move the head whatever the guards say. A limit is no guard."""
    allow: Annotated[list[Name], Check(max_length=10), Schema(examples=[["shrunk"]])] = field(default_factory=list)
    """Guards that are not to object, by their codes."""
    wake: Flag = False
    """Start the sandbox if it is paused or stopped."""
    user: Text = ""
    """Work in the sandbox as this user. Default: as whoever its provider takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BriefBody(Body):
    """Have what to read first in the receipt, and in the sandbox."""

    tokens: Annotated[int, Check(strict=True, ge=300, le=50000), Schema(examples=[2000])] = 2000
    """How many tokens the whole text has at most. Default: 2000."""
    path: Annotated[str, Check(max_length=1000), Schema(examples=["BRIEF.md"])] = ""
    """Where below the sandbox's home it is put too. Never where it would be memory, and never over a file that is no brief."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreBody(Body):
    """Restore a memory into a sandbox, or into several."""

    sandbox: SandboxRef | None = None
    """The sandbox: its provider and its id there. Either this or `sandboxes`."""
    sandboxes: Annotated[list[SandboxRef], Check(min_length=1, max_length=500)] | None = None
    """Several sandboxes: the snapshot is fetched once for all, and the answer (207) has a receipt or a problem for each."""
    snapshot: Annotated[Name, Schema(examples=["latest", "@2026-11-16T10:00Z"])] = "latest"
    """A snapshot's id, `latest` or `@TIME`. Default: `latest`."""
    mode: Literal["replace", "seed"] = "replace"
    """`seed` never overwrites a file. Default: `replace`."""
    projects: Names | None = None
    """Project folders in the sandbox. Default: where they were."""
    conversation: Text = ""
    """The conversation that it opens: kept with its snapshots."""
    withhold_projects: Flag | None = None
    """Leave out projects whose folders are not there yet. Default: as [restore] in the config says."""
    must_exist: Flag = False
    """A memory that is not there is an error, not a first start."""
    force: Flag = False
    """Restore even a database that SQLite finds damaged."""
    read_only: Flag = False
    """Restore it to be read: what this sandbox exports later is stored beside the head."""
    only: Annotated[list[Name], Check(max_length=100), Schema(examples=[["project/memory/**"]])] = field(
        default_factory=list
    )
    """Restore only a part: patterns of paths as in a snapshot, `layout:NAME` or `tier:NAME`. It is always `read_only`."""
    label: Text = ""
    """Of a reader: the label of the snapshots that it exports. Default: its sandbox's reference."""
    discard: Flag = False
    """Replace what no snapshot has without saving it first or setting it aside."""
    wake: Flag = False
    """Start the sandbox if it is paused or stopped."""
    user: Text = ""
    """Work in the sandbox as this user. Default: as whoever its provider takes."""
    brief: BriefBody | None = None
    """What to read first of what is restored. Default: none."""
    attach: Flag = True
    """Open a conversation: the sandbox is looked after until its next export. Default: true."""
    layouts: Names = field(default_factory=list)
    """What the conversation's checkpoints export. Default: whatever is there."""
    checkpoint_every: Seconds | None = None
    """Seconds between the conversation's checkpoints. Default: as [service] in the config says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachBody(Body):
    """Which sandbox to look after, and how."""

    sandbox: SandboxRef
    """The sandbox: its provider and its id there."""
    layouts: Names = field(default_factory=list)
    """Which layouts to export. Default: whatever is there."""
    projects: Names | None = None
    """Project folders in the sandbox. Default: those that are found."""
    checkpoint_every: Seconds | None = None
    """Seconds between exports. Default: as [service] in the config says."""
    conversation: Text = ""
    """Kept with its snapshots."""
    restore: Flag = False
    """Restore the memory into it first."""
    wake: Flag = False
    """Start it if it is paused or stopped."""
    user: Text = ""
    """Work in it as this user, also at checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartBody(Body):
    """Create a sandbox that remembers."""

    on: Annotated[Name, Schema(examples=["e2b:base", "daytona:my-snapshot", "local:"])]
    """The provider, and what the sandbox is made from there: a template, a snapshot. Nothing after the colon: its default."""
    metadata: Annotated[dict[Name, Text], Check(max_length=50)] = field(default_factory=dict)
    """Kept with the sandbox by its provider (Daytona: labels)."""
    timeout: Annotated[float, Check(strict=True, ge=1, le=2592000)] | None = None
    """Seconds until its provider ends it (Daytona: without activity, in whole minutes). Default: the provider's."""
    snapshot: Annotated[Name, Schema(examples=["latest"])] = "latest"
    """What is restored: a snapshot's id, `latest` or `@TIME`. Default: `latest`."""
    must_exist: Flag = False
    """A memory that is not there is an error, not a first start."""
    layouts: Names = field(default_factory=list)
    """Which layouts to export. Default: whatever is there."""
    projects: Names | None = None
    """Project folders in the sandbox. Default: where they were."""
    checkpoint_every: Seconds | None = None
    """Seconds between exports. Default: as [service] in the config says."""
    conversation: Text = ""
    """Kept with its snapshots."""
    user: Text = ""
    """Work in it as this user, also at checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveBody(Body):
    """Move a memory to a new sandbox."""

    to: Annotated[Name, Schema(examples=["daytona:my-snapshot", "e2b:base", "local:"])]
    """The provider, and what the sandbox is made from there: a template, a snapshot. Nothing after the colon: its default."""
    sandbox: Text = ""
    """Which sandbox is left, where the memory has several."""
    keep_old: Flag = False
    """Do not end the old sandbox, only stop looking after it."""
    metadata: Annotated[dict[Name, Text], Check(max_length=50)] = field(default_factory=dict)
    """Kept with the new sandbox by its provider (Daytona: labels)."""
    timeout: Annotated[float, Check(strict=True, ge=1, le=2592000)] | None = None
    """Seconds until its provider ends it (Daytona: without activity, in whole minutes). Default: the provider's."""
    user: Text = ""
    """Work in the new sandbox as this user. Default: at the same provider as before, else its own default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkBody(Body):
    """Begin a new memory with a copy of a snapshot."""

    memory: Annotated[Name, Schema(examples=["acme/agent-8"])]
    """The id of the new memory."""
    snapshot: Name = "latest"
    """Default: `latest`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackBody(Body):
    """Make another snapshot the head."""

    snapshot: Name
    """The snapshot to make the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptBody(Body):
    """Make a snapshot the head that waits for a review, that was rejected, or that has diverged."""

    snapshot: Text = ""
    """Default: the newest that waits for a review and grew out of the head, else the newest that was rejected since."""
    because: Annotated[str, Check(max_length=500)] = ""
    """Why, for those who look at it later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclineBody(Body):
    """Keep a snapshot from ever becoming the head."""

    snapshot: Text = ""
    """Default: the newest that waits for a review."""
    because: Annotated[str, Check(max_length=500)] = ""
    """Why, for those who look at it later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetBody(Body):
    """Apply the configured rules to a memory."""

    dry_run: Annotated[Flag, Schema(examples=[True])] = False
    """Only say what stays and what would go."""
