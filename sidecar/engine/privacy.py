"""Privacy on the engine's side of an export: which policy applies, why an export was refused, and what a manifest
records about passages that were removed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from sidecar.format.index import Entry
from sidecar.format.protocol import (
    DroppedPath,
    ExportAnswer,
    FilesAside,
    FoundDatabase,
    PrivateFinding,
    SkippedPath,
    WithheldRoot,
)
from sidecar.policy.limits import CREDENTIALS
from sidecar.policy.privacy import Privacy
from sidecar.program.privacy.credentials import redact_name
from sidecar.program.privacy.scrub import MOST_PATHS
from sidecar.receipts import DatabaseReport, Drop, Finding, Reason, SetAside, Skip, Withheld
from sidecar.store.manifest import Manifest

if TYPE_CHECKING:
    from sidecar.engine.exports.run import ExportRun

MOST_NAMED = 3
OTHERS = ""


def choose_privacy(run: ExportRun) -> Privacy:
    """Return the privacy policy of one export. If the guard for credentials is allowed, credentials are only warned
    about."""
    privacy = run.engine.privacy
    return privacy.soften() if CREDENTIALS in {*run.request.allow, *run.engine.guards.allow} else privacy


def explain_refusal(answer: ExportAnswer) -> Reason:
    """Return the reason why an export that contains credentials is not stored."""
    refused = [row for row in answer.findings if row.action == "refused"]
    places = [
        f"{row.name} in {redact(row.path)} {describe_position(row.line, row.column, row.row)}"
        for row in refused[:MOST_NAMED]
    ]
    count = answer.found.get("refused", len(refused))
    more = f" and {count - len(places)} more" if count > len(places) else ""
    return Reason(
        code=CREDENTIALS, message=f"There are credentials in it, and nothing was stored: {', '.join(places)}{more}."
    )


def describe_position(line: int, column: str, row: str) -> str:
    """Describe a position in a file or database for people."""
    if line:
        return f"line {line}"
    return f"{column} row {row}" if row else column


def redact(text: str) -> str:
    """Redact credentials in a text that came from a sandbox, for a receipt. File names can contain credentials too."""
    return redact_name(text)[0]


def report_skipped(rows: Iterable[SkippedPath]) -> list[Skip]:
    """Return what an answer says was left out, for a receipt."""
    return [Skip(path=redact(row.path), reason=row.reason) for row in rows]


def report_dropped(rows: Iterable[DroppedPath]) -> list[Drop]:
    """Return what an answer says was dropped because of a limit, for a receipt."""
    return [Drop(path=redact(row.path), bytes=row.bytes, tier=row.tier, reason=row.reason) for row in rows]


def report_findings(rows: Iterable[PrivateFinding]) -> list[Finding]:
    """Return what an answer says was found, for a receipt."""
    return [
        Finding(path=redact(row.path), name=row.name, action=row.action, line=row.line, column=row.column, row=row.row)
        for row in rows
    ]


def report_databases(rows: Iterable[FoundDatabase]) -> list[DatabaseReport]:
    """Return what an answer says about databases, for a receipt."""
    return [DatabaseReport(path=redact(row.path), method=row.method, check=row.check) for row in rows]


def report_withheld(rows: Iterable[WithheldRoot]) -> list[Withheld]:
    """Return which roots an answer says were withheld, for a receipt."""
    return [Withheld(name=row.name, hint=redact(row.hint), files=row.files) for row in rows]


def report_aside(row: FilesAside) -> SetAside:
    """Return where an answer says files were set aside, for a receipt."""
    return SetAside(path=redact(row.path), files=row.files, bytes=row.bytes)


def count_scrubbed(
    earlier: Manifest | None, entries: Mapping[str, Entry], answer: ExportAnswer
) -> dict[str, tuple[int, int]]:
    """Return, for each file of a new snapshot, how many private passages and credentials are missing from it. Files
    that this export removed nothing from keep the counts of the ``earlier`` snapshot, because those passages are
    probably still missing. Counts beyond the most paths are summed up under the empty path."""
    known = dict(earlier.scrubbed) if earlier else {}
    others = known.pop(OTHERS, (0, 0))
    others = answer.taken_more if any(answer.taken_more) else others
    known = {path: counts for path, counts in {**known, **answer.taken}.items() if path in entries}
    for path in list(known)[MOST_PATHS:]:
        private, credentials = known.pop(path)
        others = others[0] + private, others[1] + credentials
    return known | ({OTHERS: others} if any(others) else {})
