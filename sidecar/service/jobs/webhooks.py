"""Webhooks: selected events as signed POSTs, retried until the receiver accepts them or a day is over.

An event is written to the store as soon as it is published, and kept there until it was sent: the outbox. What a
service did not send before it ended, the next one sends.
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
from collections.abc import Sequence
from dataclasses import asdict, replace

import httpx
import structlog

from sidecar.errors import SidecarError
from sidecar.host.values import dataclass
from sidecar.ids import build_outbox_prefix
from sidecar.models.answers import Event
from sidecar.ports import Store
from sidecar.service.settings import Webhook

WAITING = 10_000
"""How many events may wait that are not in the store."""
IN_MEMORY = 100
"""Of how many events in the store the body is kept here, too; that of others is read again when their turn comes."""
LONGEST_SECONDS = 24 * 3600.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0
WRITTEN_AT_ONCE = 8
"""How many events are written to the store at the same time."""


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
        self._last_name = 0
        self._begun = time.time()
        self._taken: asyncio.Queue[_PendingEvent] = asyncio.Queue(WAITING)
        """Events that are to be written to the outbox."""
        self._to_send: asyncio.Queue[_PendingEvent] = asyncio.Queue()
        """Events that were written to the outbox, or could not be."""
        self._unwritten = self._unsent = 0
        self._log = structlog.get_logger("sidecar").bind(webhook=hook.url.partition("?")[0].rpartition("@")[2])
        self._tasks = [asyncio.create_task(self._write_outbox()), asyncio.create_task(self._send_all())]

    def take(self, event: Event) -> None:
        """Take an event to be sent, if the webhook wants its type."""
        if not any(fnmatch.fnmatchcase(event.type, pattern) for pattern in self._hook.events):
            return
        # Names sort as the events were published, even if the clock is set back.
        self._last_name = max(self._last_name + 1, time.time_ns())
        key = f"{self._folder}{self._last_name:020d}-{secrets.token_hex(4)}.json"
        try:
            self._taken.put_nowait(_PendingEvent(key, event.type, body_of(event)))
            self._unwritten += 1
        except asyncio.QueueFull:
            self._log.error("too many undelivered events: one is dropped", type=event.type)

    async def _write_outbox(self) -> None:
        """Write each event to the store and pass it on to be sent, in the order in which they were taken. What earlier
        services left there comes first."""
        for key in await self._list_outbox():
            self._pass_on(_PendingEvent(key))
        while True:
            batch = [await self._taken.get()]
            while len(batch) < WRITTEN_AT_ONCE and not self._taken.empty():
                batch.append(self._taken.get_nowait())
            for pending, stored in zip(batch, await asyncio.gather(*map(self._write, batch)), strict=True):
                if stored and self._unsent >= IN_MEMORY:
                    pending = replace(pending, body=b"")
                if stored or self._unsent < WAITING:
                    self._pass_on(pending)
                else:
                    self._log.error("too many undelivered events: one is dropped", type=pending.type)
                self._unwritten -= 1
                self._taken.task_done()

    def _pass_on(self, pending: _PendingEvent) -> None:
        self._to_send.put_nowait(pending)
        self._unsent += 1

    async def _list_outbox(self) -> Sequence[str]:
        """Return the keys of the events that earlier services left in the store. If two services send the same event,
        the receiver gets it twice, which "at least once" allows."""
        try:
            return sorted([info.key async for info in self._store.list(self._folder)])
        except SidecarError as problem:
            self._log.error("left-over events could not be read", why=str(problem))
            return []

    async def _write(self, pending: _PendingEvent) -> bool:
        """Write an event to the outbox. Return whether it is there: if not it is sent all the same, but by this service
        alone."""
        try:
            await self._store.put(pending.key, pending.body)
        except SidecarError as problem:
            self._log.error("an event is not kept until it is sent", type=pending.type, why=str(problem))
            return False
        return True

    async def _send_all(self) -> None:
        while True:
            waiting = await self._to_send.get()
            pending = waiting if waiting.body else await self._read(waiting.key)
            if pending is not None:
                await self._deliver(pending)
            self._unsent -= 1
            self._to_send.task_done()

    async def _read(self, key: str) -> _PendingEvent | None:
        """Read an event that an earlier service left; ``None`` if another one has sent it, or if it cannot be read."""
        try:
            stored = await self._store.get(key)
            return None if stored is None else _PendingEvent(key, str(json.loads(stored.data)["type"]), stored.data)
        except (SidecarError, ValueError, LookupError, TypeError) as problem:
            self._log.error("a left-over event is not sent", object=key, why=str(problem))
            return None

    async def _deliver(self, pending: _PendingEvent) -> None:
        """Send an event until it is accepted or ``LONGEST_SECONDS`` are over, then remove it from the outbox. The time
        counts from when it was published, or from when this service began: else what waits behind would only grow."""
        age = time.time() - max(self._begun, pending.published)
        pause, deadline = FIRST_PAUSE, time.monotonic() + LONGEST_SECONDS - age
        while why := await self._send(pending):
            if time.monotonic() + pause > deadline:
                self._log.error("gave up on an event", type=pending.type, why=why)
                break
            self._log.warning("an event was not taken", type=pending.type, why=why, again_in=pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        try:
            await self._store.delete([pending.key])
        except SidecarError as problem:
            self._log.warning("an event that was sent stays in the outbox", type=pending.type, why=str(problem))

    async def _send(self, pending: _PendingEvent) -> str:
        """Send the event once. Return why it was not accepted; empty if it was."""
        headers = headers_of(pending.type, pending.body, str(int(time.time())), self._secret)
        try:
            answer = await self._client.post(self._hook.url, content=pending.body, headers=headers)
        except httpx.HTTPError as problem:
            return type(problem).__name__
        return "" if answer.is_success else f"HTTP {answer.status_code}"

    async def close(self, seconds: float) -> None:
        """Write all events to the outbox and deliver them, for at most ``seconds``; what is left there is sent by the
        next service."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._taken.join()
                await self._to_send.join()
        for task in self._tasks:
            task.cancel()
        if self._unwritten:
            self._log.error("events are lost: the store did not take them in time", count=self._unwritten)
        if self._unsent:
            self._log.warning("events are left for the next service", count=self._unsent)


@dataclass(frozen=True, slots=True)
class _PendingEvent:
    """An event that is not delivered yet, with its key in the store. Without a body it is read from there."""

    key: str
    type: str = ""
    body: bytes = b""

    @property
    def published(self) -> float:
        """When it was published, by its name in the outbox; 0 for a name that is not ours."""
        stamp = self.key.rpartition("/")[2].partition("-")[0]
        return int(stamp) / 1e9 if stamp.isascii() and stamp.isdecimal() else 0.0
