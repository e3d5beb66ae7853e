"""Real commands, each in a session of its own so that it can be ended with all its children."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

OUTPUT_CHUNK = 32 * 1024


class DeadlinePassed(Exception):
    """The command ran longer than it may."""


class Output(NamedTuple):
    """Some bytes a command wrote to "stdout" or "stderr"; none of them: it has been silent for a while."""

    stream: str
    data: bytes


class Process:
    """A running command.

    Raise ``OSError`` when it cannot be started. ``merged`` sends stderr the way of stdout; ``open_stdin`` keeps a pipe
    to write to, where otherwise the command reads an empty stdin. ``uid`` is whose it is, where we may choose.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        merged: bool = False,
        open_stdin: bool = False,
        uid: int | None = None,
    ) -> None:
        self.argv = list(argv)
        self.cwd = cwd
        self._popen = subprocess.Popen(
            argv,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.PIPE if open_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
            user=uid,
            group=uid,
            extra_groups=None if uid is None else [],
        )
        self.pid = self._popen.pid

    @property
    def running(self) -> bool:
        """Whether the command itself has yet to exit, whatever its children do.

        Looks without reaping: until ``wait`` the process id is nobody else's, and safe to signal.
        """
        if self._popen.returncode is not None:
            return False
        with suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        return False

    def write(self, data: bytes) -> None:
        """Pass bytes to the command's stdin; a command that has closed it does not mind."""
        if self._popen.stdin is not None:
            with suppress(OSError, ValueError):
                view = memoryview(data)
                while view:
                    view = view[self._popen.stdin.write(view) or 0 :]

    def close_stdin(self) -> None:
        if self._popen.stdin is not None:
            with suppress(OSError):
                self._popen.stdin.close()

    def feed(self, script: bytes) -> None:
        """Write a whole stdin and close it, beside the command: it may not read all of it before it prints."""

        def work() -> None:
            self.write(script)
            self.close_stdin()

        threading.Thread(target=work, daemon=True).start()

    def output(self, deadline: float | None = None, silence: float | None = None) -> Iterator[Output]:
        """All that the command and its children print, until each has closed its end.

        After every ``silence`` seconds without any, an empty ``Output`` comes. When the monotonic clock passes
        ``deadline``, kill the command and raise ``DeadlinePassed``.
        """
        pipes = {"stdout": self._popen.stdout, "stderr": self._popen.stderr}
        with selectors.DefaultSelector() as selector:
            for name, pipe in pipes.items():
                if pipe is not None and not pipe.closed:
                    selector.register(pipe, selectors.EVENT_READ, name)
            while selector.get_map():
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                ready = selector.select(_shorter(left, silence))
                if deadline is not None and time.monotonic() >= deadline:
                    self.signal(signal.SIGKILL)
                    raise DeadlinePassed
                for key, _ in ready:
                    data = os.read(key.fd, OUTPUT_CHUNK)
                    if data:
                        yield Output(key.data, data)
                    else:
                        selector.unregister(key.fileobj)
                        _close(key.fileobj)
                if not ready:
                    yield Output("stdout", b"")

    def wait(self) -> int:
        """Its exit code; minus the signal's number when a signal ended it."""
        code = self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            _close(pipe)
        return code

    def leave(self, deadline: float | None = None) -> None:
        """Let it run on with nobody listening; a deadline still holds."""

        def work() -> None:
            with suppress(DeadlinePassed, OSError, ValueError):
                for _ in self.output(deadline):
                    pass
            self.wait()

        threading.Thread(target=work, daemon=True).start()

    def signal(self, number: int) -> None:
        """Signal the command and its children."""
        if self._popen.returncode is None:
            with suppress(OSError):
                os.killpg(self.pid, number)


def _shorter(first: float | None, second: float | None) -> float | None:
    known = [value for value in (first, second) if value is not None]
    return min(known) if known else None


def _close(pipe: object) -> None:
    if hasattr(pipe, "close"):
        with suppress(OSError):
            pipe.close()


def living(marker: str) -> list[int]:
    """The ids of live processes with ``marker`` ("NAME=value") in their environment; none where there is no /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            state = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0]
            if state not in (b"Z", b"X") and marker.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return sorted(found)
