"""The last questions before an export becomes the head, once no guard objects: what was declined, checks of one's own, and
a person's review.

None of them gives way to repetition or to force. What grows out of a snapshot that was declined is rejected until a person
accepts it; what grows out of one that waits, waits with it, whatever the config of this process says: that is known from
the store. Whether a review is asked for in the first place is up to the config.
"""

from __future__ import annotations

from dataclasses import replace

from sidecar.engine.exports.arrival import CheckedExport
from sidecar.engine.exports.decision import Verdict, find_replaced_head
from sidecar.engine.exports.run import ExportRun
from sidecar.errors import SnapshotDamaged
from sidecar.format.protocol import ExportAnswer
from sidecar.host.text import make_printable
from sidecar.ids import MemoryKeys
from sidecar.policy.review import DECLINED, PENDING
from sidecar.receipts import Accepted, Reason
from sidecar.store.manifest import Manifest
from sidecar.store.repository import Repository, Survey
from sidecar.store.reviews import ACCEPTED, LONGEST_REASON, ReviewRow, Reviews, change_reviews, format_now, read_reviews

GREW = "It grew out of {snapshot}, which {by} declined{why}."
STALE = "It was accepted, and did not become the head; the head was written again since, and is {head}. Accept it once more."
UNREADABLE = "What was decided in reviews cannot be read, so this waits for one: {problem}"


async def examine(run: ExportRun, checked: CheckedExport, manifest: Manifest, verdict: Verdict) -> Verdict:
    """Return the verdict on a snapshot that may become the head as far as guards go, after checks and review.
    ``manifest`` is the new one, or the stored one if nothing changed since."""
    if not verdict.moves or not _is_watched(run, checked, manifest):
        return verdict
    reviews, problem = await _read_reviews(run)
    line, kept = _list_line(run, checked.answer), checked.arrived is None
    row = reviews.rows.get(manifest.snapshot)
    earlier = run.state.head is not None and run.state.head.was_head(manifest.snapshot)
    if kept and not earlier and row is not None and row.decision == ACCEPTED and not row.within:
        if _is_due(run, row):
            return verdict  # whoever accepted it was killed before the head moved
        return _hold(verdict, Reason(code=PENDING, message=STALE.format(head=run.state.snapshot or "missing")))
    if why := await _find_decline(run, manifest, reviews, line):
        return _hold(verdict, Reason(code=DECLINED, message=why))
    if kept and reviews.is_pending(manifest):
        return _hold(verdict, Reason(code=PENDING, message=reviews.find_reason(manifest)))
    checks = [check for check in run.engine.checks if check.covers(run.request.memory)]
    waits = run.engine.review.covers(run.request.memory) or bool(problem) or _grew_from_pending(checked, reviews, line)
    if not checks and not waits:
        return verdict
    if kept and waits and earlier:
        return replace(verdict, moves=False, accepted=None)  # an earlier head: ``rollback`` goes back to it
    from sidecar.engine.exports.candidate import examine_candidate  # late: most exports meet neither

    head = await find_replaced_head(run, checked.base)
    failed, told = await examine_candidate(run, checked, (manifest, head), checks)
    if failed is not None:
        return _hold(verdict, failed)
    if not waits:
        return verdict
    if verdict.accepted is not None:
        told = f"{told}\n{_tell_objections(verdict.accepted)}"
    if problem:
        run.warnings.append(problem)
    return _hold(verdict, Reason(code=PENDING, message=told[:LONGEST_REASON]))


def _is_watched(run: ExportRun, checked: CheckedExport, manifest: Manifest) -> bool:
    """Whether there is anything to ask: checks or reviews in the config, decisions in the store, or a manifest that says
    that it waits. If none of them, none of what ``examine`` asks has an answer."""
    engine, decided = run.engine, MemoryKeys.of(run.request.memory).reviews in run.survey.sizes
    waits = manifest.pending or (checked.base is not None and checked.base.pending)
    return bool(engine.checks or engine.review.required or decided or waits)


def _is_due(run: ExportRun, row: ReviewRow) -> bool:
    """Whether the head is still the one that an accepted snapshot was to replace: nothing was decided since."""
    head = run.state.head
    return (row.replaces, row.generation) == ((head.snapshot, head.generation) if head else ("", 0))


