"""A sandbox at any provider: connected once, kept alive on demand, every failure translated into an error of the
sidecar.

What differs between providers is a ``Vendor``: plain blocking calls on its SDK, and the translation of its errors.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from io import RawIOBase
from itertools import chain
from typing import Any, Protocol, TypeVar

from adapters.sandboxes.transfers import SourceFailed, receive_chunks, send_chunks
from sidecar.errors import (
    SandboxDenied,
    SandboxError,
    SandboxGone,
    SandboxTimeout,
    SandboxUnreachable,
    SdkMissing,
    SidecarError,
    TransferFailed,
)
from sidecar.host.values import dataclass
from sidecar.host.work import start_in_thread
from sidecar.ports import AllowedPaths, CommandResult, SandboxStatus

IDLE_SECONDS = 60.0
PARTING_SECONDS = 5.0
MOST_WORDS = 300
LONGEST_ARGUMENT = 126 << 10
"""Linux allows 128 KiB, the final zero included; some of it is needed by what others wrap around a command."""
REMEMBERED_SECONDS = 5.0
"""For this long, what the provider said about a sandbox's end is taken as current."""
MARK = "memory-sidecar-start"
"""The metadata or label of a sandbox that was created here: the name of its plan."""
KEYS = {"e2b": ("E2B_API_KEY", "E2B_ACCESS_TOKEN"), "daytona": ("DAYTONA_API_KEY", "DAYTONA_JWT_TOKEN")}
"""Variables with what a provider's SDK proves itself by; the first is what people are told to set."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SandboxConnection:
    """A connection: the SDK's object for the sandbox, what is known of its end, and how many requests that took."""

    box: Any
    ends_at: float | None
    woken: bool = False
    trips: int = 1
    slides: bool = False

    @property
    def presence(self) -> SandboxStatus:
        """What is known of the sandbox's end, for callers."""
        return SandboxStatus(self.ends_at, self.woken, self.slides)


class FileMissing(TransferFailed):
    """There is no such file; or the sandbox no longer exists, which only its provider can tell."""


class Vendor(Protocol):
    """One provider's SDK. Every method blocks, and raises whatever the SDK raises, or a ``SandboxError``."""

    longest_command: int
    """At most this many bytes a command may have."""

    @property
    def uploads_are_others(self) -> bool:
        """Whether uploads belong to another user than the one commands run as, who then cannot remove them."""
        ...

    def reach(self, name: str, *, wake: bool) -> SandboxConnection: ...

    def prolong(self, box: Any, seconds: float) -> float | None:
        """Keep the sandbox alive for at least that long; return when it ends now."""
        ...

    def run(
        self,
        box: Any,
        command: str,
        *,
        timeout: float,
        output_limit: int,
        environment: Mapping[str, str],
        started: Callable[[Callable[[], Any]], None],
    ) -> CommandResult:
        """Run a command; ``started`` is called with a function that kills it, once there is something to kill."""
        ...

    def upload(self, box: Any, path: str, source: RawIOBase) -> None: ...

    def download(self, box: Any, path: str) -> Iterator[bytes]: ...

    def remove(self, box: Any, path: str) -> None:
        """Delete a file. Raise ``FileMissing`` if it cannot be determined whether the file or the sandbox is missing."""
        ...

    def meaning(self, problem: Exception, ref: str, *, inside: bool = False) -> SandboxError:
        """Translate an exception of the SDK; ``inside``: it comes from a call that the sandbox's own daemon answers."""
        ...


