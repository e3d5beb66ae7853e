"""May the head move to this snapshot, as far as the snapshot itself can say? It is decided in this order:

1. Is it the right store and the right memory (``_find_mix_up``)?
2. Is it all of the memory, or a part whose rest is gone (``_find_lone_part``)?
3. Do the guards object: is it worse than the head that it would replace (``list_objections``)?
4. Was a root of the head withheld from this sandbox (``_find_withheld_roots``)?
5. Has the same objection come up so often by now that the change must be meant (``_weigh``)?
6. Did the sandbox start from the head (``continues_head``)?

What passes all of them meets the checks and the review in ``gate``: nothing else decides about the head of an export.

Guards keep a good memory from being overwritten by a worse one. Without the fifth question, a guard would block a
memory forever after a change that was meant. Only objections that may be intended (``limits.REPEATABLE``: files are
missing, or the memory is smaller) can be accepted this way, with a warning and an event; the replaced head is pinned. An
empty or damaged memory, an older schema, credentials and exceeded limits stay rejected until a person decides.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from sidecar.engine.exports.arrival import CheckedExport
from sidecar.engine.exports.run import ExportRun
from sidecar.engine.sandbox.dialogue import redact, report_findings
from sidecar.engine.sandbox.identity import join_some
from sidecar.errors import SandboxNotAllowed, SidecarError, SnapshotDamaged, SnapshotNotFound, UnknownReason
from sidecar.format.index import FILE, Entry
from sidecar.format.patterns import compile_patterns
from sidecar.format.protocol import ExportAnswer, SandboxNotes
from sidecar.format.roots import get_root
from sidecar.host.text import format_count, suggest
from sidecar.host.values import dataclass
from sidecar.ids import MemoryKeys
from sidecar.layouts import Layout
from sidecar.policy.limits import (
    CREDENTIALS,
    DAMAGED,
    DOWNGRADE,
    EMPTY,
    GONE,
    MISSING,
    PARTIAL,
    REASONS,
    REPEATABLE,
    SHRUNK,
    Guards,
)
from sidecar.policy.review import PENDING, REVIEW_REASONS
from sidecar.program import notes
from sidecar.program.notes import OTHER_MEMORY, UNKNOWN_LINEAGE
from sidecar.receipts import Accepted, Reason
from sidecar.store.fetch import fetch_entries
from sidecar.store.manifest import Manifest
from sidecar.store.refusals import (
    ExportOrigin,
    RefusalCount,
    Refusals,
    RefusedExport,
    count_refusal,
    digest_conversation,
    forget_refusals,
    read_refusals,
    read_store_time,
)

Entries = Mapping[str, Entry]
Layouts = Mapping[str, Layout]
LEAST_REFUSALS = 2
"""How many refusals there must be before elapsed time counts: one refusal and a clock that jumps are not enough."""
MOST_NAMED = 3
READ_ONLY = "This sandbox was restored to be read (read-only): what it exports is stored beside the head."
ANOTHER_STORE = (
    "By its notes, this sandbox's memory {memory!r} is in the store with the id {theirs}; {store} has the id {ours}. A store"
    " that was moved away, or is not mounted, is begun again like this. Export to the right store; or say that this one is"
    " right, with --allow unknown-lineage or --force."
)
ANOTHER_MEMORY = (
    "By its notes, this sandbox holds the memory {other!r} (in {folders}), and {memory!r} was never restored or exported here."
    " If the id is mistyped, export {other!r}; if not, say so with --allow other-memory or --force."
)
NOT_YOURS = "This sandbox holds a memory that this token is not for."
LONE_PART = (
    "Only a part of the memory was restored here ({part}), and the snapshot that it came from is not among the newest hundred,"
    " or cannot be read any more: what is stored has that part alone."
)
WITHHELD = (
    "This sandbox was restored without {roots}, and nothing is known there of what the head has of it. Restore once more when"
    " the project's folder is there; then it can be exported."
)
NOTHING = (
    "The sandbox holds no memory: nothing of any layout was found in it. If it is in a project's folder, name that:"
    " --project PATH (projects, over HTTP)."
)
_DATE = "{date}"
_DAY = r"\d{4}-\d\d-\d\d"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision about a snapshot."""

    moves: bool
    """The head may move to it. If not, and there is no ``reason``, it stands beside the head as diverged."""
    reason: Reason | None
    """Why it is rejected; ``None`` if it is not."""
    accepted: Accepted | None
    """What was accepted despite the guards, if the head may move to it."""
    codes: tuple[str, ...]
    """The codes of all reasons that count as refused."""
    origin: ExportOrigin
    """Where the export comes from, for the count of refusals."""

    @property
    def is_pending(self) -> bool:
        """It waits for a review."""
        return self.reason is not None and self.reason.code == PENDING


