"""Receipts: the typed answer of an export or a restore."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class ExportOutcome(StrEnum):
    COMMITTED = "committed"
    UNCHANGED = "unchanged"
    DIVERGED = "diverged"
    REJECTED = "rejected"


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
class Reason:
    """Why an outcome is not the one hoped for: a stable code and a sentence."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Receipt:
    memory: str
    snapshot: str | None
    parent: str | None
    sandbox: str
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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReceipt(_Receipt):
    outcome: ExportOutcome
    head: str | None = None
    """The snapshot a restore takes now."""
    kind: str = ""
    """"full", "delta" or "" when nothing was added."""
    conversation: str = ""
    label: str = ""
    dropped: list[Drop] = field(default_factory=list)
    """Left out because there was more than a limit allows (``over = "trim"``), in the order it went."""
    dropped_files: int = 0
    """How many files that were in all; the list has an end."""
    dropped_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReceipt(_Receipt):
    outcome: RestoreOutcome
    mode: str = "replace"
    wanted: str = ""
    """What was asked for, when something older had to be restored instead."""
