"""Webhooks: selected events as signed POSTs, retried until the receiver accepts them or a day is over.

An event is kept in the store until it was sent. If a service dies before that, the next one sends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import hashlib
import hmac
import json
import secrets
import time
from dataclasses import asdict, dataclass

import httpx
import structlog

from sidecar.errors import SidecarError
from sidecar.ids import build_outbox_prefix
from sidecar.models.answers import Event
from sidecar.ports import Store
from sidecar.service.settings import Webhook

WAITING = 10_000
LONGEST_SECONDS = 24 * 3600.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0


def sign(secret: str, at: str, body: bytes) -> str:
    """Return the signature that a receiver compares: HMAC-SHA256 over the time and the body, so that neither can be
    changed, and a late replay is recognised."""
    return hmac.new(secret.encode(), at.encode() + b"." + body, hashlib.sha256).hexdigest()


def body_of(event: Event) -> bytes:
    """Return an event as the JSON body of a call."""
    return json.dumps(asdict(event)).encode()


def headers_of(kind: str, body: bytes, at: str, secret: str) -> dict[str, str]:
    """Return the headers of a call. ``at`` is in whole seconds since 1970. Without a secret, nothing is signed."""
    headers = {"Content-Type": "application/json", "Memory-Sidecar-Event": kind, "Memory-Sidecar-Time": at}
    if secret:
        headers["Memory-Sidecar-Signature"] = f"sha256={sign(secret, at, body)}"
    return headers


class Deliveries:
    """Sends the events of one webhook, in order, each at least once."""

    def __init__(self, hook: Webhook, secret: str, client: httpx.AsyncClient, store: Store) -> None:
        self._hook = hook
        self._secret = secret
        self._client = client
        self._store = store
        self._folder = build_outbox_prefix(hook.url)
        self._queue: asyncio.Queue[_PendingEvent] = asyncio.Queue(WAITING)
        self._undelivered = 0
        self._log = structlog.get_logger("sidecar").bind(webhook=hook.url.partition("?")[0].rpartition("@")[2])
        self._task = asyncio.create_task(self._run())

    def take(self, event: Event) -> None:
        """Enqueue an event, if the webhook wants its type."""
        if any(fnmatch.fnmatchcase(event.type, pattern) for pattern in self._hook.events):
            name = f"{time.time_ns():020d}-{secrets.token_hex(4)}.json"
            self._write_to_outbox(_PendingEvent(f"{self._folder}{name}", event.type, body_of(event)))

    def _write_to_outbox(self, parcel: _PendingEvent) -> None:
        try:
            self._queue.put_nowait(parcel)
            self._undelivered += 1
        except asyncio.QueueFull:
            self._log.error("too many undelivered events: one is dropped", type=parcel.type)

    async def _run(self) -> None:
        await self._load_outbox()
        while True:
            parcel = await self._queue.get()
            try:
                await self._deliver(parcel)
            finally:
                self._undelivered -= 1
                self._queue.task_done()

    async def _load_outbox(self) -> None:
        """Enqueue the events that earlier services left in the store. If two services send the same event, the receiver
        gets it twice, which "at least once" allows."""
        try:
            found = [info.key async for info in self._store.list(self._folder)]
        except SidecarError as problem:
            self._log.error("left-over events could not be read", why=str(problem))
            return
        for key in found:
            try:
                stored = await self._store.get(key)
                if stored is not None:
                    kind = json.loads(stored.data).get("type", "")
                    self._write_to_outbox(_PendingEvent(key, str(kind), stored.data, stored=True))
            except (SidecarError, ValueError) as problem:
                self._log.error("a left-over event is not sent", object=key, why=str(problem))

    async def _deliver(self, parcel: _PendingEvent) -> None:
        """Write the event to the store, send it until it is accepted or ``LONGEST_SECONDS`` are over, then delete it."""
        if not parcel.stored:
            with contextlib.suppress(SidecarError):  # it is sent even if it cannot be stored
                await self._store.put(parcel.key, parcel.body)
        pause, deadline = FIRST_PAUSE, time.monotonic() + LONGEST_SECONDS
        while why := await self._send(parcel):
            if time.monotonic() + pause > deadline:
                self._log.error("gave up on an event", type=parcel.type, why=why)
                break
            self._log.warning("an event was not taken", type=parcel.type, why=why, again_in=pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        with contextlib.suppress(SidecarError):
            await self._store.delete([parcel.key])

    async def _send(self, parcel: _PendingEvent) -> str:
        """Send the event once. Return why it was not accepted; empty if it was."""
        headers = headers_of(parcel.type, parcel.body, str(int(time.time())), self._secret)
        try:
            answer = await self._client.post(self._hook.url, content=parcel.body, headers=headers)
        except httpx.HTTPError as problem:
            return type(problem).__name__
        return "" if answer.is_success else f"HTTP {answer.status_code}"

    async def close(self, seconds: float) -> None:
        """Deliver the queued events for at most ``seconds``; the rest stays in the store for the next service."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._queue.join()
        if self._undelivered:
            self._log.warning("events are left for the next service", count=self._undelivered)
        self._task.cancel()


@dataclass(frozen=True, slots=True)
class _PendingEvent:
    """An event that is not delivered yet, with its key in the store."""

    key: str
    type: str
    body: bytes
    stored: bool = False
