"""The lifecycle webhooks that a provider sends: one after the other, as it happens, to one address.

They can be held back, so that a test sends them late, twice or in another order.
"""

from __future__ import annotations

import base64
import hashlib
import json
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Sign = Callable[[bytes], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Webhook:
    """One webhook: its body and headers, and what was answered (0: nothing)."""

    body: bytes
    headers: Mapping[str, str]
    status: int = 0


class Webhooks:
    """Sends what happens to sandboxes to an address, in a thread of its own."""

    def __init__(self, url: str, sign: Sign) -> None:
        self.url = url
        self.held = False
        """Nothing is sent; what would have been is kept in ``waiting``."""
        self.waiting: list[Webhook] = []
        self.sent: list[Webhook] = []
        self._sign = sign
        self._queue: queue.Queue[Webhook | None] = queue.Queue()
        threading.Thread(target=self._deliver, daemon=True).start()

    def tell(self, event: Mapping[str, object]) -> None:
        """Send an event, or keep it while they are held."""
        body = json.dumps(event).encode()
        webhook = Webhook(body, {"Content-Type": "application/json", **self._sign(body)})
        if self.held:
            self.waiting.append(webhook)
        else:
            self._queue.put(webhook)

    def post(self, webhook: Webhook) -> int:
        """Send one now, as it is. Return the status, 0 if nobody answered."""
        request = urllib.request.Request(self.url, webhook.body, dict(webhook.headers), method="POST")
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
                status = int(answer.status)
        except urllib.error.HTTPError as problem:
            status = problem.code
        except OSError:
            status = 0  # whoever listens is not there now; it is not sent again
        self.sent.append(Webhook(webhook.body, webhook.headers, status))
        return status

    def close(self) -> None:
        self._queue.put(None)

    def _deliver(self) -> None:
        while (webhook := self._queue.get()) is not None:
            self.post(webhook)


def sign_as_e2b(secret: str) -> Sign:
    """E2B's signature: the secret and the body hashed together, in base64 without padding."""

    def sign(body: bytes) -> dict[str, str]:
        digest = hashlib.sha256(secret.encode() + body).digest()
        signature = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        return {"e2b-signature": signature, "e2b-signature-version": "v1", "e2b-webhook-id": "wh-emulator"}

    return sign


def sign_as_bearer(secret: str) -> Sign:
    """The secret itself in a header, as it is set for an endpoint."""
    return lambda body: {"Authorization": f"Bearer {secret}"}
