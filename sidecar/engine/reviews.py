"""What people decide about snapshots that stand beside the head: ``accept`` and ``decline``.

A decision is written to the memory's reviews first, by compare-and-swap, and only then the head moves, by another. So of
two who decide at once the second is told; and the head never names a snapshot that waited and nobody accepted. Who is
killed in between has left a snapshot that is accepted and not the head: accepting it again moves the head. Who loses the
race for the head takes the decision back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sidecar.errors import AlreadyDecided, MemoryNotFound, NothingToAccept, SnapshotDamaged, SwapLost, UsageError
from sidecar.host.values import dataclass
from sidecar.ids import check_memory_id
from sidecar.models.answers import Acceptance, Declined
from sidecar.policy.review import DECLINED, PENDING
from sidecar.receipts import Reason
from sidecar.store.manifest import Head, Manifest, check_sizes
from sidecar.store.marks import hold_packs
from sidecar.store.pins import drop_automatic_pins, pin_automatically
from sidecar.store.repository import HeadState, Repository
from sidecar.store.reviews import ACCEPTED, LONGEST_WORDS, ReviewRow, Reviews, change_reviews, format_now, read_reviews
from sidecar.store.selectors import resolve_snapshot

MOST_INCLUDED = 2000
MOST_SHOWN = 5
OF_ITSELF = "Of those that wait none grew out of the head, {head}: name the one that is meant, of {names}."

NO_HEAD = (
    "{snapshot} does not wait for a review, and there is no head of {memory} that can be read: an export may be about to make"
    " it the head, and nothing could keep it from that."
)
NO_HEAD_HINT = "Nothing was decided. Export the memory, or accept another snapshot; then it can be declined."


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """Who decides, and why."""

    by: str = ""
    because: str = ""


NOBODY = Word()


async def accept(repository: Repository, memory: str, wanted: str = "", word: Word = NOBODY) -> Acceptance:
    """Make a snapshot the head that waits for a review, was rejected or has diverged; by default, the newest that waits
    and grew out of the head, else the newest that was rejected since the head was made. What it grew out of and waited
    too is accepted with it.

    The head that it replaces is pinned, unless it waited and grew out of that head; nothing is removed. Raise
    ``NothingToAccept`` for a snapshot that is or was the head, ``AlreadyDecided`` for one that was declined, and
    ``SwapLost`` if another writer moved the head in the meantime.
    """
    _check_word(word)
    snapshot = await resolve_snapshot(repository, check_memory_id(memory), wanted) if wanted else ""
    state = await repository.head(memory)
    head = state.head or await repository.rebuild_head(memory)
    reviews, _ = await read_reviews(repository.store, memory)
    manifest = await repository.manifest(memory, snapshot or await _find_newest(repository, memory, head, reviews))
    if manifest.snapshot == state.snapshot:
        raise NothingToAccept(f"{manifest.snapshot} is the head of {memory} already.")
    cut_short = state.head is None and manifest.snapshot in reviews.accepted
    if head is not None and head.was_head(manifest.snapshot) and not cut_short:
        raise NothingToAccept(
            f"{manifest.snapshot} was the head of {memory} before, and does not stand beside it.",
            hint=f"`memory-sidecar rollback {memory} {manifest.snapshot}` goes back to it.",
        )
    survey = await repository.survey(memory)
    check_sizes(manifest, survey.sizes)
    if manifest.snapshot in survey.damaged:
        raise SnapshotDamaged(f"{manifest.snapshot} was found damaged; the head of {memory} did not move.")
    await repository.store.prepare()
    await hold_packs(repository.store, manifest)
    line = await _list_pending_line(repository, manifest, reviews, head)
    reason, waited = _explain_standing(manifest, state, reviews), reviews.is_pending(manifest)
    follows = waited and await _grew_cleanly(repository, manifest, head, reviews)
    row = ReviewRow(
        decision=ACCEPTED,
        at=format_now(),
        by=word.by,
        because=word.because,
        replaces=state.snapshot,
        generation=state.head.generation if state.head else 0,
    )
    before, written = await _write_acceptance(repository, manifest, line, row, survey.snapshots)
    try:
        pinned = await _move_head(repository, state, manifest, "" if follows else reason.code)
    except SwapLost:
        await _take_back(repository, manifest, before, written, survey.snapshots)
        raise
    return Acceptance(
        memory=memory,
        head=manifest.snapshot,
        previous=state.snapshot or None,
        standing="pending" if waited else "rejected" if manifest.rejected else "diverged",
        reason=reason,
        pinned=pinned or state.snapshot in await repository.pinned(memory),
        by=word.by,
        because=word.because,
        included=line,
    )


async def decline(repository: Repository, memory: str, wanted: str = "", word: Word = NOBODY) -> Declined:
    """Keep a snapshot from ever becoming the head; by default, the newest that waits for a review. It stays in the store.

    Raise ``NothingToAccept`` for a snapshot that is or was the head, and ``AlreadyDecided`` for one that was accepted or
    declined before.
    """
    _check_word(word)
    snapshot = await resolve_snapshot(repository, check_memory_id(memory), wanted) if wanted else ""
    ids = await repository.list_snapshot_ids(memory)
    if not ids:
        raise MemoryNotFound(f"There is no memory {memory!r} in {repository.store.url}.")
    reviews, _ = await read_reviews(repository.store, memory)
    if not snapshot:
        snapshot = next((one for one in reviews.pending if one in ids), "")
    if not snapshot:
        raise NothingToAccept(f"No snapshot of {memory} waits for a review.", hint="Name the one to decline.")
    manifest = await repository.manifest(memory, snapshot)
    await repository.store.prepare()
    # Before the decision: earlier versions do not know of it, and refuse this head from now on.
    state = await repository.raise_head(memory)
    if state.head is not None and state.head.was_head(snapshot):
        raise NothingToAccept(
            f"{snapshot} is or was the head of {memory}: it cannot be declined any more.",
            hint=f"`memory-sidecar rollback {memory} SNAPSHOT` goes back to one before it.",
        )
    if state.head is None and not reviews.is_pending(manifest):
        # There is no head to write again below, so that an export that is under way could not move it.
        raise NothingToAccept(NO_HEAD.format(snapshot=snapshot, memory=memory), hint=NO_HEAD_HINT)
    row = ReviewRow(decision=DECLINED, at=format_now(), by=word.by, because=word.because)

    def change(found: Reviews) -> Mapping[str, ReviewRow]:
        _check_undecided(found, snapshot, (PENDING, ""))
        return {snapshot: replace(row, reason="" if manifest.pending else found.find_reason(manifest))}

    await change_reviews(repository.store, memory, ids, change)
    # An export that is under way may not know of this decision: it cannot move this head any more.
    there = (await repository.raise_head(memory, fence=True)).head
    if there is not None and there.was_head(snapshot):  # it was not decided yet when its export stored it
        overtaken = {snapshot: ReviewRow(decision=ACCEPTED, at=format_now())}
        await change_reviews(repository.store, memory, ids, lambda found: overtaken)
        raise NothingToAccept(f"{snapshot} became the head of {memory} at the same moment.")
    return Declined(memory=memory, snapshot=snapshot, head=state.snapshot or None, by=word.by, because=word.because)


def _check_word(word: Word) -> None:
    """Raise ``UsageError`` for a reason that is too long to keep."""
    if len(word.because) > LONGEST_WORDS:
        raise UsageError(f"A reason has at most {LONGEST_WORDS} characters; this one has {len(word.because):,}.")


def _check_undecided(reviews: Reviews, snapshot: str, allowed: tuple[str, ...]) -> None:
    """Raise ``AlreadyDecided`` if something else than ``allowed`` was decided about a snapshot."""
    row = reviews.rows.get(snapshot)
    if row is None or row.decision in allowed:
        return
    by, when = f" by {row.by}" if row.by else "", f" at {row.at}" if row.at else ""
    why = f": {row.because}" if row.because else ""
    raise AlreadyDecided(f"{snapshot} was {row.decision}{by}{when}{why}.")


async def _write_acceptance(
    repository: Repository, manifest: Manifest, line: list[str], row: ReviewRow, there: list[str]
) -> tuple[Reviews, dict[str, ReviewRow]]:
    """Write that a snapshot is accepted, and with it those in ``line``. Return the reviews as they were, and the rows that
    were written. Raise ``AlreadyDecided``."""
    snapshot, before, written = manifest.snapshot, Reviews(), dict[str, ReviewRow]()

    def change(found: Reviews) -> Mapping[str, ReviewRow]:
        nonlocal before, written
        # Accepted before and not the head: whoever accepted it was killed, or lost the race for the head.
        _check_undecided(found, snapshot, (PENDING, ACCEPTED, ""))
        for one in line:
            _check_undecided(found, one, (PENDING, ""))
        included = {one: replace(row, within=snapshot, reason=_keep_reason(found, one)) for one in line}
        before, written = found, {**included, snapshot: replace(row, reason=_keep_reason(found, snapshot))}
        return written

    await change_reviews(repository.store, manifest.memory, there, change)
    return before, written


async def _take_back(
    repository: Repository, manifest: Manifest, before: Reviews, written: Mapping[str, ReviewRow], there: list[str]
) -> None:
    """Put the rows of an acceptance that lost the race for the head back to what they were, so that it does not take effect
    later: unless somebody has written others since, or the snapshot became the head."""
    head = (await repository.head(manifest.memory)).head
    if head is not None and head.was_head(manifest.snapshot):
        return

    def change(found: Reviews) -> Mapping[str, ReviewRow | None]:
        if found.rows.get(manifest.snapshot) != written[manifest.snapshot]:
            return {}
        return {one: before.rows.get(one) for one, row in written.items() if found.rows.get(one) == row}

    await change_reviews(repository.store, manifest.memory, there, change)


def _keep_reason(reviews: Reviews, snapshot: str) -> str:
    row = reviews.rows.get(snapshot)
    return row.reason if row else ""


async def _move_head(repository: Repository, state: HeadState, manifest: Manifest, doubt: str) -> bool:
    """Move the head to an accepted snapshot, after pinning it if there was a ``doubt``: the code of why that one was not
    the head. Return whether it was pinned now. Raise ``SwapLost``."""
    memory, before, pinned = manifest.memory, state.snapshot, False
    if before and doubt:
        why = f"{doubt} (accepted by a person)"
        pinned = await pin_automatically(repository, memory, before, manifest.snapshot, why)
    try:
        # Compare-and-swap: it fails if another writer changed the head since ``state`` was read. The pin that was just
        # made would then protect a snapshot that was not replaced, so it is removed.
        await repository.move_head(state, manifest)
    except SwapLost:
        if pinned:
            await drop_automatic_pins(repository, memory, [before])
        raise
    await drop_automatic_pins(repository, memory)
    return pinned


async def _list_pending_line(
    repository: Repository, manifest: Manifest, reviews: Reviews, head: Head | None
) -> list[str]:
    """Return the snapshots that wait and that this one grew out of, newest first."""
    line: list[str] = []
    while manifest.parent and manifest.parent not in line and len(line) < MOST_INCLUDED:
        found = (await repository.manifests(manifest.memory, [manifest.parent])).get(manifest.parent)
        if not isinstance(found, Manifest) or not reviews.is_pending(found):
            break
        if head is not None and head.was_head(found.snapshot):  # its row is gone
            break
        line.append(found.snapshot)
        manifest = found
    return line


def _explain_standing(manifest: Manifest, state: HeadState, reviews: Reviews) -> Reason:
    """Return why a snapshot is not the head."""
    if why := reviews.find_reason(manifest):
        return Reason(code=PENDING, message=why)
    code, _, message = manifest.rejected.partition(": ")
    if code:
        return Reason(code=code, message=message)
    return Reason(code="diverged", message=f"It did not grow out of the head ({state.snapshot or 'there is none'}).")


async def _find_newest(repository: Repository, memory: str, head: Head | None, reviews: Reviews) -> str:
    """Return the snapshot that is meant where none is named."""
    ids = await repository.list_snapshot_ids(memory)
    if not ids:
        raise MemoryNotFound(f"There is no memory {memory!r} in {repository.store.url}.")
    newest = head.newest if head is not None else ""
    # Also those that are newer than the head and not listed: the reviews may have been removed.
    read = [one for one in ids if one > newest or reviews.get_decision(one) == PENDING]
    manifests = [one for one in (await repository.manifests(memory, read)).values() if isinstance(one, Manifest)]
    waiting = [one for one in manifests if reviews.is_pending(one)]
    for manifest in waiting:
        if await _grew_cleanly(repository, manifest, head, reviews):
            return manifest.snapshot
    for manifest in manifests:
        # Older ones are not offered: what they contain may be long out of date. Nor is what grew out of a declined one.
        plain = not reviews.get_decision(manifest.snapshot) and not manifest.rejected.startswith(f"{DECLINED}: ")
        if manifest.rejected and plain and manifest.snapshot > newest:
            return manifest.snapshot
    if waiting:
        shown = ", ".join(one.snapshot for one in waiting[:MOST_SHOWN])
        raise NothingToAccept(OF_ITSELF.format(head=head.snapshot if head else "which is missing", names=shown))
    raise NothingToAccept(f"Nothing waits for a review, or was rejected since the head of {memory} was made.")


async def _grew_cleanly(repository: Repository, manifest: Manifest, head: Head | None, reviews: Reviews) -> bool:
    """Whether a snapshot that waits grew out of the present head, and out of nothing that was declined."""
    memory, line = manifest.memory, await _list_pending_line(repository, manifest, reviews, head)
    last = manifest if not line else (await repository.manifests(memory, [line[-1]])).get(line[-1])
    if not isinstance(last, Manifest) or last.parent in reviews.declined:
        return False
    if head is None or not last.parent or last.parent == head.snapshot:
        return head is None or last.parent == head.snapshot
    # Retention may have removed what was in between; what was accepted with the head is below it.
    row = reviews.rows.get(last.parent)
    return row is not None and row.decision == ACCEPTED and row.within == head.snapshot
