"""Look after sandboxes: while a conversation is open, and those attached until told otherwise.

A restore through the service opens a conversation, an export by the caller closes it. In between its sandbox is exported at
checkpoints, before its provider ends it, when this service stops, and when it takes over from a service that died.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import structlog

from sidecar.engine import RestoreRequest
from sidecar.engine.choosing import LATEST
from sidecar.errors import (
    HeadMoved,
    ObjectRefused,
    SandboxAsleep,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SidecarError,
)
from sidecar.ports import Presence
from sidecar.receipts import ExportOutcome, ExportReceipt, RestoreOutcome, RestoreReceipt
from sidecar.service.attachments import (
    ENDED,
    FORGOTTEN_AFTER,
    IDLE,
    LOST,
    OPEN,
    Attachment,
    Attachments,
    Care,
    Held,
    NotAttached,
    Place,
)
from sidecar.service.jobs import Jobs
from sidecar.service.leases import Lease, LeaseLost
from sidecar.service.operations import Locks
from sidecar.service.saving import CHECKPOINT, SHUTDOWN, ConversationClosed, Saving, TakenOver, was_exported
from sidecar.service.sidecar import Sidecar
from sidecar.service.standing import after_checkpoint, after_export, after_opening, after_trouble
from sidecar.service.unsaved import unsaved_after, unsaved_by

JITTER = 0.1
MOST_TRIES = 10
"""So often an attachment is swapped again that others write at the same time."""
GONE = (SandboxGone, SandboxNotFound)


@dataclass(slots=True)
class _Kept:
    """An attachment of ours."""

    held: Held
    opened_here: bool = False
    """A restore through this service opened its conversation."""
    ends_at: float = 0.0
    """The end for which the last export before it is planned or made, when that was late already."""
    unused_until: float = 0.0
    """Of one whose end each use puts off: its end after an export that found nothing new, as long as that is what it is."""
    written: float = field(default_factory=time.monotonic)
    """When we last wrote it; what a listing that began earlier says of it is out of date."""


class Keeper:
    def __init__(self, sidecar: Sidecar, jobs: Jobs) -> None:
        self._sidecar = sidecar
        self._jobs = jobs
        store = sidecar.engine.repository.store
        self.lease = Lease(store, sidecar.settings.lease)
        self._attachments = Attachments(store)
        self._saving = Saving(sidecar, self._attachments, self.lease)
        self._kept: dict[Place, _Kept] = {}
        self._turn = asyncio.Lock()
        self._changing = Locks()
        self._ending = Locks()
        self._lost_here: dict[Place, Attachment] = {}
        self._log = structlog.get_logger("sidecar").bind(instance=self.lease.instance)
        sidecar.keeper = self

    async def start(self) -> None:
        """Say that we live, take what nobody looks after, and go on doing both."""
        await self.tick()
        self._jobs.every("look around", self.lease.renew_every, self.tick)

    @property
    def alive(self) -> bool:
        return self._jobs.running and self.lease.held

    @property
    def attachments(self) -> list[Attachment]:
        """Those of this service, also such as are told of only a little longer."""
        return [kept.held.attachment for kept in self._kept.values()]

    @property
    def looked_after(self) -> list[Attachment]:
        return [one for one in self.attachments if one.looked_after]

    def at_risk(self) -> list[Attachment]:
        """Ours that are lost, or were not saved for two checkpoints or by the last export."""
        return [one for one in self.attachments if one.at_risk]

    async def find(self, memory: str, sandbox: str = "") -> Attachment:
        """The attachment of a memory, or the one of this sandbox. Raise ``NotAttached`` or ``SeveralAttachments``."""
        if sandbox:
            held = await self._attachments.find(memory, self._sidecar.sandboxes.name_of(sandbox))
            if held is None:
                raise NotAttached(f"The sandbox {sandbox} is not attached to {memory}.")
            return held.attachment
        return await self._attachments.only(memory)

    async def find_all(self) -> list[Attachment]:
        return [held.attachment for held in await self._attachments.all()]

    # Begin and end

    async def open_conversation(
        self, request: RestoreRequest, receipt: RestoreReceipt, care: Care, ends_at: float | None
    ) -> RestoreReceipt:
        """A caller restored a memory into a sandbox: its conversation is open, from before the caller hears of it.

        A restore is as good without: when this cannot be written down, the receipt says so.
        """
        try:
            if await self._opens(request, receipt):
                await self.look_after((receipt.memory, receipt.sandbox), care, receipt, ends_at)
        except SidecarError as problem:
            self._log.error("a conversation is not looked after", memory=receipt.memory, **problem.as_dict())
            told = f"This conversation is not looked after: {problem.message} Export it as soon as it has ended."
            return replace(receipt, warnings=[*receipt.warnings, told])
        return receipt

    async def _opens(self, request: RestoreRequest, receipt: RestoreReceipt) -> bool:
        """Whether what was restored is to be exported again: not for readers, nor for who looks into the past."""
        if receipt.outcome is RestoreOutcome.INCOMPLETE or request.mode != "replace":
            return False
        if getattr(request, "read_only", False):
            return False
        if request.snapshot == LATEST or receipt.snapshot is None:
            return True
        return (await self._sidecar.engine.repository.head(request.memory)).snapshot == receipt.snapshot

    async def look_after(
        self, place: Place, care: Care, restored: RestoreReceipt | None = None, ends_at: float | None = None
    ) -> Attachment:
        """Look after a sandbox from now on, beside others of its memory."""
        async with self._changing.held(place):
            kept = self._kept.get(place)
            before = kept.held if kept else None
            if before is None and (care.lasting or self._attachments.first_was(*place)):
                before = await self._find_readable(place)
            held = None
            for _ in range(MOST_TRIES):
                mine = self._opened(place, care, before, restored)
                with contextlib.suppress(HeadMoved):
                    held = await (self._attachments.write(mine, before) if before else self._attachments.add(mine))
                    break
                before = await self._find_readable(place)
            if held is None:
                raise HeadMoved(f"The attachment of {place[1]} is written by others all the time.")
            self._keep(held, opened_here=restored is not None or (kept is not None and kept.opened_here))
            self._lost_here.pop(place, None)
        if before is not None and before.attachment.owner not in ("", self.lease.instance):
            # Whatever the former owner has under way can no longer become the head.
            await self._sidecar.engine.repository.fence(place[0])
        if care.lasting:
            self._jobs.once(_job("watch", place), 0, self._watch_end, place)
            self._sidecar.events.publish("attachment.attached", memory=place[0], sandbox=place[1])
        elif ends_at is not None:
            self._plan_end(place, ends_at)
        return held.attachment

    def _opened(self, place: Place, care: Care, before: Held | None, restored: RestoreReceipt | None) -> Attachment:
        earlier, every = before.attachment if before else None, self._sidecar.settings.checkpoint_every
        return after_opening(place, care, earlier, restored, owner=self.lease.instance, every=every)

    async def _find_readable(self, place: Place) -> Held | None:
        """What is attached; what is refused is replaced, and so it is nothing."""
        try:
            return await self._attachments.find(*place)
        except ObjectRefused:
            return None

    async def find_row(self, memory: str, sandbox: str) -> Held | None:
        """The attachment of a sandbox that its caller is exporting. Trouble with it is no trouble of the export."""
        if (kept := self._kept.get((memory, sandbox))) is not None:
            return kept.held
        try:
            return await self._attachments.find(memory, sandbox)
        except SidecarError as problem:
            self._log.warning("cannot see whether it is attached", memory=memory, sandbox=sandbox, **problem.as_dict())
            return None

    async def close_conversation(self, receipt: ExportReceipt, row: Held | None) -> None:
        """A caller exported a sandbox: its conversation is closed, unless nothing was kept of it.

        Trouble with writing that down is no trouble of the export: at worst there is one more checkpoint.
        """
        place = (receipt.memory, receipt.sandbox)
        try:
            if await self._change(place, lambda one: after_export(one, receipt)):
                self._plan(place)
            elif row is not None:
                await self._change_anothers(row, lambda one: after_export(one, receipt))
        except SidecarError as problem:
            self._log.warning("could not note an export", memory=place[0], sandbox=place[1], **problem.as_dict())

    async def report_gone(self, memory: str, sandbox: str, problem: SidecarError) -> None:
        """A caller found a sandbox gone."""
        await self._gone((memory, self._sidecar.sandboxes.name_of(sandbox)), problem)

    async def detach(self, attachment: Attachment) -> None:
        """Stop looking after it, unless another has taken its place."""
        held = await self._attachments.find(*attachment.place)
        if held is None or held.attachment.attached != attachment.attached:
            return
        await self._attachments.remove(held)
        self._drop(attachment.place)
        self._lost_here.pop(attachment.place, None)
        about = {"memory": attachment.memory, "sandbox": attachment.sandbox}
        self._sidecar.events.publish("attachment.detached", **about)

    # Others on the same store

    async def tick(self) -> None:
        """Renew the lease; take up what is ours, take over what nobody looks after, let go of what others took."""
        async with self._turn:
            began = time.monotonic()
            await self.lease.renew()
            living = await self.lease.living()
            found = {held.place: held for held in await self._attachments.all()}
            for double in self._attachments.doubles:
                await self._attachments.remove(double)
            taken = {held.key for held in found.values()}
            for place, kept in list(self._kept.items()):
                if place not in found and kept.written < began:
                    await self._missing(place, kept, taken)
            orphans = []
            for place, held in found.items():
                known = self._kept.get(place)
                if known is None or known.written < began:
                    orphans += await self._consider(held, living)
            await self._take_over(orphans)

    async def _missing(self, place: Place, kept: _Kept, taken: set[str]) -> None:
        """One of ours is not in the store any more: it was detached, unless somebody altered it or took its key."""
        if kept.held.key in self._attachments.unreadable:
            return
        if kept.held.key not in taken:
            self._drop(place)
            return
        # A service of an earlier version, which knows one sandbox per memory, put another one in its place.
        with contextlib.suppress(HeadMoved):
            kept.held = await self._attachments.move(kept.held)
            kept.written = time.monotonic()

    async def _consider(self, held: Held, living: set[str]) -> list[Held]:
        """What an attachment that was found in the store means to us. Return it, if no living service looks after it."""
        place, attachment, owner = held.place, held.attachment, held.attachment.owner
        if await self._put_back(held):
            return []
        if attachment.forgettable:
            await self._attachments.remove(held)
            self._drop(place)
        elif owner == self.lease.instance:
            await self._take_up(held)
        elif place in self._kept:
            self._log.warning("another service has taken over", memory=place[0], sandbox=place[1], owner=owner)
            self._drop(place)
        elif owner not in living and attachment.looked_after:
            return [held]
        return []

    async def _take_up(self, held: Held) -> None:
        """One of ours, as another service may have changed it: closed, say."""
        kept = self._kept.get(held.place)
        if kept is None:
            self._keep(held)
            return
        if kept.held.version == held.version:
            if kept.held.attachment != held.attachment:  # the store could not take it when it was to be written
                kept.held = await self._attachments.write(kept.held.attachment, held)
            return
        before, kept.held = kept.held.attachment, held
        if (before.state, before.checkpoint_every) != (held.attachment.state, held.attachment.checkpoint_every):
            self._plan(held.place)

    async def _put_back(self, held: Held) -> bool:
        """Whether somebody put an earlier state of an attachment of ours back: then ours is written again."""
        kept = self._kept.get(held.place)
        if kept is None or not _is_earlier(held.attachment, kept.held.attachment):
            return False
        self._log.error("an earlier attachment was put back; it is replaced", memory=held.attachment.memory)
        with contextlib.suppress(HeadMoved):
            kept.held = await self._attachments.write(kept.held.attachment, held)
            kept.written = time.monotonic()
        return True

    async def _take_over(self, orphans: Iterable[Held]) -> None:
        taken = []
        for held in orphans:
            with contextlib.suppress(HeadMoved):
                taken.append((held, await self._attachments.take(held, self.lease.instance)))
        for memory in {held.attachment.memory for held, _ in taken}:
            # Whatever the former owners have under way can no longer become the head.
            await self._sidecar.engine.repository.fence(memory)
        for held, ours in taken:
            attachment, former = ours.attachment, held.attachment.owner
            self._keep(ours)
            self._log.info("taken over", memory=attachment.memory, sandbox=attachment.sandbox, former=former)
            self._sidecar.events.publish(
                "attachment.taken-over",
                memory=attachment.memory,
                sandbox=attachment.sandbox,
                conversation=attachment.conversation,
                former=former,
                generation=attachment.generation,
            )
            # Nobody knows how long it was not looked after.
            self._jobs.once(_job("end", ours.place), random.uniform(0, 1), self._checkpoint, ours.place)

    # What is done when

    def _keep(self, held: Held, *, opened_here: bool = False) -> None:
        self._kept[held.place] = _Kept(held, opened_here)
        self._plan(held.place)

    def _plan(self, place: Place) -> None:
        """Checkpoints for one that is looked after; one that is not is only looked at, to tell when it has ended."""
        kept = self._kept.get(place)
        if kept is None:
            return
        attachment, every = kept.held.attachment, kept.held.attachment.checkpoint_every
        if attachment.looked_after:
            self._jobs.cancel(_job("look", place))
            self._jobs.every(_job("checkpoint", place), every, self._checkpoint, place, jitter=every * JITTER)
            return
        self._jobs.cancel(_job("checkpoint", place), _job("watch", place), _job("end", place))
        if attachment.state == IDLE:
            self._jobs.once(_job("look", place), every, self._look, place, every)

    def _drop(self, place: Place) -> None:
        self._kept.pop(place, None)
        self._jobs.cancel(*(_job(kind, place) for kind in ("checkpoint", "watch", "end", "look")))

    def _plan_end(self, place: Place, ends_at: float) -> None:
        """Plan an export in good time before a sandbox ends; one, and not another, where the time is short already: each
        might prolong its life a little."""
        kept, left = self._kept.get(place), ends_at - time.time()
        if kept is None:
            return
        lead = self._sidecar.settings.lead
        if left <= lead:
            if ends_at <= kept.ends_at + 1:
                return
            kept.ends_at = ends_at
        self._jobs.once(_job("end", place), left - lead if left > lead else left / 2, self._checkpoint, place)

    async def _watch_end(self, place: Place, *, nothing_new: bool = False) -> None:
        """Find out when its provider will end a sandbox, and plan an export before that."""
        if not self._is_looked_after(place):
            return
        try:
            presence = await self._presence(place)
        except GONE as problem:
            await self._gone(place, problem)
        except SandboxError as problem:
            attachment = self._current(place)
            if attachment is not None and attachment.problem_code != problem.code:  # else it was told
                self._log.warning("cannot see when it ends", memory=place[0], sandbox=place[1], **problem.as_dict())
        else:
            if presence.ends_at is not None:
                self._plan_end(place, presence.ends_at)
            if (kept := self._kept.get(place)) is not None:
                kept.unused_until = presence.ends_at or 0.0 if presence.slides and nothing_new else 0.0

    async def _presence(self, place: Place) -> Presence:
        async with self._sidecar.sandboxes.fresh(place[1]) as sandbox:
            return await sandbox.connect()

    async def _look(self, place: Place, pause: float) -> None:
        """Whether a sandbox that its caller has exported is still there; ever less often."""
        kept = self._kept.get(place)
        if kept is None or kept.held.attachment.state != IDLE or kept.held.attachment.lasting:
            return
        try:
            await self._presence(place)
        except GONE as problem:
            await self._gone(place, problem)
            return
        except SandboxError:
            pass
        if pause < FORGOTTEN_AFTER[IDLE]:
            self._jobs.once(_job("look", place), 2 * pause, self._look, place, 2 * pause)

    def _is_looked_after(self, place: Place) -> bool:
        kept = self._kept.get(place)
        return kept is not None and kept.held.attachment.looked_after

    async def _checkpoint(self, place: Place) -> None:
        """Export, if there is anything new, and look again when it ends. What went wrong is noted and told by then."""
        if await self._is_unused(place):
            return
        nothing_new = False
        with contextlib.suppress(SidecarError):
            nothing_new = (await self.save(place, CHECKPOINT)).outcome is ExportOutcome.UNCHANGED
        await self._watch_end(place, nothing_new=nothing_new)

    async def _is_unused(self, place: Place) -> bool:
        """Whether nobody has used a sandbox since an export found nothing new in it, and one more would only keep it from its
        end."""
        kept = self._kept.get(place)
        if kept is None or not kept.unused_until:
            return False
        try:
            presence = await self._presence(place)
        except SandboxAsleep:
            return True  # and it keeps what it has
        except SandboxError:
            return False  # an export says what is the matter
        return presence.slides and presence.ends_at is not None and presence.ends_at <= kept.unused_until + 1

    async def save(self, place: Place, why: str) -> ExportReceipt:
        """Export a sandbox of ours, and note whether it is saved. Raise a ``SidecarError`` when the export failed."""
        kept = self._kept.get(place)
        if kept is None:
            raise NotAttached(f"{place[1]} is not looked after by this service.")
        try:
            receipt = await self._saving.save(kept.held.attachment, lambda: self._current(place), why)
        except GONE as problem:
            await self._gone(place, problem)
            raise
        except (ConversationClosed, LeaseLost):
            raise
        except SidecarError as problem:
            trouble = unsaved_by(problem)
            await self._note(place, lambda one: after_trouble(one, trouble) if one.looked_after else one)
            raise
        # One that its caller has exported meanwhile stands as that export said.
        await self._note(place, lambda one: after_checkpoint(one, receipt) if one.looked_after else one)
        return receipt

    def _current(self, place: Place) -> Attachment | None:
        kept = self._kept.get(place)
        return kept.held.attachment if kept else None

    async def _gone(self, place: Place, problem: SidecarError) -> None:
        """A sandbox is gone: within a conversation, that is told as loudly as can be."""
        async with self._ending.held(place):  # a caller and a checkpoint may find out at the same time
            attachment = self._current(place)
            if attachment is None or attachment.state in (LOST, ENDED):
                return
            if attachment.state == IDLE or await was_exported(self._sidecar.engine.repository, attachment):
                await self._ended(attachment)
            else:
                await self._lost(attachment, problem)
            self._plan(place)

    async def _ended(self, attachment: Attachment) -> None:
        about = {"memory": attachment.memory, "sandbox": attachment.sandbox, "conversation": attachment.conversation}
        self._log.info("sandbox ended", **about)
        self._sidecar.events.publish("sandbox.ended", **about, last_saved=attachment.saved)
        await self._note(attachment.place, lambda one: one.turned(ENDED))
        kept = self._kept.get(attachment.place)
        if kept is not None:
            # A service of an earlier version would look after it, and call it lost.
            with contextlib.suppress(SidecarError):
                kept.held = await self._attachments.move(kept.held)
                kept.written = time.monotonic()

    async def _lost(self, attachment: Attachment, problem: SidecarError) -> None:
        about = {"memory": attachment.memory, "sandbox": attachment.sandbox, "conversation": attachment.conversation}
        unsaved = attachment.unsaved_seconds
        self._log.critical("sandbox lost", **about, unsaved_seconds=unsaved)
        self._sidecar.events.publish(
            "sandbox.lost",
            **about,
            last_saved=attachment.saved,
            snapshot=attachment.snapshot or None,
            unsaved_seconds=unsaved,
            error=problem.as_dict(),
        )
        trouble = unsaved_by(problem)
        words = f"{trouble.kind}: {problem.message} What was written in its last {unsaved:.0f} seconds may be lost."
        await self._note(attachment.place, lambda one: replace(one.turned(LOST), problem=words, hint=trouble.hint))
        self._lost_here[attachment.place] = attachment

    # Writing down how it stands

    async def _note(self, place: Place, change: Callable[[Attachment], Attachment]) -> None:
        """Write down how an attachment of ours stands. Nothing of that is worth a failure; it is known here all the same."""
        with contextlib.suppress(SidecarError):
            await self._change(place, change)

    async def _change(self, place: Place, change: Callable[[Attachment], Attachment]) -> bool:
        """Swap an attachment of ours for what ``change`` makes of it. Let go of one that is not ours (any more): False."""
        async with self._changing.held(place):
            for _ in range(MOST_TRIES):
                if (kept := self._kept.get(place)) is None:
                    return False
                before, after = kept.held.attachment, change(kept.held.attachment)
                if after == before:
                    return True
                try:
                    kept.held = await self._attachments.write(after, kept.held)
                except HeadMoved:
                    if not await self._is_still_ours(place, kept):
                        self._drop(place)
                        return False
                    continue
                except SidecarError:
                    kept.held = replace(kept.held, attachment=after)
                    raise
                kept.written = time.monotonic()
                self._tell_relief(before, after)
                return True
            raise HeadMoved(f"The attachment of {place[1]} is written by others all the time.")

    async def _is_still_ours(self, place: Place, kept: _Kept) -> bool:
        """Whether one that somebody wrote since is still ours to write, as it is now."""
        there = await self._attachments.find(*place)
        if there is None and await self._attachments.is_taken(kept.held):
            there = await self._attachments.move(kept.held)
        if there is None or there.attachment.owner != self.lease.instance:
            return False
        kept.held = there
        return True

    async def _change_anothers(self, row: Held, change: Callable[[Attachment], Attachment]) -> None:
        """The same for one that another service looks after, or none; that one sees it when it looks around."""
        held: Held | None = row
        for _ in range(MOST_TRIES):
            if held is None:
                return
            after = change(held.attachment)
            if after == held.attachment:
                return
            try:
                await self._attachments.write(after, held)
                self._tell_relief(held.attachment, after)
                return
            except HeadMoved:
                held = await self._attachments.find(*row.place)

    def _tell_relief(self, before: Attachment, after: Attachment) -> None:
        """What went wrong was told once, when it began; so is its end."""
        if before.problem and not after.problem:
            about = {"memory": after.memory, "sandbox": after.sandbox, "conversation": after.conversation}
            self._log.warning("saved again", problem=before.problem_code, **about)

    # The end of this service

    async def stop(self, seconds: float, *, with_callers: bool = False) -> list[Attachment]:
        """Export all that is looked after, what was not saved for longest first, and let go of it. Return what is not saved.

        ``with_callers``: those who opened conversations here have ended before us, so these are closed.
        """
        self._jobs.stop()
        deadline = time.monotonic() + seconds
        waiting = sorted(self.looked_after, key=lambda one: -one.unsaved_seconds)
        if with_callers:
            self._warn_of_open(waiting)
        saving = [asyncio.create_task(self._last(one.place)) for one in waiting]
        if saving:
            await asyncio.wait(saving, timeout=max(0.0, deadline - time.monotonic()))
        unsaved = [one.place for one, task in zip(waiting, saving, strict=True) if not task.done() or not task.result()]
        for task in saving:
            task.cancel()
        # And what its caller's export, the last word on it, did not save.
        unsaved += [one.place for one in self.attachments if one.state in (IDLE, ENDED) and one.problem]
        standing = {**{one.place: one for one in waiting}, **{one.place: one for one in self.attachments}}
        left = [standing[place] for place in dict.fromkeys([*unsaved, *self._lost_here]) if place in standing]
        await self._let_go({one.place for one in left}, with_callers=with_callers)
        with contextlib.suppress(SidecarError):
            await self.lease.release()
        return left

    def _warn_of_open(self, attachments: Iterable[Attachment]) -> None:
        for one in attachments:
            if one.state == OPEN and not one.lasting and self._kept[one.place].opened_here:
                about = {"memory": one.memory, "sandbox": one.sandbox, "conversation": one.conversation}
                self._log.warning("restored and never exported; it is exported now", **about)

    async def _let_go(self, unsaved: set[Place], *, with_callers: bool) -> None:
        def let_go(place: Place, kept: _Kept) -> Callable[[Attachment], Attachment]:
            over = with_callers and kept.opened_here and place not in unsaved
            return lambda one: replace(one.turned(IDLE) if over and not one.lasting else one, owner="")

        mine = [(place, kept) for place, kept in self._kept.items() if kept.held.attachment.looked_after]
        await asyncio.gather(*(self._note(place, let_go(place, kept)) for place, kept in mine))

    async def _last(self, place: Place) -> bool:
        """Whether it is saved, or will be without us."""
        try:
            receipt = await self.save(place, SHUTDOWN)
        except (SandboxAsleep, TakenOver):
            return True  # a sandbox that sleeps keeps what it has
        except ConversationClosed:
            attachment = self._current(place)
            return attachment is None or not attachment.problem
        except GONE:
            attachment = self._current(place)
            return attachment is None or attachment.state == ENDED
        except SidecarError as problem:
            self._log.error("not saved", memory=place[0], sandbox=place[1], **problem.as_dict())
            return False
        return unsaved_after(receipt) is None


def _job(kind: str, place: Place) -> str:
    return f"{kind} {place[0]} {place[1]}"


def _is_earlier(found: Attachment, known: Attachment) -> bool:
    return found.generation < known.generation and found.attached <= known.attached
