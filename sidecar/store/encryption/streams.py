"""Decrypt an object while it arrives: age reads and writes in a thread of its own, a few chunks at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from sidecar.store.encryption.keyring import Keyring

PIECE = 1 << 18
AHEAD = 2
"""Pieces that wait to be taken: so little is in memory, however large the object."""


class _Abandoned(Exception):
    """The rest is not needed any more."""


class _Bridge:
    """Connects a thread that blocks with an event loop that must not: what the thread reads and writes, the loop
    fetches and takes."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self._loop = asyncio.get_running_loop()
        self._incoming = memoryview(b"")
        self._outgoing = bytearray()
        self.ready: asyncio.Queue[bytes] = asyncio.Queue(AHEAD)
        self.abandoned = False
        self.problem: BaseException | None = None
        """What went wrong outside of age, which would only report that reading failed."""

    def read(self, size: int = -1) -> bytes:
        if not self._incoming:
            self._incoming = memoryview(self._wait(lambda: anext(self._chunks, b"")))
        wanted = len(self._incoming) if size < 0 else size
        piece, self._incoming = bytes(self._incoming[:wanted]), self._incoming[wanted:]
        return piece

    def write(self, data: bytes) -> int:
        self._outgoing += data
        while len(self._outgoing) >= PIECE:
            self._hand_over(PIECE)
        return len(data)

    def flush(self) -> None:
        """Do nothing; what is left is passed on at the end."""

    def finish(self) -> None:
        if self._outgoing:
            self._hand_over(len(self._outgoing))

    def _hand_over(self, size: int) -> None:
        piece = bytes(self._outgoing[:size])
        del self._outgoing[:size]
        self._wait(lambda: self.ready.put(piece))

    def _wait(self, wanted: Callable[[], Awaitable[Any]]) -> Any:
        """Run a coroutine in the loop and wait for it in the thread. Raise _Abandoned if the result is not needed any
        more."""

        async def done() -> Any:
            return await wanted()

        try:
            result = asyncio.run_coroutine_threadsafe(done(), self._loop).result()
        except BaseException as problem:
            self.problem = problem
            raise
        if self.abandoned:
            raise _Abandoned
        return result


async def decrypt_stream(chunks: AsyncIterator[bytes], keyring: Keyring) -> AsyncGenerator[bytes]:
    """Yield the decrypted contents of ``chunks``, in pieces. Raise ``NotDecrypted`` or ``Altered``, perhaps only at the
    end: the caller must check the whole before using it."""
    bridge, loop = _Bridge(chunks), asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def work() -> None:
        problem: BaseException | None = None
        try:
            keyring.decrypt_stream(bridge, bridge)
            bridge.finish()
        except BaseException as raised:
            problem = bridge.problem or raised
        loop.call_soon_threadsafe(_settle, ended, problem)

    # Not a thread of the pool: the store below needs those to continue, and each would wait for the other.
    threading.Thread(target=work, name="opening", daemon=True).start()
    try:
        while True:
            taking = asyncio.ensure_future(bridge.ready.get())
            both: set[asyncio.Future[Any]] = {taking, ended}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                taking.cancel()
                break
            yield taking.result()
        while not bridge.ready.empty():
            yield bridge.ready.get_nowait()
        await ended
    finally:
        bridge.abandoned = True
        while not ended.done():
            while not bridge.ready.empty():
                bridge.ready.get_nowait()
            await asyncio.wait({ended}, timeout=0.05)
        if not ended.cancelled():
            ended.exception()  # retrieved, so that it is not logged as never retrieved


def _settle(ended: asyncio.Future[None], problem: BaseException | None) -> None:
    if ended.done():
        return
    if problem is None:
        ended.set_result(None)
    else:
        ended.set_exception(problem)
