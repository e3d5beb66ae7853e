"""The ledger: this service's attachments in memory, kept in step with the store.

The store decides. Other services write there too: a caller may export through any of them, and one of them takes over
if this service's lease expires. So every change is a compare-and-swap. If it fails, it is applied again on top of what
the other service wrote, as long as this service still owns the attachment.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import field, replace

import structlog

from sidecar.errors import ObjectRefused, SidecarError, SwapLost
from sidecar.host.values import dataclass
from sidecar.service.attachments.attachment import Attachment, AttachmentKey, Attachments, StoredAttachment
from sidecar.service.operations import Locks

MOST_TRIES = 10
"""How often a change is tried again on an attachment that other services write at the same time."""
Change = Callable[[Attachment], Attachment]


@dataclass(slots=True)
class OwnedAttachment:
    """An attachment that this service owns."""

    held: StoredAttachment
    opened_here: bool = False
    """A restore through this service opened its conversation."""
    written: float = field(default_factory=time.monotonic)
    """When this service last wrote it. A listing that began earlier is out of date for it."""

    @property
    def attachment(self) -> Attachment:
        return self.held.attachment

    def hold(self, held: StoredAttachment) -> None:
        self.held, self.written = held, time.monotonic()


class Ledger:
    """The attachments that this service owns, by memory and sandbox."""

    def __init__(self, attachments: Attachments, instance: str) -> None:
        self._stored = attachments
        self._instance = instance
        self._entries: dict[AttachmentKey, OwnedAttachment] = {}
        self._changing = Locks()
        self.on_change: Callable[[AttachmentKey], None] = lambda place: None
        """Called with an attachment that this service gained or lost, or whose state or export schedule changed."""
        self._log = structlog.get_logger("sidecar").bind(instance=instance)

    @property
    def attachments(self) -> list[Attachment]:
        """All attachments of this service, including those that have ended and are listed for a limited time."""
        return [entry.attachment for entry in self._entries.values()]

    @property
    def looked_after(self) -> list[Attachment]:
        return [one for one in self.attachments if one.looked_after]

    def find(self, place: AttachmentKey) -> Attachment | None:
        entry = self._entries.get(place)
        return entry.attachment if entry else None

    def held(self, place: AttachmentKey) -> StoredAttachment | None:
        entry = self._entries.get(place)
        return entry.held if entry else None

    def was_opened_here(self, place: AttachmentKey) -> bool:
        entry = self._entries.get(place)
        return entry is not None and entry.opened_here

    def keep(self, held: StoredAttachment, *, opened_here: bool = False) -> None:
        self._entries[held.place] = OwnedAttachment(held, opened_here)
        self.on_change(held.place)

    def drop(self, place: AttachmentKey) -> None:
        self._entries.pop(place, None)
        self.on_change(place)

    # Changes

    async def begin(
        self, place: AttachmentKey, make: Callable[[Attachment | None], Attachment], *, opened_here: bool
    ) -> tuple[Attachment, Attachment | None]:
        """Write an attachment that begins or continues, as ``make`` builds it from the present one. Return the new one
        and the one before."""
        async with self._changing.held(place):
            entry = self._entries.get(place)
            before = entry.held if entry else await self._find_readable(place)
            for _ in range(MOST_TRIES):
                # Built again for every attempt, on top of what another service may have written since.
                mine = make(before.attachment if before else None)
                with contextlib.suppress(SwapLost):
                    held = await (self._stored.write(mine, before) if before else self._stored.add(mine))
                    self.keep(held, opened_here=opened_here or (entry is not None and entry.opened_here))
                    return mine, before.attachment if before else None
                before = await self._find_readable(place)
        raise _build_busy_error(place)

    async def _find_readable(self, place: AttachmentKey) -> StoredAttachment | None:
        """Return the attachment in the store; ``None`` also if it is refused as altered, since it will be replaced."""
        try:
            return await self._stored.find(*place)
        except ObjectRefused:
            return None

    async def note(self, place: AttachmentKey, change: Change) -> None:
        """Change an attachment and ignore errors: the change is kept in memory, and written with the next comparison
        with the store."""
        with contextlib.suppress(SidecarError):
            await self.change(place, change)

    async def change(self, place: AttachmentKey, change: Change) -> bool:
        """Swap an attachment of this service for what ``change`` makes of it. Return ``False`` and drop it if another
        service owns it now."""
        async with self._changing.held(place):
            for _ in range(MOST_TRIES):
                if (entry := self._entries.get(place)) is None:
                    return False
                before, after = entry.attachment, change(entry.attachment)
                if after == before:
                    return True
                try:
                    entry.hold(await self._stored.write(after, entry.held))
                except SwapLost:
                    if not await self._read_again(place, entry):
                        self.drop(place)
                        return False
                    continue
                except SidecarError:
                    # The store failed: keep the change in memory with the old version, so that it can be written later
                    # (``_take_up``).
                    entry.held = replace(entry.held, attachment=after)
                    self._log_change(before, after)
                    raise
                self._log_change(before, after)
                return True
        raise _build_busy_error(place)

    async def release(self, place: AttachmentKey) -> bool:
        """Give up an attachment that another service is to take. Return ``False`` if it is not this service's any more.

        An export that is under way loses its right to move the head, as after a take-over.
        """
        async with self._changing.held(place):
            entry = self._entries.get(place)
            if entry is None:
                return False
            try:
                await self._stored.write(replace(entry.attachment, owner=""), entry.held)
            except SwapLost:
                return False  # changed meanwhile: the next comparison with the store tells
            self.drop(place)
            return True

    async def _read_again(self, place: AttachmentKey, entry: OwnedAttachment) -> bool:
        """After a lost swap, take what the store has now. Return ``False`` if another service owns it, or none."""
        there = await self._stored.find(*place)
        if there is None and await self._stored.is_taken(entry.held):
            there = await self._stored.move(entry.held)
        if there is None or there.attachment.owner != self._instance:
            return False
        entry.held = there
        return True

    async def change_foreign(self, row: StoredAttachment, change: Change) -> None:
        """Change an attachment that another service owns, or none; its owner sees the change at its next comparison
        with the store."""
        held: StoredAttachment | None = row
        for _ in range(MOST_TRIES):
            if held is None or (after := change(held.attachment)) == held.attachment:
                return
            try:
                await self._stored.write(after, held)
            except SwapLost:
                held = await self._stored.find(*row.place)
                continue
            self._log_recovery(held.attachment, after)
            return

    async def move_out_of_sight(self, place: AttachmentKey) -> None:
        """Move an attachment to a key that services of earlier versions do not list: they would go on exporting its
        sandbox."""
        async with self._changing.held(place):
            if (entry := self._entries.get(place)) is not None:
                with contextlib.suppress(SidecarError):
                    entry.hold(await self._stored.move(entry.held))

    def _log_change(self, before: Attachment, after: Attachment) -> None:
        self._log_recovery(before, after)
        if _needs_new_plan(before, after):
            self.on_change(after.place)

    def _log_recovery(self, before: Attachment, after: Attachment) -> None:
        """Log when a problem is over. It was logged once, when it began."""
        if before.problem and not after.problem:
            about = {"memory": after.memory, "sandbox": after.sandbox, "conversation": after.conversation}
            self._log.warning("saved again", problem=before.problem_code, **about)

    # In step with the store

    async def look_around(self, living: set[str]) -> list[StoredAttachment]:
        """Compare with the store: add and update this service's attachments, drop those that other services took or
        detached. Return the attachments whose owner has no valid lease."""
        began = time.monotonic()
        found = {held.place: held for held in await self._stored.all(living - {self._instance})}
        await self._clear_doubles(living)
        taken = {held.key for held in found.values()}
        for place, entry in list(self._entries.items()):
            if place not in found and entry.written < began:
                await self._on_missing(place, entry, taken)
        orphans = []
        for place, held in found.items():
            known = self._entries.get(place)
            if known is not None and known.written >= began:
                continue
            if self._has_no_owner(held, living):
                orphans.append(held)
            else:
                await self._follow_store(held)
        return orphans

    async def _clear_doubles(self, living: set[str]) -> None:
        """Remove second objects for the same memory and sandbox."""
        # Not those of other services with a valid lease: one of them may be moving an attachment from one key to the
        # other.
        for double in self._stored.doubles:
            if double.attachment.owner == self._instance or double.attachment.owner not in living:
                await self._stored.remove(double)

    async def _on_missing(self, place: AttachmentKey, entry: OwnedAttachment, taken: Iterable[str]) -> None:
        """Handle an attachment of this service that is not in the store any more: it was detached, unless its object
        was altered or its key is used for another sandbox."""
        if entry.held.key in self._stored.unreadable:
            return
        if entry.held.key not in taken:
            self.drop(place)
            return
        # A service of an earlier version, which knows one sandbox per memory, put another one in its place.
        with contextlib.suppress(SwapLost):
            entry.hold(await self._stored.move(entry.held))

    def _has_no_owner(self, held: StoredAttachment, living: set[str]) -> bool:
        """Whether an attachment in the store is to be looked after and its owner, not this service, has no valid
        lease."""
        owned = held.place in self._entries or held.attachment.owner in {self._instance, *living}
        return not owned and held.attachment.looked_after

    async def _follow_store(self, held: StoredAttachment) -> None:
        """Bring this ledger in step with an attachment in the store that has an owner, or has ended."""
        place, owner = held.place, held.attachment.owner
        entry = self._entries.get(place)
        if entry is not None and _is_earlier(held.attachment, entry.attachment):
            await self._replace_earlier(held, entry)
        elif held.attachment.forgettable:
            if await self._stored.remove_if_same(held):
                self.drop(place)
        elif owner == self._instance:
            await self._take_up(held)
        elif entry is not None:
            self._log.warning("another service has taken over", memory=place[0], sandbox=place[1], owner=owner)
            self.drop(place)

    async def _take_up(self, held: StoredAttachment) -> None:
        """Update the ledger from an attachment of this service that another service may have changed, for example
        closed."""
        entry = self._entries.get(held.place)
        if entry is None:
            self.keep(held)
        elif entry.held.version == held.version:
            if entry.attachment != held.attachment:  # an earlier write to the store failed
                with contextlib.suppress(SwapLost):
                    entry.hold(await self._stored.write(entry.attachment, held))
        else:
            before, entry.held = entry.attachment, held
            if _needs_new_plan(before, held.attachment):
                self.on_change(held.place)

    async def _replace_earlier(self, held: StoredAttachment, entry: OwnedAttachment) -> None:
        """Write an attachment of this service again: the store has an earlier state of it, for example restored from a
        copy."""
        self._log.error("an earlier attachment was put back; it is replaced", memory=held.attachment.memory)
        with contextlib.suppress(SwapLost):
            entry.hold(await self._stored.write(entry.attachment, held))


def _needs_new_plan(before: Attachment, after: Attachment) -> bool:
    """Whether the export schedule depends on the difference."""
    return (before.state, before.lasting, before.checkpoint_every) != (
        after.state,
        after.lasting,
        after.checkpoint_every,
    )


def _is_earlier(found: Attachment, known: Attachment) -> bool:
    return found.generation < known.generation and found.attached <= known.attached


def _build_busy_error(place: AttachmentKey) -> SwapLost:
    return SwapLost(f"The attachment of {place[1]} is written by others all the time.")
