"""Transfers through vendor SDKs that block: in threads, chunk by chunk. Waiting is bounded: what stands still is
abandoned."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

from sidecar.errors import SandboxUnreachable
from sidecar.host.work import start_in_thread

BATCH = 512 << 10


class SourceFailed(Exception):
    """What was to be sent could not be read: the fault is neither the SDK's nor the sandbox's."""

    def __init__(self, problem: BaseException) -> None:
        super().__init__(str(problem))
        self.problem = problem


async def send_chunks(send: Callable[[io.RawIOBase], None], chunks: AsyncIterator[bytes], *, idle: float) -> None:
    """Let ``send`` read ``chunks`` as a file, in a thread. Raise ``SandboxUnreachable`` if nothing moves for ``idle``
    seconds.

    A problem of ``chunks`` itself is raised as ``SourceFailed``, whatever the SDK made of it.
    """
    source = _Chunks(chunks, asyncio.get_running_loop())
    sending = start_in_thread(lambda: send(source))
    try:
        while not sending.done():
            taken = source.taken
            await asyncio.wait({sending}, timeout=idle)
            if not sending.done() and source.taken == taken:
                raise SandboxUnreachable(f"The upload stood still for {idle:.0f} seconds.")
        if source.problem is not None:
            raise SourceFailed(source.problem)
        sending.result()
    finally:
        source.abandon()
        sending.add_done_callback(_retrieve_exception)


def _retrieve_exception(future: asyncio.Future[Any]) -> None:
    """Retrieve a future's exception, so that it is not logged as never retrieved."""
    if not future.cancelled():
        future.exception()


class _Chunks(io.RawIOBase):
    """An async stream as a blocking file, read in another thread."""

    def __init__(self, chunks: AsyncIterator[bytes], loop: asyncio.AbstractEventLoop) -> None:
        self._chunks = chunks
        self._loop = loop
        self._rest = memoryview(b"")
        self._abandoned = False
        self.taken = 0
        self.problem: BaseException | None = None

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if not self._rest and not self._abandoned:
            self._rest = memoryview(self._fetch_next())
        if self._abandoned:
            raise OSError("the upload was given up")
        size = len(self._rest) if size is None or size < 0 else size
        piece, self._rest = bytes(self._rest[:size]), self._rest[size:]
        self.taken += len(piece)
        return piece

    def _fetch_next(self) -> bytes:
        """Fetch the next chunk from the loop, in the reading thread; keep the exception for the caller."""

        async def take() -> bytes:
            return await anext(self._chunks, b"")

        try:
            return asyncio.run_coroutine_threadsafe(take(), self._loop).result()
        except BaseException as problem:
            self.problem = problem
            raise

    def abandon(self) -> None:
        """Make further reads fail."""
        self._abandoned = True


async def receive_chunks(start: Callable[[], Iterator[bytes]], *, idle: float) -> AsyncGenerator[bytes]:
    """Yield the chunks of a blocking stream, read in threads. Raise ``SandboxUnreachable`` if nothing moves for
    ``idle`` seconds."""
    stream = _Stream(start)
    reading = start_in_thread(stream.read_batch)
    try:
        while True:
            taken = stream.taken
            await asyncio.wait({reading}, timeout=idle)
            if reading.done():
                if not (chunk := reading.result()):
                    return
                yield chunk
                reading = start_in_thread(stream.read_batch)
            elif stream.taken == taken:
                raise SandboxUnreachable(f"The download stood still for {idle:.0f} seconds.")
    finally:
        stream.abandon()
        reading.add_done_callback(_retrieve_exception)
        if reading.done():  # else its thread is still reading, and closes the stream itself
            await asyncio.wait({start_in_thread(stream.close)}, timeout=idle)


class _Stream:
    """A vendor's iterator of chunks, read in batches large enough to be worth a thread."""

    def __init__(self, start: Callable[[], Iterator[bytes]]) -> None:
        self._start = start
        self._pieces: Iterator[bytes] | None = None
        self._abandoned = False
        self.taken = 0

    def read_batch(self) -> bytes:
        """Return the next bytes; none at the end."""
        if self._pieces is None:
            self._pieces = self._start()
        batch = bytearray()
        for piece in self._pieces:
            batch += piece
            self.taken += len(piece)
            if self._abandoned:
                self.close()
                break
            if len(batch) >= BATCH:
                break
        return bytes(batch)

    def abandon(self) -> None:
        """Make the reading thread stop and close the stream."""
        self._abandoned = True

    def close(self) -> None:
        close = getattr(self._pieces, "close", None)
        if close is not None:
            with suppress(Exception):
                close()
