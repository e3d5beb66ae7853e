"""Receipts: the typed results of an export and a restore."""

from __future__ import annotations

from dataclasses import asdict, field
from enum import StrEnum
from typing import Annotated, Any

from sidecar.host.values import dataclass
from sidecar.schema import OneOf


class ExportOutcome(StrEnum):
    COMMITTED = "committed"
    UNCHANGED = "unchanged"
    DIVERGED = "diverged"
    REJECTED = "rejected"
    PENDING = "pending"


class RestoreOutcome(StrEnum):
    COMPLETE = "complete"
    INCOMPLETE = "incomplete"
    EMPTY = "empty"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseReport:
    """How a database was copied, and what SQLite said of the copy."""

    path: str
    method: str
    check: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    path: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """A path that was left out because there was more than a limit allows."""

    path: str
    bytes: int
    tier: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something private, or a credential: where it was and what was done, never what it was."""

    path: str
    name: str
    """"private", "private-unclosed", the kind of credential, or "setting" for a secret of a settings file."""
    action: str
    """"removed", "redacted", "warned" or "refused"."""
    line: int = 0
    """In a text, as it was stored."""
    column: str = ""
    """In a database: "table.column". In settings: the key. Not in a file's contents: "(name)" or "(link target)"."""
    row: str = ""
    """Its key there, where that is a number."""

    @property
    def position(self) -> str:
        """Where it was in its file or database, for people."""
        if self.line:
            return f"line {self.line}"
        return f"{self.column} row {self.row}" if self.row else self.column


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrubbed:
    """How much was taken out of a snapshot before it was stored."""

    private: int = 0
    """Private passages."""
    credentials: int = 0

    @property
    def words(self) -> str:
        """A sentence about it; empty if nothing was removed."""
        parts = [
            f"{count:,} {what}{'' if count == 1 else 's'}"
            for count, what in ((self.private, "private passage"), (self.credentials, "credential"))
            if count
        ]
        verb = "was" if self.private + self.credentials == 1 else "were"
        return f"{' and '.join(parts)} {verb} taken out of this snapshot before it was stored." if parts else ""