def check_reasons(reasons: Iterable[str]) -> None:
    """Raise ``UnknownReason`` for a reason that no guard has; the hint names the nearest known one."""
    for reason in reasons:
        if reason not in REASONS:
            raise UnknownReason(f"There is no guard {reason!r} to allow.", hint=suggest(reason, REASONS, listed=True))


async def decide(run: ExportRun, checked: CheckedExport, manifest: Manifest, head: Manifest | None) -> Verdict:
    """Decide about a new snapshot. ``head`` is the one that it would replace, if that can be read."""
    mixed_up = _find_mix_up(run, checked.answer) or _find_lone_part(checked)
    reasons = [mixed_up] if mixed_up else []
    if not reasons and not run.request.force:
        reasons = await _judge(run, checked, manifest, checked.entries, head)
    origin = _build_origin(run, checked.answer, straight=manifest.parent == run.state.snapshot)
    reason, accepted = await _weigh(run, checked.answer, reasons, origin)
    moves = reason is None and await continues_head(run, checked.answer)
    codes = tuple(one.code for one in reasons)
    return Verdict(moves=moves, reason=reason, accepted=accepted, codes=codes, origin=origin)


async def decide_again(run: ExportRun, checked: CheckedExport, kept: Manifest) -> Verdict:
    """Decide about a snapshot that an earlier export stored without moving the head to it, and that the sandbox still
    has unchanged."""
    mixed_up = _find_mix_up(run, checked.answer) or _find_lone_part(checked)
    reasons = [mixed_up] if mixed_up else []
    if not reasons and not run.request.force:
        code, _, message = kept.rejected.partition(": ")
        if code in REVIEW_REASONS:  # asked again in ``gate``
            code = ""
        if code not in run.allowed:
            reasons = [Reason(code=code, message=message)] if code else []
        else:
            reasons = await _judge_again(run, checked, kept)
    origin = _build_origin(run, checked.answer, straight=False)
    reason, accepted = await _weigh(run, checked.answer, reasons, origin)
    # A manifest names only the first reason against it; before the snapshot is accepted, all guards are applied again.
    if accepted is not None:
        reason, accepted = await _weigh(run, checked.answer, await _judge_again(run, checked, kept), origin)
    forced = run.request.force and (reason is None or reason.code != PARTIAL)
    moves = forced or (reason is None and await continues_head(run, checked.answer))
    codes = (reason.code,) if reason else ()
    return Verdict(moves=moves, reason=reason, accepted=accepted, codes=codes, origin=origin)


def explain_divergence(run: ExportRun, answer: ExportAnswer) -> Reason:
    """Return the reason for an outcome of ``DIVERGED``."""
    if answer.reader:
        return Reason(code="read-only", message=READ_ONLY)
    head = run.state.snapshot or run.state.problem or "which is missing"
    return Reason(code="diverged", message=f"This sandbox did not start from the head ({head}).")


