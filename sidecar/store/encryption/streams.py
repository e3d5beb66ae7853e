"""Open a sealed object while it arrives: age reads and writes in a thread of its own, a few chunks at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from sidecar.store.encryption.keyring import Keyring

PIECE = 1 << 18
AHEAD = 2
"""Pieces that wait to be taken: so little is in memory however large the object."""


class _Abandoned(Exception):
    """Nobody wants the rest."""


class _Bridge:
    """Between a thread that blocks and a loop that must not: what the one reads and writes, the other fetches and takes."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self._loop = asyncio.get_running_loop()
        self._incoming = memoryview(b"")
        self._outgoing = bytearray()
        self.ready: asyncio.Queue[bytes] = asyncio.Queue(AHEAD)
        self.abandoned = False
        self.problem: BaseException | None = None
        """What went wrong outside of age, which would only say that reading failed."""

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
        """What is left is handed over at the end."""

    def finish(self) -> None:
        if self._outgoing:
            self._hand_over(len(self._outgoing))

    def _hand_over(self, size: int) -> None:
        piece = bytes(self._outgoing[:size])
        del self._outgoing[:size]
        self._wait(lambda: self.ready.put(piece))

    def _wait(self, wanted: Callable[[], Awaitable[Any]]) -> Any:
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
    """What is sealed in ``chunks``, in pieces. Raise ``Unopened`` or ``Altered``, perhaps at the end only:
    who takes it compares it as a whole."""
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

    # Not one of the pool's threads: the store below needs those to get on, and would wait for us while we wait for it.
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
            ended.exception()  # heard, also when nobody waited for it


def _settle(ended: asyncio.Future[None], problem: BaseException | None) -> None:
    if ended.done():
        return
    if problem is None:
        ended.set_result(None)
    else:
        ended.set_exception(problem)
