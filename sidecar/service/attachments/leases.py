"""Leases: each service renews its lease in the store every few seconds, so that the others see that it is alive.

Ages are measured by the store's clock alone, so services with different clocks agree. A service stops acting on its own
lease well before the others take it for dead, so that two services do not act on one attachment at once.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time

from sidecar.errors import SidecarError
from sidecar.format.checksums import encode_checksummed
from sidecar.ids import INSTANCES, build_instance_key
from sidecar.ports import Store

RENEWED, BELIEVED, DEAD = 0.2, 0.6, 0.8
"""Fractions of a lease's duration: after which it is renewed, until which its owner relies on it, and after which other
services take the owner for dead."""


class LeaseLost(SidecarError):
    """The service no longer holds the lease on a sandbox."""

    code = "lease-lost"
    retryable = True
    default_hint = "Another service looks after this sandbox now; nothing was lost."


class Lease:
    """The lease of this service. It is an object in the store, named after the instance, that is written again to renew
    it."""

    def __init__(self, store: Store, seconds: float) -> None:
        self.instance = f"{socket.gethostname()[:40]}-{secrets.token_hex(6)}"
        self.seconds = seconds
        self._store = store
        self._renewed = float("-inf")
        self._renewing = asyncio.Lock()

    @property
    def renew_every(self) -> float:
        return self.seconds * RENEWED

    @property
    def held(self) -> bool:
        """Whether this service may still act on its attachments."""
        return time.monotonic() - self._renewed < self.seconds * BELIEVED

    async def renew(self) -> None:
        """Write the lease. The time before the request counts, so that a slow request does not extend it."""
        began = time.monotonic()
        await self._store.put(
            build_instance_key(self.instance), encode_checksummed({"instance": self.instance, "seconds": self.seconds})
        )
        self._renewed = began

    async def keep(self) -> None:
        """Renew the lease if about ``renew_every`` seconds have passed since the last time."""
        async with self._renewing:
            if time.monotonic() - self._renewed > self.renew_every * 0.9:
                await self.renew()

    async def list_living(self) -> set[str]:
        """Return the ids of the services with a valid lease, including this one. Leases that ended long ago are
        deleted."""
        heard = {info.key: info.modified async for info in self._store.list(INSTANCES)}
        # The present time by the store's clock: that of this service's own lease, which was renewed just before.
        now = heard.get(build_instance_key(self.instance), max(heard.values(), default=0.0))
        keys = {key for key, modified in heard.items() if now - modified < self.seconds * DEAD}
        gone = [key for key, modified in heard.items() if now - modified > max(3600.0, 10 * self.seconds)]
        if gone:
            await self._store.delete(gone)
        return {key.removeprefix(INSTANCES).removesuffix(".json") for key in keys} | {self.instance}

    async def release(self) -> None:
        """Delete the lease, so that other services take over at once."""
        self._renewed = float("-inf")
        await self._store.delete([build_instance_key(self.instance)])
