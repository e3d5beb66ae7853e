"""What was taken out of an export: by which policy, and what a snapshot remembers of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sidecar.engine.sandbox.dialogue import ExportAnswer
from sidecar.format.index import Entry
from sidecar.policy.limits import CREDENTIALS
from sidecar.policy.privacy import Privacy
from sidecar.program.privacy.credentials import redact_name
from sidecar.program.privacy.scrub import MOST_PATHS
from sidecar.receipts import Reason
from sidecar.store.manifest import Manifest

if TYPE_CHECKING:
    from sidecar.engine.exports.run import ExportRun

MOST_NAMED = 3
OTHERS = ""


def choose_privacy(run: ExportRun) -> Privacy:
    """The policy of one export. Where credentials are allowed, they are still warned of."""
    privacy = run.engine.privacy
    return privacy.soften() if CREDENTIALS in {*run.request.allow, *run.engine.guards.allow} else privacy


def explain_refusal(answer: ExportAnswer) -> Reason:
    """Why an export with credentials in it is not stored."""
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
    """A place in a file, for a person."""
    if line:
        return f"line {line}"
    return f"{column} row {row}" if row else column


def redact(text: str) -> str:
    """What a sandbox said, for a receipt: there may be a credential in a name, wherever that is from."""
    return redact_name(text)[0]


def count_scrubbed(
    earlier: Manifest | None, entries: Mapping[str, Entry], answer: ExportAnswer
) -> dict[str, tuple[int, int]]:
    """How much is missing from each file of a new snapshot: by what this export took out, and for a file it took nothing
    out of by what the ``earlier`` snapshot says, for that may well be missing still."""
    known = dict(earlier.scrubbed) if earlier else {}
    others = known.pop(OTHERS, (0, 0))
    others = answer.taken_more if any(answer.taken_more) else others
    known = {path: counts for path, counts in {**known, **answer.taken}.items() if path in entries}
    for path in list(known)[MOST_PATHS:]:
        private, credentials = known.pop(path)
        others = others[0] + private, others[1] + credentials
    return known | ({OTHERS: others} if any(others) else {})
