"""Pins: a tiny object in the store for each snapshot that no rule and no limit may remove.

A pin that a person set contains the time. A pin that was set automatically, on a head that was replaced by something a
guard had objected to, contains checksummed JSON that says so; of these the newest few stay, and a byte limit may remove
them. A caller that only needs to know what must stay does not have to distinguish the two.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime

from sidecar.errors import SwapLost
from sidecar.format.checksums import decode_checksummed, encode_checksummed
from sidecar.host.values import dataclass
from sidecar.ids import MemoryKeys, check_memory_id
from sidecar.ports import StoredObject
from sidecar.store.manifest import Manifest
from sidecar.store.repository import Repository
from sidecar.store.selectors import resolve_snapshot

FORMAT = 1
MOST_AUTOMATIC = 5
"""Automatic pins that a memory keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutomaticPin:
    """Why a snapshot was pinned automatically."""

    since: str
    replaced_by: str
    why: str
    """What the guards reported about the snapshot that replaced it."""

    def encode(self) -> bytes:
        return encode_checksummed({"format": FORMAT, "automatic": asdict(self)})

    @property
    def words(self) -> str:
        """The reason as a text for people."""
        return f"{self.replaced_by} took its place though {self.why}"


async def pin(repository: Repository, memory: str, wanted: str) -> str:
    """Pin a snapshot until it is unpinned; return its id. Raise ``MemoryNotFound`` or ``SnapshotNotFound``.

    A snapshot that cannot be read can be pinned too: it stays in any case, and is pinned once it has been repaired.
    """
    snapshot = await resolve_snapshot(repository, check_memory_id(memory), wanted)
    manifest = (await repository.manifests(memory, [snapshot])).get(snapshot)
    await repository.store.prepare()
    since = datetime.now(UTC).isoformat(timespec="seconds")
    await repository.store.put(MemoryKeys.of(memory).pin(snapshot), since.encode())
    if isinstance(manifest, Manifest):
        await repository.keep(manifest)
    return snapshot


async def unpin(repository: Repository, memory: str, wanted: str) -> str:
    """Remove a snapshot's pin, if it has one; return its id."""
    snapshot = await resolve_snapshot(repository, check_memory_id(memory), wanted)
    await repository.store.delete([MemoryKeys.of(memory).pin(snapshot)])
    return snapshot


async def list_automatic_pins(repository: Repository, memory: str) -> dict[str, AutomaticPin]:
    """Return the snapshots that were pinned automatically, newest pin first."""
    keys = {MemoryKeys.of(memory).pin(snapshot): snapshot for snapshot in await repository.pinned(memory)}
    pins = {keys[key]: _parse_automatic(stored) for key, stored in (await repository.read_small_objects(keys)).items()}
    found = {snapshot: pin for snapshot, pin in pins.items() if pin is not None}
    return dict(sorted(found.items(), key=lambda one: (one[1].since, one[0]), reverse=True))


async def pin_automatically(repository: Repository, memory: str, snapshot: str, replaced_by: str, why: str) -> bool:
    """Pin a head that is about to be replaced by a doubtful snapshot, unless it is pinned already.

    Return whether it was pinned now.
    """
    manifest = (await repository.manifests(memory, [snapshot])).get(snapshot)
    if not isinstance(manifest, Manifest):
        return False
    since = datetime.now(UTC).isoformat(timespec="milliseconds")
    pin = AutomaticPin(since=since, replaced_by=replaced_by, why=why)
    try:
        await repository.store.swap(MemoryKeys.of(memory).pin(snapshot), pin.encode(), expected=None)
    except SwapLost:
        return False
    await repository.keep(manifest)
    return True


async def drop_automatic_pins(repository: Repository, memory: str, snapshots: list[str] | None = None) -> None:
    """Remove the automatic pins of these snapshots; by default, of all but the newest few. A person's pin stays."""
    if snapshots is None:
        snapshots = list(await list_automatic_pins(repository, memory))[MOST_AUTOMATIC:]
    for snapshot in snapshots:
        key = MemoryKeys.of(memory).pin(snapshot)
        # Read it again: a person may have pinned it since.
        stored = (await repository.read_small_objects([key])).get(key)
        if stored is not None and _parse_automatic(stored) is not None:
            await repository.store.delete([key])


def _parse_automatic(stored: StoredObject) -> AutomaticPin | None:
    """Return the contents of an automatic pin; ``None`` for a person's pin, which contains a time, and for one that
    cannot be read."""
    import msgspec  # late: few memories have one

    try:
        return msgspec.convert(decode_checksummed(stored.data).get("automatic"), AutomaticPin, strict=True)
    except (ValueError, msgspec.ValidationError):
        return None
