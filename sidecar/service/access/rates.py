"""How often a named token may call, and how many of its calls may be open at once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from sidecar.errors import RateLimited
from sidecar.host.values import dataclass
from sidecar.service.access.grants import Caller

SHARE = 8
"""One token may have this part of the service's connections open in calls."""
LEAST_OPEN = 16
LONGEST_DELAY = 1.0
"""Who has used up a quota is told after so many seconds at most. Without that wait, a caller that repeats its calls at
once would keep the service busy with refusing them."""


@dataclass(slots=True)
class _Bucket:
    """A token bucket: it fills up by ``calls_per_minute`` a minute, and each call takes one."""

    left: float
    filled: float


class Rates:
    """The calls of named tokens in this service."""

    def __init__(self, connections: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_open = max(LEAST_OPEN, connections // SHARE)
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}
        self._open: Counter[str] = Counter()

    @asynccontextmanager
    async def count_call(self, caller: Caller) -> AsyncIterator[None]:
        """Count a call for as long as the body runs. Raise ``RateLimited``, after a while, if it is one too many."""
        if not caller.id:
            yield
            return
        if self._open[caller.id] >= self._most_open:
            raise RateLimited(f"{self._most_open} calls with this token are open already.")
        self._open[caller.id] += 1
        try:
            if problem := self._take(caller):
                await self.hold_back(caller, problem.seconds)
                raise problem
            yield
        finally:
            self._open[caller.id] -= 1
            if not self._open[caller.id]:
                del self._open[caller.id]

    async def hold_back(self, caller: Caller, seconds: float = LONGEST_DELAY) -> None:
        """Wait before a named token is told that a quota is used up. The call counts as open meanwhile, so that there
        are only so many."""
        if caller.id:
            await asyncio.sleep(min(LONGEST_DELAY, seconds))

    def _take(self, caller: Caller) -> RateLimited | None:
        """Count a call in this minute. Return the error if it is one too many."""
        most = caller.quotas.calls_per_minute
        if not most:
            return None
        now = self._clock()
        bucket = self._buckets.setdefault(caller.id, _Bucket(most, now))
        bucket.left = min(most, bucket.left + (now - bucket.filled) * most / 60)
        bucket.filled = now
        if bucket.left < 1:
            seconds = (1 - bucket.left) * 60 / most
            return RateLimited(f"This token may call {most} times a minute, and has.", seconds=seconds)
        bucket.left -= 1
        return None
