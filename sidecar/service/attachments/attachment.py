"""Attachments in the store: one small object per memory and sandbox, with its owner, changed by compare-and-swap."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import asdict, field, replace
from datetime import UTC, datetime

import msgspec
import structlog

from sidecar.errors import ObjectRefused, SnapshotError, SwapLost
from sidecar.format.checksums import decode_checksummed, encode_checksummed
from sidecar.host.values import dataclass
from sidecar.ids import ATTACHMENTS, CONVERSATIONS, build_attachment_key, build_conversation_key, is_plain_id
from sidecar.models import answers
from sidecar.policy.review import PENDING
from sidecar.ports import ObjectInfo, Store

OPEN, IDLE, LOST, ENDED = "open", "idle", "lost", "ended"
ATTACHED = "attached"
"""The state "open" as versions before there were conversations call it."""
AS_USER = "as-user "
"""Prefix of the state of an attachment that is exported as a named user."""
FORGOTTEN_AFTER = {IDLE: 3600.0, ENDED: 3600.0, LOST: 7 * 86400.0}
"""Seconds for which an attachment that is not exported any more is still listed."""
SETTLED_SECONDS = 3.0
"""Two writes within one tick of a store's clock (a second, with S3) look the same in a listing. An object that has
looked the same for longer than this was not written in the meantime."""
LET_BE_SECONDS = 900.0
"""For so long an attachment of another living service is not read again because it was written again at the same size:
with each checkpoint a new time is written, and every service would read what all others write."""
PARALLEL = 8
"""The most concurrent requests to the store, when there are many attachments."""

AttachmentKey = tuple[str, str]
"""A memory and one of its sandboxes."""


class NotAttached(SnapshotError):
    """No sandbox of the memory is attached, or not the one named."""

    code = "not-attached"
    default_hint = "PUT /v1/memories/{memory}/attachment attaches a sandbox."


class SeveralAttachments(SnapshotError):
    """Several sandboxes of the memory are attached, and none was named."""

    code = "several-attachments"
    default_hint = "Say which one is meant: ?sandbox=REF, or --sandbox REF."


class AttachmentDamaged(ObjectRefused):
    """The object that describes an attachment cannot be read or trusted."""

    code = "attachment-damaged"
    default_hint = "Attach the sandbox again."


class Attachment(answers.Attachment):
    """A sandbox the sidecar looks after, and what follows from its state by the clock of this machine."""

    __slots__ = ()

    @property
    def unsaved_seconds(self) -> float:
        """How much may be lost with the sandbox: since it was saved, or attached."""
        return _count_seconds_since(self.saved or self.attached)

    @property
    def looked_after(self) -> bool:
        return self.state == OPEN or (self.state == IDLE and self.lasting)

    @property
    def overdue(self) -> bool:
        return self.looked_after and self.unsaved_seconds > 2 * self.checkpoint_every

    @property
    def at_risk(self) -> bool:
        return self.state == LOST or bool(self.problem) or self.overdue

    @property
    def forgettable(self) -> bool:
        """Whether it has been listed long enough after its end, and can be removed."""
        return (
            not self.looked_after and _count_seconds_since(self.changed or self.attached) > FORGOTTEN_AFTER[self.state]
        )

    @property
    def problem_code(self) -> str:
        return self.problem.partition(":")[0]

    @property
    def is_pending(self) -> bool:
        """Whether its last export is kept and only waits for a review."""
        return self.problem_code == PENDING

    def change_state(self, state: str) -> Attachment:
        """Return it in another state, as of now."""
        return self if state == self.state else replace(self, state=state, changed=format_now())


@dataclass(frozen=True, slots=True, kw_only=True)
class CareOptions:
    """How a sandbox is to be exported. What is not set stays as it was, or is taken from the service's settings."""

    layouts: list[str] = field(default_factory=list)
    projects: list[str] | None = None
    checkpoint_every: float | None = None
    conversation: str = ""
    user: str = ""
    by: str = ""
    lasting: bool = False


@dataclass(frozen=True, slots=True)
class StoredAttachment:
    """An attachment as it was read: its key, and the version that a compare-and-swap expects there."""

    attachment: Attachment
    key: str
    version: str

    @property
    def place(self) -> AttachmentKey:
        return self.attachment.place


@dataclass(slots=True)
class _CachedAttachment:
    """What a listing showed of an object (``stamp``, unchanged ``since``), and the attachment that was ``read`` then."""

    stamp: tuple[float, int]
    since: float
    read: float
    held: StoredAttachment | None

    @property
    def settled(self) -> bool:
        return self.read - self.since > SETTLED_SECONDS


