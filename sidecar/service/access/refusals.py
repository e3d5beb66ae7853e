"""Calls that are refused (401, 403): counted, slowed down by where they come from, and told.

Only the refusal itself is delayed. A caller with a right token never waits for what others at its address did, so
nobody can be locked out.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import Counter, OrderedDict
from collections.abc import Callable

from sidecar.host.values import dataclass
from sidecar.service.events import Events
from sidecar.service.logs import warn

FREE = 5
"""How many refusals of one peer are not delayed."""
FIRST_DELAY, LONGEST_DELAY = 0.1, 2.0
QUIET_SECONDS = 60.0
"""After so long without a refusal, a peer begins anew."""
MOST_PEERS = 1000
MOST_WAITING, MOST_WAITING_OF_ONE = 64, 4
"""How many refusals wait at once. A waiting one occupies a connection, which others may need."""
TELL_SECONDS = 60.0
MOST_TOLD = 5


@dataclass(slots=True)
class _Peer:
    refusals: int = 0
    last: float = 0.0
    waiting: int = 0


class Refusals:
    """The recent refusals, by peer."""

    def __init__(
        self, events: Events, count: Callable[[int], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``count`` is called with the HTTP status of each."""
        self._events = events
        self.count = count
        self._clock = clock
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self._waiting = 0
        self._untold: Counter[str] = Counter()
        self._untold_peers: Counter[str] = Counter()
        self._told = -TELL_SECONDS

    async def refuse(self, status: int, address: str, caller: str = "") -> bool:
        """Count and report a refusal, and wait as long as its peer has to. Return ``False`` if it did not wait because
        too many do: the connection is better closed."""
        self.count(status)
        peer = _find_network(address)
        self._tell(status, peer, caller)
        entry = self._note(peer)
        delay = compute_delay(entry.refusals)
        if not delay:
            return True
        if self._waiting >= MOST_WAITING or entry.waiting >= MOST_WAITING_OF_ONE:
            return False
        self._waiting += 1
        entry.waiting += 1
        try:
            await wait(delay)
        finally:
            self._waiting -= 1
            entry.waiting -= 1
        return True

    def _note(self, peer: str) -> _Peer:
        """Count a refusal of a peer. The peer that was refused longest ago is forgotten when there are too many."""
        now, entry = self._clock(), self._peers.pop(peer, None) or _Peer()
        if now - entry.last > QUIET_SECONDS:
            entry.refusals = 0
        entry.refusals += 1
        entry.last = now
        self._peers[peer] = entry
        while len(self._peers) > MOST_PEERS:
            self._peers.popitem(last=False)
        return entry

    def _tell(self, status: int, peer: str, caller: str) -> None:
        """Log the refusal, and publish an event at most once a minute: callers must not be able to fill the log, nor
        push other events out."""
        why = "no valid token" if status == 401 else "the token may not do that"
        warn(f"calls are refused: {why}", status=status, peer=peer, **({"caller": caller} if caller else {}))
        self._untold[str(status)] += 1
        if len(self._untold_peers) < MOST_PEERS or peer in self._untold_peers:
            self._untold_peers[peer] += 1
        now = self._clock()
        if now - self._told < TELL_SECONDS:
            return
        peers = [name for name, _ in self._untold_peers.most_common(MOST_TOLD)]
        self._events.publish("access.refused", refused=dict(self._untold), peers=peers, caller=caller)
        self._told = now
        self._untold.clear()
        self._untold_peers.clear()


async def wait(seconds: float) -> None:
    await asyncio.sleep(seconds)


def compute_delay(refusals: int) -> float:
    """Return how many seconds the answer to a peer's latest refusal is delayed."""
    if refusals <= FREE:
        return 0.0
    return min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(refusals - FREE - 1, 10))


def _find_network(address: str) -> str:
    """Return what counts as one peer: an IPv4 address, or the network of an IPv6 one, of which a single host has
    billions."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)