def explain_credentials(answer: ExportAnswer) -> Reason:
    """Return the reason why an export that contains credentials is not stored."""
    refused = report_findings(row for row in answer.findings if row.action == "refused")
    places = [f"{row.name} in {row.path} {row.position}" for row in refused[:MOST_NAMED]]
    count = answer.found.get("refused", len(refused))
    more = f" and {count - len(places)} more" if count > len(places) else ""
    return Reason(
        code=CREDENTIALS, message=f"There are credentials in it, and nothing was stored: {', '.join(places)}{more}."
    )


async def continues_head(run: ExportRun, answer: ExportAnswer) -> bool:
    """Whether the sandbox's memory is based on the present head, or counts as such.

    It is if the sandbox was last restored from the head or exported to it. It also is if its last export never became
    the head but the one before did: that last export was cut short, or lost a race against another export of the same
    sandbox.
    """
    if run.request.beside:
        return False
    if run.request.force or run.request.adopt:
        return True
    if answer.reader:
        return False
    origin, state = run.parent(answer), run.state
    if state.head is None and not state.problem:
        return bool(origin) or not await run.engine.repository.has_eligible(run.request.memory, run.survey.snapshots)
    if state.head is None:
        return False
    if origin == state.snapshot or (state.snapshot in answer.lineage and not state.head.was_head(origin)):
        return True
    # A damaged head cannot be restored, so no sandbox can be based on it: one that is based on an earlier head may
    # replace it.
    return state.snapshot in run.survey.damaged and state.head.was_head(origin)


def check_owner(run: ExportRun, answer: ExportAnswer) -> None:
    """Raise ``SandboxNotAllowed`` if, by the sandbox's notes, its files belong to a memory that the caller may not see:
    nothing of it is to be stored where the caller can read it."""
    if run.engine.view is None:
        return
    own, others = _check_notes(answer)
    if notes.find_objection(run.identity, own, others, answer.folders, answer.lineage) != OTHER_MEMORY:
        return
    owners = notes.find_owners(run.identity, others, answer.folders)
    if not all(run.engine.view.sees(one.memory) for one in owners):
        raise SandboxNotAllowed(NOT_YOURS, hint="Name a sandbox that holds your own memory.")


def _check_notes(answer: ExportAnswer) -> tuple[notes.Notes | None, list[notes.Notes]]:
    """Return the sandbox's notes of the memory, if there are any, and of others, as far as they are valid."""
    own = _parse_notes(answer.notes) if answer.notes is not None else None
    return own, [found for one in answer.others if (found := _parse_notes(one)) is not None]


def _find_mix_up(run: ExportRun, answer: ExportAnswer) -> Reason | None:
    """Return the reason why this export would continue a memory of another store, or another memory, by the notes that
    the sandbox had before; ``None`` if it would not or that is allowed."""
    told, memory = run.identity, run.request.memory
    own, others = _check_notes(answer)
    code = notes.find_objection(told, own, others, answer.folders, answer.lineage)
    if code in told.allow:
        return None
    if code == UNKNOWN_LINEAGE:
        assert own is not None
        store = run.engine.repository.store.url
        message = ANOTHER_STORE.format(memory=memory, theirs=own.store, store=store, ours=told.store)
        return Reason(code=code, message=message)
    if code == OTHER_MEMORY:
        other = notes.find_owners(told, others, answer.folders)[0]
        shared = [repr(redact(folder)) for folder in sorted({*other.roots.values()} & {*answer.folders.values()})]
        message = ANOTHER_MEMORY.format(other=redact(other.memory), folders=join_some(shared), memory=memory)
        return Reason(code=code, message=message)
    return None


def _find_lone_part(checked: CheckedExport) -> Reason | None:
    """Return the reason why an export has only a part of its memory: the snapshot that the part came from is gone, so
    that the rest could not be added to it. Nothing overrides that."""
    lone = checked.base is None or checked.base.rejected.startswith(f"{PARTIAL}:")
    if not checked.answer.part or not lone:
        return None
    return Reason(code=PARTIAL, message=LONE_PART.format(part=", ".join(map(redact, checked.answer.part[:MOST_NAMED]))))


