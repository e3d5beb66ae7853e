"""The last questions before an export becomes the head, once no guard objects: what was declined, checks of one's own, and
a person's review.

None of them gives way to repetition or to force. What grows out of a snapshot that was declined is rejected until a person
accepts it; what grows out of one that waits, waits with it, whatever the config of this process says: that is known from
the store. Whether a review is asked for in the first place is up to the config.
"""

from __future__ import annotations

from dataclasses import replace

from sidecar.engine.comparison import describe
from sidecar.engine.exports.arrival import CheckedExport
from sidecar.engine.exports.candidate import Candidate, read_candidate
from sidecar.engine.exports.checks import run_checks
from sidecar.engine.exports.decision import Verdict, find_replaced_head
from sidecar.engine.exports.run import ExportRun
from sidecar.errors import SnapshotDamaged, StoreError, UntrustedSandbox
from sidecar.format.protocol import ExportAnswer
from sidecar.host.text import make_printable
from sidecar.host.work import run_in_thread
from sidecar.models.records import Comparison
from sidecar.models.wording import describe_counts
from sidecar.policy.review import DECLINED, PENDING
from sidecar.receipts import Accepted, Reason
from sidecar.store.manifest import Manifest
from sidecar.store.reviews import ACCEPTED, LONGEST_REASON, ReviewRow, Reviews, change_reviews, format_now, read_reviews

MOST_READ = 256 << 20
"""If more bytes have to be read to tell what changed, a review is asked for without it."""
MOST_LINES = 20
LONGEST_TITLE = 120
SIGNS = {"added": "+", "changed": "~", "removed": "-"}
GREW = "It grew out of {snapshot}, which {by} declined{why}."
WAITS = "It waits for a review"
UNREADABLE = "What was decided in reviews cannot be read, so this waits for one: {problem}"


async def examine(run: ExportRun, checked: CheckedExport, manifest: Manifest, verdict: Verdict) -> Verdict:
    """Return the verdict on a snapshot that may become the head as far as guards go, after checks and review.
    ``manifest`` is the new one, or the stored one if nothing changed since."""
    if not verdict.moves:
        return verdict
    reviews, problem = await _read_reviews(run)
    line, kept = _list_line(run, checked.answer), checked.arrived is None
    row = reviews.rows.get(manifest.snapshot)
    if kept and row is not None and row.decision == ACCEPTED and not row.within:
        return verdict  # whoever accepted it was killed before the head moved
    if declined := next((one for one in line if one in reviews.declined), ""):
        return _hold(verdict, Reason(code=DECLINED, message=_explain_decline(declined, manifest, reviews)))
    if kept and reviews.is_pending(manifest):
        return _hold(verdict, Reason(code=PENDING, message=reviews.find_reason(manifest)))
    checks = [check for check in run.engine.checks if check.covers(run.request.memory)]
    waits = run.engine.review.covers(run.request.memory) or bool(problem) or _grew_from_pending(checked, reviews, line)
    if not checks and not waits:
        return verdict
    candidate = await read_candidate(run, checked, manifest, await find_replaced_head(run, checked.base))
    changes = None
    if checks:
        run.engine.progress.step("checking")
        before, after = await candidate.stage(candidate.list_compared() | candidate.list_files())
        changes = await run_in_thread(describe, manifest.memory, _name_sides(candidate), before, after, False)
        if failed := await run_checks(checks, after, changes):
            return _hold(verdict, failed)
    if not waits:
        return verdict
    told = _tell(changes) if changes is not None else await _describe(candidate)
    if verdict.accepted is not None:
        told = f"{told}\n{_tell_objections(verdict.accepted)}"
    if problem:
        run.warnings.append(problem)
    return _hold(verdict, Reason(code=PENDING, message=told[:LONGEST_REASON]))


