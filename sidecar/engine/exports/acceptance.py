"""Accept a snapshot that guards object to, once the same objection has come up often enough.

Without this, a guard would block a memory forever after a change that was meant. Only objections that may be intended
(``limits.REPEATABLE``: files are missing, or the memory is smaller) can be accepted this way, with a warning and an
event; the replaced head is pinned. An empty or damaged memory, an older schema, credentials and exceeded limits stay
rejected until a person decides.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from sidecar.engine.exports.commit import advance_head
from sidecar.engine.exports.run import ExportRun
from sidecar.errors import SidecarError
from sidecar.format.protocol import ExportAnswer
from sidecar.ids import MemoryKeys
from sidecar.policy.limits import GONE, REPEATABLE, Guards
from sidecar.receipts import Accepted, ExportOutcome, Reason
from sidecar.store.manifest import Manifest
from sidecar.store.pins import drop_automatic_pins, pin_automatically
from sidecar.store.refusals import (
    ExportOrigin,
    RefusalCount,
    Refusals,
    count_refusal,
    digest_conversation,
    forget_refusals,
    read_refusals,
    read_store_time,
)
from sidecar.store.repository import HeadState

LEAST_REFUSALS = 2
"""How many refusals there must be before elapsed time counts: one refusal and a clock that jumps are not enough."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about an export after the guards."""

    reason: Reason | None
    """Why it does not become the head; ``None`` if it may."""
    accepted: Accepted | None = None
    """What was accepted despite the guards, if it may become the head."""


WITHHELD = (
    "This sandbox was restored without {roots}, and nothing is known there of what the head has of it. Restore once more when"
    " the project's folder is there; then it can be exported."
)


def _find_withheld_roots(run: ExportRun, answer: ExportAnswer) -> list[str]:
    """Return the roots of the head that the restore withheld from this sandbox, and that would be lost by this export.
    An export with a base keeps the base's files of those roots, so only full exports are affected. Such roots are not
    really missing, so repetition must not make this acceptable."""
    free = run.request.force or run.request.adopt or run.request.beside
    if answer.base or answer.notes is None or run.replaces is None or free:
        return []
    if GONE in {*run.request.allow, *run.engine.guards.allow}:
        return []
    return [root.name for root in run.replaces.roots if root.name in answer.notes.withheld]


def build_origin(run: ExportRun, answer: ExportAnswer, *, straight: bool) -> ExportOrigin:
    """Describe where an export comes from, for the count of refusals."""
    return ExportOrigin(sandbox=run.sandbox.ref, lineage=tuple(answer.lineage), straight=straight)


async def decide_on_guards(
    run: ExportRun, answer: ExportAnswer, reasons: Sequence[Reason], origin: ExportOrigin
) -> Verdict:
    """Decide about an export by the guards' reasons, and by how often the same reasons were given before."""
    if withheld := _find_withheld_roots(run, answer):
        return Verdict(Reason(code=GONE, message=WITHHELD.format(roots=", ".join(withheld))))
    if not reasons:
        return Verdict(None)
    if run.state.head is None or run.request.adopt or not await run.continues_head(answer):
        return Verdict(reasons[0])
    refusals, _ = await read_refusals(run.engine.repository.store, run.state.head)
    everything = refusals.with_earlier(origin, await _list_uncounted_refusals(run, refusals, origin))
    longest: RefusalCount | None = None
    for reason in reasons:
        tally = everything.before(origin, reason.code) if reason.code in REPEATABLE else None
        if tally is None or not await _is_enough(run, tally, refusals.before(origin, reason.code)):
            return Verdict(reason)
        longest = tally if longest is None or tally.since < longest.since else longest
    assert longest is not None
    accepted = Accepted(
        reasons=list(reasons),
        since=_format_time(longest.since),
        refusals=longest.times,
        conversations=_count_conversations(longest, run.request.conversation),
        replaced=run.state.snapshot,
    )
    return Verdict(None, accepted)


async def _list_uncounted_refusals(run: ExportRun, refusals: Refusals, origin: ExportOrigin) -> list[Manifest]:
    """Return the rejected snapshots of a sandbox that are not in the count: the process ended before counting, or was
    an earlier version."""
    names = refusals.list_uncounted(origin)
    found = (await run.engine.repository.manifests(run.request.memory, names)).values() if names else ()
    return [manifest for manifest in found if isinstance(manifest, Manifest) and manifest.rejected]


async def _is_enough(run: ExportRun, tally: RefusalCount, timed: RefusalCount | None) -> bool:
    """Whether a reason has come up often enough. ``timed`` counts only the refusals whose time was taken from the
    store's clock."""
    guards, store = run.engine.guards, run.engine.repository.store
    if 0 < guards.accept_after_conversations <= _count_conversations(tally, run.request.conversation):
        return True
    if not guards.accept_after_seconds or timed is None or timed.times < LEAST_REFUSALS:
        return False
    await store.prepare()
    now = await read_store_time(store, MemoryKeys.of(run.request.memory))
    return now - timed.since >= guards.accept_after_seconds


