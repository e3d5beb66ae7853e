"""Work that a process of its own does, on another core, while this one goes on.

A thread would not do: what looks through a text holds the interpreter's lock, and while SQLite reads a live database
nothing else may run in the process that reads it (``sqlite/backup.py``).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, BinaryIO, Callable, List, Optional

from sidecar.program import places

MOST_FILES = 256
"""How many descriptors a child closes: it must hold none of what its parent has locked or prints to."""

Tell = Callable[[Any], None]
"""Tells the parent something that JSON can say."""


class Child:
    """A process that does ``work`` and tells of it, piece by piece. Without one, where there is no Linux or no room, it
    tells nothing, and whoever needs the work does it.

    No other thread may run when it is made: a lock that one holds would stay locked in the child.
    """

    def __init__(self, work: Callable[[Tell], None]) -> None:
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


def _work(work: Callable[[Tell], None], telling: int, waiting: int) -> None:
    """Work in the child, and stay until the parent ends it, or has ended. If something is raised no more is told, and the
    parent does it."""

    def tell(said: Any) -> None:
        os.write(telling, json.dumps(said).encode("ascii") + b"\n")

    try:
        places.close_folders()
        low, high = sorted((telling, waiting))
        for first, end in ((0, low), (low + 1, high), (high + 1, MOST_FILES)):
            os.closerange(first, end)
        for _ in range(3):  # SQLite opens no database where output may go
            os.open(os.devnull, os.O_RDWR)
        work(tell)
        os.close(telling)
        os.read(waiting, 1)
    finally:
        os._exit(0)