def _parse_notes(claim: SandboxNotes) -> notes.Notes | None:
    """Return the notes that a sandbox claims to have had; ``None`` if they are not valid."""
    return notes.parse_value(asdict(claim))


async def find_replaced_head(run: ExportRun, base: Manifest | None = None) -> Manifest | None:
    """Return the manifest of the head that an export may replace; ``None`` if there is no head or it is damaged.
    ``base`` is the one that the export is based on, which need not be read again."""
    state = run.state
    if state.head is None or state.snapshot in run.survey.damaged:
        return None
    if base is not None and base.snapshot == state.snapshot:
        return base
    try:
        return await run.engine.repository.manifest(state.head.memory, state.snapshot)
    except (SnapshotDamaged, SnapshotNotFound):
        return None


async def _judge_again(run: ExportRun, checked: CheckedExport, kept: Manifest) -> list[Reason]:
    """Apply the guards to a stored snapshot, compared with the present head."""
    head = await find_replaced_head(run)
    entries, _, _ = await fetch_entries(run.engine.repository.store, kept, run.scratch)
    return await _judge(run, CheckedExport(checked.answer), kept, entries, head)


async def _judge(
    run: ExportRun, checked: CheckedExport, new: Manifest, entries: Entries, head: Manifest | None
) -> list[Reason]:
    """Return the guards' reasons against replacing the head by this snapshot, without those that are allowed. A head
    that cannot be read is not compared with."""
    head_entries: Entries = {}
    if head is not None and head is checked.base:
        head_entries = checked.base_entries
    elif head is not None:
        try:
            head_entries, _, _ = await fetch_entries(run.engine.repository.store, head, run.scratch)
        except SnapshotDamaged:
            head = None
    pair = Comparison(new, entries, head, head_entries, run.engine.layouts, checked.answer.trimmed)
    return [reason for reason in list_objections(pair, run.engine.guards) if reason.code not in run.allowed]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A new snapshot beside the head that it would replace."""

    new: Manifest
    entries: Entries
    head: Manifest | None
    head_entries: Entries
    layouts: Layouts
    trimmed: Collection[str] = ()
    """The roots that lost files to a size limit: what was left out on purpose does not count as lost."""


def list_objections(pair: Comparison, guards: Guards) -> Iterator[Reason]:
    """Yield every guard's reason against making the new snapshot the head."""
    new, entries, head, layouts = pair.new, pair.entries, pair.head, pair.layouts
    if new.files == 0:
        yield Reason(code=EMPTY, message=NOTHING)
        return  # everything else follows from it
    for database in new.databases:
        if database.check != "ok":
            yield Reason(code=DAMAGED, message=f"SQLite says of {database.path}: {database.check}")
    if head is None:
        return
    head_entries = _leave_out_rotated(entries, head, pair.head_entries, layouts, pair.trimmed)
    beside = " beside what rotates" if len(head_entries) < len(pair.head_entries) else ""
    if missing := _find_missing_path(entries, head, head_entries, layouts):
        yield Reason(code=MISSING, message=f"{missing} is gone; the head has it.")
    yield from _find_missing_roots(entries, head, head_entries, pair.trimmed)
    yield from _find_downgrades(new, head, layouts)
    now, then = (new.files + new.dropped, new.bytes + new.dropped_bytes), _count_files(head_entries)
    yield from _find_shrinkage("It", now, then, guards, beside)
    for layout in guards.layouts:
        now, then = _count_layout(layout, new, entries), _count_layout(layout, head, head_entries)
        if not new.dropped:  # dropped files are not counted by layout
            yield from _find_shrinkage(f"Its {layout} part", now, then, guards.narrow_to_layout(layout), beside)