class Attachments:
    """The attachments of one store.

    The first lasting one of a memory has the key that earlier versions know, so that their services take it over too.
    Every other one has a key of its own, which earlier versions do not list: they handle only one sandbox per memory
    and would overwrite the first with the second. When earlier versions write an attachment, they leave out fields that
    they do not know; it is a lasting one then.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._log = structlog.get_logger("sidecar")
        self._seen: dict[str, _CachedAttachment] = {}
        self.unreadable: set[str] = set()
        self.doubles: list[StoredAttachment] = []
        """Second objects for a memory and sandbox; the attachment that ``all`` returns takes precedence."""

    async def all(self, others: Collection[str] = ()) -> list[StoredAttachment]:
        """Return the attachments that can be read, one per memory and sandbox, and set ``unreadable`` to the keys of
        the others.

        Only objects that a listing shows as changed are read again. Of those that belong to ``others``, other services,
        an earlier version may be returned, with the times of an earlier checkpoint.
        """
        infos = [info for prefix in (ATTACHMENTS, CONVERSATIONS) async for info in self._store.list(prefix)]
        turns, unreadable = asyncio.Semaphore(PARALLEL), set()

        async def look(info: ObjectInfo) -> tuple[str, _CachedAttachment | None]:
            async with turns:
                try:
                    return info.key, await self._read_if_changed(info, others)
                except SnapshotError as problem:
                    if info.key not in self.unreadable:
                        self._log.error("an attachment is refused", object=info.key, **problem.as_dict())
                    unreadable.add(info.key)
                    return info.key, None

        looked = await asyncio.gather(*map(look, infos))
        self._seen = {key: seen for key, seen in looked if seen is not None}
        self.unreadable = unreadable
        found: dict[AttachmentKey, StoredAttachment] = {}
        self.doubles = []
        # Objects under the shared key come first and win: an earlier version may have attached there a sandbox that has
        # a key of its own already.
        for held in [seen.held for _, seen in looked if seen is not None and seen.held is not None]:
            if found.setdefault(held.place, held) is not held:
                self.doubles.append(held)
        return list(found.values())

    @property
    def seen(self) -> list[Attachment]:
        """The attachments that the last listing showed, also those of other services."""
        return [seen.held.attachment for seen in self._seen.values() if seen.held is not None]

    async def _read_if_changed(self, info: ObjectInfo, others: Collection[str]) -> _CachedAttachment:
        """Read an object again unless its listing shows that it is unchanged, or that little can have changed."""
        stamp, began = (info.modified, info.size), time.monotonic()
        seen = self._seen.get(info.key)
        if seen is not None and seen.held is not None:
            if info.version and info.version == seen.held.version:  # as it was read, or as this service wrote it
                return replace(seen, stamp=stamp)
            # Little can have changed at the same size: one without an owner has another.
            alike = seen.held.attachment.owner in others and seen.stamp[1] == info.size
            if alike and began - seen.read < LET_BE_SECONDS:
                return seen
        if seen is not None and seen.stamp == stamp and seen.settled and not info.version:
            return seen
        # The cached copy counts only if it was read long enough after the stamp was first seen: two writes within one
        # tick of the store's clock have the same stamp.
        since = seen.since if seen is not None and seen.stamp == stamp else began
        return _CachedAttachment(stamp, since, began, await self._read(info.key))

    async def find(self, memory: str, sandbox: str) -> StoredAttachment | None:
        """Return the attachment of a sandbox. Raise ``AttachmentDamaged``, or the error of a signed store, if it was
        altered."""
        first, own = await asyncio.gather(
            self._read(build_attachment_key(memory)), self._read(build_conversation_key(memory, sandbox))
        )
        return first if first is not None and first.attachment.sandbox == sandbox else own

    async def find_only(self, memory: str) -> Attachment:
        """Return the only attached sandbox of a memory. Raise ``NotAttached`` or ``SeveralAttachments``."""
        await self._read(build_attachment_key(memory))  # raises if it was altered
        rows = [held.attachment for held in await self.all() if held.attachment.memory == memory]
        # Attachments that have ended and are still listed do not make the active one ambiguous.
        rows = [one for one in rows if one.looked_after] or rows
        if not rows:
            raise NotAttached(f"No sandbox of {memory} is attached.")
        if len(rows) > 1:
            listed = ", ".join(f"{one.sandbox} ({one.state})" for one in rows)
            raise SeveralAttachments(f"{memory} has {len(rows)} sandboxes: {listed}.")
        return rows[0]

    async def _read(self, key: str) -> StoredAttachment | None:
        """Read the attachment at a key; ``None`` if there is none. Raise ``AttachmentDamaged``."""
        stored = await self._store.get(key)
        if stored is None:
            return None
        try:
            attachment = _decode(stored.data)
        except (ValueError, msgspec.ValidationError) as problem:
            raise AttachmentDamaged(f"{key} is damaged: {problem}.", version=stored.version) from None
        if key not in (build_attachment_key(attachment.memory), build_conversation_key(*attachment.place)):
            raise AttachmentDamaged(f"{key} is damaged: it belongs to another memory.", version=stored.version)
        return StoredAttachment(attachment, key, stored.version)

    async def add(self, attachment: Attachment) -> StoredAttachment:
        """Write a new attachment, also in the place of an altered object. Raise ``SwapLost`` if its key is taken."""
        # The shared key of an id that is not plain has a ~, which not every server accepts.
        if attachment.lasting and is_plain_id(attachment.memory):
            try:
                return await self._put(attachment, build_attachment_key(attachment.memory))
            except SwapLost:
                pass  # the shared key is taken by another sandbox
        return await self._put(attachment, build_conversation_key(*attachment.place))

    async def _put(self, attachment: Attachment, key: str) -> StoredAttachment:
        """Create the object, or replace one that cannot be read. Raise ``SwapLost`` if there is a readable one."""
        try:
            return await self._swap_object(attachment, key, None)
        except SwapLost:
            try:
                await self._read(key)
            except ObjectRefused as refused:
                return await self._swap_object(attachment, key, refused.version)
            raise

    async def write(self, attachment: Attachment, before: StoredAttachment) -> StoredAttachment:
        """Replace an attachment by compare-and-swap. Raise ``SwapLost`` if another service wrote it since it was read."""
        return await self._swap_object(attachment, before.key, before.version)

    async def move(self, held: StoredAttachment) -> StoredAttachment:
        """Move an attachment to a key of its own, which earlier versions do not list. Raise ``SwapLost``."""
        own = build_conversation_key(*held.place)
        if held.key == own:
            return held
        # Written before the old object is deleted: a crash in between leaves two, of which ``Ledger`` removes one, and
        # never none.
        moved = await self._swap_object(held.attachment, own, None)
        there = await self._read(held.key)
        if there is not None and there.place == held.place:
            await self._store.delete([held.key])
        return moved

    async def is_taken(self, held: StoredAttachment) -> bool:
        """Whether its key is used for another sandbox of the memory now, by a service of an earlier version."""
        there = await self._read(held.key)
        return there is not None and there.place != held.place

    async def take(self, held: StoredAttachment, owner: str) -> StoredAttachment:
        """Become its owner, with the next generation. Raise ``SwapLost`` if another service was faster."""
        taken = replace(held.attachment, owner=owner, generation=held.attachment.generation + 1)
        return await self.write(taken, held)

    async def remove(self, held: StoredAttachment) -> None:
        await self._store.delete([held.key])

    async def remove_if_same(self, held: StoredAttachment) -> bool:
        """Remove an attachment if it is as it was read. Return ``False`` if another service has written it since."""
        there = await self._store.get(held.key)
        if there is not None and there.version != held.version:
            return False
        await self.remove(held)
        return True

    async def remove_all(self, memory: str) -> None:
        """Remove the attachments of a memory that is deleted: an export of one would create it again."""
        rows = [*await self.all(), *self.doubles]
        await self._store.delete(
            {build_attachment_key(memory), *(row.key for row in rows if row.attachment.memory == memory)}
        )

    async def _swap_object(self, attachment: Attachment, key: str, version: str | None) -> StoredAttachment:
        held = StoredAttachment(attachment, key, await self._store.swap(key, _encode(attachment), expected=version))
        if (seen := self._seen.get(key)) is not None:
            seen.held = held
        return held


def _encode(attachment: Attachment) -> bytes:
    # Earlier versions expect a time in ``saved``: the time of the attachment, as long as nothing was saved. They do not
    # know ``user`` and would export from another home; so they get a state that they do not know, and report that
    # instead.
    state = f"{AS_USER}{attachment.state}" if attachment.user else attachment.state
    return encode_checksummed(asdict(replace(attachment, saved=attachment.saved or attachment.attached, state=state)))


def _decode(data: bytes) -> Attachment:
    """Parse an attachment. Raise ``ValueError`` or ``msgspec.ValidationError``."""
    attachment = msgspec.convert(decode_checksummed(data), Attachment)
    if attachment.user:
        attachment = replace(attachment, state=attachment.state.removeprefix(AS_USER))
    if attachment.state == ATTACHED:
        attachment = replace(attachment, state=OPEN)
    if attachment.state not in (OPEN, *FORGOTTEN_AFTER):
        raise ValueError(f"{attachment.state!r} is no state of an attachment")
    return attachment if attachment.snapshot else replace(attachment, saved="")


def _count_seconds_since(moment: str) -> float:
    """Return the seconds since a moment; 0 if the clock was set back in the meantime."""
    try:
        return max(0.0, round((datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds(), 1))
    except (ValueError, TypeError):
        return 0.0


def format_now() -> str:
    """Return the present time in UTC, as attachments have it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