class RemoteSandbox:
    """A sandbox behind a vendor's SDK."""

    def __init__(self, ref: str, vendor: Vendor, *, wake: bool = False, idle: float = IDLE_SECONDS) -> None:
        self.ref = ref
        self.control_trips = 0
        self._vendor = vendor
        self._name = ref.partition(":")[2]
        self._wake = wake
        self._idle = idle
        self._turn = asyncio.Lock()
        self._reached: SandboxConnection | None = None
        self._asked = 0.0

    def ground(self, projects: Sequence[str] | None) -> AllowedPaths | None:
        return None  # everything in it is the sandbox's own

    def holds(self, path: str) -> bool:
        return False  # only a request could tell

    async def stamp(self, projects: Sequence[str] | None) -> str:
        return ""

    async def connect(self) -> SandboxStatus:
        return (await self._connect_once()).presence

    async def prolong(self, seconds: float) -> SandboxStatus:
        if time.monotonic() - self._asked > REMEMBERED_SECONDS:
            self._reached = None  # another process may have prolonged it further, which must not be undone
        reached = await self._connect_once()
        if reached.ends_at is None or reached.ends_at - time.time() >= seconds:
            return reached.presence
        ends_at = await self._call_inside(lambda: self._vendor.prolong(reached.box, seconds))
        self.control_trips += 1
        self._remember(SandboxConnection(reached.box, ends_at, reached.woken, slides=reached.slides))
        return SandboxStatus(ends_at, reached.woken, reached.slides)

    async def run(
        self, command: str, *, timeout: float, output_limit: int, environment: Mapping[str, str] | None = None
    ) -> CommandResult:
        if len(command.encode()) > self._vendor.longest_command:
            return await self._run_from_file(command, timeout, output_limit, environment)
        box = (await self._connect_once()).box
        command_there = _Command()
        running = start_in_thread(
            lambda: self._vendor.run(
                box,
                command,
                timeout=timeout,
                output_limit=output_limit,
                environment=environment or {},
                started=command_there.started,
            )
        )
        try:
            done, _ = await asyncio.wait({running}, timeout=timeout + PARTING_SECONDS)
            if not done:
                raise SandboxTimeout(f"The command in {self.ref} did not end within {timeout:.0f} seconds.")
            return running.result()
        except BaseException as problem:
            # Also when cancelled, or when it printed too much: no command of the sidecar keeps running in a sandbox.
            await asyncio.wait({start_in_thread(command_there.give_up)}, timeout=PARTING_SECONDS)
            if isinstance(problem, Exception):
                raise await self._translate_failure(problem) from None
            raise

    async def _run_from_file(
        self, command: str, timeout: float, output_limit: int, environment: Mapping[str, str] | None
    ) -> CommandResult:
        """Run a command that is too long to be sent as one: from a file, with one more request."""
        path = f"/tmp/memory-sidecar-{secrets.token_hex(8)}.command"
        removed = False

        async def text() -> AsyncIterator[bytes]:
            yield command.encode()

        try:
            await self.upload(path, text())
            short = f"/bin/sh {path}\nr=$?\nrm -f {path} 2>/dev/null\nexit $r\n"
            done = await self.run(short, timeout=timeout, output_limit=output_limit, environment=environment)
            removed = not self._vendor.uploads_are_others
            return replace(done, uploads=1, trips=done.trips + (not removed))
        finally:
            if not removed and (reached := self._reached) is not None:
                gone = start_in_thread(lambda: _run_quietly(lambda: self._vendor.remove(reached.box, path)))
                await asyncio.wait({gone}, timeout=PARTING_SECONDS)

    async def upload(self, path: str, chunks: AsyncIterator[bytes]) -> None:
        box = (await self._connect_once()).box
        try:
            await send_chunks(lambda source: self._vendor.upload(box, path, source), chunks, idle=self._idle)
        except SourceFailed as failure:
            raise failure.problem from None
        except Exception as problem:
            raise await self._translate_failure(problem) from None

    async def download(self, path: str) -> AsyncGenerator[bytes]:
        box = (await self._connect_once()).box
        chunks = receive_chunks(lambda: self._vendor.download(box, path), idle=self._idle)
        try:
            async for chunk in chunks:
                yield chunk
        except Exception as problem:
            raise await self._translate_failure(problem) from None
        finally:
            await chunks.aclose()

    async def remove(self, path: str) -> None:
        box = (await self._connect_once()).box
        with suppress(FileMissing):
            await self._call_inside(lambda: self._vendor.remove(box, path))

    async def close(self) -> None:
        self._reached = None

    async def _connect_once(self) -> SandboxConnection:
        """Return the connection, made on first use."""
        async with self._turn:
            if self._reached is None:
                self._remember(await self._call(lambda: self._vendor.reach(self._name, wake=self._wake)))
                assert self._reached is not None
                self.control_trips += self._reached.trips
            return self._reached

    def _remember(self, reached: SandboxConnection) -> None:
        """Keep a connection, and when it was made."""
        self._reached, self._asked = reached, time.monotonic()

    async def _call(self, work: Callable[[], T]) -> T:
        """Call the provider's control plane, and translate its errors."""
        try:
            return await self._wait_for_answer(work)
        except SdkMissing:
            raise
        except Exception as problem:
            self.control_trips += 1
            raise self._translate_error(problem) from None

    async def _call_inside(self, work: Callable[[], T]) -> T:
        """Make a short call that only a running sandbox can answer."""
        try:
            return await self._wait_for_answer(work)
        except Exception as problem:
            raise await self._translate_failure(problem) from None

    async def _wait_for_answer(self, work: Callable[[], T]) -> T:
        """Run a blocking call in a thread. Raise ``SandboxUnreachable`` if it does not return in time."""
        calling = start_in_thread(work)
        done, _ = await asyncio.wait({calling}, timeout=self._idle)
        if not done:
            raise SandboxUnreachable(f"The provider of {self.ref} did not answer within {self._idle:.0f} seconds.")
        return calling.result()

    def _translate_error(self, problem: Exception, *, inside: bool = False) -> SidecarError:
        """Translate an exception into an error of the sidecar, without credentials in its message."""
        if isinstance(problem, SidecarError):
            return problem
        return remove_credentials(self._vendor.meaning(problem, self.ref, inside=inside))

    async def _translate_failure(self, problem: Exception) -> SidecarError:
        """Return the error for a failed command or transfer. The provider is asked whether a sandbox that does not
        answer still exists."""
        meaning = self._translate_error(problem, inside=True)
        if isinstance(meaning, SandboxGone | TransferFailed):
            self._reached = None
            try:
                self._remember(await self._call(lambda: self._vendor.reach(self._name, wake=False)))
            except SandboxError as answer:
                return answer
            if isinstance(meaning, SandboxGone):
                return SandboxUnreachable(f"{self.ref} is said to run, but did not answer: {meaning.message}")
        return meaning


