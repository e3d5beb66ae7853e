"""What an answer says, for a receipt: every text that comes from a sandbox is redacted on the way."""

from __future__ import annotations

from collections.abc import Iterable

from sidecar.engine.sandbox.dialogue import redact
from sidecar.format.protocol import (
    DroppedPath,
    FilesAside,
    FoundDatabase,
    PrivateFinding,
    SkippedPath,
    WithheldRoot,
)
from sidecar.receipts import DatabaseReport, Drop, Finding, SetAside, Skip, Withheld


def report_skipped(rows: Iterable[SkippedPath]) -> list[Skip]:
    return [Skip(path=redact(row.path), reason=row.reason) for row in rows]


def report_dropped(rows: Iterable[DroppedPath]) -> list[Drop]:
    return [Drop(path=redact(row.path), bytes=row.bytes, tier=row.tier, reason=row.reason) for row in rows]


def report_findings(rows: Iterable[PrivateFinding]) -> list[Finding]:
    return [
        Finding(path=redact(row.path), name=row.name, action=row.action, line=row.line, column=row.column, row=row.row)
        for row in rows
    ]


def report_databases(rows: Iterable[FoundDatabase]) -> list[DatabaseReport]:
    return [DatabaseReport(path=redact(row.path), method=row.method, check=row.check) for row in rows]


def report_withheld(rows: Iterable[WithheldRoot]) -> list[Withheld]:
    return [Withheld(name=row.name, hint=redact(row.hint), files=row.files) for row in rows]


def report_aside(row: FilesAside) -> SetAside:
    return SetAside(path=redact(row.path), files=row.files, bytes=row.bytes)
