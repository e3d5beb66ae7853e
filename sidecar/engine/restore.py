"""Restore: a snapshot becomes a sandbox's memory again."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from sidecar.engine.asking import Answer
from sidecar.engine.attending import kept_alive, left_clean, reach, tidy
from sidecar.engine.choosing import LATEST, choose, choose_unread
from sidecar.engine.direct import RELAYED, NotDirect
from sidecar.engine.identity import absent, missing, other_home
from sidecar.engine.parts import CountedSandbox, Engine, together
from sidecar.engine.placing import Parcel, RestoreRequest, look_first, place, place_directly
from sidecar.engine.privacy import shown
from sidecar.engine.unsaved import Saved, Saving, Standing
from sidecar.errors import BadAnswer, LimitExceeded, NotSavedFirst, ProgramFailed, SidecarError
from sidecar.ids import memory_key
from sidecar.ports import Sandbox
from sidecar.receipts import Reason, RestoreOutcome, RestoreReceipt, Scrubbed
from sidecar.repository import Survey
from sidecar.snapshots.manifest import Head, Manifest
from sidecar.snapshots.missing import scrubbed_of, trimmed_words
from sidecar.spool import spool

INSTEAD = "Restored {snapshot} instead of {wanted}: {problems}"
STILL_HERE = "The store cannot bring back {wanted} ({problems}), but this sandbox still has it: export it."
ASK_FROM = 4 << 20
"""From so many bytes on it is worth a command to ask a sandbox that was in use whether it needs them."""
MOST_KNOWN = 100
LOST = "The sandbox's answer was lost ({problem}), but asked again it says that everything is in place."


async def restore(engine: Engine, sandbox: Sandbox, request: RestoreRequest) -> RestoreReceipt:
    """Restore a memory into ``sandbox``: staged, verified, then swapped there.

    What the sandbox has and no snapshot does is exported first; a sandbox that holds the latest snapshot, or is ahead of it,
    is left as it is. Raise a ``SidecarError`` when nothing could be tried. Outcome ``incomplete`` says that the sandbox
    refused, or that something there could not be saved; what it had is as it was.
    """
    await engine.repository.admit(request.memory)
    run = _Run(engine, sandbox, CountedSandbox(sandbox, engine.progress), request, time.monotonic())
    try:
        if engine.direct:
            try:
                return await _from_the_bucket(run)
            except NotDirect as reason:
                run.warnings = [RELAYED.format(reason=reason)] if str(reason) else []
        return await _through_the_sidecar(run)
    except (ProgramFailed, LimitExceeded, NotSavedFirst) as problem:
        return run.receipt(RestoreOutcome.INCOMPLETE, reason=Reason(code=problem.code, message=problem.message))


@dataclass(slots=True)
class _Run:
    """One restore: what was asked for, and what is known by now."""

    engine: Engine
    target: Sandbox
    sandbox: CountedSandbox
    request: RestoreRequest
    started: float
    operation: str = field(default_factory=lambda: secrets.token_hex(8))
    manifest: Manifest | None = None
    wanted: str = ""
    warnings: list[str] = field(default_factory=list)
    standing: Standing = field(default_factory=Standing)
    saved: list[Saved] = field(default_factory=list)

    def begin(self, manifest: Manifest, survey: Survey, keep: tuple[str, ...], head: Head | None, store: str) -> None:
        """Note what is to be restored, and what the sandbox has to know of the store."""
        self.manifest = manifest
        self.engine.progress.about(manifest.snapshot)
        known = list(dict.fromkeys([*keep, manifest.snapshot, *survey.snapshots[:MOST_KNOWN]]))
        self.standing.stored.setdefault(memory_key(manifest.memory), known)
        self.standing.heads = [one for one in known if one in keep or (head is not None and head.was(one))]
        self.standing.unusable = sorted(survey.damaged)
        self.standing.keep = [] if self.request.discard or self.request.mode == "seed" else list(keep)
        self.standing.store = store

    def receipt(
        self, outcome: RestoreOutcome, answer: Answer | None = None, reason: Reason | None = None
    ) -> RestoreReceipt:
        kept = answer is not None and answer.status == "kept"
        withheld = [replace(row, hint=shown(row.hint)) for row in answer.withheld] if answer else []
        scrubbed = scrubbed_of(self.manifest) if self.manifest and not kept else Scrubbed()
        missing = [trimmed_words(self.manifest), scrubbed.words] if self.manifest and not kept else []
        snapshot = self.manifest.snapshot if self.manifest else None
        first = next((saved for saved in self.saved if saved.memory == self.request.memory), None)
        first = first or next(iter(self.saved), None)
        return RestoreReceipt(
            outcome=outcome,
            memory=self.request.memory,
            snapshot=answer.holds if answer and kept else snapshot,
            parent=(self.manifest.parent or None) if self.manifest and not (answer and answer.holds) else None,
            sandbox=self.sandbox.ref,
            home=shown(answer.home) if answer else "",
            user=shown(answer.user) if answer else "",
            mode=self.request.mode,
            wanted=self.wanted,
            files=answer.files if answer else 0,
            bytes=answer.bytes if answer else 0,
            packed_bytes=sum(saved.packed_bytes for saved in self.saved),
            transferred_bytes=self.sandbox.transferred_bytes,
            round_trips=sum(self.sandbox.trips.values()),
            trips=self.sandbox.trips,
            duration_ms=round((time.monotonic() - self.started) * 1000),
            databases=[row.report() for row in answer.databases] if answer else [],
            skipped=[replace(row, path=shown(row.path)) for row in answer.skipped] if answer else [],
            warnings=[
                *(other_home(self.sandbox, answer, self.manifest) if answer else []),
                *self.warnings,
                *(saved.words for saved in self.saved),
                *(row.words for row in withheld),
                *(map(shown, answer.warnings) if answer else []),
                *filter(None, missing),
            ],
            reason=reason,
            scrubbed=scrubbed,
            kept=kept,
            saved_first=first.snapshot if first else None,
            saved_first_memory=first.memory if first and first.memory != self.request.memory else "",
            set_aside=answer.set_aside.report() if answer and answer.set_aside else None,
            read_only=self.request.read_only and outcome is RestoreOutcome.COMPLETE,
            withheld=withheld,
        )


async def _from_the_bucket(run: _Run) -> RestoreReceipt:
    engine, request = run.engine, run.request
    presence, (manifest, state), survey = await together(
        reach(run.sandbox),
        choose_unread(engine.repository, request.memory, request.snapshot),
        engine.repository.survey(request.memory),
    )
    keep = (manifest.snapshot,) if request.snapshot == LATEST else ()
    run.begin(manifest, survey, keep, state.head, state.store_id)
    if engine.reached is not None:
        await engine.reached(manifest.snapshot)
    engine.progress.step("putting it in place")

    def placing() -> Awaitable[Answer]:
        return place_directly(engine, run.sandbox, request, manifest, run.standing, run.operation)

    async with kept_alive(engine, run.sandbox, presence, run.warnings):
        answer = await _placed(run, manifest, [], placing)
    return run.receipt(RestoreOutcome.COMPLETE, answer)


async def _through_the_sidecar(run: _Run) -> RestoreReceipt:
    engine, request = run.engine, run.request
    async with spool() as scratch:
        engine.progress.step("fetching the snapshot")
        presence, choice, survey = await together(
            reach(run.sandbox),
            choose(engine.repository, request.memory, request.snapshot, scratch),
            engine.repository.survey(request.memory),
        )
        if choice is None:
            return await _nothing(run)
        run.warnings += choice.warnings
        manifest = choice.fetched.manifest
        run.begin(manifest, survey, choice.keep, choice.head, choice.store)
        if engine.reached is not None:
            await engine.reached(manifest.snapshot)
        parcel = Parcel(choice.fetched, scratch)
        first = [look_first] if request.in_use and parcel.size >= ASK_FROM else []

        def placing() -> Awaitable[Answer]:
            step = first.pop() if first else place
            return step(engine, run.sandbox, request, parcel, run.standing, run.operation)

        async with kept_alive(engine, run.sandbox, presence, run.warnings):
            answer = await _placed(run, manifest, parcel.uploads, placing)
    if choice.problems and answer.status != "kept":
        run.wanted = choice.wanted
        instead = INSTEAD.format(snapshot=manifest.snapshot, wanted=choice.wanted, problems=choice.problems)
        run.warnings.append(instead)
    elif choice.problems:
        run.warnings.append(STILL_HERE.format(wanted=answer.holds, problems=choice.problems))
    return run.receipt(RestoreOutcome.COMPLETE, answer)


async def _placed(
    run: _Run, manifest: Manifest, uploads: list[str], placing: Callable[[], Awaitable[Answer]]
) -> Answer:
    """Have it put in place, once what it would replace is saved."""
    answer = await _settled(run, manifest, uploads, placing())
    if answer.status in ("clear", "no-python"):
        answer = await _settled(run, manifest, uploads, placing())
    if answer.status == "unsaved":
        saving = Saving(run.engine, run.target, run.sandbox, manifest, run.request.projects, run.standing)
        try:
            run.saved += await saving.save(answer.unsaved)
        except BaseException:
            await tidy(run.engine, run.sandbox, manifest.memory, manifest.snapshot, uploads)
            raise
        answer = await _settled(run, manifest, uploads, placing())
    if answer.status != "complete" and not (answer.status == "kept" and answer.holds in run.standing.keep):
        raise BadAnswer(f"The sandbox's answer has a status it cannot have now: {answer.status!r}.")
    return answer


async def _settled(run: _Run, manifest: Manifest, uploads: list[str], placing: Awaitable[Answer]) -> Answer:
    """Wait for the sandbox's answer. When it fails to come, leave nothing behind there, and ask whether all is in place."""
    try:
        return await placing
    except BaseException as problem:
        if left_clean(problem):
            raise
        answer = await tidy(run.engine, run.sandbox, manifest.memory, manifest.snapshot, uploads, run.operation)
        if answer is None or not isinstance(problem, SidecarError):
            raise
        return replace(answer, warnings=[*answer.warnings, LOST.format(problem=problem.message)])


async def _nothing(run: _Run) -> RestoreReceipt:
    """There is nothing to restore: a first start, unless the memory has to exist. Raise ``MemoryNotFound`` then."""
    repository, memory = run.engine.repository, run.request.memory
    beside = await repository.snapshot_ids(memory)
    if run.request.must_exist:
        raise await missing(repository, memory, beside)
    run.warnings += await absent(repository, memory, beside)
    return run.receipt(RestoreOutcome.EMPTY)
