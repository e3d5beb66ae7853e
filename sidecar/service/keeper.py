"""Look after the attached sandboxes: checkpoints, an export before the end, and taking over from services that died."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass, replace
from typing import Any

import structlog

from sidecar.errors import (
    HeadMoved,
    ObjectRefused,
    SandboxAsleep,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SidecarError,
)
from sidecar.ids import attachment_key
from sidecar.service.attachments import Attachment, Attachments, Held, NotAttached, now
from sidecar.service.jobs import Jobs
from sidecar.service.leases import Lease
from sidecar.service.operations import Receipt
from sidecar.service.saving import Saving
from sidecar.service.sidecar import Sidecar

JITTER = 0.1


@dataclass(slots=True)
class _Kept:
    """An attachment of ours."""

    held: Held
    ends_at: float | None = None


class Keeper:
    def __init__(self, sidecar: Sidecar, jobs: Jobs) -> None:
        self._sidecar = sidecar
        self._jobs = jobs
        store = sidecar.engine.repository.store
        self.lease = Lease(store, sidecar.settings.lease)
        self._attachments = Attachments(store)
        self._saving = Saving(sidecar, self._attachments, self.lease)
        self._kept: dict[str, _Kept] = {}
        self._turn = asyncio.Lock()
        self._log = structlog.get_logger("sidecar").bind(instance=self.lease.instance)

    async def start(self) -> None:
        """Say that we live, take what nobody looks after, and go on doing both."""
        await self.tick()
        self._jobs.every("look around", self.lease.renew_every, self.tick)

    @property
    def alive(self) -> bool:
        return self._jobs.running and self.lease.held

    @property
    def attachments(self) -> list[Attachment]:
        """Those this service looks after."""
        return [kept.held.attachment for kept in self._kept.values()]

    def at_risk(self) -> list[Attachment]:
        """Ours that are lost, or were not saved for two checkpoints or since the last attempt failed."""
        return [one for one in self.attachments if one.state == "lost" or one.problem or one.overdue]

    async def find(self, memory: str) -> Attachment:
        """Raise ``NotAttached``."""
        held = await self._attachments.find(memory)
        if held is None:
            raise NotAttached(f"No sandbox of {memory} is attached.")
        return held.attachment

    async def find_all(self) -> list[Attachment]:
        return [held.attachment for held in await self._attachments.all()]

    async def attach(self, wanted: Attachment) -> Attachment:
        """Look after a sandbox from now on, in place of any other of that memory."""
        while True:
            before, there = await self._before(wanted.memory)
            generation = before.attachment.generation + 1 if before else 1
            mine = replace(wanted, owner=self.lease.instance, generation=generation, attached=now(), saved=now())
            with contextlib.suppress(HeadMoved):
                held = await self._attachments.write(mine, there)
                break
        await self._sidecar.engine.repository.fence(wanted.memory)
        self._keep(held)
        self._sidecar.events.publish("attachment.attached", memory=wanted.memory, sandbox=wanted.sandbox)
        return held.attachment

    async def _before(self, memory: str) -> tuple[Held | None, str | None]:
        """What is attached, and the version to replace; what is refused is replaced too."""
        try:
            before = await self._attachments.find(memory)
        except ObjectRefused as refused:
            return None, refused.version
        return before, before.version if before else None

    async def detach(self, attachment: Attachment) -> None:
        """Stop looking after it, unless another has taken its place."""
        held = await self._attachments.find(attachment.memory)
        if held is None or held.attachment.attached != attachment.attached:
            return
        await self._attachments.remove(attachment.memory)
        self._drop(attachment.memory)
        about = {"memory": attachment.memory, "sandbox": attachment.sandbox}
        self._sidecar.events.publish("attachment.detached", **about)

    async def tick(self) -> None:
        """Renew the lease; take up what is ours, take over what nobody looks after, let go of what others took."""
        async with self._turn:
            await self.lease.renew()
            living = await self.lease.living()
            found = {held.attachment.memory: held for held in await self._attachments.all()}
            for memory in [memory for memory in self._kept if memory not in found]:
                # One that somebody altered is still ours to look after.
                if attachment_key(memory) not in self._attachments.unreadable:
                    self._drop(memory)
            for memory, held in found.items():
                owner = held.attachment.owner
                if await self._put_back(held):
                    continue
                if owner == self.lease.instance:
                    if memory not in self._kept:
                        self._keep(held)
                elif memory in self._kept:
                    self._log.warning("another service has taken over", memory=memory, owner=owner)
                    self._drop(memory)
                elif owner not in living:
                    await self._take_over(held)

    async def _put_back(self, held: Held) -> bool:
        """Whether somebody put an earlier state of an attachment of ours back: then ours is written again."""
        kept = self._kept.get(held.attachment.memory)
        if kept is None or not _is_earlier(held.attachment, kept.held.attachment):
            return False
        self._log.error("an earlier attachment was put back; it is replaced", memory=held.attachment.memory)
        with contextlib.suppress(HeadMoved):
            kept.held = await self._attachments.write(kept.held.attachment, held.version)
        return True

    async def _take_over(self, held: Held) -> None:
        try:
            taken = await self._attachments.take(held, self.lease.instance)
        except HeadMoved:
            return
        attachment = taken.attachment
        # Whatever the former owner has under way can no longer become the head.
        await self._sidecar.engine.repository.fence(attachment.memory)
        self._keep(taken)
        self._log.info("taken over", memory=attachment.memory, sandbox=attachment.sandbox, former=held.attachment.owner)
        self._sidecar.events.publish(
            "attachment.taken-over",
            memory=attachment.memory,
            sandbox=attachment.sandbox,
            former=held.attachment.owner,
            generation=attachment.generation,
        )
        # Nobody knows how long it was not looked after.
        self._jobs.once(f"end {attachment.memory}", random.uniform(0, 1), self._checkpoint, attachment.memory)

    def _keep(self, held: Held) -> None:
        memory, every = held.attachment.memory, held.attachment.checkpoint_every
        self._kept[memory] = _Kept(held)
        if held.attachment.state == "lost":
            return
        self._jobs.every(f"checkpoint {memory}", every, self._checkpoint, memory, jitter=every * JITTER)
        self._jobs.once(f"watch {memory}", 0, self._watch_end, memory)

    def _drop(self, memory: str) -> None:
        self._kept.pop(memory, None)
        self._jobs.cancel(f"checkpoint {memory}", f"watch {memory}", f"end {memory}")

    async def _watch_end(self, memory: str) -> None:
        """Find out when its provider will end a sandbox, and plan an export before that."""
        kept = self._kept.get(memory)
        if kept is None:
            return
        try:
            async with self._sidecar.sandboxes.fresh(kept.held.attachment.sandbox) as sandbox:
                kept.ends_at = (await sandbox.connect()).ends_at
        except (SandboxGone, SandboxNotFound) as problem:
            await self._lost(memory, problem)
            return
        except SandboxError as problem:
            self._log.warning("cannot see when it ends", memory=memory, **problem.as_dict())
            return
        if kept.ends_at is not None:
            left = kept.ends_at - time.time() - self._sidecar.settings.lead
            self._jobs.once(f"end {memory}", left, self._checkpoint, memory)

    async def _checkpoint(self, memory: str) -> None:
        """Export, if there is anything new, and look again when it ends."""
        await self.save(memory, "checkpoint")
        await self._watch_end(memory)

    async def save(self, memory: str, why: str) -> Receipt:
        """Export an attached sandbox of ours, and note that it is saved. Raise a ``SidecarError`` when it is not."""
        kept = self._kept.get(memory)
        if kept is None:
            raise NotAttached(f"{memory} is not looked after by this service.")
        try:
            receipt = await self._saving.save(kept.held.attachment, why)
        except (SandboxGone, SandboxNotFound) as problem:
            await self._lost(memory, problem)
            raise
        except SidecarError as problem:
            await self._note(memory, problem=f"{problem.code}: {problem.message}")
            raise
        await self._note(memory, saved=now(), snapshot=receipt.snapshot or "", problem="")
        return receipt

    async def _note(self, memory: str, **changes: Any) -> None:
        """Write down how an attachment of ours stands; nothing of that is worth a failure."""
        kept = self._kept.get(memory)
        if kept is None:
            return
        with contextlib.suppress(SidecarError):
            try:
                kept.held = await self._attachments.write(replace(kept.held.attachment, **changes), kept.held.version)
            except HeadMoved:
                self._drop(memory)

    async def _lost(self, memory: str, problem: SidecarError) -> None:
        """A sandbox is gone with what it had not saved: say so as loudly as can be."""
        kept = self._kept.get(memory)
        if kept is None or kept.held.attachment.state == "lost":
            return
        attachment = kept.held.attachment
        unsaved = attachment.unsaved_seconds
        self._log.critical("sandbox lost", memory=memory, sandbox=attachment.sandbox, unsaved_seconds=unsaved)
        self._sidecar.events.publish(
            "sandbox.lost",
            memory=memory,
            sandbox=attachment.sandbox,
            last_saved=attachment.saved,
            snapshot=attachment.snapshot or None,
            unsaved_seconds=unsaved,
            error=problem.as_dict(),
        )
        await self._note(memory, state="lost", problem=f"{problem.code}: {problem.message}")
        self._jobs.cancel(f"checkpoint {memory}", f"end {memory}")

    async def stop(self, seconds: float) -> list[Attachment]:
        """Export all that is attached, what was not saved for longest first, and let go of it. Return what is not saved."""
        self._jobs.stop()
        deadline = time.monotonic() + seconds
        waiting = sorted((one for one in self.attachments if one.state != "lost"), key=lambda one: -one.unsaved_seconds)
        saving = [asyncio.create_task(self._last(one.memory)) for one in waiting]
        if saving:
            await asyncio.wait(saving, timeout=max(0.0, deadline - time.monotonic()))
        unsaved = [one for one, task in zip(waiting, saving, strict=True) if not task.done() or not task.result()]
        for task in saving:
            task.cancel()
        for memory in list(self._kept):
            await self._note(memory, owner="")
        with contextlib.suppress(SidecarError):
            await self.lease.release()
        return unsaved

    async def _last(self, memory: str) -> bool:
        try:
            await self.save(memory, "shutdown")
        except SandboxAsleep:
            return True  # a sandbox that sleeps keeps what it has
        except SidecarError as problem:
            self._log.error("not saved", memory=memory, **problem.as_dict())
            return False
        return True


def _is_earlier(found: Attachment, known: Attachment) -> bool:
    return found.generation < known.generation and found.attached <= known.attached
