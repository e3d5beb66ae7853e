"""Memories in the sandboxes of every provider: the same few lines open, count and compare them all."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from emulators import DaytonaEmulator, E2BEmulator
from emulators.processes import living
from sidecar.engine import Engine
from sidecar.ids import MemoryKeys
from sidecar.ports import AllowedPaths, CommandResult, Sandbox, SandboxStatus
from sidecar.store.manifest import Manifest
from sidecar.store.repository import Repository
from sidecar.wiring import open_sandbox, open_store
from tests.parts.homes import OwnMachine, observe, write
from tests.parts.sent import request_in

Name = Literal["local", "e2b", "daytona"]
Hook = Callable[[dict[str, Any]], Awaitable[None] | None]

LARGE = 2 << 20
"""More bytes than come back in a command's output."""
CONTROL = ("info", "connect", "timeout", "activity", "start")
TOOLS = (
    *(
        "sh",
        "cat",
        "chmod",
        "cp",
        "cut",
        "dirname",
        "env",
        "find",
        "gzip",
        "head",
        "ls",
        "mkdir",
        "mktemp",
        "mv",
        "printf",
    ),
    *("rm", "rmdir", "sed", "sha256sum", "sleep", "sort", "sqlite3", "tail", "tar", "tr", "wc"),
)
"""What a sandbox without Python has."""


