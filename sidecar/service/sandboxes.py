"""Sandboxes that stay open between calls, so that a provider is asked about each of them once, not for every export."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from sidecar.errors import SidecarError
from sidecar.host.values import dataclass
from sidecar.ports import Sandbox

MOST_OPEN = 500


@dataclass(frozen=True, slots=True)
class SandboxTarget:
    """A sandbox as a caller names it."""

    ref: str
    wake: bool = False
    """Start it if it is paused or stopped."""
    user: str = ""
    """As whom to work in it; "": as whoever its provider takes."""


class Sandboxes:
    """A pool of idle open sandboxes."""

    def __init__(self, opener: Callable[..., Sandbox]) -> None:
        self._open_one = opener
        self._idle: OrderedDict[SandboxTarget, Sandbox] = OrderedDict()

    @asynccontextmanager
    async def use(self, target: SandboxTarget) -> AsyncIterator[Sandbox]:
        """Yield a sandbox, for one caller at a time. After a failed use it is closed, and not reused."""
        sandbox = self._idle.pop(target, None) or self._open_one(target.ref, wake=target.wake, user=target.user)
        try:
            yield sandbox
        except BaseException:
            await sandbox.close()
            raise
        self._idle[target] = sandbox
        while len(self._idle) > MOST_OPEN:
            _, oldest = self._idle.popitem(last=False)
            await oldest.close()

    def is_open(self, ref: str) -> bool:
        """Whether it was used before and is still open."""
        return any(known.ref == ref for known in self._idle)

    @asynccontextmanager
    async def open_fresh(self, ref: str) -> AsyncIterator[Sandbox]:
        """Open a sandbox without the pool, so that nothing about it is cached, and close it afterwards."""
        sandbox = self._open_one(ref)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    def check(self, ref: str) -> None:
        """Raise a ``SidecarError`` for what cannot be a sandbox, or may not be one here."""
        self._open_one(ref)

    def name_of(self, ref: str) -> str:
        """Return a reference as the sandbox itself writes it; unchanged if there is no such sandbox any more."""
        try:
            return self._open_one(ref).ref
        except SidecarError:
            return ref

    async def close(self) -> None:
        while self._idle:
            _, sandbox = self._idle.popitem()
            await sandbox.close()
