"""SIGTERM during a conversation: the memory is saved first, then the process ends with exit code 143.

A handler is installed only if the default one is in place and this is the main thread, so that a program's own handling
is never replaced. The default is restored when the last conversation has ended. A second SIGTERM ends the process at
once.
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
"""Short retries after SIGTERM: the sender kills the process soon, and a service that stops too saves open conversations
itself."""
OTHERS_SECONDS = 60.0
"""How long a conversation waits for the last exports of other conversations in the same process."""


class Termination:
    """For ``Client``: the signal raises ``SystemExit`` in the main thread, which unwinds the open conversations."""

    def __init__(self) -> None:
        self._process = 0
        self._open = 0
        self._exporting = 0
        self.told = False

    def begin(self) -> bool:
        """Register a conversation and install the handler. Return ``False`` if the signal is not handled here."""
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
        """Defer the signal while the last export is made, and raise ``SystemExit`` afterwards if it came."""
        if not began:
            yield
            return
        self._exporting += 1
        try:
            yield
        finally:
            self._exporting -= 1
            self._open -= 1
            # Restored only if the handler is still this one: the program may have installed its own since.
            if not self._open and signal.getsignal(signal.SIGTERM) == self._on_signal:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self.told:
                raise SystemExit(EXIT_CODE)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # A second signal; or this is a forked child, and the conversations are its parent's.
        if self.told or os.getpid() != self._process:
            kill_self()
        self.told = True
        # During an export the exception would break the request; ``defer_signal`` raises it afterwards.
        if not self._exporting:
            raise SystemExit(EXIT_CODE)


class AsyncTermination:
    """For ``AsyncClient``: the signal cancels the tasks that have open conversations, which unwinds them."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handler: Any = None
        self._process = 0
        self._open: Counter[asyncio.Task[Any]] = Counter()
        self._exporting: Counter[asyncio.Task[Any]] = Counter()
        self._all_ended = asyncio.Event()
        self.told = False

    def begin(self) -> bool:
        """Register a conversation of this task and install the handler. Return ``False`` if the signal is not handled
        here."""
        if threading.current_thread() is not threading.main_thread():
            return False
        try:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
        except RuntimeError:  # another event loop than asyncio's
            return False
        if task is None or not self._install_handler(loop):
            return False
        self._open[task] += 1
        return True

    def _install_handler(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Install the handler on this loop, unless it is there. Return ``False`` if the program has a handler of its
        own."""
        if self._open and self._loop is loop:
            return bool(signal.getsignal(signal.SIGTERM) == self._handler)
        if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            return False
        try:
            loop.add_signal_handler(signal.SIGTERM, self._on_signal)
        except (NotImplementedError, RuntimeError, ValueError):  # the loop has no signals, or is not the main one
            return False
        self._loop, self._handler = loop, signal.getsignal(signal.SIGTERM)
        self._open.clear()
        self._exporting.clear()
        self._process, self.told, self._all_ended = os.getpid(), False, asyncio.Event()
        return True

    @contextlib.asynccontextmanager
    async def defer_signal(self, began: bool) -> AsyncIterator[None]:
        """Do not cancel this task while its last export is made. Raise ``SystemExit`` afterwards if the signal came,
        but only once the other conversations are exported too, because it ends the event loop."""
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
    """End the process by SIGTERM with its default action."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


TERMINATION = Termination()
ASYNC_TERMINATION = AsyncTermination()
