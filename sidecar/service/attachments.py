"""Which sandboxes are looked after, by whom: one small object per memory in the store, swapped by compare."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime

import msgspec
import structlog

from sidecar.errors import ObjectRefused, SnapshotError
from sidecar.ids import ATTACHMENTS, attachment_key
from sidecar.ports import Store
from sidecar.snapshots.sealed import seal, unseal


class NotAttached(SnapshotError):
    code = "not-attached"
    default_hint = "PUT /v1/memories/{memory}/attachment attaches a sandbox."


class AttachmentDamaged(ObjectRefused):
    code = "attachment-damaged"
    default_hint = "Attach the sandbox anew."


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """A sandbox the sidecar looks after between restore and export."""

    memory: str
    sandbox: str
    layouts: list[str] = field(default_factory=list)
    projects: list[str] | None = None
    checkpoint_every: float = 300.0
    attached: str = ""
    generation: int = 1
    """Grows with each owner: an owner of an earlier one has lost it."""
    owner: str = ""
    """The service that looks after it; "" while none does."""
    state: str = "attached"
    """"attached", or "lost": the sandbox is gone."""
    saved: str = ""
    """When it was last exported, or found unchanged."""
    snapshot: str = ""
    problem: str = ""
    """Why the last export failed, if it did."""

    @property
    def unsaved_seconds(self) -> float:
        if not self.saved:
            return float("inf")
        return round((datetime.now(UTC) - datetime.fromisoformat(self.saved)).total_seconds(), 1)

    @property
    def overdue(self) -> bool:
        return self.unsaved_seconds > 2 * self.checkpoint_every


@dataclass(frozen=True, slots=True)
class Held:
    """An attachment as it was read, with the version that a swap must still find."""

    attachment: Attachment
    version: str | None


class Attachments:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._log = structlog.get_logger("sidecar")
        self.unreadable: set[str] = set()

    async def all(self) -> list[Held]:
        """Those that can be read; ``unreadable`` are the keys of the others."""
        keys = [info.key async for info in self._store.list(ATTACHMENTS)]
        found, unreadable = [], set()
        for key in keys:
            try:
                found.append(await self._read(key))
            except SnapshotError as problem:
                self._log.error("an attachment is refused", object=key, **problem.as_dict())
                unreadable.add(key)
        self.unreadable = unreadable
        return [held for held in found if held is not None]

    async def find(self, memory: str) -> Held | None:
        return await self._read(attachment_key(memory))

    async def _read(self, key: str) -> Held | None:
        stored = await self._store.get(key)
        if stored is None:
            return None
        try:
            held = Held(msgspec.convert(unseal(stored.data), Attachment), stored.version)
        except (ValueError, msgspec.ValidationError) as problem:
            raise AttachmentDamaged(f"{key} is damaged: {problem}.", version=stored.version) from None
        if attachment_key(held.attachment.memory) != key:
            raise AttachmentDamaged(f"{key} is damaged: it belongs to another memory.", version=stored.version)
        return held

    async def write(self, attachment: Attachment, version: str | None) -> Held:
        """Raise ``HeadMoved`` when somebody else wrote it since."""
        data = seal(asdict(attachment))
        return Held(attachment, await self._store.swap(attachment_key(attachment.memory), data, expected=version))

    async def take(self, held: Held, owner: str) -> Held:
        """Become its owner. Raise ``HeadMoved`` when somebody else was faster."""
        taken = replace(held.attachment, owner=owner, generation=held.attachment.generation + 1)
        return await self.write(taken, held.version)

    async def remove(self, memory: str) -> None:
        await self._store.delete([attachment_key(memory)])


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
