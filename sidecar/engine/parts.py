"""What an export and a restore both need: settings, and a sandbox whose traffic is counted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sidecar.layouts import Layout, built_in
from sidecar.limits import Guards, Limits
from sidecar.ports import Finished, Sandbox
from sidecar.progress import Progress, Unwatched
from sidecar.repository import Repository
from sidecar.wiring import open_home


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    command: float = 1800.0
    """Seconds a command in the sandbox may take."""
    database_wait: float = 30.0
    """Seconds to wait for a gap between a database's writers."""
    turn_wait: float = 60.0
    """Seconds to wait for another export or restore in the same sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Everything the verbs work with, wired once."""

    repository: Repository
    layouts: Mapping[str, Layout] = field(default_factory=built_in)
    limits: Limits = Limits()
    guards: Guards = Guards()
    timing: Timing = Timing()
    inline_bytes: int = 1 << 20
    """A bundle up to this size comes back in the command's output; a larger one is downloaded."""
    progress: Progress = field(default_factory=Unwatched)
    open_home: Callable[[Path], Sandbox] = open_home
    """A folder of our own as a sandbox: imports, and what sandboxes without Python bring, are read there."""


class CountedSandbox:
    """A sandbox that counts what passes: round trips and bytes, both ways."""

    def __init__(self, sandbox: Sandbox, progress: Progress) -> None:
        self._sandbox = sandbox
        self._progress = progress
        self.ref = sandbox.ref
        self.round_trips = 0
        self.transferred_bytes = 0

    async def run(self, command: str, *, timeout: float, output_limit: int) -> Finished:
        self.round_trips += 1
        self.transferred_bytes += len(command)
        finished = await self._sandbox.run(command, timeout=timeout, output_limit=output_limit)
        self.transferred_bytes += len(finished.output)
        return finished

    async def upload(self, path: str, chunks: AsyncIterator[bytes]) -> None:
        self.round_trips += 1
        await self._sandbox.upload(path, self._counted(chunks))

    def download(self, path: str) -> AsyncIterator[bytes]:
        self.round_trips += 1
        return self._counted(self._sandbox.download(path))

    async def remove(self, path: str) -> None:
        await self._sandbox.remove(path)

    async def close(self) -> None:
        await self._sandbox.close()

    async def _counted(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for chunk in chunks:
            self.transferred_bytes += len(chunk)
            self._progress.advance(len(chunk))
            yield chunk
