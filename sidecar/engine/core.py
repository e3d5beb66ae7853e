"""The engine: the settings and ports that every verb works with, and a sandbox wrapper that counts its traffic."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, overload

from sidecar.errors import BadConfig
from sidecar.host.sections import check_least
from sidecar.host.values import dataclass
from sidecar.host.work import NoProgress, Progress
from sidecar.ids import ROOT
from sidecar.layouts import Layout, load_built_in
from sidecar.policy.limits import Guards, Limits
from sidecar.policy.local_folders import OF_OUR_OWN, LocalPolicy
from sidecar.policy.privacy import Privacy
from sidecar.policy.retention import Retention
from sidecar.policy.review import ExportCheck, Review
from sidecar.ports import AllowedPaths, CommandResult, Sandbox, SandboxProvider, SandboxStatus, Store
from sidecar.store.repository import Repository

if TYPE_CHECKING:
    from sidecar.search.upkeep import SearchIndex

Reached = Callable[[str], Awaitable[None]]
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")

STALE_SECONDS = 300.0


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
    """Return ``timing``. Raise ``BadConfig`` if a time is too short for any export to succeed."""
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
        """Whether projects that were not named, and whose folders do not exist yet, are left out of a restore."""
        return self.projects == NAMED


def check_restore(settings: RestoreSettings) -> RestoreSettings:
    """Return ``settings``. Raise ``BadConfig`` if ``projects`` is not one of the known words."""
    if settings.projects not in (FOUND, NAMED):
        raise BadConfig(f'[restore] projects must be "{FOUND}" or "{NAMED}".', at=("restore", "projects"))
    return settings


class View(Protocol):
    """Which memories a caller may know of."""

    def sees(self, memory: str) -> bool: ...

    def may_see_folder(self, folder: str) -> bool:
        """Whether the memory in a folder of the store, which may have any id that makes such a name, may be one of
        them."""
        ...


class SandboxOpener(Protocol):
    """Opens the sandbox behind ``provider:id``: ``sidecar.wiring.open_sandbox``."""

    def __call__(self, ref: str, *, wake: bool = ..., user: str = ..., local: LocalPolicy = ...) -> Sandbox: ...


class ProviderOpener(Protocol):
    """Opens who creates sandboxes at a provider: ``sidecar.wiring.open_provider``."""

    def __call__(self, provider: str, *, local: LocalPolicy = ...) -> SandboxProvider: ...


class StoreUse:
    """How many bytes all memories use in a store: counted by a listing every ``STALE_SECONDS``, and in between by
    adding what this process stores.

    What other services add is therefore counted after five minutes at the latest. Removals by others never make an
    export fail wrongly: before an export is refused, the store is listed again.
    """

    def __init__(self) -> None:
        self._bytes = 0
        self._counted = -STALE_SECONDS

    async def bytes(self, store: Store, *, fresh: bool = False) -> int:
        """Return the bytes in use; ``fresh`` forces a new listing."""
        if fresh or time.monotonic() - self._counted >= STALE_SECONDS:
            self._bytes = sum([info.size async for info in store.list(ROOT)])
            self._counted = time.monotonic()
        return self._bytes

    def add(self, count: int) -> None:
        self._bytes += count


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The store, the sandbox opener and all settings that the verbs need. Built once, at start."""

    repository: Repository
    open_sandbox: SandboxOpener
    open_provider: ProviderOpener | None = None
    """For who creates sandboxes too, not only works in them."""
    layouts: Mapping[str, Layout] = field(default_factory=load_built_in)
    limits: Limits = Limits()
    guards: Guards = Guards()
    privacy: Privacy = Privacy()
    timing: Timing = Timing()
    retention: Retention = Retention()
    restoring: RestoreSettings = RestoreSettings()
    review: Review = Review()
    """Which memories a person looks at before they change."""
    checks: Sequence[ExportCheck] = ()
    """Commands that look at a snapshot before it becomes the head."""
    set_aside_bytes: int = 2 << 30
    """How many bytes of files that came with a sandbox, and that restores replaced, are kept there at most."""
    inline_bytes: int = 1 << 20
    """A bundle up to this size is returned in the command's output; a larger one is downloaded."""
    direct: bool = False
    """Let packs travel directly between sandbox and bucket, if the store can make signed links."""
    progress: Progress = field(default_factory=NoProgress)
    reached: Reached | None = None
    """Called once the sandbox was reached and there is something to do, before anything is stored or changed. It gets
    the id of the snapshot: for an export, the id that the new one would have."""
    check_right: Callable[[], Awaitable[None]] | None = None
    """Called before a head is moved. Raises if the caller no longer has the right to move it, for example because its
    lease was taken over."""
    forgot: Callable[[str, int], None] | None = None
    """Called after an export with a memory and the number of its snapshots that the retention rules removed."""
    view: View | None = None
    """Which memories the caller may know of; ``None``: all. Nothing in a receipt or an error names another, or depends on
    whether there is one."""
    may_use_folder: Callable[[str], bool] | None = None
    """Whether the caller may use a folder of this machine outside of its sandbox's home, where a project or a link leads
    to; ``None``: all that ``local`` allows."""
    charge: Callable[[str, int], Awaitable[None]] | None = None
    """Called before a snapshot is stored, with the memory and how many bytes the store will gain at most. Raises
    ``LimitExceeded`` if the caller may not store as much."""
    index: SearchIndex | None = None
    """Updates the search index, if a search database is configured. The verbs do not wait for it."""
    use: StoreUse = field(default_factory=StoreUse)
    local: LocalPolicy = OF_OUR_OWN
    """Which folders of this machine may be used as sandboxes, and which ones they must not overlap."""

    def narrow_to(self, memory: str) -> Self:
        """Return the engine with the limits, guards and privacy settings of one memory."""
        return replace(
            self, limits=self.limits.of(memory), guards=self.guards.of(memory), privacy=self.privacy.of(memory)
        )

    def open_home(self, home: Path) -> Sandbox:
        """Open a folder that belongs to the sidecar as a sandbox. Imports, and the tarballs of sandboxes without
        Python, are unpacked into such a folder and exported from there."""
        return self.open_sandbox(f"local:{home}", local=OF_OUR_OWN)