def _find_missing_path(entries: Entries, head: Manifest, head_entries: Entries, layouts: Layouts) -> str:
    """Return a path that its layout requires and the head has, but the new snapshot has not; empty if there is none."""
    for root in head.roots:
        required = layouts[root.layout].required if root.layout in layouts else ()
        wanted = compile_patterns(f"{root.name}/{pattern}" for pattern in required)
        for path, entry in head_entries.items():
            if entry.type == FILE and path not in entries and wanted.match(path):
                return path
    return ""


def _find_missing_roots(
    entries: Entries, head: Manifest, head_entries: Entries, trimmed: Collection[str]
) -> Iterator[Reason]:
    """Yield a reason for each root of which the head has files and the new snapshot has none, as when a sandbox started
    empty."""
    for root in head.roots:
        if root.name in trimmed or any(_mark_files(root.name, entries)):
            continue
        if lost := sum(_mark_files(root.name, head_entries)):
            there = f"the head has {format_count(lost, 'file')} there"
            message = f"Nothing was found of {root.name} ({root.layout} in {root.hint}); {there}."
            yield Reason(code=GONE, message=message)


def _leave_out_rotated(
    entries: Entries, head: Manifest, head_entries: Entries, layouts: Layouts, trimmed: Collection[str]
) -> Entries:
    """Return the head's entries without rotating files that their owner has deleted since, so that they count neither
    before nor after. Roots that a size limit trimmed are left as they are: there, a missing file counts as still
    present."""
    rotating = {
        root.name: _compile_rotating(layouts[root.layout])
        for root in head.roots
        if root.layout in layouts and layouts[root.layout].rotating and root.name not in trimmed
    }

    def rotated(path: str) -> bool:
        root, _, relative = path.partition("/")
        return root in rotating and rotating[root].match(relative) is not None

    gone = {path for path in head_entries if path not in entries and rotated(path)}
    return {path: entry for path, entry in head_entries.items() if path not in gone} if gone else head_entries


def _compile_rotating(layout: Layout) -> re.Pattern[str]:
    text = compile_patterns(pattern.replace(_DATE, "\0") for pattern in layout.rotating).pattern
    return re.compile(text.replace(re.escape("\0"), _DAY), re.DOTALL)


def _mark_files(root: str, entries: Entries) -> Iterator[bool]:
    """Yield, for each entry, whether it is a file below ``root``."""
    return (entry.type == FILE and path.startswith(f"{root}/") for path, entry in entries.items())


def _find_downgrades(new: Manifest, head: Manifest, layouts: Layouts) -> Iterator[Reason]:
    """Yield a reason for each database whose schema version, if its layout tells it, is older than the head's."""
    layout_of = {root.name: root.layout for root in new.roots}
    before = {database.path: database.schema for database in head.databases}
    for database in new.databases:
        root, _, relative = database.path.partition("/")
        layout = layouts.get(layout_of.get(root, ""))
        if layout is None or relative not in layout.schemas or database.check != "ok":
            continue
        if database.schema < before.get(database.path, 0):
            message = f"{database.path} has schema {database.schema or 'none'}; the head has {before[database.path]}."
            yield Reason(code=DOWNGRADE, message=message)


def _find_shrinkage(
    what: str, now: tuple[int, int], then: tuple[int, int], guards: Guards, beside: str = ""
) -> Iterator[Reason]:
    (files, size), (files_then, size_then) = now, then
    if size_then >= guards.shrink_from_bytes and size < size_then * guards.shrink_to:
        yield Reason(code=SHRUNK, message=f"{what} has {size:,} bytes; the head has {size_then:,}{beside}.")
    if files_then >= guards.shrink_from_files and files < files_then * guards.shrink_to:
        yield Reason(
            code=SHRUNK, message=f"{what} has {format_count(files, 'file')}; the head has {files_then:,}{beside}."
        )


def _count_layout(layout: str, manifest: Manifest, entries: Entries) -> tuple[int, int]:
    """Return the number and the total size of the files of one layout."""
    roots = {root.name for root in manifest.roots if root.layout == layout}
    return _count_files({path: entry for path, entry in entries.items() if get_root(path) in roots})