def _count_conversations(tally: RefusalCount, conversation: str) -> int:
    """Return the number of different conversations that were refused, including this one."""
    return len({*tally.conversations, *([digest_conversation(conversation)] if conversation else [])})


async def keep_replaced(run: ExportRun, manifest: Manifest, accepted: Accepted, going: Collection[str]) -> Accepted:
    """Pin the head that an accepted snapshot will replace, unless it is in ``going``: to be removed, as there is no
    room for both."""
    if accepted.replaced in going:
        return accepted
    why = ", ".join(dict.fromkeys(reason.code for reason in accepted.reasons))
    repository = run.engine.repository
    await repository.store.prepare()
    run.pinned = await pin_automatically(repository, manifest.memory, accepted.replaced, manifest.snapshot, why)
    return replace(accepted, pinned=run.pinned or accepted.replaced in await repository.pinned(manifest.memory))


async def settle_head(
    run: ExportRun, manifest: Manifest, accepted: Accepted | None, *, moves: bool
) -> tuple[ExportOutcome, HeadState, Accepted | None]:
    """Move the head to a stored snapshot, if it may move, and remove the pins and the count of refusals that are now
    obsolete."""
    repository = run.engine.repository
    outcome, state = await advance_head(run.engine, manifest, run.state, moves=moves)
    committed = outcome is ExportOutcome.COMMITTED
    try:
        if run.pinned:
            # After a lost swap, remove the pin that was just made; otherwise (``None``) all automatic pins but the
            # newest few.
            unused = None if committed else [run.state.snapshot]
            await drop_automatic_pins(repository, manifest.memory, unused)
        if committed and MemoryKeys.of(manifest.memory).refusals in run.survey.sizes:
            await repository.store.delete([MemoryKeys.of(manifest.memory).refusals])
    except SidecarError as problem:
        run.warnings.append(f"Pins that are not needed any more could not be removed: {problem.message}")
    return outcome, state, accepted if committed else None


async def note_refusal(
    run: ExportRun, answer: ExportAnswer, origin: ExportOrigin, snapshot: str, reasons: Collection[str]
) -> list[str]:
    """Count that a snapshot was refused, so that a repetition is recognised. Return warnings that say when it will be
    accepted."""
    if _find_withheld_roots(run, answer):
        return []
    codes = [code for code in dict.fromkeys(reasons) if code in REPEATABLE]
    # If refusals are counted already, this snapshot may have more counted reasons than the first one, which its
    # manifest names.
    known = MemoryKeys.of(run.request.memory).refusals in run.survey.sizes
    if run.state.head is None or run.request.adopt or not (codes or known) or not await run.continues_head(answer):
        return []
    store, conversation = run.engine.repository.store, run.request.conversation
    try:
        counted, _ = await read_refusals(store, run.state.head)
        earlier = await _list_uncounted_refusals(run, counted, origin)
        refusals = await count_refusal(store, run.state.head, origin, snapshot, codes, conversation, earlier)
    except SidecarError as problem:
        return [f"This refusal could not be counted: {problem.message}"]
    if len(codes) < len(set(reasons)):  # a reason that repetition never makes acceptable
        return []
    tallies = [tally for code in codes if (tally := refusals.before(origin, code)) is not None]
    return _describe_refusals(min(tallies, key=lambda tally: tally.times), run.engine.guards)


def _describe_refusals(tally: RefusalCount, guards: Guards) -> list[str]:
    """Describe how often it was refused by now, and when it will be accepted."""
    when = []
    if guards.accept_after_conversations:
        left = max(1, guards.accept_after_conversations - len(tally.conversations))
        when.append(f"in {left} more conversation{'' if left == 1 else 's'}")
    if guards.accept_after_seconds:
        when.append(f"after {_format_time(tally.since + guards.accept_after_seconds)}")
    if not when:
        return []
    times = "once" if tally.times == 1 else f"{tally.times:,} times since {_format_time(tally.since)}"
    return [f"Refused {times}. It becomes the head by itself when it comes again {' or '.join(when)}."]


async def note_recovery(run: ExportRun, answer: ExportAnswer) -> None:
    """Delete the counted refusals of this sandbox: its memory is equal to the head again."""
    keys, store = MemoryKeys.of(run.request.memory), run.engine.repository.store
    if run.state.head is None or keys.refusals not in run.survey.sizes:
        return
    try:
        await forget_refusals(store, run.state.head, build_origin(run, answer, straight=False))
    except SidecarError as problem:
        run.warnings.append(f"What was refused before still counts: {problem.message}")


def _format_time(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")
