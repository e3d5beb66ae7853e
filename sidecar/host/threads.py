"""Long work outside the event loop: in threads of its own, with a time limit.

asyncio's default threads are few, and the store's small calls use them. Checking or unpacking a tarball can take
minutes, and a hostile one takes as long as it is allowed to: it must not block everything else.
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
"""How long cancelled work is waited for, so that it does not write to a folder that is being removed."""

_threads = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="long-work")


class Deadline:
    """A time limit for work in a thread. A thread cannot be stopped from outside, so the work calls ``check``
    regularly."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._called_off = threading.Event()

    def check(self) -> None:
        """Raise ``UnpackTimeout`` if the time is over or the work was cancelled."""
        if self._called_off.is_set() or time.monotonic() > self._end:
            raise UnpackTimeout(f"Checking and unpacking what arrived took longer than {self._seconds:g} seconds.")

    def cancel(self) -> None:
        self._called_off.set()


async def run_in_thread(work: Callable[..., T], *args: object, seconds: float | None = None) -> T:
    """Run ``work`` in one of these threads and return its result; with ``seconds``, it gets a ``Deadline`` as its last
    argument.

    If the caller is cancelled, the deadline is cancelled too, and the work is waited for up to ``PARTING_SECONDS``.
    """
    deadline = None if seconds is None else Deadline(seconds)
    given = args if deadline is None else (*args, deadline)
    context = contextvars.copy_context()
    running = asyncio.get_running_loop().run_in_executor(_threads, lambda: context.run(work, *given))
    try:
        # Shielded, because a thread cannot be cancelled: the work has to notice it by its deadline.
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if deadline is not None:
            deadline.cancel()
            await asyncio.wait({running}, timeout=PARTING_SECONDS)
        # Retrieve the exception, which asyncio would otherwise log as never retrieved.
        running.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise
