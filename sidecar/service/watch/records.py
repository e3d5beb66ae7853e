"""What the store knows about sandboxes that name their memory: one small object for each sandbox, and one for each memory
that says which of its sandboxes may change it.

All are replaced by compare-and-swap: of several services one restores, a service that died half way is followed by
another, and no sandbox is restored into a second time.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Generic, TypeVar

import msgspec
import structlog

from sidecar.errors import SwapLost
from sidecar.format.checksums import decode_checksummed, encode_checksummed
from sidecar.host.values import dataclass
from sidecar.ids import build_listing_key, build_notice_key, build_notice_prefix, build_writer_key
from sidecar.ports import Store
from sidecar.service.attachments.leases import Lease

RESTORING, ATTACHED, READING, CALLERS, FAILED = "restoring", "attached", "reader", "callers", "failed"
"""What became of a sandbox: a service restores into it, or will again; it is looked after; it was restored read-only; its
caller had restored a memory into it before; it cannot be restored into."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A sandbox that was noticed."""

    sandbox: str
    memory: str
    state: str
    instance: str = ""
    """The service that restores into it; empty: none."""
    begun: bool = False
    """A restore was begun, so what the sandbox says of its last one may be of that."""
    reader: bool = False
    """It is restored read-only: another living sandbox has the memory."""
    noticed: float = 0.0
    failures: int = 0
    not_before: float = 0.0
    """Until then it is not tried again."""
    snapshot: str = ""
    """What was restored."""
    problem: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Which of the sandboxes that name a memory may change it."""

    memory: str
    sandbox: str
    """Empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lister:
    """The service that lists a provider's sandboxes."""

    instance: str


@dataclass(frozen=True, slots=True)
class Held(Generic[T]):
    """A record as it was read or written, with the version that a compare-and-swap expects."""

    record: T
    version: str


class _Records(Generic[T]):
    """The records of one kind."""

    def __init__(self, store: Store, kind: type[T]) -> None:
        self._store = store
        self._kind = kind
        self._log = structlog.get_logger("sidecar")

    async def _read(self, key: str) -> tuple[Held[T] | None, str | None]:
        """Return the record at a key and its version. One that is damaged counts as none, but for its version: the next
        write replaces it."""
        stored = await self._store.get(key)
        if stored is None:
            return None, None
        try:
            record = msgspec.convert(decode_checksummed(stored.data), self._kind)
        except (ValueError, msgspec.ValidationError) as problem:
            self._log.error("a record of the watch is damaged, and counts as none", object=key, problem=str(problem))
            return None, stored.version
        return Held(record, stored.version), stored.version

    async def _write(self, key: str, record: T, version: str | None) -> Held[T]:
        """Raise ``SwapLost`` if another service wrote it."""
        await self._store.prepare()
        data = encode_checksummed(asdict(record))  # type: ignore[call-overload]
        return Held(record, await self._store.swap(key, data, expected=version))


class Notices(_Records[Notice]):
    """The sandboxes that were noticed."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, Notice)

    async def read(self, sandbox: str) -> Held[Notice] | None:
        """Return what is known about a sandbox; ``None`` if it was never noticed."""
        held, _ = await self._read(build_notice_key(sandbox))
        return held if held is not None and held.record.sandbox == sandbox else None

    async def write(self, notice: Notice, before: Held[Notice] | None) -> Held[Notice]:
        """Write what is known about a sandbox in place of ``before``. Raise ``SwapLost`` if another service wrote it."""
        key = build_notice_key(notice.sandbox)
        version = before.version if before is not None else None
        if before is None:
            held, version = await self._read(key)
            if held is not None:
                raise SwapLost(f"{notice.sandbox} was noticed by another service.")
        return await self._write(key, notice, version)

    async def remove(self, sandbox: str) -> None:
        await self._store.delete([build_notice_key(sandbox)])

    async def remove_others(self, provider: str, sandboxes: set[str], before: float) -> int:
        """Remove what is known about sandboxes of a provider that are not among these, if it was written before a
        moment by the store's clock. Return how many were removed."""
        kept = {build_notice_key(one) for one in sandboxes}
        prefix = build_notice_prefix(provider)
        over = [info.key async for info in self._store.list(prefix) if info.key not in kept and info.modified < before]
        await self._store.delete(over)
        return len(over)


class Writers(_Records[Writer]):
    """Which sandbox may change a memory."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, Writer)

    async def read(self, memory: str) -> tuple[str, str | None]:
        """Return the sandbox that may change a memory, empty if there is none, and the version to replace."""
        held, version = await self._read(build_writer_key(memory))
        return (held.record.sandbox if held is not None and held.record.memory == memory else ""), version

    async def claim(self, memory: str, sandbox: str, version: str | None) -> None:
        """Note that this one may. Raise ``SwapLost`` if another service was faster."""
        await self._write(build_writer_key(memory), Writer(memory=memory, sandbox=sandbox), version)

    async def release(self, memory: str, sandbox: str) -> None:
        """Note that this one may not any more, if it may."""
        there, version = await self.read(memory)
        if there == sandbox:
            await self.claim(memory, "", version)

    async def remove(self, memory: str) -> None:
        await self._store.delete([build_writer_key(memory)])


class ListingClaim(_Records[Lister]):
    """The claim to list a provider's sandboxes: of the services with the same tables one does."""

    def __init__(self, store: Store, lease: Lease, digest: str) -> None:
        super().__init__(store, Lister)
        self._lease = lease
        self._key = build_listing_key(digest)

    async def take(self) -> bool:
        """Return whether this service lists; it does if no other living one has the claim."""
        held, version = await self._read(self._key)
        if held is not None and held.record.instance == self._lease.instance:
            return self._lease.held
        if held is not None and held.record.instance in await self._lease.list_living():
            return False
        try:
            await self._write(self._key, Lister(instance=self._lease.instance), version)
        except SwapLost:
            return False
        return True
