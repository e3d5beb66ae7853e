"""Pins: a tiny object in the store for each snapshot that no rule and no limit may take.

One that a person set holds the time. One that was set automatically, on a head that gave way to something a guard had objected
to, holds sealed JSON that says so; of these the newest few stay, and a byte limit may take them. Who lists pins to see
what must stay need not tell the two apart.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import msgspec

from sidecar.errors import HeadMoved, ObjectRefused
from sidecar.ids import Keys, check_memory_id
from sidecar.ports import Stored
from sidecar.repository import Repository
from sidecar.snapshots.manifest import Manifest
from sidecar.snapshots.resolving import resolve
from sidecar.snapshots.sealed import seal, unseal

FORMAT = 1
MOST_AUTOMATIC = 5
"""Automatic pins that a memory keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutomaticPin:
    """Why a snapshot was pinned without a person asking for it."""

    since: str
    replaced_by: str
    why: str
    """What the guards had to say of the snapshot that took its place."""

    def encode(self) -> bytes:
        return seal({"format": FORMAT, "automatic": asdict(self)})

    @property
    def words(self) -> str:
        return f"{self.replaced_by} took its place though {self.why}"


async def pin(repository: Repository, memory: str, wanted: str) -> str:
    """Keep a snapshot until it is unpinned; return its id. Raise ``MemoryNotFound`` or ``SnapshotNotFound``.

    One that cannot be read can be pinned too: it stays in any case, and the pin is there when it has been mended.
    """
    snapshot = await resolve(repository, check_memory_id(memory), wanted)
    manifest = (await repository.manifests(memory, [snapshot])).get(snapshot)
    await repository.store.prepare()
    since = datetime.now(UTC).isoformat(timespec="seconds")
    await repository.store.put(Keys.of(memory).pin(snapshot), since.encode())
    if isinstance(manifest, Manifest):
        await repository.keep(manifest)
    return snapshot


async def unpin(repository: Repository, memory: str, wanted: str) -> str:
    """Leave a snapshot to the rules again; return its id. One that is not pinned is fine."""
    snapshot = await resolve(repository, check_memory_id(memory), wanted)
    await repository.store.delete([Keys.of(memory).pin(snapshot)])
    return snapshot


async def automatic_pins(repository: Repository, memory: str) -> dict[str, AutomaticPin]:
    """The snapshots that were pinned automatically, newest pin first."""
    keys, found = Keys.of(memory), {}
    for snapshot in await repository.pinned(memory):
        if (pin := _automatic(await _read(repository, keys.pin(snapshot)))) is not None:
            found[snapshot] = pin
    return dict(sorted(found.items(), key=lambda one: (one[1].since, one[0]), reverse=True))


async def pin_automatically(repository: Repository, memory: str, snapshot: str, replaced_by: str, why: str) -> bool:
    """Pin a snapshot that something doubtful is about to replace as the head, unless it is pinned already.

    Return whether it was pinned now.
    """
    manifest = (await repository.manifests(memory, [snapshot])).get(snapshot)
    if not isinstance(manifest, Manifest):
        return False
    since = datetime.now(UTC).isoformat(timespec="milliseconds")
    pin = AutomaticPin(since=since, replaced_by=replaced_by, why=why)
    try:
        await repository.store.swap(Keys.of(memory).pin(snapshot), pin.encode(), expected=None)
    except HeadMoved:
        return False
    await repository.keep(manifest)
    return True


async def drop_automatic_pins(repository: Repository, memory: str, snapshots: list[str] | None = None) -> None:
    """Remove the automatic pins of these snapshots; by default, of all but the newest few. A person's pin stays."""
    if snapshots is None:
        snapshots = list(await automatic_pins(repository, memory))[MOST_AUTOMATIC:]
    for snapshot in snapshots:
        key = Keys.of(memory).pin(snapshot)
        # Read again: a person may have made it theirs.
        if _automatic(await _read(repository, key)) is not None:
            await repository.store.delete([key])


async def _read(repository: Repository, key: str) -> Stored | None:
    try:
        return await repository.store.get(key)
    except ObjectRefused:  # it does not count, and is not ours to remove
        return None


def _automatic(stored: Stored | None) -> AutomaticPin | None:
    """What an automatic pin says; ``None`` for a person's, which holds a time, and for what cannot be read."""
    try:
        value = unseal(stored.data) if stored is not None else {}
        return msgspec.convert(value.get("automatic"), AutomaticPin, strict=True)
    except (ValueError, msgspec.ValidationError):
        return None
