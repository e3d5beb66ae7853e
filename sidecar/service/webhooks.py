"""Webhooks: chosen events as signed POSTs, tried again until somebody takes them or a day is over."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import hashlib
import hmac
import json
import time
from dataclasses import asdict

import httpx
import structlog

from sidecar.service.events import Event
from sidecar.service.settings import Webhook

WAITING = 10_000
LONGEST_SECONDS = 24 * 3600.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0


def signature(secret: str, at: str, body: bytes) -> str:
    """What a receiver compares: HMAC-SHA256 over the time and the body, so that neither can be changed or replayed late."""
    return hmac.new(secret.encode(), at.encode() + b"." + body, hashlib.sha256).hexdigest()


class Deliveries:
    """Sends one webhook's events, in order, at least once each."""

    def __init__(self, hook: Webhook, secret: str, client: httpx.AsyncClient) -> None:
        self._hook = hook
        self._secret = secret
        self._client = client
        self._queue: asyncio.Queue[Event] = asyncio.Queue(WAITING)
        self._undelivered = 0
        self._log = structlog.get_logger("sidecar").bind(webhook=hook.url.partition("?")[0].rpartition("@")[2])
        self._task = asyncio.create_task(self._run())

    def take(self, event: Event) -> None:
        if not any(fnmatch.fnmatchcase(event.type, pattern) for pattern in self._hook.events):
            return
        try:
            self._queue.put_nowait(event)
            self._undelivered += 1
        except asyncio.QueueFull:
            self._log.error("too many undelivered events: one is dropped", type=event.type, number=event.number)

    async def _run(self) -> None:
        while True:
            event = await self._queue.get()
            try:
                await self._deliver(event)
            finally:
                self._undelivered -= 1
                self._queue.task_done()

    async def _deliver(self, event: Event) -> None:
        body = json.dumps(asdict(event)).encode()
        pause, deadline = FIRST_PAUSE, time.monotonic() + LONGEST_SECONDS
        while True:
            why = await self._send(event, body)
            if not why:
                return
            if time.monotonic() + pause > deadline:
                self._log.error("gave up on an event", type=event.type, number=event.number, why=why)
                return
            self._log.warning("an event was not taken", type=event.type, number=event.number, why=why, again_in=pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _send(self, event: Event, body: bytes) -> str:
        """Why it was not taken; "" when it was."""
        at = str(int(time.time()))
        headers = {"Content-Type": "application/json", "Memory-Sidecar-Event": event.type, "Memory-Sidecar-Time": at}
        if self._secret:
            headers["Memory-Sidecar-Signature"] = f"sha256={signature(self._secret, at, body)}"
        try:
            answer = await self._client.post(self._hook.url, content=body, headers=headers)
        except httpx.HTTPError as problem:
            return type(problem).__name__
        return "" if answer.is_success else f"HTTP {answer.status_code}"

    async def close(self, seconds: float) -> int:
        """Deliver what waits, for so long; return how many events stay undelivered."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._queue.join()
        left = self._undelivered
        self._task.cancel()
        return left
