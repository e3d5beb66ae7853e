"""What an export and a restore both need: settings, and a sandbox whose traffic is counted."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from sidecar.engine.quota import StoreUse
from sidecar.errors import BadConfig
from sidecar.host.progress import NoProgress, Progress
from sidecar.host.sections import check_least
from sidecar.layouts import Layout, load_built_in
from sidecar.policy.limits import Guards, Limits
from sidecar.policy.local_folders import OF_OUR_OWN, LocalPolicy
from sidecar.policy.privacy import Privacy
from sidecar.policy.retention import Retention
from sidecar.ports import AllowedPaths, CommandResult, Sandbox, SandboxStatus
from sidecar.store.repository import Repository

if TYPE_CHECKING:
    from sidecar.search.index import MemoryIndex

Reached = Callable[[str], Awaitable[None]]
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    command: float = 1800.0
    """Seconds a command in the sandbox may take."""
    database_wait: float = 30.0
    """Seconds to wait for a gap between a database's writers."""
    turn_wait: float = 60.0
    """Seconds to wait for another export or restore in the same sandbox."""
    worker_wait: float = 5.0
    """Seconds to wait for a memory worker to write what it has taken on, before an export or a restore."""
    keep_alive: float = 120.0
    """A sandbox that would end sooner than in so many seconds is prolonged while it is worked with."""
    direct: int = 600
    """Seconds for which a link straight to the bucket is good."""
    unpack: float = 1800.0
    """Seconds that checking or unpacking what arrived may take here, and a tarball to arrive over HTTP."""


def check_timing(timing: Timing) -> Timing:
    """Raise ``BadConfig`` for what no export could be made in."""
    check_least(timing, "timing", {"command": 1, "direct": 1, "unpack": 1})
    return timing


FOUND, NAMED = "found", "named"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreSettings:
    """What restores do unless they are told otherwise."""

    projects: str = FOUND
    """Which projects are restored: "found": all, where they were; "named": those that a restore names, and those whose
    folders are there, so that nothing is in the way of a ``git clone``."""

    @property
    def withhold(self) -> bool:
        return self.projects == NAMED


def check_restore(settings: RestoreSettings) -> RestoreSettings:
    """Raise ``BadConfig`` for a word that is none of them."""
    if settings.projects not in (FOUND, NAMED):
        raise BadConfig(f'[restore] projects must be "{FOUND}" or "{NAMED}".', at=("restore", "projects"))
    return settings


class SandboxOpener(Protocol):
    """Opens the sandbox behind ``provider:id``: ``sidecar.wiring.open_sandbox``."""

    def __call__(self, ref: str, *, wake: bool = ..., user: str = ..., local: LocalPolicy = ...) -> Sandbox: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Everything the verbs work with, wired once."""

    repository: Repository
    open_sandbox: SandboxOpener
    layouts: Mapping[str, Layout] = field(default_factory=load_built_in)
    limits: Limits = Limits()
    guards: Guards = Guards()
    privacy: Privacy = Privacy()
    timing: Timing = Timing()
    retention: Retention = Retention()
    restoring: RestoreSettings = RestoreSettings()
    set_aside_bytes: int = 2 << 30
    """So much of what restores replace is kept in a sandbox, if it came with the sandbox."""
    inline_bytes: int = 1 << 20
    """A bundle up to this size comes back in the command's output; a larger one is downloaded."""
    direct: bool = False
    """Let packs go straight between sandbox and bucket, where the store can make links."""
    progress: Progress = field(default_factory=NoProgress)
    reached: Reached | None = None
    """Called once the sandbox was reached and there is something to do, before anything is stored or changed; an export says
    which id its snapshot would have."""
    fence: Callable[[], Awaitable[None]] | None = None
    """Called before a head is moved; raises when whoever asked for that has lost the right to."""
    forgot: Callable[[str, int], None] | None = None
    """Called with a memory and how many of its snapshots the rules have let go after an export."""
    index: MemoryIndex | None = None
    """What makes memories searchable, where there is a database for it. The verbs do not wait for it."""
    use: StoreUse = field(default_factory=StoreUse)
    local: LocalPolicy = OF_OUR_OWN
    """Which folders of this machine may be sandboxes, and what they stay apart from."""

    def open_home(self, home: Path) -> Sandbox:
        """A folder of our own as a sandbox: imports, and what sandboxes without Python bring, are read there."""
        return self.open_sandbox(f"local:{home}", local=OF_OUR_OWN)


def new_upload_path() -> str:
    """Where in a sandbox to put what a restore brings."""
    return f"/tmp/memory-sidecar-{secrets.token_hex(8)}.bundle"


@overload
async def gather(first: Awaitable[A], second: Awaitable[B], /) -> tuple[A, B]: ...
@overload
async def gather(first: Awaitable[A], second: Awaitable[B], third: Awaitable[C], /) -> tuple[A, B, C]: ...
async def gather(*things: Awaitable[Any]) -> tuple[Any, ...]:
    """Wait for some things at once; when one fails, the others are called off."""
    tasks = [asyncio.ensure_future(thing) for thing in things]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class CountedSandbox:
    """A sandbox that counts what passes: round trips and bytes, both ways."""

    def __init__(self, sandbox: Sandbox, progress: Progress) -> None:
        self._sandbox = sandbox
        self._progress = progress
        self._control_before = sandbox.control_trips
        self._trips: Counter[str] = Counter()
        self.ref = sandbox.ref
        self.transferred_bytes = 0

    @property
    def trips(self) -> dict[str, int]:
        """How many of each: "control", "command", "upload", "download"."""
        control = self._sandbox.control_trips - self._control_before
        return {**({"control": control} if control else {}), **self._trips}

    def ground(self, projects: Sequence[str] | None) -> AllowedPaths | None:
        return self._sandbox.ground(projects)

    async def connect(self) -> SandboxStatus:
        return await self._sandbox.connect()

    async def prolong(self, seconds: float) -> SandboxStatus:
        return await self._sandbox.prolong(seconds)

    async def run(
        self, command: str, *, timeout: float, output_limit: int, environment: Mapping[str, str] | None = None
    ) -> CommandResult:
        self._trips["command"] += 1
        self.transferred_bytes += len(command) + sum(map(len, (environment or {}).values()))
        finished = await self._sandbox.run(command, timeout=timeout, output_limit=output_limit, environment=environment)
        self._trips["command"] += finished.trips - 1
        if finished.uploads:
            self._trips["upload"] += finished.uploads
        self.transferred_bytes += len(finished.output)
        return finished

    async def upload(self, path: str, chunks: AsyncIterator[bytes]) -> None:
        self._trips["upload"] += 1
        await self._sandbox.upload(path, self._count_chunks(chunks))

    async def download(self, path: str) -> AsyncGenerator[bytes]:
        self._trips["download"] += 1
        async with contextlib.aclosing(self._sandbox.download(path)) as chunks:
            async for chunk in self._count_chunks(chunks):
                yield chunk

    def add(self, trips: Mapping[str, int], transferred: int) -> None:
        """Count what passed while somebody else counted. The sandbox itself counts what is asked of its provider."""
        self._trips.update({kind: count for kind, count in trips.items() if kind != "control"})
        self.transferred_bytes += transferred

    async def remove(self, path: str) -> None:
        self._trips["remove"] += 1
        await self._sandbox.remove(path)

    async def _count_chunks(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for chunk in chunks:
            self.transferred_bytes += len(chunk)
            self._progress.advance(len(chunk))
            yield chunk