async def find_hold(repository: Repository, manifest: Manifest) -> Reason | None:
    """Return why a stored snapshot may not become the head by itself: it was rejected, was declined, or waits; ``None`` if
    nothing is known against it."""
    code, _, message = manifest.rejected.partition(": ")
    try:
        reviews, _ = await read_reviews(repository.store, manifest.memory)
    except SnapshotDamaged as damage:
        unread = Reason(code=PENDING, message=manifest.pending or UNREADABLE.format(problem=damage.message))
        return Reason(code=code, message=message) if code else unread
    if manifest.snapshot in reviews.declined:
        return Reason(code=DECLINED, message=_explain_decline(manifest.snapshot, manifest, reviews))
    if manifest.pending or reviews.is_pending(manifest):
        return Reason(code=PENDING, message=reviews.find_reason(manifest))
    return Reason(code=code, message=message) if code else None


async def note_pending(
    repository: Repository, manifest: Manifest, survey: Survey | None = None, reason: str = ""
) -> None:
    """List a snapshot among those that wait, before it is stored. ``survey`` is what the memory has, if that is known;
    ``reason``: why it waits, if its manifest does not say."""
    row = ReviewRow(decision=PENDING, at=format_now(), reason=reason)

    def change(reviews: Reviews) -> dict[str, ReviewRow]:
        return {} if manifest.snapshot in reviews.rows else {manifest.snapshot: row}

    try:
        # Rows of snapshots that are gone are dropped, so it has to be known which are there: all of them.
        complete = survey is not None and survey.complete
        there = survey.snapshots if survey and complete else await repository.list_snapshot_ids(manifest.memory)
        await change_reviews(repository.store, manifest.memory, there, change)
    except SnapshotDamaged:
        if reason:
            raise
        # Its manifest says that it waits: that alone keeps it from becoming the head.


def _hold(verdict: Verdict, reason: Reason) -> Verdict:
    return replace(verdict, moves=False, reason=reason, accepted=None, codes=())


async def _read_reviews(run: ExportRun) -> tuple[Reviews, str]:
    """Return the reviews, and a warning if they cannot be read. Where the listing has none, the first decision since then
    writes the head again, and this export loses the swap."""
    store, memory = run.engine.repository.store, run.request.memory
    if MemoryKeys.of(memory).reviews not in run.survey.sizes:
        return Reviews(), ""
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


async def _find_decline(run: ExportRun, manifest: Manifest, reviews: Reviews, line: list[str]) -> str:
    """Return why a snapshot counts as declined: it was, or one that it grew out of; "" if it does not. ``line`` has only
    snapshots that are still there: of others, those that grew out of them tell."""
    declined = reviews.declined
    if not declined or not line:
        return ""
    if found := next((one for one in line if one in declined), ""):
        return _explain_decline(found, manifest, reviews)
    others = await run.engine.repository.manifests(manifest.memory, [one for one in line if one != manifest.snapshot])
    for one in (manifest, *(others.get(snapshot) for snapshot in line)):
        if not isinstance(one, Manifest):
            continue
        if one.parent in declined:
            return _explain_decline(one.parent, manifest, reviews)
        code, _, message = one.rejected.partition(": ")
        if code == DECLINED and reviews.get_decision(one.snapshot) != ACCEPTED:
            return message
    return ""


def _grew_from_pending(checked: CheckedExport, reviews: Reviews, line: list[str]) -> bool:
    """Whether it grew out of a snapshot that waits: by the memory's reviews, or by what its base says of itself."""
    base = checked.base
    return not set(line).isdisjoint(reviews.pending) or (
        base is not None and base.snapshot in line and reviews.is_pending(base)
    )


def _explain_decline(declined: str, manifest: Manifest, reviews: Reviews) -> str:
    """Return the words for a snapshot of which itself, or what it grew out of, was ``declined``."""
    row = reviews.rows[declined]
    by, why = make_printable(row.by) or "somebody", f": {make_printable(row.because)}" if row.because else ""
    if declined == manifest.snapshot:
        return f"{by} declined it{why}."
    return GREW.format(snapshot=declined, by=by, why=why)


def _tell_objections(accepted: Accepted) -> str:
    return "\n".join(f"! {reason.message} [{reason.code}]" for reason in accepted.reasons)