class Watched:
    """Any sandbox, with a note of what was asked of it, and a moment to act before each command."""

    def __init__(self, sandbox: Sandbox, before: Hook | None = None) -> None:
        self._sandbox = sandbox
        self._before = before
        self.ref = sandbox.ref
        self.commands: list[dict[str, Any]] = []
        self.uploads: list[str] = []
        self.downloads: list[str] = []

    @property
    def control_trips(self) -> int:
        return self._sandbox.control_trips

    @property
    def counts(self) -> Counter[str]:
        return +Counter(command=len(self.commands), upload=len(self.uploads), download=len(self.downloads))

    def ground(self, projects: Sequence[str] | None) -> AllowedPaths | None:
        return self._sandbox.ground(projects)

    def holds(self, path: str) -> bool:
        return self._sandbox.holds(path)

    async def stamp(self, projects: Sequence[str] | None) -> str:
        return await self._sandbox.stamp(projects)

    async def connect(self) -> SandboxStatus:
        return await self._sandbox.connect()

    async def prolong(self, seconds: float) -> SandboxStatus:
        return await self._sandbox.prolong(seconds)

    async def run(self, command: str, **how: Any) -> CommandResult:
        request = request_in(command, how.get("environment")) if "sidecar.program" in command else {}
        self.commands.append(request)
        if self._before is not None and inspect.isawaitable(acting := self._before(request)):
            await acting
        return await self._sandbox.run(command, **how)

    async def upload(self, path: str, chunks: AsyncIterator[bytes]) -> None:
        self.uploads.append(path)
        await self._sandbox.upload(path, chunks)

    async def download(self, path: str) -> AsyncGenerator[bytes]:
        self.downloads.append(path)
        async with contextlib.aclosing(self._sandbox.download(path)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def remove(self, path: str) -> None:
        await self._sandbox.remove(path)

    async def close(self) -> None:
        await self._sandbox.close()


class BareSandbox(OwnMachine):
    """A local sandbox that has only the tools of one folder."""

    def __init__(self, home: Path, tools: Path) -> None:
        super().__init__(home)
        self._environment = {"HOME": str(home), "PATH": str(tools)}


@dataclass
class Box:
    """One sandbox: what its provider calls it, its home on this machine, and the emulator's own object for it."""

    provider: Provider
    ref: str
    home: Path
    emulated: Any = None
    tools: Path | None = None

    def open(self, *, wake: bool = False, before: Hook | None = None) -> Watched:
        bare = self.emulated is None and self.tools is not None
        sandbox = BareSandbox(self.home, self.tools) if bare and self.tools else open_sandbox(self.ref, wake=wake)
        watched = Watched(sandbox, before)
        self.provider.opened.append(watched)
        return watched

    def left_behind(self) -> list[str]:
        """What of ours is still in it: processes, work folders, uploads, commands' output. Its cache may stay."""
        processes = [f"process {pid}" for pid in living(f"HOME={self.home}")]
        folders = [str(path) for path in (self.home / ".cache/memory-sidecar").glob("work-*")]
        uploads = [Path(path).stem for opened in self.provider.opened for path in opened.uploads]
        files = [str(path) for name in uploads for path in Path("/tmp").glob(f"{name}*")]
        return processes + folders + files + [path for path in self.provider.named if Path(path).exists()]

    async def is_clean(self, within: float = 5.0) -> bool:
        """Whether nothing of ours stays in it, given a moment."""
        deadline = time.monotonic() + within
        while self.left_behind() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return not self.left_behind()


def _note_names(sandbox: Any, named: set[str]) -> None:
    """Note every path of ours in /tmp that a script given to this sandbox names."""
    spawn = sandbox.spawn

    def spawned(*about: Any, **more: Any) -> Any:
        process = spawn(*about, **more)
        feed = process.feed

        def fed(script: bytes) -> None:
            named.update(f"/tmp/{name.decode()}" for name in re.findall(rb"\bmemory-sidecar-[0-9a-f]+\.run", script))
            feed(script)

        process.feed = fed
        return process

    sandbox.spawn = spawned


class Provider:
    """A provider with nothing in it yet. ``asked`` is what *it* counted, in a receipt's words."""

    def __init__(self, name: Name, folder: Path, server: E2BEmulator | DaytonaEmulator | None) -> None:
        self.name = name
        self.folder = folder
        self.emulator = server
        self.opened: list[Watched] = []
        self.named: set[str] = set()
        self._made = 0

    @property
    def server(self) -> E2BEmulator | DaytonaEmulator:
        assert self.emulator is not None
        return self.emulator

    def box(self, *, tools: Path | None = None, **options: Any) -> Box:
        if self.emulator is not None:
            made = self.emulator.create(tools=tools, **options)
            _note_names(made, self.named)
            return Box(self, f"{self.name}:{made.id}", made.home, made, tools)
        self._made += 1
        home = self.folder / f"home {self._made}"
        home.mkdir(parents=True)
        return Box(self, f"local:{home}", home, None, tools)

    def asked(self) -> dict[str, int]:
        if self.emulator is None:
            return dict(sum((opened.counts for opened in self.opened), Counter[str]()))
        return dict(Counter("control" if call.step in CONTROL else call.step for call in self.emulator.calls))

    def clear(self) -> None:
        """Forget what was asked so far."""
        for opened in self.opened:
            opened.commands.clear()
            opened.uploads.clear()
            opened.downloads.clear()
        if self.emulator is not None:
            self.emulator.clear()


@contextmanager
def provider_named(name: Name, folder: Path) -> Iterator[Provider]:
    """A provider for one test. Whoever uses it sets its ``environment`` first."""
    if name == "local":
        yield Provider(name, folder, None)
        return
    (folder / name).mkdir(parents=True, exist_ok=True)
    with (E2BEmulator if name == "e2b" else DaytonaEmulator)(base=folder / name) as server:
        yield Provider(name, folder, server)


def shell_tools(folder: Path) -> Path:
    """A folder with the tools of a sandbox that has no Python. Return it."""
    folder.mkdir()
    for name in TOOLS:
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    return folder


def engine_on(url: str, **settings: Any) -> Engine:
    return replace(Engine(open_sandbox=open_sandbox, repository=Repository(open_store(url))), **settings)


def plain_home(home: Path, rows: int = 40) -> Path:
    """A small memory of both layouts without anything odd in it but a blank and an emoji. Return the home."""
    write(home / ".claude-mem/modes/code mode.json", b'{"name": "code"}', 0o600)
    observe(home, rows)
    write(home / "MEMORY.md", b"# Long term\n")
    write(home / "memory/day 🦊.md", b"today\n" * 50)
    return home


def grow(home: Path, word: str = "later") -> None:
    """A conversation's worth of changes, small ones."""
    observe(home, 3, word)
    with (home / "MEMORY.md").open("ab") as file:
        file.write(f"{word}\n".encode())


def grow_large(home: Path, seed: int = 1, size: int = LARGE) -> None:
    """Add what does not compress and is too large for a command's output."""
    write(home / f"memory/large-{seed}.md", random.Random(seed).randbytes(size))


def damage_database(home: Path) -> None:
    """Spoil the database in a way that copying does not notice and a check does."""
    path = home / ".claude-mem/claude-mem.db"
    data = bytearray(path.read_bytes())
    data[4096 * 3 : 4096 * 5] = b"\x07" * 8192
    path.write_bytes(data)


async def manifests_of(engine: Engine, memory: str) -> list[Manifest]:
    """Every snapshot of a memory, oldest first; each must be readable."""
    ids = sorted(await engine.repository.list_snapshot_ids(memory))
    return [await engine.repository.manifest(memory, snapshot) for snapshot in ids]


async def strays(engine: Engine, memory: str) -> set[str]:
    """The objects among a memory's packs that no manifest names; and those that are named and missing."""
    keys = MemoryKeys.of(memory)
    held = {info.key async for info in engine.repository.store.list(keys.packs)}
    named = {
        key
        for manifest in await manifests_of(engine, memory)
        for pack in manifest.packs
        for key in (keys.pack(pack.id, pack.codec), keys.index(pack.id))
    }
    return held ^ named