def _count_files(entries: Entries) -> tuple[int, int]:
    """Return the number and the total size of the files among ``entries``."""
    files = [entry.size for entry in entries.values() if entry.type == FILE]
    return len(files), sum(files)


def _find_withheld_roots(run: ExportRun, answer: ExportAnswer) -> list[str]:
    """Return the roots of the head that the restore withheld from this sandbox, and that would be lost by this export.
    An export with a base keeps the base's files of those roots, so only full exports are affected. Such roots are not
    really missing, so repetition must not make this acceptable."""
    free = run.request.force or run.request.adopt or run.request.beside
    if answer.base or answer.notes is None or run.replaces is None or free:
        return []
    if GONE in run.allowed:
        return []
    return [root.name for root in run.replaces.roots if root.name in answer.notes.withheld]


async def _weigh(
    run: ExportRun, answer: ExportAnswer, reasons: Sequence[Reason], origin: ExportOrigin
) -> tuple[Reason | None, Accepted | None]:
    """Weigh the guards' reasons by how often the same ones were given before. Return the one that rejects the export,
    or else what is accepted despite them."""
    if withheld := _find_withheld_roots(run, answer):
        return Reason(code=GONE, message=WITHHELD.format(roots=", ".join(withheld))), None
    if not reasons:
        return None, None
    if run.state.head is None or run.request.adopt or not await continues_head(run, answer):
        return reasons[0], None
    refusals, _ = await read_refusals(run.engine.repository.store, run.state.head)
    everything = refusals.with_earlier(origin, await _list_uncounted_refusals(run, refusals, origin))
    longest: RefusalCount | None = None
    for reason in reasons:
        tally = everything.before(origin, reason.code) if reason.code in REPEATABLE else None
        if tally is None or not await _is_enough(run, tally, refusals.before(origin, reason.code)):
            return reason, None
        longest = tally if longest is None or tally.since < longest.since else longest
    assert longest is not None
    accepted = Accepted(
        reasons=list(reasons),
        since=_format_time(longest.since),
        refusals=longest.times,
        conversations=_count_conversations(longest, run.request.conversation),
        replaced=run.state.snapshot,
    )
    return None, accepted


def _build_origin(run: ExportRun, answer: ExportAnswer, *, straight: bool) -> ExportOrigin:
    """Describe where an export comes from, for the count of refusals."""
    return ExportOrigin(sandbox=run.sandbox.ref, lineage=tuple(answer.lineage), straight=straight)


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


async def note_refusal(run: ExportRun, answer: ExportAnswer, verdict: Verdict, snapshot: str) -> list[str]:
    """Count that a snapshot was refused, so that a repetition is recognised. Return warnings that say when it will be
    accepted."""
    if _find_withheld_roots(run, answer):
        return []
    codes = [code for code in dict.fromkeys(verdict.codes) if code in REPEATABLE]
    # If refusals are counted already, this snapshot may have more counted reasons than the first one, which its
    # manifest names.
    known = MemoryKeys.of(run.request.memory).refusals in run.survey.sizes
    if run.state.head is None or run.request.adopt or not (codes or known) or not await continues_head(run, answer):
        return []
    store, origin = run.engine.repository.store, verdict.origin
    refused = RefusedExport(snapshot=snapshot, reasons=codes, conversation=run.request.conversation)
    try:
        counted, _ = await read_refusals(store, run.state.head)
        earlier = await _list_uncounted_refusals(run, counted, origin)
        refusals = await count_refusal(store, run.state.head, origin, refused, earlier)
    except SidecarError as problem:
        return [f"This refusal could not be counted: {problem.message}"]
    if len(codes) < len(set(verdict.codes)):  # a reason that repetition never makes acceptable
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
        await forget_refusals(store, run.state.head, _build_origin(run, answer, straight=False))
    except SidecarError as problem:
        run.warnings.append(f"What was refused before still counts: {problem.message}")


def _format_time(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")
