"""Sandboxes of every provider, for tests: the real adapters, at emulated providers."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from adapters.sandboxes.daytona import Daytona
from adapters.sandboxes.e2b import E2B
from adapters.sandboxes.remote import RemoteSandbox, Vendor
from emulators import Call, DaytonaEmulator, DaytonaSandbox, E2BEmulator, E2BSandbox
from emulators.calls import Step
from emulators.processes import living
from sidecar.ports import Sandbox
from sidecar.wiring import open_sandbox

Emulator = E2BEmulator | DaytonaEmulator
Emulated = E2BSandbox | DaytonaSandbox

INSIDE: frozenset[Step] = frozenset({"command", "signal", "upload", "download", "filesystem", "health", "home"})
"""The steps that go to a sandbox itself, and not to its provider's control plane."""


@dataclass(frozen=True)
class Made:
    """A sandbox that runs, seen from behind: where its home really is, and the emulator's hold on it."""

    ref: str
    home: Path
    handle: Emulated | None = None

    @property
    def emulated(self) -> Emulated:
        assert self.handle is not None
        return self.handle

    def processes(self) -> list[int]:
        """What still runs in it."""
        return living(f"HOME={self.home}")


class Provider:
    """Where sandboxes come from: ``local``, or the emulator of a provider."""

    def __init__(self, name: str, *, base: Path, server: Emulator | None = None) -> None:
        self.name = name
        self._base = base
        self._server = server

    @property
    def server(self) -> Emulator:
        assert self._server is not None
        return self._server

    @property
    def remote(self) -> bool:
        return self._server is not None

    @property
    def merges_output(self) -> bool:
        """Whether a command's stderr comes with its stdout."""
        return self.name == "daytona"

    def create(self, *, seconds: float = 900, **options: object) -> Made:
        """A running sandbox that ends by itself after so many seconds (at Daytona: without activity)."""
        if isinstance(self._server, E2BEmulator):
            made: Emulated = self._server.create(timeout=seconds, **options)  # type: ignore[arg-type]
        elif isinstance(self._server, DaytonaEmulator):
            made = self._server.create(auto_stop=seconds / 60, **options)  # type: ignore[arg-type]
        else:
            home = self._base / f"home-{time.monotonic_ns()}"
            home.mkdir()
            return Made(f"local:{home}", home)
        return Made(f"{self.name}:{made.id}", made.home, made)

    def open(self, made: Made, *, wake: bool = False) -> Sandbox:
        return open_sandbox(made.ref, wake=wake)

    def open_impatient(self, made: Made) -> RemoteSandbox:
        """A sandbox that gives up after a second without any progress."""
        return RemoteSandbox(made.ref, self.vendor(), idle=1)

    def vendor(self) -> Vendor:
        return E2B() if self.name == "e2b" else Daytona()

    def control_calls(self) -> list[Call]:
        """What the control plane was asked."""
        return [call for call in self.server.calls if call.step not in INSIDE] if self._server is not None else []


EMULATORS: dict[str, Callable[..., Emulator]] = {"e2b": E2BEmulator, "daytona": DaytonaEmulator}


def cleaned(server: Emulator) -> None:
    """Have an emulator forget what an earlier test did to it."""
    server.faults.clear()
    server.latency = 0.0
    server.stop_webhooks()
    for sandbox in server.sandboxes():
        sandbox.kill()
    server.clear()


def provider_variables() -> list[str]:
    """The variables in the environment that would lead an SDK elsewhere."""
    return [name for name in os.environ if name.startswith(("E2B_", "DAYTONA_"))]


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """End what takes longer, however it hangs."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"this took more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


async def until(true: Callable[[], bool], *, seconds: float = 5) -> bool:
    """Whether this comes true soon."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


@asynccontextmanager
async def nothing_left_waiting() -> AsyncIterator[None]:
    """What is done within leaves no thread that still waits for an SDK."""

    def waiting() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "sandbox-call"}

    before = waiting()
    yield
    assert await until(lambda: waiting() <= before)


async def chunks_of(data: bytes, size: int = 1 << 16) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def failing_after(chunks: Iterable[bytes], problem: BaseException) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk
    raise problem


async def downloaded(sandbox: Sandbox, path: str | Path) -> bytes:
    return b"".join([chunk async for chunk in sandbox.download(str(path))])
