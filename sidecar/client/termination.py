"""SIGTERM inside a conversation: its memory is saved first, then the process ends with exit code 143.

Only where nothing else was arranged: the default handler is in place, and this is the main thread. It is put back when the
last conversation has ended. A second SIGTERM ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from types import FrameType
from typing import Any

from sidecar.client.retries import Retries

EXIT_CODE = 128 + signal.SIGTERM
LAST_RETRIES = Retries(attempts=5, seconds=15, longest_wait=3)
"""Whoever sent the signal does not wait for long, and a service that stops too saves an open conversation by itself."""
OTHERS_SECONDS = 60.0
"""How long a conversation waits for the last exports of others in the same process."""


class Termination:
    """For conversations of ``Client``: the signal raises ``SystemExit`` where the main thread is, and that ends them."""

    def __init__(self) -> None:
        self._process = 0
        self._open = 0
        self._exporting = 0
        self.told = False

    def begin(self) -> bool:
        """Have SIGTERM end a conversation first. False: that is not ours to arrange."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(signal.SIGTERM) != (self._on_signal if self._open else signal.SIG_DFL):
            return False
        if not self._open:
            signal.signal(signal.SIGTERM, self._on_signal)
            self._process, self.told = os.getpid(), False
        self._open += 1
        return True

    @contextlib.contextmanager
    def defer_signal(self, began: bool) -> Iterator[None]:
        """While its last export is made, the signal waits. Raise ``SystemExit`` afterwards, if it came."""
        if not began:
            yield
            return
        self._exporting += 1
        try:
            yield
        finally:
            self._exporting -= 1
            self._open -= 1
            if not self._open and signal.getsignal(signal.SIGTERM) == self._on_signal:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self.told:
                raise SystemExit(EXIT_CODE)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if (
            self.told or os.getpid() != self._process
        ):  # impatient; or a child of ours, whose conversations these are not
            kill_self()
        self.told = True
        if not self._exporting:
            raise SystemExit(EXIT_CODE)


class AsyncTermination:
    """The same for ``AsyncClient``: the signal cancels the tasks that have conversations, which ends those."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handler: Any = None
        self._process = 0
        self._open: Counter[asyncio.Task[Any]] = Counter()
        self._exporting: Counter[asyncio.Task[Any]] = Counter()
        self._all_ended = asyncio.Event()
        self.told = False

    def begin(self) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return False
        try:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
        except RuntimeError:  # not asyncio's
            return False
        if task is None or not self._install_handler(loop):
            return False
        self._open[task] += 1
        return True

    def _install_handler(self, loop: asyncio.AbstractEventLoop) -> bool:
        if self._open and self._loop is loop:
            return bool(signal.getsignal(signal.SIGTERM) == self._handler)
        if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            return False
        try:
            loop.add_signal_handler(signal.SIGTERM, self._on_signal)
        except (NotImplementedError, RuntimeError, ValueError):  # a loop without signals, or not the main one
            return False
        self._loop, self._handler = loop, signal.getsignal(signal.SIGTERM)
        self._open.clear()
        self._exporting.clear()
        self._process, self.told, self._all_ended = os.getpid(), False, asyncio.Event()
        return True

    @contextlib.asynccontextmanager
    async def defer_signal(self, began: bool) -> AsyncIterator[None]:
        """While its last export is made, its task is not cancelled. Raise ``SystemExit`` afterwards, if the signal came: once
        the other conversations have made theirs, since that ends the event loop."""
        task = asyncio.current_task() if began else None
        if task is None:
            yield
            return
        self._exporting[task] += 1
        try:
            yield
        finally:
            self._exporting[task] -= 1
            self._open[task] -= 1
            if not self._open[task]:
                del self._open[task], self._exporting[task]
                await self._wait_for_others()
            if self.told:
                raise SystemExit(EXIT_CODE)

    async def _wait_for_others(self) -> None:
        if not self._open:
            self._all_ended.set()
            if self._loop is not None and signal.getsignal(signal.SIGTERM) == self._handler:
                self._loop.remove_signal_handler(signal.SIGTERM)
        elif self.told:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(OTHERS_SECONDS):
                    await self._all_ended.wait()

    def _on_signal(self) -> None:
        if self.told or os.getpid() != self._process:
            kill_self()
        self.told = True
        for task in self._open:
            if not self._exporting[task]:
                task.cancel()


def kill_self() -> None:
    """Die of the signal, as if nothing had been arranged."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


TERMINATION = Termination()
ASYNC_TERMINATION = AsyncTermination()