class _Command:
    """A command in a sandbox that may have to be killed, before or after it is known how."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kill: Callable[[], Any] | None = None
        self._given_up = False

    def started(self, kill: Callable[[], Any]) -> None:
        """Take the function that kills it; call it at once if the command was given up."""
        with self._lock:
            self._kill = kill
            late = self._given_up
        if late:
            _run_quietly(kill)

    def give_up(self) -> None:
        """Kill the command now, or as soon as it is known how."""
        with self._lock:
            self._given_up = True
            kill = self._kill
        if kill is not None:
            _run_quietly(kill)


def remove_credentials(problem: SandboxError) -> SandboxError:
    """Remove credentials from an error's message: some services repeat what they were sent."""
    for name in chain.from_iterable(KEYS.values()):
        if secret := os.environ.get(name):
            problem.message = problem.message.replace(secret, "…")
            problem.args = (problem.message,)
    return problem


def format_problem(problem: Exception) -> str:
    """Return an SDK's exception as one bounded line.

    A long one keeps its beginning and its end: some daemons quote the whole command before they say what is wrong.
    """
    words = f"{type(problem).__name__}: {' '.join(str(problem).split())}"
    return words if len(words) <= MOST_WORDS else f"{words[: MOST_WORDS // 3]} … {words[-MOST_WORDS * 2 // 3 :]}"


def means_no_room(words: str) -> bool:
    """Return whether a message says that the disk is full."""
    return "no space left" in words.lower()


def means_unwritable(words: str) -> bool:
    """Return whether a daemon says that it may not write a file: the file system, or the user, does not allow it."""
    return any(said in words.lower() for said in ("read-only file system", "permission denied"))


def make_denied_error(ref: str, provider: str, variable: str) -> SandboxDenied:
    """Return the error for a refused API key. The provider's own message may repeat what it was sent, so it is left out."""
    if not os.environ.get(variable):
        return SandboxDenied(
            f"{variable} is not set in the environment of the sidecar, which needs it to reach {ref}: {provider} asks for it.",
            hint=f"Set {variable}, to a key of the account that the sandbox belongs to, where memory-sidecar itself is started,"
            " and start it again. For what is asked of a service, that is `memory-sidecar serve`: it never sees the"
            " environment of whoever calls it.",
        )
    return SandboxDenied(
        f"{provider} did not accept the API key for {ref}.",
        hint=f"Set {variable} to a key of the account it belongs to, where memory-sidecar itself is started.",
    )


def _run_quietly(work: Callable[[], Any]) -> None:
    with suppress(Exception):
        work()
