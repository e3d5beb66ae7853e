"""Long work beside the event loop: in threads of its own, for no longer than it may take.

asyncio's own threads are few, and the store's small calls go through them. What checks or unpacks a tarball can take minutes,
and a hostile one as long as it is allowed to: it must not hold up everything else.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sidecar.errors import UnpackTimeout

T = TypeVar("T")
MOST_THREADS = 16
PARTING_SECONDS = 5.0
"""How long work that was called off is waited for, so that it does not write where things are being removed."""

_threads = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="long-work")


class Deadline:
    """A moment after which work in a thread is to end. Whoever does the work asks, whenever it has done a little."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._called_off = threading.Event()

    def check(self) -> None:
        """Raise ``UnpackTimeout`` when the time is over, or the work is not wanted any more."""
        if self._called_off.is_set() or time.monotonic() > self._end:
            raise UnpackTimeout(f"Checking and unpacking what arrived took longer than {self._seconds:g} seconds.")

    def cancel(self) -> None:
        self._called_off.set()


async def run_in_thread(work: Callable[..., T], *args: object, seconds: float | None = None) -> T:
    """Do ``work`` in one of these threads; with ``seconds``, it gets a ``Deadline`` as its last argument.

    When the caller is cancelled the work is called off, and waited for a little.
    """
    deadline = None if seconds is None else Deadline(seconds)
    given = args if deadline is None else (*args, deadline)
    context = contextvars.copy_context()
    running = asyncio.get_running_loop().run_in_executor(_threads, lambda: context.run(work, *given))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if deadline is not None:
            deadline.cancel()
            await asyncio.wait({running}, timeout=PARTING_SECONDS)
        running.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise
