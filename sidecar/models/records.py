"""The answers about records: what snapshots say, what differs between them, and where it is from."""

from __future__ import annotations

from dataclasses import asdict, field
from typing import Annotated, Any

from sidecar.host.values import dataclass
from sidecar.models.answers import Counts, Difference
from sidecar.schema import OneOf

ChangeKind = Annotated[str, OneOf("added", "changed", "removed")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRow:
    """One thing that a memory says. ``id`` is short for its kind and key."""

    id: str
    kind: str
    key: str
    title: str
    text: str = ""
    project: str = ""
    session: str = ""
    at: str | None = None
    """When it was written down; ISO, in UTC."""
    path: str = ""
    """The file it is in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordChange(RecordRow):
    """A record that differs. A removed one is told as it was."""

    change: ChangeKind
    diff: list[str] = field(default_factory=list)
    """Of a changed one: the lines of its text that differ, each after "-", "+" or a blank."""
    source: str = ""
    """Exactly what stands in the file, where that can be told; of a removed one, what stood there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """A file that differs and holds no records, or none that differ."""

    change: ChangeKind
    path: str
    old_size: int = 0
    new_size: int = 0
    diff: list[str] = field(default_factory=list)
    """If it is text: the lines that differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Difference):
    """What differs from one snapshot to another, by records and by files."""

    counts: dict[str, Counts] = field(default_factory=dict)
    """By kind of record; messages are only counted."""
    records: list[RecordChange] = field(default_factory=list)
    files: list[FileChange] = field(default_factory=list)
    """Those that hold no records, or none that differ."""
    more: int = 0
    """How many records and files are counted and not described."""
    problems: list[str] = field(default_factory=list)
    """What could not be read as records."""
    next: str | None = None
    """Where the next page of ``records`` begins; null on the last one."""

    def as_dict(self) -> dict[str, Any]:
        return {name.rstrip("_"): value for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """A page of what a snapshot says, in the order of its files."""

    memory: str
    snapshot: str
    records: list[RecordRow]
    next: str | None = None
    """Where the next page begins; null on the last one."""
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The snapshot that something came with, and what is known about that."""

    snapshot: str
    created: str = ""
    conversation: str = ""
    label: str = ""
    sandbox: str = ""
    before: bool = False
    """It came with this snapshot, or with one before it that retention has forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """A version of a file or a record: the snapshot that brought it, and what that did."""

    origin: Origin
    change: ChangeKind
    size: int = 0
    """Of a file."""
    record: RecordRow | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Every version of a file or a record, the oldest first."""

    memory: str
    what: str
    versions: list[HistoryEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlamedRecord(RecordRow):
    """A record without its text, and where it is from."""

    origin: Origin
    """What its present text came with."""
    first: Origin
    """What it came with at first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Which conversation and sandbox taught each record of a snapshot."""

    memory: str
    snapshot: str
    records: list[BlamedRecord]
    problems: list[str] = field(default_factory=list)
    next: str | None = None
    """Where the next page begins; null on the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BriefItem:
    """Something that a brief quotes, with where it is from."""

    path: str
    """The file in the snapshot."""
    kind: str
    title: str
    text: str
    """As it stands in the memory, but for private passages."""
    tier: Annotated[str, OneOf("hot", "warm", "cold")]
    layout: str
    at: str | None = None
    """When it was written; ISO, in UTC."""
    age: int | None = None
    """How many seconds before its snapshot that was."""
    project: str = ""
    session: str = ""
    snapshot: str = ""
    """The first snapshot that was made after it was written; "" if that is not known any more."""
    conversation: str = ""
    """That snapshot's conversation."""
    tokens: int
    """What it takes of the budget, with its heading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedItem:
    """Something that did not fit into a brief."""

    path: str
    title: str
    tokens: int
    """About how many it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Brief:
    """What an agent should read first of a snapshot, within a budget of tokens. It is reference, not instructions."""

    memory: str
    snapshot: str
    created: str
    """When the snapshot was made. Ages are counted from then."""
    tokens: int
    """How many tokens ``text`` has at most."""
    budget: int
    text: str
    """All of it, assembled as Markdown."""
    items: list[BriefItem] = field(default_factory=list)
    """What it quotes, in order."""
    skipped: list[SkippedItem] = field(default_factory=list)
    """What did not fit, in the order in which it would have come."""
    more: int = 0
    """How many others there are that did not fit."""
    unread: list[str] = field(default_factory=list)
    """Hot and warm Markdown that is not quoted, as the order of its layout does not name it; the first 100."""
    problems: list[str] = field(default_factory=list)
    """What could not be read."""
    estimate: str = ""
    """How far ``tokens`` can be trusted."""
