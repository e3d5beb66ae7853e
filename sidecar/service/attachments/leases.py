"""Who is alive: each service says so in the store every few seconds, and none believes its own word for long.

Ages are told by the store's clock alone, so services whose clocks differ agree. A service stops acting on its lease well
before others take it for dead.
"""

from __future__ import annotations

import secrets
import socket
import time

from sidecar.errors import SidecarError
from sidecar.format.checksums import encode_checksummed
from sidecar.ids import INSTANCES, build_instance_key
from sidecar.ports import Store

RENEWED, BELIEVED, DEAD = 0.2, 0.6, 0.8
"""Parts of a lease: renewed so often, believed by its holder so long, and by others so long."""


class LeaseLost(SidecarError):
    """The service no longer holds the lease on a sandbox."""

    code = "lease-lost"
    retryable = True
    default_hint = "Another service looks after this sandbox now; nothing was lost."


class Lease:
    def __init__(self, store: Store, seconds: float) -> None:
        self.instance = f"{socket.gethostname()[:40]}-{secrets.token_hex(6)}"
        self.seconds = seconds
        self._store = store
        self._renewed = float("-inf")

    @property
    def renew_every(self) -> float:
        return self.seconds * RENEWED

    @property
    def held(self) -> bool:
        """Whether this service may still act on what it owns."""
        return time.monotonic() - self._renewed < self.seconds * BELIEVED

    async def renew(self) -> None:
        began = time.monotonic()
        await self._store.put(
            build_instance_key(self.instance), encode_checksummed({"instance": self.instance, "seconds": self.seconds})
        )
        self._renewed = began

    async def keep(self) -> None:
        """Renew it, if that was not done for a while."""
        if time.monotonic() - self._renewed > self.renew_every:
            await self.renew()

    async def list_living(self) -> set[str]:
        """The services that were heard of lately, this one included."""
        heard = {info.key: info.modified async for info in self._store.list(INSTANCES)}
        now = heard.get(build_instance_key(self.instance), max(heard.values(), default=0.0))
        keys = {key for key, modified in heard.items() if now - modified < self.seconds * DEAD}
        gone = [key for key, modified in heard.items() if now - modified > max(3600.0, 10 * self.seconds)]
        if gone:
            await self._store.delete(gone)
        return {key.removeprefix(INSTANCES).removesuffix(".json") for key in keys} | {self.instance}

    async def release(self) -> None:
        self._renewed = float("-inf")
        await self._store.delete([build_instance_key(self.instance)])
