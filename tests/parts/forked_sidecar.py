"""Processes that cost milliseconds: ``python -m sidecar`` and the program of local sandboxes, forked from ones that have them
loaded, and real ones otherwise.

Each has its own pid, environment, working directory and descriptors, dies of signals as any other, and runs what it is as
``python`` does. What it does not have is a command line and an environment of its own in ``/proc``, nor settings that Python
reads when it starts (``PYTHON…``): what is about those needs ``subprocess``.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import pkgutil
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

PROJECT = Path(__file__).resolve().parents[2]
OWN = (PROJECT, "sidecar")
SLOW_TO_LOAD = ("uvicorn", "boto3", "s3transfer.manager", "psycopg", "pyrage", "e2b", "daytona._sync.daytona")
"""What the sidecar imports only when it is needed."""

Stream = int | IO[Any] | None
"""As ``subprocess.Popen`` takes it."""

PYTHON = {"program": ["-I", "-S"]}
"""With what options Python is started, by the kind of process."""

programs_are_forked = False
"""Whether the programs of local sandboxes are forked too (``tests.parts.forked_command``)."""

known: dict[str, str] = {}
"""Addresses that this process was told."""


class Sidecar:
    """One process, with what the tests use of ``subprocess.Popen``."""

    def __init__(
        self,
        words: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = PROJECT,
        code: Path = PROJECT,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = None,
        stderr: Stream = None,
        text: bool = False,
        start_new_session: bool = False,
        files: int = 0,
        kind: str = "sidecar",
    ) -> None:
        """With ``files`` it may have no more than so many open. ``code``: the folder of the sidecar that is run. ``kind``:
        ``sidecar``, ``program`` (of a sandbox), or any module that is to be run as ``python -m`` does."""
        self.args = [kind, *map(str, words)]
        self.returncode: int | None = None
        self.stdin: IO[Any] | None = None
        self.stdout: IO[Any] | None = None
        self.stderr: IO[Any] | None = None
        self._text = text
        given: list[int] = []
        with contextlib.ExitStack() as ours:
            for number, stream in enumerate((stdin, stdout, stderr)):
                given.append(self._descriptor(number, stream, given, ours))
            request = {
                "words": self.args,
                "environment": dict(os.environ if env is None else env),
                "folder": str(cwd),
                "session": start_new_session,
                "files": files,
                "mask": _mask(),
                "programs": _zygote(PROJECT, "program") if programs_are_forked and (code, kind) == OWN else "",
            }
            self._zygote = socket.socket(socket.AF_UNIX)
            self._zygote.connect(_zygote(code, kind))
            socket.send_fds(self._zygote, [b"."], given)
            self._zygote.sendall(json.dumps(request).encode() + b"\n")
        self._told = self._zygote.makefile("rb")
        self.pid = int(self._told.readline())

    def _descriptor(self, number: int, stream: Stream, given: list[int], ours: contextlib.ExitStack) -> int:
        if stream is None:
            return number
        if stream == subprocess.STDOUT:
            return given[1]
        if stream == subprocess.DEVNULL:
            return ours.enter_context(open(os.devnull, "r+b")).fileno()
        if stream != subprocess.PIPE:
            return stream if isinstance(stream, int) else stream.fileno()
        reading, writing = os.pipe()
        theirs, mine = (reading, writing) if number == 0 else (writing, reading)
        ours.callback(os.close, theirs)
        mode, encoding = ("", "utf-8") if self._text else ("b", None)
        opened = os.fdopen(mine, ("w" if number == 0 else "r") + mode, encoding=encoding)
        setattr(self, ("stdin", "stdout", "stderr")[number], opened)
        return theirs

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._zygote], [], [], 0)[0]:
            self._ended()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._zygote], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self._ended()
        assert self.returncode is not None
        return self.returncode

    def _ended(self) -> None:
        self.returncode = int(self._told.readline())
        self._told.close()
        self._zygote.close()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        """Give it its input, read what it prints until it prints no more, and wait for its end."""
        deadline = None if timeout is None else time.monotonic() + timeout
        nothing: Any = "" if self._text else b""
        if self.stdin is not None:
            with self.stdin, contextlib.suppress(BrokenPipeError):
                self.stdin.write(input or nothing)
        read: dict[IO[Any], Any] = {}
        threads = [
            threading.Thread(target=lambda stream=stream: read.update({stream: stream.read()}), daemon=True)
            for stream in (self.stdout, self.stderr)
            if stream is not None
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(None if deadline is None else max(0, deadline - time.monotonic()))
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(None if deadline is None else max(0.1, deadline - time.monotonic()))
        for stream in read:
            stream.close()
        printed, said = (nothing if stream is None else read[stream] for stream in (self.stdout, self.stderr))
        return printed, said

    def __enter__(self) -> Sidecar:
        return self

    def __exit__(self, *error: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self.wait()


def run(words: Sequence[str | Path], *, timeout: float = 120, **how: Any) -> subprocess.CompletedProcess[Any]:
    """Run a command to its end, as ``subprocess.run`` with ``capture_output`` does."""
    process = Sidecar(words, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how})
    try:
        printed, said = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return subprocess.CompletedProcess(process.args, process.wait(), printed, said)


def _mask() -> int:
    """The umask of this process: Linux tells it without changing it."""
    status = Path("/proc/self/status")
    told = status.read_text() if status.exists() else ""
    return int(next((line.split()[1] for line in told.splitlines() if line.startswith("Umask:")), "022"), 8)


@functools.cache
def _zygote(code: Path, kind: str) -> str:
    """Start the process that has loaded this code and that the others are forked from, once. Return its address."""
    if kind in known:
        return known[kind]
    folder = tempfile.mkdtemp(prefix="sidecars-", dir="/tmp")  # whatever a test says about temporary folders
    address = f"{folder}/socket"
    starter = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
    process = subprocess.Popen(
        [sys.executable, *PYTHON.get(kind, []), "-c", starter, __file__, address, kind],
        cwd=code,
        env={name: value for name, value in os.environ.items() if not name.startswith(("MEMORY_SIDECAR_", "AWS_"))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None and process.stdout.readline() == b"ready\n"

    def close(pipe: IO[bytes] = process.stdin) -> None:
        pipe.close()
        process.wait(10)
        os.rmdir(folder)

    atexit.register(close)
    return address


def _load_program() -> None:
    """Import all that a program may come to need, under the names it has in a sandbox."""
    sys.path.append(str(PROJECT))
    import sidecar.program

    for module in pkgutil.walk_packages(sidecar.program.__path__, "sidecar.program."):
        importlib.import_module(module.name)


def _load_sidecar() -> None:
    """Import all that a sidecar may come to need."""
    import adapters
    import sidecar

    for package in (sidecar, adapters):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    for name in SLOW_TO_LOAD if Path.cwd() == PROJECT else ():  # those of other versions are few
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


class _Zygote:
    def __init__(self, address: str) -> None:
        self._address = address
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(64)
        self._running: dict[int, socket.socket] = {}
        self._woken, waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(waker, False)
        self._waker = waker
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)

    def next_request(self) -> dict[str, Any] | None:
        """Return in a new process, with what it is to be; in this one with ``None`` when no more are wanted."""
        while True:
            ready = select.select([self._listener, sys.stdin, self._woken], [], [])[0]
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 1 << 16)
                self._tell_of_ended()
            if sys.stdin in ready:
                os.unlink(self._address)
                return None
            if self._listener in ready:
                connection, _ = self._listener.accept()
                pid = os.fork()
                if pid == 0:
                    return self._become(connection)
                self._running[pid] = connection

    def _tell_of_ended(self) -> None:
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with self._running.pop(pid) as connection, contextlib.suppress(OSError):
                connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))

    def _become(self, connection: socket.socket) -> dict[str, Any]:
        """Let go of all that is the other's, and take the descriptors that the new process is to have."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for one in (self._listener, *self._running.values()):
            one.close()
        os.close(self._woken)
        os.close(self._waker)
        _, given, _, _ = socket.recv_fds(connection, 1, 3)
        with connection, connection.makefile("rb") as lines:
            request: dict[str, Any] = json.loads(lines.readline())
            if request["session"]:
                os.setsid()
            connection.sendall(b"%d\n" % os.getpid())  # not before its group can be killed
        for number, descriptor in enumerate(given):
            os.dup2(descriptor, number)
        for descriptor in given:
            os.close(descriptor)
        return request