def new_upload_path() -> str:
    """Return a fresh path in the sandbox for an upload: a bundle, or a request that is too long for a command."""
    return f"/tmp/memory-sidecar-{secrets.token_hex(8)}.bundle"


@overload
async def gather(first: Awaitable[A], second: Awaitable[B], /) -> tuple[A, B]: ...
@overload
async def gather(first: Awaitable[A], second: Awaitable[B], third: Awaitable[C], /) -> tuple[A, B, C]: ...
async def gather(*things: Awaitable[Any]) -> tuple[Any, ...]:
    """Await several things concurrently and return their results. If one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(thing) for thing in things]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class CountedSandbox:
    """A sandbox that counts round trips and transferred bytes, both ways."""

    def __init__(
        self, sandbox: Sandbox, progress: Progress, may_use_folder: Callable[[str], bool] | None = None
    ) -> None:
        self._sandbox = sandbox
        self._progress = progress
        self._may_use_folder = may_use_folder
        self._control_before = sandbox.control_trips
        self._trips: Counter[str] = Counter()
        self.ref = sandbox.ref
        self.transferred_bytes = 0
        self.without_python = False
        """It has said that it has no Python that can run the program."""

    @property
    def trips(self) -> dict[str, int]:
        """The number of round trips by kind: "control", "command", "upload", "download" and "remove"."""
        control = self._sandbox.control_trips - self._control_before
        return {**({"control": control} if control else {}), **self._trips}

    def ground(self, projects: Sequence[str] | None) -> AllowedPaths | None:
        allowed = self._sandbox.ground(projects)
        if allowed is None or self._may_use_folder is None:
            return allowed
        home, *others = allowed.beneath
        return replace(allowed, beneath=(home, *filter(self._may_use_folder, others)))

    def holds(self, path: str) -> bool:
        return self._sandbox.holds(path)

    async def stamp(self, projects: Sequence[str] | None) -> str:
        return await self._sandbox.stamp(projects)

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
        """Add traffic that another ``CountedSandbox`` of the same sandbox counted. "control" trips are left out: the
        sandbox itself counts those, so they are included already."""
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
