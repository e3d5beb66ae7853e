"""A sandbox: a folder, the real processes that run in it, and how long it lives."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from emulators.processes import Process, living
from emulators.wire import Connection

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

OnTimeout = Literal["kill", "pause", "stop"]


class NotRunning(Exception):
    """The sandbox is paused, stopped or gone."""


@dataclass(frozen=True, slots=True)
class User:
    """Somebody whose commands and files there may be in a sandbox."""

    name: str
    home: Path
    uid: int | None = None
    """Whose they are on this machine; ``None``: whoever runs the server."""

    def own(self, path: Path) -> None:
        """Make it this user's."""
        if self.uid is not None:
            os.chown(path, self.uid, self.uid)


class Sandbox:
    """One sandbox, in its provider's words. Safe to use from many threads.

    Its paths are the machine's own: a path means the same to a command and to the file methods.
    """

    USER: ClassVar[str]
    MARKER: ClassVar[str]
    """The environment variable that names the sandbox to its processes; what was started in it is found by it."""
    RUNNING: ClassVar[str]
    GONE: ClassVar[str]

    def __init__(
        self,
        id: str,
        base: Path,
        *,
        envs: Mapping[str, str],
        metadata: Mapping[str, str],
        tools: Path | None,
        on_timeout: OnTimeout,
        uids: Mapping[str, int | None] | None = None,
    ) -> None:
        self.id = id
        self.folder = base / id
        self.home = self.folder / "home" / self.USER
        uids = {self.USER: None, "root": None, **(uids or {})}
        self.users = {
            name: User(name, self.folder / ("root" if name == "root" else f"home/{name}"), uid)
            for name, uid in uids.items()
        }
        """Those who are known there: the one it is made for, root, and whoever else has a number of his own."""
        for user in self.users.values():
            user.home.mkdir(parents=True, mode=0o755)
            user.own(user.home)
        if any(user.uid is not None for user in self.users.values()):
            base.chmod(0o711)
        self.work = self.home
        self.uploaded: list[Path] = []
        """Every path that something was uploaded to."""
        self.read_only: tuple[Path, ...] = ()
        """Folders that the daemon finds it cannot write to."""
        self.envs = dict(envs)
        self.metadata = dict(metadata)
        self.tools = tools
        self.on_timeout = on_timeout
        self.created_at = time.time()
        self.ends_at: float | None = None
        """Seconds since the epoch; ``None``: it lives until it is ended."""
        self.on_change: Callable[[str], None] = lambda state: None
        """Called with each state that it enters, also when it is created."""
        self._state = self.RUNNING
        self._changed = threading.Condition(threading.RLock())
        self._watched = False
        self._processes: list[Process] = []
        self._connections: set[Connection] = set()

    # What it is

    @property
    def state(self) -> str:
        """In the provider's words; a time-out that has passed counts at once."""
        with self._changed:
            if self._state == self.RUNNING and self.ends_at is not None and time.time() >= self.ends_at:
                self.expire()
            return self._state

    @property
    def running(self) -> bool:
        return self.state == self.RUNNING

    def commands(self) -> list[Process]:
        """The commands that clients started and that still run."""
        with self._changed:
            self._processes = [process for process in self._processes if process.running]
            return list(self._processes)

    def processes(self) -> list[int]:
        """The ids of all live processes of the sandbox, those that commands left behind included."""
        return sorted({process.pid for process in self.commands()} | set(living(f"{self.MARKER}={self.id}")))

    # What is done in it

    @property
    def path(self) -> str:
        """Where its commands are looked for."""
        return PATH if self.tools is None else str(self.tools)

    def environment(self, extra: Mapping[str, str], user: User | None = None) -> dict[str, str]:
        """All that a command finds in its environment: nothing of the server's own."""
        user = user or self.users[self.USER]
        own = {"PATH": self.path, "LANG": "C.UTF-8", "HOME": str(user.home), "USER": user.name, "LOGNAME": user.name}
        path = {} if self.tools is None else {"PATH": self.path}
        return {**own, **self.envs, **extra, **path, self.MARKER: self.id}

    def spawn(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        envs: Mapping[str, str] | None = None,
        merged: bool = False,
        open_stdin: bool = False,
        user: User | None = None,
    ) -> Process:
        """Start a command. Raise ``NotRunning``, or ``OSError`` when it cannot be started."""
        user = user or self.users[self.USER]
        with self._changed:
            if not self.running:
                raise NotRunning
            process = Process(
                argv,
                cwd=cwd or self.work,
                env=self.environment(envs or {}, user),
                merged=merged,
                open_stdin=open_stdin,
                uid=user.uid,
            )
            self._processes = [*self.commands(), process]
            return process

    @contextmanager
    def serving(self, connection: Connection) -> Iterator[None]:
        """While a request for this sandbox is served, its connection breaks when the sandbox ends or pauses."""
        with self._changed:
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._changed:
                self._connections.discard(connection)

    # How long it lives

    def end_in(self, seconds: float | None) -> None:
        """Reach the time-out so many seconds from now; ``None``: never."""
        with self._changed:
            self.ends_at = None if seconds is None else time.time() + seconds
            if seconds is not None and not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, daemon=True).start()
            self._changed.notify_all()

    def lengthen(self, seconds: float) -> None:
        """Reach the time-out no sooner than so many seconds from now."""
        with self._changed:
            if self.ends_at is not None and time.time() + seconds > self.ends_at:
                self.end_in(seconds)

    def expire(self) -> None:
        """Do what the sandbox does at its time-out."""
        {"kill": self.kill, "pause": self.pause, "stop": self.stop}[self.on_timeout]()

    def kill(self) -> None:
        """End it for good: its processes die and its folder goes."""

        def end() -> None:
            self._end_processes()
            shutil.rmtree(self.folder, ignore_errors=True)

        self._leave_for(self.GONE, end)

    def stop(self) -> None:
        """End its processes and keep its files."""
        self._leave_for("stopped", self._end_processes)

    def pause(self) -> None:
        """Freeze its processes."""
        self._leave_for("paused", lambda: self._signal(signal.SIGSTOP))

    def crash(self) -> None:
        """Let its daemon die, with the commands that it runs, and be there again at once."""
        with self._changed:
            for connection in self._connections:
                connection.muted = True
            self._end_processes()
            for connection in self._connections:
                connection.sever()

    def resume(self) -> None:
        """Run again after a pause or a stop."""
        with self._changed:
            if self._state == self.GONE:
                raise NotRunning
            self._state = self.RUNNING
        self._signal(signal.SIGCONT)
        self.on_change(self.RUNNING)

    def _leave_for(self, state: str, leave: Callable[[], object] = lambda: None) -> None:
        """Enter a state in which nothing is served; there is no way back from "gone".

        Clients hear nothing more, lest they take the end of a process for the end of its command, and lose their
        connections when all is done.
        """
        with self._changed:
            if self._state == self.GONE:
                return
            self._state = state
            self.ends_at = None
            for connection in self._connections:
                connection.muted = True
            leave()
            for connection in self._connections:
                connection.sever()
            self._changed.notify_all()
            self.on_change(state)

    def _end_processes(self) -> None:
        # What is dying may still have forked, so look again.
        for _ in range(50):
            if not self._signal(signal.SIGKILL):
                return
            time.sleep(0.005)

    def _signal(self, number: int) -> list[int]:
        for process in self.commands():
            process.signal(number)
        found = self.processes()
        for pid in found:
            with suppress(OSError):
                os.kill(pid, number)
        return found

    def _watch(self) -> None:
        with self._changed:
            while self._state != self.GONE:
                if self._state == self.RUNNING and self.ends_at is not None:
                    left = self.ends_at - time.time()
                    if left <= 0:
                        self.expire()
                    else:
                        self._changed.wait(left)
                else:
                    self._changed.wait()