def _live(request: Mapping[str, Any]) -> None:
    """Be ``python -m sidecar`` with these words."""
    if request["files"]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (request["files"], request["files"]))
    os.umask(request["mask"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    tempfile.tempdir = None
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _text(1, "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2, "backslashreplace")  # type: ignore[misc]
    kind, *words = request["words"]
    if kind == "program":
        from sidecar.program.main import main

        nonce, *parts = words
        code = main(nonce, *map(base64.b64decode, parts))
        sys.stdout.flush()
        os._exit(code)
    if request["programs"]:
        from tests.parts.forked_command import fork_programs

        fork_programs(request["programs"])
    sys.argv = [kind, *words]
    runpy.run_module(kind, run_name="__main__", alter_sys=True)


def _text(number: int, errors: str) -> io.TextIOWrapper:
    by_line = number == 2 or os.isatty(number)
    return io.TextIOWrapper(os.fdopen(number, "wb", closefd=False), "utf-8", errors, line_buffering=by_line)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wanted_kind = sys.argv[-1]
    if wanted_kind == "sidecar":
        _load_sidecar()
    elif wanted_kind == "program":
        _load_program()
    else:
        importlib.import_module(wanted_kind)
    assert threading.active_count() == 1, "a thread would be missing in every process that is forked"
    gc.collect()
    gc.freeze()
    zygote = _Zygote(sys.argv[-2])
    print("ready", flush=True)
    if (wanted := zygote.next_request()) is not None:
        _live(wanted)
