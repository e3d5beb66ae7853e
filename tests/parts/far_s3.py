"""An S3 server that is far away: a relay on loopback that answers late, and knows what it was asked."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass(frozen=True)
class Request:
    """One request: what it was, when it came and when it was answered."""

    method: str
    path: str
    began: float
    ended: float
    status: int

    def __str__(self) -> str:
        parts = urlsplit(self.path)
        about = parse_qs(parts.query)
        what = f"list {about['prefix'][0]}" if "prefix" in about else unquote(parts.path)
        return f"{self.method} {what} {self.status}"


@dataclass
class FarServer:
    """The relay. ``requests`` is what passed since ``forget``."""

    server: tuple[str, int]
    delay: float
    endpoint: str = ""
    requests: list[Request] = field(default_factory=list)

    def forget(self) -> None:
        self.requests = []

    @property
    def count(self) -> int:
        return len(self.requests)

    @property
    def in_a_row(self) -> int:
        """The most requests of which each began after the one before had ended."""
        ends, steps = float("-inf"), 0
        for one in sorted(self.requests, key=lambda one: one.ended):
            if one.began >= ends:
                steps, ends = steps + 1, one.ended
        return steps

    @property
    def by_method(self) -> Counter[str]:
        return Counter(one.method for one in self.requests)

    def told(self) -> str:
        began = min((one.began for one in self.requests), default=0.0)
        rows = sorted(self.requests, key=lambda one: one.began)
        return "\n".join(f"{one.began - began:7.3f} {one.ended - began:7.3f} {one}" for one in rows)

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay the requests of one connection, one after the other."""
        there, back = await asyncio.open_connection(*self.server, limit=1 << 20)
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError, ValueError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                began = time.monotonic()
                method, path, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
                back.write(head)
                await self._copy_body(head, reader, back)
                await asyncio.sleep(self.delay)
                answer = await there.readuntil(b"\r\n\r\n")
                status = int(answer.split(b" ", 2)[1])
                # Noted before the answer is passed on: whoever has the answer finds the request counted.
                self.requests.append(Request(method, path, began, time.monotonic(), status))
                writer.write(answer)
                if method != "HEAD" and status not in (204, 304):
                    await self._copy_body(answer, there, writer)
                await writer.drain()
        for end in (back, writer):
            end.close()

    async def _copy_body(self, head: bytes, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        fields = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
        }
        if fields.get(b"transfer-encoding", b"").lower() == b"chunked":
            while True:
                size = await source.readuntil(b"\r\n")
                target.write(size)
                rest = int(size.split(b";")[0], 16)
                target.write(await source.readexactly(rest + 2))
                await target.drain()
                if not rest:
                    return
        left = int(fields.get(b"content-length", b"0"))
        while left:
            chunk = await source.read(min(left, 1 << 18))
            if not chunk:
                raise ConnectionResetError
            left -= len(chunk)
            target.write(chunk)
            await target.drain()


@contextmanager
def far_server(endpoint: str, delay: float = 0.02) -> Iterator[FarServer]:
    """A relay to a server on loopback that adds ``delay`` seconds to each request."""
    parts = urlsplit(endpoint)
    far = FarServer((parts.hostname or "", parts.port or 80), delay)
    loop, ready = asyncio.new_event_loop(), threading.Event()

    async def listen() -> None:
        relay = await asyncio.start_server(far.pass_on, "127.0.0.1", 0, limit=1 << 20)
        far.endpoint = f"http://127.0.0.1:{relay.sockets[0].getsockname()[1]}"
        ready.set()
        async with relay:
            await relay.serve_forever()

    def run() -> None:
        with suppress(RuntimeError):
            loop.run_until_complete(listen())
        for task in (left := asyncio.all_tasks(loop)):
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield far
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
