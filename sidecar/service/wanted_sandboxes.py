"""What the store knows about memories that are to have a living sandbox (``[[start]]`` in the config).

One small object per memory, replaced by compare-and-swap: of several services one creates, the budget counts across
restarts, and ``stop`` lasts. ``jobs/wanted_sandboxes`` acts on it; a call to start or to stop only notes here what was
asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, field, replace

import msgspec
import structlog

from sidecar.errors import SwapLost
from sidecar.format.checksums import decode_checksummed, encode_checksummed
from sidecar.host.values import dataclass
from sidecar.ids import build_wanted_key
from sidecar.ports import Store

ATTEMPTS = 10
"""How often a change is tried that other services are faster with."""


@dataclass(frozen=True, slots=True)
class WantedState:
    """How a memory stands that is to have a living sandbox."""

    memory: str
    table: str
    """A digest of its table in the config. A service that starts with another one begins afresh."""
    sandbox: str = ""
    """Its sandbox, as far as is known."""
    stopped: bool = False
    """None is to be created: it was stopped, and not started since."""
    attempt: str = ""
    """The key of the creation that is under way, or that failed and is tried again."""
    instance: str = ""
    """The service that creates it; empty: none."""
    creations: list[float] = field(default_factory=list)
    """When a provider was asked for one, within the last hour."""
    failures: int = 0
    """How many creations failed in a row."""
    not_before: float = 0.0
    """Until then none is created."""
    problem: str = ""
    since: float = 0.0
    """Since when it is missing; 0: it is not."""


@dataclass(frozen=True, slots=True)
class HeldState:
    """A state as it was read or written, with the version that a compare-and-swap expects."""

    state: WantedState
    version: str | None


class WantedStates:
    """The states in one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._log = structlog.get_logger("sidecar")

    async def read(self, memory: str) -> HeldState | None:
        """Return the state of a memory; ``None`` if it was never to have a sandbox. One that is damaged counts as one that
        was never written, but for its version: the next write replaces it."""
        key = build_wanted_key(memory)
        stored = await self._store.get(key)
        if stored is None:
            return None
        try:
            state = msgspec.convert(decode_checksummed(stored.data), WantedState)
            if state.memory != memory:
                raise ValueError("it belongs to another memory")
        except (ValueError, msgspec.ValidationError) as problem:
            self._log.error("what is known about a wanted sandbox is damaged", object=key, problem=str(problem))
            state = WantedState(memory, "")
        return HeldState(state, stored.version)

    async def write(self, state: WantedState, before: HeldState | None) -> HeldState:
        """Raise ``SwapLost`` if another service wrote it."""
        await self._store.prepare()
        expected = before.version if before is not None else None
        data = encode_checksummed(asdict(state))
        return HeldState(state, await self._store.swap(build_wanted_key(state.memory), data, expected=expected))

    async def change(self, memory: str, change: Callable[[WantedState], WantedState]) -> HeldState | None:
        """Change a state, whoever else does. Return it; ``None`` if there is none."""
        for left in reversed(range(ATTEMPTS)):
            held = await self.read(memory)
            if held is None or (after := change(held.state)) == held.state:
                return held
            try:
                return await self.write(after, held)
            except SwapLost:
                if not left:
                    raise
        return None

    async def note_started(self, memory: str, sandbox: str) -> None:
        """Note that a memory has this sandbox now, if it is to have one."""
        await self.change(memory, lambda state: settle(replace(state, stopped=False), sandbox))

    async def note_stopped(self, memory: str) -> bool:
        """Note that no sandbox is to be created for a memory any more. Return whether one was to be."""
        return await self.change(memory, lambda state: replace(settle(state, ""), stopped=True)) is not None


def settle(state: WantedState, sandbox: str) -> WantedState:
    """Return the state of a memory that has this sandbox, and whose creations are over."""
    return replace(state, sandbox=sandbox, attempt="", instance="", failures=0, not_before=0.0, problem="", since=0.0)
