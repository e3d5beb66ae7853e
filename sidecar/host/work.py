"""How work is run outside the event loop's own turn: in threads, a few at a time, again where that is safe, and with its
progress told.

asyncio's default threads are few, and the store's small calls use them. Checking or unpacking a tarball can take
minutes, and a hostile one takes as long as it is allowed to: it must not block everything else.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from sidecar.errors import SandboxTimeout, SidecarError, UnpackTimeout
from sidecar.host.values import dataclass

A = TypeVar("A")
T = TypeVar("T")
MOST_THREADS = 16
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds between two attempts, at first and at most, without the jitter of up to a second."""
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


def start_in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Start ``work`` in a thread of its own; the future gets its result or its exception.

    The thread is a daemon: a call that never returns is abandoned, not waited for at exit.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(method: Callable[[Any], None], value: object) -> None:
        if not future.done():
            method(value)

    def run() -> None:
        method: Callable[[Any], None]
        try:
            method, value = future.set_result, work()
        except BaseException as problem:
            method, value = future.set_exception, problem  # type: ignore[assignment]
        with suppress(RuntimeError):  # the loop has ended: the result is not needed any more
            loop.call_soon_threadsafe(settle, method, value)

    threading.Thread(target=run, daemon=True, name="sandbox-call").start()
    return future


async def gather_few(work: Callable[[A], Awaitable[T]], items: Iterable[A], most: int) -> list[T]:
    """Do the work for each item, at most ``most`` at a time. Return the results in the order of the items."""
    turns = asyncio.Semaphore(most)

    async def take(item: A) -> T:
        async with turns:
            return await work(item)

    return await asyncio.gather(*map(take, items))


def _is_retryable(problem: BaseException) -> bool:
    # After a timeout the caller has already waited as long as it wanted to.
    return isinstance(problem, SidecarError) and problem.retryable and not isinstance(problem, SandboxTimeout)


@dataclass(slots=True)
class Attempt:
    """One attempt, as a context: an error in it that another attempt may get past is logged and not raised."""

    last: bool
    failed: bool = False

    def __enter__(self) -> None:
        self.failed = False

    def __exit__(self, kind: object, problem: BaseException | None, trace: object) -> bool:
        if problem is None or self.last or not _is_retryable(problem):
            return False
        assert isinstance(problem, SidecarError)
        logging.getLogger("sidecar").warning("trying again: %s [%s]", problem.message, problem.code)
        self.failed = True
        return True


class Attempts:
    """The attempts at a step, with more and more time between them, and jitter. It ends with the first that does not
    fail."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._made: list[Attempt] = []

    def __aiter__(self) -> Attempts:
        return self

    async def __anext__(self) -> Attempt:
        count = len(self._made)
        if count and not self._made[-1].failed:
            raise StopAsyncIteration
        if count:
            await asyncio.sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (count - 1) + random.random()))
        self._made.append(Attempt(last=count + 1 == self._most))
        return self._made[-1]


def retry_safely(attempts: int = 3) -> Attempts:
    """Return the attempts at a step that changes nothing, or can be repeated.

    (Written out here, because importing ``tenacity`` takes a tenth of what a command needs to start.)
    """
    return Attempts(attempts)


class Progress(Protocol):
    """Receives the progress of one operation."""

    def about(self, snapshot: str) -> None:
        """The operation makes or restores this snapshot."""
        ...

    def step(self, name: str, total: int | None = None) -> None:
        """A new step begins; ``total`` is the expected number of bytes, if known."""
        ...

    def advance(self, count: int) -> None:
        """``count`` more bytes of the present step are done."""
        ...


class NoProgress:
    """Ignores all progress."""

    def about(self, snapshot: str) -> None:
        return None

    def step(self, name: str, total: int | None = None) -> None:
        return None

    def advance(self, count: int) -> None:
        return None
