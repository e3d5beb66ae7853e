"""Work that a process of its own does, on another core, while this one goes on.

A thread would not do: what looks through a text holds the interpreter's lock, and while SQLite reads a live database
nothing else may run in the process that reads it (``sqlite/backup.py``).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
from typing import Any, BinaryIO, Callable, List, Optional

from sidecar.program import places

MOST_FILES = 256
"""How many descriptors a child closes: it must hold none of what its parent has locked or prints to."""

Tell = Callable[[Any], None]
"""Tells the parent something that JSON can say."""
Ask = Callable[[], bool]
"""Waits until the parent asks for more. False if it will not."""


class Child:
    """A process that does ``work`` and tells of it, piece by piece. Without one, where there is no Linux or no room, it
    tells nothing, and whoever needs the work does it.

    No other thread may run when it is made: a lock that one holds would stay locked in the child.
    """

    def __init__(self, work: Callable[[Tell, Ask], None]) -> None:
        self._process = 0
        self._told: Optional[BinaryIO] = None
        self._held = -1
        if not sys.platform.startswith("linux"):
            return
        pipes: List[int] = []
        try:
            pipes += os.pipe()
            pipes += os.pipe()
            self._process = os.fork()
        except OSError:
            for one in pipes:
                os.close(one)
            return
        hearing, telling, waiting, self._held = pipes
        if not self._process:
            _work(work, telling, waiting)
        os.close(telling)
        os.close(waiting)
        self._told = open(hearing, "rb")

    def hear(self) -> Any:
        """Wait for what is told next, and return it; ``None`` if nothing more will be told."""
        line = self._told.readline() if self._told is not None else b""
        return json.loads(line) if line.endswith(b"\n") else None

    def has_told(self, seconds: float) -> bool:
        """Return whether there is something to hear, or never will be; wait so long for it. Before anything was heard."""
        return self._told is None or bool(select.select([self._told], [], [], seconds)[0])

    def ask(self) -> None:
        """Ask for more."""
        if self._told is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended, which is noticed when it is heard
                os.write(self._held, b"?")

    def end(self) -> None:
        """Let the process end, whatever it does, without waiting for that: it may have a large file to close."""
        if self._told is not None:
            os.kill(self._process, signal.SIGKILL)
            self._told.close()
            os.close(self._held)
            self._told = None

    def wait(self) -> None:
        """End the process, and wait for its end."""
        self.end()
        if self._process:
            os.waitpid(self._process, 0)
            self._process = 0


def _work(work: Callable[[Tell, Ask], None], telling: int, waiting: int) -> None:
    """Work in the child, and stay until the parent ends it, or has ended. If something is raised no more is told, and the
    parent does it."""

    lock = threading.Lock()

    def tell(said: Any) -> None:
        with lock:
            os.write(telling, json.dumps(said).encode("ascii") + b"\n")

    try:
        places.close_folders()
        low, high = sorted((telling, waiting))
        for first, end in ((0, low), (low + 1, high), (high + 1, MOST_FILES)):
            os.closerange(first, end)
        for _ in range(3):  # SQLite opens no database where output may go
            os.open(os.devnull, os.O_RDWR)
        work(tell, lambda: bool(os.read(waiting, 1)))
        os.close(telling)
        while os.read(waiting, 1):
            pass
    finally:
        os._exit(0)