GREW = "It grew out of "
"""So begins the reason of an export that was not declined itself, but what it grew out of was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why an outcome is not the one hoped for: a stable code and a sentence."""

    code: str
    message: str
    """Its first line is a sentence. Further lines hold parts of the memory, or what a check printed of it."""

    @property
    def headline(self) -> str:
        """The sentence, without anything that is in the memory."""
        return self.message.partition("\n")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What guards objected to, and accepted because it came again and again."""

    reasons: list[Reason]
    since: str
    """When it was first refused, by the store's clock."""
    refusals: int
    """How often it was refused before."""
    conversations: int
    """In how many conversations it came, this one included."""
    replaced: str
    """The head that it takes the place of."""
    pinned: bool = False
    """That one is pinned: no rule takes it until it is unpinned, or five others were pinned this way after it."""

    @property
    def words(self) -> str:
        """A sentence about it."""
        against = " ".join(f"{reason.message} [{reason.code}]" for reason in self.reasons)
        often = f"{self.refusals:,} refusal{'' if self.refusals == 1 else 's'} since {self.since}"
        kept = "is pinned" if self.pinned else "is not pinned: it is so already, or there is no room for it"
        return f"Accepted after {often}: {against} The head that it replaces, {self.replaced}, {kept}."


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """Where in the sandbox the files are that came with it and were replaced."""

    path: str
    files: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Withheld:
    """A root of a project that was not restored, for its folder is not there yet."""

    name: str
    hint: str
    """Where it belongs."""
    files: int = 0

    @property
    def words(self) -> str:
        return (
            f"{self.name} waits until {self.hint} is there, and stays in the memory meanwhile: make that folder (clone the"
            " project), then restore again."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What is in a snapshot and not in the one before because its layouts did not know of it then."""

    files: int
    bytes: int
    paths: list[str]
    """A few of them."""

    @property
    def words(self) -> str:
        more = self.files - len(self.paths)
        shown = ", ".join(self.paths) + (f" and {more:,} more" if more > 0 else "")
        files = "1 file" if self.files == 1 else f"{self.files:,} files"
        return f"New because the layouts know of it by now: {files} with {self.bytes:,} bytes ({shown})."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Receipt:
    memory: str
    snapshot: str | None
    parent: str | None
    sandbox: str
    home: str = ""
    """The home in the sandbox that was worked in; "" where nothing was asked of it, or it did not say."""
    user: str = ""
    """The user there as whom."""
    files: int = 0
    bytes: int = 0
    packed_bytes: int = 0
    """Added to the store."""
    transferred_bytes: int = 0
    """Between the sandbox and outside, both ways."""
    round_trips: int = 0
    """All requests to the sandbox and its provider that were waited for one after the other."""
    trips: dict[str, int] = field(default_factory=dict)
    """The same by kind: "control" (connecting, prolonging), "command", "upload", "download"."""
    duration_ms: int = 0
    databases: list[DatabaseReport] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    reason: Reason | None = None
    scrubbed: Scrubbed = Scrubbed()
    """Taken out of this snapshot before it was stored, by this export or an earlier one."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReceipt(_Receipt):
    outcome: ExportOutcome
    head: str | None = None
    """The snapshot a restore takes now."""
    kind: Annotated[str, OneOf("full", "delta", "")] = ""
    """How the pack was made; empty when nothing was added."""
    conversation: str = ""
    label: str = ""
    dropped: list[Drop] = field(default_factory=list)
    """Left out because there was more than a limit allows (``over = "trim"``), in the order it went."""
    dropped_more: int = 0
    """How many there were beyond the list."""
    dropped_files: int = 0
    """How many files that were in all."""
    dropped_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    """Private passages and credentials in what this export read."""
    findings_more: int = 0
    """How many there were beyond the list."""
    found: dict[str, int] = field(default_factory=dict)
    """All of them by what was done: "removed", "redacted", "warned", "refused"."""
    accepted: Accepted | None = None
    """What guards objected to, when it became the head all the same because it came again and again."""
    not_taken: dict[str, int] = field(default_factory=dict)
    """By root: how many files and folders were seen in it that are not part of its layout. A folder counts once."""
    databases_not_taken: list[str] = field(default_factory=list)
    """The SQLite databases among them."""
    learned: Learned | None = None

    @property
    def may_be_accepted(self) -> bool:
        """Whether ``accept`` can make what was kept the head: not if it was declined itself, as a decision stays."""
        decided = (
            self.reason is not None and self.reason.code == "declined" and not self.reason.message.startswith(GREW)
        )
        return self.snapshot is not None and not decided

    @property
    def is_saved(self) -> bool:
        """Whether the head has what the sandbox had: it was committed, or there was nothing new since the head."""
        if self.outcome is ExportOutcome.UNCHANGED:
            return self.snapshot is not None and self.snapshot == self.head
        return self.outcome is ExportOutcome.COMMITTED


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreBrief:
    """What to read first of what was restored: reference, not instructions."""

    snapshot: str
    tokens: int
    """How many tokens ``text`` has at most: an estimate that errs on the safe side."""
    budget: int
    text: str
    """All of it, as Markdown."""
    skipped: int = 0
    """How many things did not fit."""
    path: str = ""
    """Where below the sandbox's home it was put; "" if it was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReceipt(_Receipt):
    outcome: RestoreOutcome
    mode: Annotated[str, OneOf("replace", "seed")] = "replace"
    wanted: str = ""
    """What was asked for, when something older had to be restored instead."""
    kept: bool = False
    """The sandbox held ``snapshot`` already, and whatever came since: it was left as it is."""
    saved_first: str | None = None
    """The snapshot, beside the head, that has what was in the sandbox and in no snapshot before it was replaced."""
    saved_first_memory: str = ""
    """The memory that snapshot is of, where it is not this one."""
    set_aside: SetAside | None = None
    read_only: bool = False
    """Restored to be read: an export of this sandbox is stored beside the head."""
    only: list[str] = field(default_factory=list)
    """The part of the memory that was restored; empty: all of it."""
    withheld: list[Withheld] = field(default_factory=list)
    """Projects that are not there yet, with ``withhold_projects``."""
    brief: RestoreBrief | None = None
    """What to read first, if it was asked for and could be made."""
