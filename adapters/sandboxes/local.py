"""A folder on this machine as a sandbox: ``local:/path/to/home``.

Real, not a mock: agents run on plain machines too, and everything works here as it does with a provider.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import pwd
import selectors
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, BinaryIO

from sidecar.errors import (
    BadReference,
    OutputTooLarge,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SandboxTimeout,
    TransferFailed,
)
from sidecar.format.packs import widen_pipe
from sidecar.host.files import open_private
from sidecar.host.work import start_in_thread
from sidecar.policy.local_folders import OF_OUR_OWN, LocalPolicy
from sidecar.ports import AllowedPaths, CommandResult, SandboxStatus

CHUNK = 1 << 20
COMPLAINT = 4096
"""The most bytes of stderr that are kept, from its end."""
PARTING_SECONDS = 5
BREATH_SECONDS = 0.05
# Variables of the machine. Every other variable is passed on only if it points into the sandbox's home.
SHARED_VARIABLES = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "USER", "LOGNAME", "SHELL", "TERM")


class LocalSandbox:
    """Commands run with ``HOME`` and the working folder set to the home, as the user who runs the sidecar."""

    def __init__(self, home: Path, policy: LocalPolicy = OF_OUR_OWN) -> None:
        self.home = home
        self._policy = policy
        self.ref = f"local:{home}"
        self.control_trips = 0
        self._environment = _build_environment(home)

    def ground(self, projects: Sequence[str] | None) -> AllowedPaths | None:
        return self._policy.ground(str(self.home), projects)

    def holds(self, path: str) -> bool:
        return self._locate(path).is_file()

    async def stamp(self, projects: Sequence[str] | None) -> str:
        from adapters.sandboxes.stamps import compute_stamp  # late: a command needs none

        return await asyncio.to_thread(compute_stamp, self._policy.list_folders(str(self.home), projects))

    async def connect(self) -> SandboxStatus:
        return SandboxStatus()

    async def prolong(self, seconds: float) -> SandboxStatus:
        return SandboxStatus()

    async def run(
        self, command: str, *, timeout: float, output_limit: int, environment: Mapping[str, str] | None = None
    ) -> CommandResult:
        """Run a command in a thread; it is killed with its children if it times out or is cancelled."""
        # In a thread from the first step: starting a process is slow on a busy machine.
        job = Command(self.home, {**self._environment, **(environment or {})}, output_limit)
        running = start_in_thread(lambda: job.run(command))
        try:
            await asyncio.wait({running}, timeout=timeout)
            if not running.done():
                raise SandboxTimeout(f"The command in {self.ref} did not end within {timeout:.0f} seconds.")
            return running.result()
        except OSError as problem:
            if not self.home.is_dir():
                raise SandboxGone(f"{self.ref} is gone: the folder is not there any more.") from None
            raise SandboxError(f"No command can be run in {self.ref}: {problem.strerror}.") from None
        finally:
            # Also when cancelled: no command of the sidecar keeps running in a sandbox.
            if not running.done():
                job.end()
                await asyncio.wait({running}, timeout=PARTING_SECONDS)
                running.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def upload(self, path: str, chunks: AsyncIterator[bytes]) -> None:
        with self._translate_write_errors(path):
            # Only for this user, because it may contain a whole memory.
            file = await asyncio.to_thread(open, path, "wb", opener=open_private)
        try:
            async for chunk in chunks:
                with self._translate_write_errors(path):
                    await asyncio.to_thread(file.write, chunk)
        finally:
            with self._translate_write_errors(path):
                file.close()

    async def download(self, path: str) -> AsyncGenerator[bytes]:
        try:
            with await asyncio.to_thread(_open_file, self._locate(path)) as file:
                while chunk := await asyncio.to_thread(file.read, CHUNK):
                    yield chunk
        except OSError as problem:
            raise TransferFailed(f"Could not read {path} in {self.ref}: {problem.strerror}.") from None

    async def remove(self, path: str) -> None:
        with self._translate_write_errors(path):
            Path(path).unlink(missing_ok=True)

    async def close(self) -> None:
        return None

    def _locate(self, path: str) -> Path:
        return self.home / path[2:] if path.startswith("~/") else Path(path)

    @contextlib.contextmanager
    def _translate_write_errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            raise SandboxError(f"Could not write {path} in {self.ref}: {problem.strerror}.") from None


def _open_file(place: Path) -> BinaryIO:
    """Open a file to read. Raise ``OSError`` if it is a link, or not a regular file: a pipe would block."""
    file = open(os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a file")
    return file


def open_local(place: str, policy: LocalPolicy = OF_OUR_OWN, user: str = "") -> LocalSandbox:
    """Return the sandbox for what follows ``local:``. Raise ``BadReference``, ``SandboxNotAllowed`` or
    ``SandboxNotFound`` if it is not an existing folder that may be one, or if another user than the present one is
    asked for.
    """
    if user and user != (present := _read_user()):
        raise BadReference(
            f"In a folder of this machine the sidecar works as the user it runs as, {present}, and not as {user}.",
            hint=f"Leave out --user, or run the sidecar as {user}.",
        )
    if not place:
        raise BadReference("A local sandbox needs a folder.", hint="Write local:/path/to/home.")
    try:
        home = Path(os.path.realpath(Path(place).expanduser()))
        policy.check(str(home))  # first: not every caller may learn what else is on this machine
        there = home.is_dir()
    except (RuntimeError, ValueError, OSError):
        raise BadReference(f"{place!r} is not a folder.", hint="Write local:/path/to/home.") from None
    if not there:
        raise SandboxNotFound(f"There is no folder {home}.", hint=f"Check the path, or make it: mkdir -p {home}")
    return LocalSandbox(home, policy)


def _read_user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _build_environment(home: Path) -> dict[str, str]:
    """Return the environment of commands in the sandbox."""
    environment = {name: os.environ[name] for name in SHARED_VARIABLES if name in os.environ}
    environment.update((name, value) for name, value in os.environ.items() if value.startswith(f"{home}/"))
    search = environment.get("PATH", os.defpath)
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), search])
    environment["HOME"] = str(home)
    return environment


class Command:
    """One command on this machine: run to its end with bounded output, or killed with all its children. ``run`` blocks;
    ``end`` may be called from another thread."""

    def __init__(self, home: Path, environment: dict[str, str], limit: int) -> None:
        self._home = home
        self._environment = environment
        self._limit = limit
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self._lock = threading.Lock()

    def run(self, script: str) -> CommandResult:
        """Run a shell script. Raise ``OSError`` if it cannot be started, ``OutputTooLarge`` if it prints too much."""
        # The script is passed on stdin: a command line has a size limit, and shows in the process list.
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            ["/bin/sh", "-s"],
            cwd=self._home,
            env=self._environment,
            start_new_session=True,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            bufsize=0,
        )
        widen_pipe(process.stdout)
        with self._lock:
            self._process = process
        if self._ended:
            self.end()
        try:
            output, complaint = self._talk(process, memoryview(script.encode()))
        except BaseException:
            self.end()
            raise
        finally:
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
            code = self._wait_for_exit(process)
        return CommandResult(code, output, complaint.decode("utf-8", "replace")[-COMPLAINT:])

    def end(self) -> None:
        """Kill it with all its children, also those that have outlived it."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def _wait_for_exit(self, process: subprocess.Popen[bytes]) -> int:
        """Return its exit code. It is reaped under the lock, so that ``end`` never kills another process that got its
        number."""
        while True:
            with self._lock, contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(BREATH_SECONDS)
                self._process = None
                return code
            time.sleep(BREATH_SECONDS)  # let other threads have the lock

    def _talk(self, process: subprocess.Popen[bytes], script: memoryview) -> tuple[bytes, bytes]:
        """Send the script and read both streams to their ends; only the tail of stderr is kept."""
        assert process.stdin and process.stdout and process.stderr
        output, complaint = bytearray(), bytearray()
        os.set_blocking(process.stdin.fileno(), False)
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdin, selectors.EVENT_WRITE)
            ready.register(process.stdout, selectors.EVENT_READ, output)
            ready.register(process.stderr, selectors.EVENT_READ, complaint)
            while ready.get_map():
                for key, _ in ready.select():
                    stream: IO[bytes] = key.fileobj  # type: ignore[assignment]
                    if stream is process.stdin:
                        script = _send_some(stream, script)
                        done = not script
                    else:
                        chunk = os.read(stream.fileno(), CHUNK)
                        key.data.extend(chunk)
                        done = not chunk
                    if done:
                        ready.unregister(stream)
                        stream.close()
                del complaint[:-COMPLAINT]
                if len(output) > self._limit:
                    raise OutputTooLarge(f"The sandbox printed more than {self._limit} bytes.")
        return bytes(output), bytes(complaint)


def _send_some(stream: IO[bytes], script: memoryview) -> memoryview:
    """Send some of the script and return the rest; nothing if the shell does not read it any more."""
    try:
        return script[os.write(stream.fileno(), script[:CHUNK]) :]
    except BlockingIOError:
        return script
    except BrokenPipeError:
        return script[:0]
