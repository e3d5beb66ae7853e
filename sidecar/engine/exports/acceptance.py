"""A guard delays, it never freezes: what comes again and again is accepted, loudly, and what it replaces is kept.

Only what may well be meant (``limits.REPEATABLE``): something is missing, or the memory is smaller. An empty or damaged
memory, an older schema, credentials and limits stay refused until a person decides.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from sidecar.engine.exports.commit import advance_head
from sidecar.engine.exports.run import ExportRun
from sidecar.engine.sandbox.dialogue import ExportAnswer
from sidecar.errors import SidecarError
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
"""Before it is accepted for the time that went by: one refusal and a clock that jumps are not enough."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of an export that guards have something to say about."""

    reason: Reason | None
    """Why it does not become the head."""
    accepted: Accepted | None = None
    """What is accepted, when it does become the head."""


WITHHELD = (
    "This sandbox was restored without {roots}, and nothing is known there of what the head has of it. Restore once more when"
    " the project's folder is there; then it can be exported."
)


def _find_withheld_roots(run: ExportRun, answer: ExportAnswer) -> list[str]:
    """Roots of the head that were withheld from this sandbox and would be lost with this export: only one that builds on
    another snapshot keeps what that has of them. They are not gone, however often that is said."""
    free = run.request.force or run.request.adopt or run.request.beside
    if answer.base or answer.notes is None or run.replaces is None or free:
        return []
    if GONE in {*run.request.allow, *run.engine.guards.allow}:
        return []
    return [root.name for root in run.replaces.roots if root.name in answer.notes.withheld]


def build_origin(run: ExportRun, answer: ExportAnswer, *, straight: bool) -> ExportOrigin:
    return ExportOrigin(sandbox=run.sandbox.ref, lineage=tuple(answer.lineage), straight=straight)


async def decide_on_guards(
    run: ExportRun, answer: ExportAnswer, reasons: Sequence[Reason], origin: ExportOrigin
) -> Verdict:
    """Decide on an export by what the guards say of it, and by how often they said so before."""
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
    """What was refused from a sandbox and is not counted: whoever did so ended too soon, or is of an earlier version."""
    names = refusals.list_uncounted(origin)
    found = (await run.engine.repository.manifests(run.request.memory, names)).values() if names else ()
    return [manifest for manifest in found if isinstance(manifest, Manifest) and manifest.rejected]


async def _is_enough(run: ExportRun, tally: RefusalCount, timed: RefusalCount | None) -> bool:
    """``timed``: of these, the refusals of which the store's clock told the time."""
    guards, store = run.engine.guards, run.engine.repository.store
    if 0 < guards.accept_after_conversations <= _count_conversations(tally, run.request.conversation):
        return True
    if not guards.accept_after_seconds or timed is None or timed.times < LEAST_REFUSALS:
        return False
    await store.prepare()
    now = await read_store_time(store, MemoryKeys.of(run.request.memory))
    return now - timed.since >= guards.accept_after_seconds


def _count_conversations(tally: RefusalCount, conversation: str) -> int:
    return len({*tally.conversations, *([digest_conversation(conversation)] if conversation else [])})


async def keep_replaced(run: ExportRun, manifest: Manifest, accepted: Accepted, going: Collection[str]) -> Accepted:
    """Pin the head that an accepted snapshot is to replace; unless it is ``going``, because there is no room for both."""
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
    """Move the head to a stored snapshot, if it may have it; and see to the pins and the count that this makes superfluous."""
    repository = run.engine.repository
    outcome, state = await advance_head(run.engine, manifest, run.state, moves=moves)
    committed = outcome is ExportOutcome.COMMITTED
    try:
        if run.pinned:
            # After a lost race, the one that was just made; else all but the newest few.
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
    """Count that a snapshot was refused, so that it is known when that comes again. Return what there is to say of it."""
    if _find_withheld_roots(run, answer):
        return []
    codes = [code for code in dict.fromkeys(reasons) if code in REPEATABLE]
    # Of one that was refused before, more may be remembered than the first reason.
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
    if len(codes) < len(set(reasons)):  # that does not give way, however often it comes
        return []
    tallies = [tally for code in codes if (tally := refusals.before(origin, code)) is not None]
    return _describe_refusals(min(tallies, key=lambda tally: tally.times), run.engine.guards)


def _describe_refusals(tally: RefusalCount, guards: Guards) -> list[str]:
    """How often it was refused by now, and when it will not be."""
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
    """What comes from this sandbox is as good as the head: what was refused from it before does not count any more."""
    keys, store = MemoryKeys.of(run.request.memory), run.engine.repository.store
    if run.state.head is None or keys.refusals not in run.survey.sizes:
        return
    try:
        await forget_refusals(store, run.state.head, build_origin(run, answer, straight=False))
    except SidecarError as problem:
        run.warnings.append(f"What was refused before still counts: {problem.message}")


def _format_time(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")
