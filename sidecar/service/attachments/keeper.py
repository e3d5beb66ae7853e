"""The keeper: manages the service's attachments, both those of open conversations and lasting ones.

A restore through the service opens a conversation, an export by the caller closes it. In between, the sandbox is
exported at checkpoints, before its provider ends it, when this service stops, and when it takes over from a service
that died. The ``Ledger`` knows which attachments this service owns, the ``ExportSchedule`` when they are exported.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from functools import partial

import structlog

from sidecar.audit.lines import build_own_call
from sidecar.engine import RestoreRequest
from sidecar.engine.restores.choice import LATEST
from sidecar.errors import SandboxAsleep, SidecarError, SwapLost
from sidecar.models import answers
from sidecar.receipts import ExportReceipt, RestoreOutcome, RestoreReceipt
from sidecar.service.attachments.attachment import (
    ENDED,
    IDLE,
    LOST,
    OPEN,
    PARALLEL,
    Attachment,
    AttachmentKey,
    Attachments,
    CareOptions,
    NotAttached,
    StoredAttachment,
)
from sidecar.service.attachments.checkpoints import (
    CHECKPOINT,
    SHUTDOWN,
    AttachmentSaver,
    ConversationClosed,
    TakenOver,
    was_exported_last,
)
from sidecar.service.attachments.leases import Lease, LeaseLost
from sidecar.service.attachments.ledger import Ledger
from sidecar.service.attachments.schedule import GONE, ExportSchedule
from sidecar.service.attachments.stillness import Stillness
from sidecar.service.attachments.transitions import apply_checkpoint, apply_export, apply_opening, apply_problem
from sidecar.service.attachments.trouble import build_save_problem, find_save_problem
from sidecar.service.core import Sidecar
from sidecar.service.jobs.scheduler import Jobs
from sidecar.service.operations import Locks

UNEVEN = 0.1
"""By so much of its share a service may have more attachments before it hands any over."""
MOST_HANDED_OVER = 50
"""How many it hands over at a time."""
MOST_ROUNDS = 3
"""After so many looks an attachment without an owner is taken by whoever sees it, whatever the shares."""
LET_GO_SECONDS = 2.0
"""Time to write, at the end, that this service has released its attachments. If it is not enough, other services see it
from the lease, which ends."""


class Keeper:
    """Opens, exports, takes over and releases the attachments of this service."""

    def __init__(self, sidecar: Sidecar, jobs: Jobs, *, shares: bool = True) -> None:
        """``shares``: it hands over what is more than its share; not one that runs beside a command."""
        self._shares = shares
        self._sidecar = sidecar
        self._jobs = jobs
        store = sidecar.engine.repository.store
        self.lease = Lease(store, sidecar.settings.lease)
        self._attachments = Attachments(store)
        stillness = Stillness(sidecar.sandboxes, sidecar.engine.repository)
        self._saving = AttachmentSaver(sidecar, self._attachments, self.lease, stillness)
        self._ledger = Ledger(self._attachments, self.lease.instance)
        self._schedule = ExportSchedule(
            sidecar, jobs, self._ledger, save=partial(self.save, why=CHECKPOINT), report_gone=self._on_gone
        )
        self._turn = asyncio.Lock()
        self._ending = Locks()
        self._lost_here: dict[AttachmentKey, Attachment] = {}
        self._orphaned: dict[AttachmentKey, int] = {}
        """The attachments without an owner, and for how many looks."""
        self._begun_here: set[AttachmentKey] = set()
        self._log = structlog.get_logger("sidecar").bind(instance=self.lease.instance)
        sidecar.keeper = self

    async def start(self) -> None:
        """Renew the lease, take over attachments without a living owner, and keep doing both."""
        await self.lease.renew()
        self._jobs.every("look around", self.lease.renew_every, self.renew_and_look_around, first=0)
        # A separate job, because comparing with the store takes long when there is much to take over, and the lease
        # must not expire meanwhile.
        self._jobs.every("say that we live", self.lease.renew_every, self.lease.keep)
        if cron := self._sidecar.settings.find_cron(self._sidecar.settings.checkpoint_at):
            self._jobs.at("checkpoints", cron, self._schedule.checkpoint_all)

    @property
    def alive(self) -> bool:
        """Whether jobs run and the lease is valid."""
        return self._jobs.running and self.lease.held

    @property
    def attachments(self) -> list[Attachment]:
        """All attachments of this service, including those that have ended and are listed for a limited time."""
        return self._ledger.attachments

    @property
    def looked_after(self) -> list[Attachment]:
        return self._ledger.looked_after

    def list_known(self) -> list[Attachment]:
        """Return the attachments as this service saw them last, also those of other services; its own as they are."""
        ours = {one.place: one for one in self.attachments}
        return list({**{one.place: one for one in self._attachments.seen}, **ours}.values())

    def list_memories(self, sandbox: str) -> set[str]:
        """Return the memories that a sandbox is looked after for, or was until lately, as far as this service knows."""
        known = [*self._attachments.seen, *self.attachments]
        return {one.memory for one in known if one.sandbox == sandbox and one.state in (OPEN, IDLE)}

    def checkpoint_soon(self, place: AttachmentKey) -> None:
        """Export a sandbox of this service within a second: it is not known since when it was not."""
        self._schedule.export_soon(place)

    async def set_note(self, place: AttachmentKey, note: str) -> None:
        """Record something that there is to know about an attachment of this service."""
        await self._ledger.note(place, lambda one: replace(one, note=note))

    def has_begun(self, attachment: Attachment) -> bool:
        """Whether the sandbox was restored, attached or exported through this service, not just taken over."""
        return attachment.place in self._begun_here

    def at_risk(self) -> list[Attachment]:
        """Return this service's attachments that are lost, or were not saved for two checkpoints or by the last export."""
        return [one for one in self.attachments if one.at_risk]

    async def find(self, memory: str, sandbox: str = "") -> Attachment:
        """Return the attachment of a memory, or of this sandbox. Raise ``NotAttached`` or ``SeveralAttachments``."""
        if sandbox:
            held = await self._attachments.find(memory, self._sidecar.sandboxes.name_of(sandbox))
            if held is None:
                raise NotAttached(f"The sandbox {sandbox} is not attached to {memory}.")
            return held.attachment
        return await self._attachments.find_only(memory)

    async def find_all(self) -> list[Attachment]:
        """Return all attachments in the store, by memory and sandbox."""
        found = [held.attachment for held in await self._attachments.all()]
        return sorted(found, key=lambda one: one.place)

    async def forget_memory(self, memory: str) -> None:
        """Remove the attachments of a memory that is deleted: an export of one of its sandboxes would create it again."""
        await self._attachments.remove_all(memory)
        for one in self.attachments:
            if one.memory == memory:
                self._drop(one.place)

    # Begin and end

    async def open_conversation(
        self, request: RestoreRequest, receipt: RestoreReceipt, care: CareOptions, ends_at: float | None
    ) -> RestoreReceipt:
        """Open a conversation after a caller restored a memory into a sandbox, before the caller gets the receipt.

        The restore is valid without it: if the attachment cannot be written, a warning is added to the receipt.
        """
        try:
            if await self._opens_conversation(request, receipt):
                await self.look_after((receipt.memory, receipt.sandbox), care, receipt, ends_at)
        except SidecarError as problem:
            self._log.error("a conversation is not looked after", memory=receipt.memory, **problem.as_dict())
            told = f"This conversation is not looked after: {problem.message} Export it as soon as it has ended."
            return replace(receipt, warnings=[*receipt.warnings, told])
        return receipt

    async def _opens_conversation(self, request: RestoreRequest, receipt: RestoreReceipt) -> bool:
        """Whether the sandbox is expected to be exported again: not after a read-only restore, nor after one of an
        earlier snapshot."""
        if receipt.outcome is RestoreOutcome.INCOMPLETE or request.mode != "replace":
            return False
        if request.read_only:
            return False
        if request.snapshot == LATEST or receipt.snapshot is None:
            return True
        return (await self._sidecar.engine.repository.head(request.memory)).snapshot == receipt.snapshot

    async def look_after(
        self,
        place: AttachmentKey,
        care: CareOptions,
        restored: RestoreReceipt | None = None,
        ends_at: float | None = None,
    ) -> Attachment:
        """Attach a sandbox, in addition to other sandboxes of its memory. Return the attachment."""
        owner, every = self.lease.instance, self._sidecar.settings.checkpoint_every
        mine, before = await self._ledger.begin(
            place,
            lambda there: apply_opening(place, care, there, restored, owner=owner, every=every),
            opened_here=restored is not None,
        )
        self._lost_here.pop(place, None)
        self._begun_here.add(place)
        if before is not None and before.owner not in ("", owner):
            # Rewrite the head, so that an export that the former owner has under way loses its swap and checks its
            # ownership again.
            await self._sidecar.engine.repository.fence(place[0])
        if care.lasting:
            self._schedule.watch(place)
            self._sidecar.events.publish("attachment.attached", memory=place[0], sandbox=place[1])
        elif ends_at is not None:
            self._schedule.plan_end(place, ends_at)
        return mine

    async def find_stored(self, memory: str, sandbox: str) -> StoredAttachment | None:
        """Return the attachment of a sandbox that its caller is exporting. Errors are only logged: they must not fail
        the export."""
        if (ours := self._ledger.held((memory, sandbox))) is not None:
            return ours
        try:
            return await self._attachments.find(memory, sandbox)
        except SidecarError as problem:
            self._log.warning("cannot see whether it is attached", memory=memory, sandbox=sandbox, **problem.as_dict())
            return None

    async def close_conversation(self, receipt: ExportReceipt, row: StoredAttachment | None) -> None:
        """Close a conversation after its caller exported the sandbox, unless nothing of it was stored.

        Errors are only logged: they must not fail the export, and at worst there is one more checkpoint.
        """
        place = (receipt.memory, receipt.sandbox)
        self._begun_here.add(place)
        try:
            if not await self._ledger.change(place, lambda one: apply_export(one, receipt)) and row is not None:
                await self._ledger.change_foreign(row, lambda one: apply_export(one, receipt))
        except SidecarError as problem:
            self._log.warning("could not note an export", memory=place[0], sandbox=place[1], **problem.as_dict())

    async def report_gone(self, memory: str, sandbox: str, problem: SidecarError) -> None:
        """Handle that a caller found a sandbox gone."""
        await self._on_gone((memory, self._sidecar.sandboxes.name_of(sandbox)), problem)

    async def detach(self, attachment: answers.Attachment) -> None:
        """Remove an attachment, unless the sandbox was attached again in the meantime."""
        held = await self._attachments.find(*attachment.place)
        if held is None or held.attachment.attached != attachment.attached:
            return
        await self._attachments.remove(held)
        self._drop(attachment.place)
        about = {"memory": attachment.memory, "sandbox": attachment.sandbox}
        self._sidecar.events.publish("attachment.detached", **about)

    def _drop(self, place: AttachmentKey) -> None:
        self._ledger.drop(place)
        self._lost_here.pop(place, None)

    # Other services on the same store

    async def renew_and_look_around(self) -> None:
        """Renew the lease, compare the ledger with the store, and take over attachments whose owner has no valid lease."""
        async with self._turn:
            await self.lease.keep()
            living = await self.lease.list_living()
            orphans = await self._ledger.look_around(living)
            share = compute_share(sum(one.looked_after for one in self._attachments.seen), len(living))
            await self._take_over(self._choose_orphans(orphans, share))
            if self._shares and len(living) > 1:
                await self._hand_over(share)

    def _choose_orphans(self, orphans: Sequence[StoredAttachment], share: int) -> list[StoredAttachment]:
        """Return the orphans to take: those that fit into this service's share, and those that nobody took for long."""
        waited = {held.place: self._orphaned.get(held.place, 0) + 1 for held in orphans}
        self._orphaned = waited
        # Services that look at the same moment choose different ones.
        shuffled = random.sample(orphans, len(orphans))
        fitting = shuffled[: max(0, share - len(self.looked_after))]
        late = [held for held in shuffled if waited[held.place] > MOST_ROUNDS]
        return list({held.place: held for held in [*fitting, *late]}.values())

    async def _hand_over(self, share: int) -> None:
        """Give up attachments that are more than this service's share, so that others take them.

        Only one that was saved lately goes: its next export is by its new owner, who exports it soon.
        """
        mine = [one for one in self.looked_after if not one.problem and one.saved]
        excess = len(self.looked_after) - share
        if excess <= max(1.0, share * UNEVEN):
            return
        for one in sorted(mine, key=lambda one: one.unsaved_seconds)[: min(excess, MOST_HANDED_OVER)]:
            with contextlib.suppress(SidecarError):
                if await self._ledger.release(one.place):
                    self._log.info("handed over", memory=one.memory, sandbox=one.sandbox)

    async def _take_over(self, orphans: Iterable[StoredAttachment]) -> None:
        """Become the owner of these attachments by compare-and-swap. Those that another service took first are left
        out."""
        turns = asyncio.Semaphore(PARALLEL)

        async def take(held: StoredAttachment) -> tuple[StoredAttachment, StoredAttachment] | None:
            async with turns:
                try:
                    return held, await self._attachments.take(held, self.lease.instance)
                except SwapLost:  # another service was faster
                    return None

        async def fence(memory: str) -> None:
            async with turns:
                await self._sidecar.engine.repository.fence(memory)

        taken = [both for both in await asyncio.gather(*map(take, orphans)) if both]
        # Rewrite each head once, after the take-over is written: an export that a former owner still has under way
        # loses its swap, reads the attachment again and finds the new owner. Fencing first would leave a gap in which
        # it could still succeed.
        await asyncio.gather(*map(fence, {held.attachment.memory for held, _ in taken}))
        for held, ours in taken:
            self._resume_former(held.attachment.owner, ours)

    def _resume_former(self, former: str, ours: StoredAttachment) -> None:
        """Start exporting a sandbox that was taken over from ``former``, and publish that."""
        attachment = ours.attachment
        self._ledger.keep(ours)
        self._schedule.export_soon(ours.place)
        own = build_own_call("take-over", memory=attachment.memory, sandbox=attachment.sandbox)
        self._sidecar.trail.add(own, f"generation {attachment.generation}")
        self._log.info("taken over", memory=attachment.memory, sandbox=attachment.sandbox, former=former)
        self._sidecar.events.publish(
            "attachment.taken-over",
            memory=attachment.memory,
            sandbox=attachment.sandbox,
            conversation=attachment.conversation,
            former=former,
            generation=attachment.generation,
        )

    # Exports, and sandboxes that are gone

    async def save(self, place: AttachmentKey, why: str) -> ExportReceipt:
        """Export a sandbox of this service and record whether it is saved. Raise a ``SidecarError`` if the export
        failed."""
        attachment = self._ledger.find(place)
        if attachment is None:
            raise NotAttached(f"{place[1]} is not looked after by this service.")
        try:
            receipt = await self._saving.save(attachment, lambda: self._ledger.find(place), why)
        except GONE as problem:
            await self._on_gone(place, problem)
            raise
        except (ConversationClosed, LeaseLost):
            raise
        except SidecarError as problem:
            trouble = build_save_problem(problem)
            await self._ledger.note(place, lambda one: apply_problem(one, trouble) if one.looked_after else one)
            raise
        # If its caller exported it in the meantime, the result of that export stands.
        await self._ledger.note(place, lambda one: apply_checkpoint(one, receipt) if one.looked_after else one)
        return receipt

    async def _on_gone(self, place: AttachmentKey, problem: SidecarError) -> None:
        """Handle a sandbox that is gone: as ended if its caller exported it last, else as lost, with a critical log
        entry and an event."""
        async with self._ending.held(place):  # a caller and a checkpoint may find out at the same time
            attachment = self._ledger.find(place)
            if attachment is None or attachment.state in (LOST, ENDED):
                return
            if attachment.state == IDLE or await was_exported_last(self._sidecar.engine.repository, attachment):
                await self._note_ended(attachment)
            else:
                await self._note_lost(attachment, problem)

    async def _note_ended(self, attachment: Attachment) -> None:
        """Record a sandbox that is gone after its export."""
        about = {"memory": attachment.memory, "sandbox": attachment.sandbox, "conversation": attachment.conversation}
        self._log.info("sandbox ended", **about)
        self._sidecar.events.publish("sandbox.ended", **about, last_saved=attachment.saved)
        await self._ledger.note(attachment.place, lambda one: one.change_state(ENDED))
        # A service of an earlier version would try to export it and report it as lost.
        await self._ledger.move_out_of_sight(attachment.place)

    async def _note_lost(self, attachment: Attachment, problem: SidecarError) -> None:
        """Record a sandbox that is gone with unsaved changes, with a critical log entry and an event."""
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
        trouble = build_save_problem(problem)
        words = f"{trouble.kind}: {problem.message} What was written in its last {unsaved:.0f} seconds may be lost."
        await self._ledger.note(
            attachment.place, lambda one: replace(one.change_state(LOST), problem=words, hint=trouble.hint)
        )
        self._lost_here[attachment.place] = attachment

    # The end of this service

    async def stop(self, seconds: float, *, with_callers: bool = False) -> list[Attachment]:
        """Export all attached sandboxes, the longest unsaved first, and release them. Return those that are not saved.

        ``with_callers``: the callers that opened conversations here have ended too, so these conversations are closed.
        """
        self._jobs.stop()
        async with self._keep_lease():
            left = await self._save_all(time.monotonic() + seconds, with_callers=with_callers)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LET_GO_SECONDS):
                    await self._let_go({one.place for one in left}, with_callers=with_callers)
        with contextlib.suppress(SidecarError):
            await self.lease.release()
        return left

    @contextlib.asynccontextmanager
    async def _keep_lease(self) -> AsyncIterator[None]:
        """Renew the lease while the body runs: the jobs have ended, and other services must not take over what is still
        being saved."""

        async def renew() -> None:
            while True:
                await asyncio.sleep(self.lease.renew_every)
                with contextlib.suppress(SidecarError):
                    await self.lease.renew()

        renewing = asyncio.create_task(renew())
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.wait([renewing])

    async def _save_all(self, deadline: float, *, with_callers: bool) -> list[Attachment]:
        """Export everything until the deadline. Return the attachments that are not saved."""
        waiting = sorted(self.looked_after, key=lambda one: -one.unsaved_seconds)
        if with_callers:
            self._warn_of_open(waiting)
        saving = [asyncio.create_task(self._save_last(one.place)) for one in waiting]
        if saving:
            await asyncio.wait(saving, timeout=max(0.0, deadline - time.monotonic()))
        unsaved = [one.place for one, task in zip(waiting, saving, strict=True) if not task.done() or not task.result()]
        for task in saving:
            task.cancel()
        # Also those that their caller exported last, without saving all of it.
        unsaved += [one.place for one in self.attachments if one.state in (IDLE, ENDED) and one.problem]
        standing = {one.place: one for one in [*waiting, *self.attachments]}
        return [standing[place] for place in dict.fromkeys([*unsaved, *self._lost_here]) if place in standing]

    def _warn_of_open(self, attachments: Iterable[Attachment]) -> None:
        for one in attachments:
            if one.state == OPEN and not one.lasting and self._ledger.was_opened_here(one.place):
                about = {"memory": one.memory, "sandbox": one.sandbox, "conversation": one.conversation}
                self._log.warning("restored and never exported; it is exported now", **about)

    async def _save_last(self, place: AttachmentKey) -> bool:
        """Export before the service stops. Return whether the sandbox is saved, or needs no export by this service."""
        try:
            receipt = await self.save(place, SHUTDOWN)
        except (SandboxAsleep, TakenOver):
            return True  # a sleeping sandbox keeps its files
        except ConversationClosed:
            attachment = self._ledger.find(place)
            return attachment is None or not attachment.problem
        except GONE:
            attachment = self._ledger.find(place)
            return attachment is None or attachment.state == ENDED
        except SidecarError:  # the operation has logged it
            return False
        return find_save_problem(receipt) is None

    async def _let_go(self, unsaved: set[AttachmentKey], *, with_callers: bool) -> None:
        """Write that this service no longer owns its attachments."""
        turns = asyncio.Semaphore(PARALLEL)

        async def let_go(one: Attachment) -> None:
            over = with_callers and not one.lasting and one.place not in unsaved
            closed = over and self._ledger.was_opened_here(one.place)
            async with turns:
                await self._ledger.note(
                    one.place, lambda row: replace(row.change_state(IDLE) if closed else row, owner="")
                )

        await asyncio.gather(*map(let_go, self.looked_after))


def compute_share(attachments: int, services: int) -> int:
    """Return how many attachments each service is to have."""
    return -(-attachments // max(1, services))