async def note_pending(run: ExportRun, manifest: Manifest, reason: str = "") -> None:
    """List a snapshot among those that wait, before it is stored. ``reason``: why, if its manifest does not say."""
    row = ReviewRow(decision=PENDING, at=format_now(), reason=reason)

    def change(reviews: Reviews) -> dict[str, ReviewRow]:
        return {} if manifest.snapshot in reviews.rows else {manifest.snapshot: row}

    try:
        await change_reviews(run.engine.repository.store, manifest.memory, run.survey.snapshots, change)
    except SnapshotDamaged:
        if reason:
            raise
        # Its manifest says that it waits: that alone keeps it from becoming the head.


def _hold(verdict: Verdict, reason: Reason) -> Verdict:
    return replace(verdict, moves=False, reason=reason, accepted=None, codes=())


async def _read_reviews(run: ExportRun) -> tuple[Reviews, str]:
    """Return the reviews, and a warning if they cannot be read."""
    store, memory = run.engine.repository.store, run.request.memory
    try:
        return (await read_reviews(store, memory))[0], ""
    except SnapshotDamaged as damage:
        return Reviews(), UNREADABLE.format(problem=damage.message)


def _list_line(run: ExportRun, answer: ExportAnswer) -> list[str]:
    """Return the snapshots that the sandbox's memory grew out of since it left the line of heads, newest first."""
    line: list[str] = []
    if run.request.adopt:
        return line
    for snapshot in answer.lineage:
        if run.state.head is not None and run.state.head.was_head(snapshot):
            break
        line.append(snapshot)
    return line


def _grew_from_pending(checked: CheckedExport, reviews: Reviews, line: list[str]) -> bool:
    """Whether it grew out of a snapshot that waits: by the memory's reviews, or by what its base says of itself."""
    base = checked.base
    return not set(line).isdisjoint(reviews.pending) or (
        base is not None and base.snapshot in line and reviews.is_pending(base)
    )


def _explain_decline(declined: str, manifest: Manifest, reviews: Reviews) -> str:
    row = reviews.rows[declined]
    by, why = make_printable(row.by) or "somebody", f": {make_printable(row.because)}" if row.because else ""
    if declined == manifest.snapshot:
        return f"{by} declined it{why}."
    return GREW.format(snapshot=declined, by=by, why=why)


def _name_sides(candidate: Candidate) -> tuple[str, str]:
    return candidate.earlier.snapshot if candidate.earlier else "", candidate.manifest.snapshot


async def _describe(candidate: Candidate) -> str:
    """Return what a snapshot changes, for the person who reviews it. It never fails an export."""
    paths = candidate.list_compared()
    if candidate.measure(paths) > MOST_READ:
        return f"{WAITS}. It is too large to say here what it changes: `diff` does."
    try:
        before, after = await candidate.stage(paths)
        sides = _name_sides(candidate)
        return _tell(await run_in_thread(describe, candidate.manifest.memory, sides, before, after, False))
    except (SnapshotDamaged, StoreError, UntrustedSandbox) as problem:
        return f"{WAITS}. What it changes could not be read: {make_printable(problem.message)}"


def _tell(changes: Comparison) -> str:
    """Return what a snapshot changes: a sentence with counts, then a few lines, escaped."""
    lines = [f"{SIGNS[row.change]} {row.kind}: {_shorten(row.title)}" for row in changes.records]
    lines += [f"{SIGNS[file.change]} file: {_shorten(file.path)}" for file in changes.files]
    more = changes.more + len(lines) - MOST_LINES
    rest = [f"and {more:,} more"] if more > 0 else []
    counts = describe_counts(changes.counts) if changes.counts else f"files alone ({len(changes.files):,})"
    return "\n".join([f"{WAITS}: {counts}.", *lines[:MOST_LINES], *rest])


def _tell_objections(accepted: Accepted) -> str:
    return "\n".join(f"! {reason.message} [{reason.code}]" for reason in accepted.reasons)


def _shorten(text: str) -> str:
    text = make_printable(text)
    return text if len(text) <= LONGEST_TITLE else f"{text[: LONGEST_TITLE - 1]}…"
