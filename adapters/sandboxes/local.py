"""A folder on this machine as a sandbox: ``local:/path/to/home``.

Real, not a mock: agents run on plain machines too, and everything that works here works the same way elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from pathlib import Path

from sidecar.errors import (
    BadReference,
    OutputTooLarge,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SandboxTimeout,
    TransferFailed,
)
from sidecar.ports import Finished, Presence

CHUNK = 1 << 20
COMPLAINT = 4096
PARTING_SECONDS = 5
# The machine's own; every other variable reaches the sandbox only if it points into its home.
SHARED_VARIABLES = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "USER", "LOGNAME", "SHELL", "TERM")


class LocalSandbox:
    """Commands run with ``HOME`` and the working folder set to the home, as the user who runs the sidecar."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.ref = f"local:{home}"
        self.control_trips = 0
        self._environment = _environment(home)

    async def connect(self) -> Presence:
        return Presence()

    async def prolong(self, seconds: float) -> Presence:
        return Presence()

    async def run(self, command: str, *, timeout: float, output_limit: int) -> Finished:
        # The script goes in by stdin: a command line has a size limit, and shows in the process list.
        try:
            process = await asyncio.create_subprocess_exec(
                "/bin/sh",
                "-s",
                cwd=self.home,
                env=self._environment,
                start_new_session=True,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as problem:
            if not self.home.is_dir():
                raise SandboxGone(f"{self.ref} is gone: the folder is not there any more.") from None
            raise SandboxError(f"No command can be run in {self.ref}: {problem.strerror}.") from None
        streams = [
            asyncio.ensure_future(_drain(process.stdout, output_limit)),
            asyncio.ensure_future(_drain(process.stderr, None)),
            asyncio.ensure_future(_feed(process.stdin, command)),
        ]
        try:
            async with asyncio.timeout(timeout):
                output, complaint, _ = await asyncio.gather(*streams)
                code = await process.wait()
        except TimeoutError:
            raise SandboxTimeout(f"The command in {self.ref} did not end within {timeout:.0f} seconds.") from None
        finally:
            # Also when cancelled: nothing of ours goes on running in a sandbox.
            if process.returncode is None:
                await _end(process, streams)
        return Finished(code, output, complaint.decode("utf-8", "replace")[-COMPLAINT:])

    async def upload(self, path: str, chunks: AsyncIterator[bytes]) -> None:
        with self._writing(path):
            file = await asyncio.to_thread(open, path, "wb")
        try:
            async for chunk in chunks:
                with self._writing(path):
                    await asyncio.to_thread(file.write, chunk)
        finally:
            with self._writing(path):
                file.close()

    async def download(self, path: str) -> AsyncGenerator[bytes]:
        try:
            place = self.home / path[2:] if path.startswith("~/") else Path(path)
            with await asyncio.to_thread(open, place, "rb") as file:
                while chunk := await asyncio.to_thread(file.read, CHUNK):
                    yield chunk
        except OSError as problem:
            raise TransferFailed(f"Could not read {path} in {self.ref}: {problem.strerror}.") from None

    async def remove(self, path: str) -> None:
        with self._writing(path):
            Path(path).unlink(missing_ok=True)

    async def close(self) -> None:
        return None

    @contextlib.contextmanager
    def _writing(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            raise SandboxError(f"Could not write {path} in {self.ref}: {problem.strerror}.") from None


def open_local(place: str) -> LocalSandbox:
    """The sandbox for what follows ``local:``. Raise when it is not a folder that is there."""
    if not place:
        raise BadReference("A local sandbox needs a folder.", hint="Write local:/path/to/home.")
    home = Path(place).expanduser()
    if not home.is_dir():
        raise SandboxNotFound(f"There is no folder {home}.", hint=f"Check the path, or make it: mkdir -p {home}")
    return LocalSandbox(home.resolve())


def _environment(home: Path) -> dict[str, str]:
    environment = {name: os.environ[name] for name in SHARED_VARIABLES if name in os.environ}
    environment.update((name, value) for name, value in os.environ.items() if value.startswith(f"{home}/"))
    search = environment.get("PATH", os.defpath)
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), search])
    environment["HOME"] = str(home)
    return environment


async def _end(process: asyncio.subprocess.Process, streams: Sequence[asyncio.Future[bytes]]) -> None:
    """Kill a command with all its children, and throw away what they still say: asyncio waits for the end of that."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PARTING_SECONDS):
            await asyncio.gather(_drain(process.stdout, None), _drain(process.stderr, None), process.wait())


async def _drain(stream: asyncio.StreamReader | None, limit: int | None) -> bytes:
    """Read to the end; without a limit only the tail is kept."""
    assert stream is not None
    kept = bytearray()
    while chunk := await stream.read(CHUNK):
        kept += chunk
        if limit is None:
            del kept[:-COMPLAINT]
        elif len(kept) > limit:
            raise OutputTooLarge(f"The sandbox printed more than {limit} bytes.")
    return bytes(kept)


async def _feed(stream: asyncio.StreamWriter | None, text: str) -> bytes:
    assert stream is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(text.encode())
        await stream.drain()
    stream.close()
    return b""
