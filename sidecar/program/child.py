"""A question that a process of its own answers, on another core, while this one goes on.

A thread would not do: what looks through a text holds the interpreter's lock.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Callable

MOST_FILES = 256
"""How many descriptors a child closes: it must hold none of what its parent has locked or prints to."""


class Child:
    """A process that answers a yes or no. Without one, where there is no Linux or no room, the question waits until it is
    asked.

    No other thread may run when it is made: a lock that one holds would stay locked in the child.
    """

    def __init__(self, question: Callable[[], bool]) -> None:
        self._question = question
        self._process = 0
        self._answer = -1
        if not sys.platform.startswith("linux"):
            return
        try:
            self._answer, writing = os.pipe()
        except OSError:
            return
        try:
            self._process = os.fork()
        except OSError:
            os.close(self._answer)
        else:
            if not self._process:
                _work(question, writing)
        os.close(writing)

    def ask(self) -> bool:
        """Return the answer. Raise what the question raises."""
        told = os.read(self._answer, 1) if self._process else b""
        self.end()
        return told == b"y" if told else self._question()

    def end(self) -> None:
        """End the process, if there is one."""
        if self._process:
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)
            os.close(self._answer)
            self._process = 0


def _work(question: Callable[[], bool], writing: int) -> None:
    """Answer in the child, which ends with that. If something is raised nothing is answered, and the parent looks."""
    try:
        os.closerange(0, writing)
        os.closerange(writing + 1, MOST_FILES)
        os.write(writing, b"y" if question() else b"n")
    finally:
        os._exit(0)
