"""Turns that are shared fairly between owners: nobody waits for another's whole queue."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import field

from sidecar.host.values import dataclass


@dataclass(slots=True, eq=False)
class _Waiting:
    arrived: int
    most: int
    ready: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class FairTurns:
    """So many turns at once. A turn that is free goes to the owner who has the fewest; among equals, to who came first."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._arrivals = 0
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[_Waiting]] = {}

    @asynccontextmanager
    async def held(self, owner: str = "", most: int = 0) -> AsyncIterator[None]:
        """Hold a turn for the body. ``most``: how many turns the owner may hold at once; 0: all there are."""
        await self._take(owner, most)
        try:
            yield
        finally:
            self._give_back(owner)

    async def _take(self, owner: str, most: int) -> None:
        self._arrivals += 1
        waiting = _Waiting(self._arrivals, most)
        self._waiting.setdefault(owner, deque()).append(waiting)
        self._hand_out()
        try:
            await waiting.ready
        except asyncio.CancelledError:
            if waiting.ready.done() and not waiting.ready.cancelled():
                self._give_back(owner)  # it got the turn at the moment it was cancelled
            elif waiting in self._waiting.get(owner, ()):
                self._waiting[owner].remove(waiting)
                self._forget_if_empty(owner)
            raise

    def _give_back(self, owner: str) -> None:
        self._free += 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        self._hand_out()

    def _hand_out(self) -> None:
        """Give the free turns to those who wait."""
        while self._free:
            ready = [
                (self._held[owner], line[0].arrived, owner)
                for owner, line in self._waiting.items()
                if not line[0].most or self._held[owner] < line[0].most
            ]
            if not ready:
                return
            _, _, owner = min(ready)
            waiting = self._waiting[owner].popleft()
            self._forget_if_empty(owner)
            if waiting.ready.cancelled():
                continue
            self._free -= 1
            self._held[owner] += 1
            waiting.ready.set_result(None)

    def _forget_if_empty(self, owner: str) -> None:
        if not self._waiting[owner]:
            del self._waiting[owner]
