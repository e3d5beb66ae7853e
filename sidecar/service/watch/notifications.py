"""What providers send when something happens to a sandbox: whether it is from them, and which sandbox it is about.

Nothing else in it is believed. It is only a reason to look at that sandbox, through the provider's API: one that is sent
again, late or out of turn changes nothing.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from sidecar.errors import UsageError
from sidecar.service.access.callers import NoValidToken

E2B_SIGNATURE = "e2b-signature"
MOST_REMEMBERED = 10_000
MOST_BYTES = 64 << 10
"""The largest body. Those of the providers have some hundred bytes."""
_SANDBOX = re.compile(r"[A-Za-z0-9][\w.-]{0,127}", re.ASCII)
_FORGED = "It is not signed with the secret of a [[watch]]."
_SECRET = "Set secret_env in [[watch]], and give its secret to the provider: see docs/conductor.md, Watch."


class BadHook(UsageError):
    """What was sent to a hook names no sandbox."""

    code = "bad-hook"
    default_hint = "Have the provider send sandbox events as JSON: see docs/conductor.md, Watch."


class NotFromProvider(NoValidToken):
    """What was sent to a hook is not signed with its secret."""

    code = "hook-refused"
    default_hint = _SECRET


class Notifications:
    """The webhooks of one provider."""

    def __init__(self, provider: str, secrets: Iterable[str]) -> None:
        self._provider = provider
        self._secrets = [secret for secret in dict.fromkeys(secrets) if secret]
        self._before: OrderedDict[str, None] = OrderedDict()

    @property
    def expected(self) -> bool:
        """Whether there is a secret to check them by."""
        return bool(self._secrets)

    def read(self, body: bytes, headers: Mapping[str, str]) -> str | None:
        """Return the sandbox that a webhook is about; ``None`` if it is about none, or came before. Raise
        ``NotFromProvider`` or ``BadHook``."""
        if not any(self._is_signed(secret, body, headers) for secret in self._secrets):
            raise NotFromProvider(_FORGED)
        try:
            event = json.loads(body)
        except (ValueError, RecursionError):
            # A signature of E2B's kind can be prolonged by who has seen one, with bytes that are no JSON.
            raise BadHook("What was sent to the hook is no JSON.") from None
        if not isinstance(event, dict):
            raise BadHook("What was sent to the hook is no event.")
        kind = event.get("type" if self._provider == "e2b" else "event")
        if not isinstance(kind, str) or not kind.startswith("sandbox."):
            return None
        sandbox = event.get("sandboxId" if self._provider == "e2b" else "id")
        if not isinstance(sandbox, str) or not _SANDBOX.fullmatch(sandbox):
            raise BadHook("The event that was sent to the hook names no sandbox.")
        return None if self._is_repeated(body, event) else f"{self._provider}:{sandbox}"

    def _is_signed(self, secret: str, body: bytes, headers: Mapping[str, str]) -> bool:
        if self._provider == "e2b":
            given = headers.get(E2B_SIGNATURE, "").rstrip("=").replace("+", "-").replace("/", "_")
            return hmac.compare_digest(given.encode(), sign_e2b(secret, body).encode())
        # How Daytona signs is not confirmed: its webhooks carry the secret itself, in a header that is set for them.
        scheme, _, given = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode(), secret.encode())
        return scheme.lower() == "bearer" and same

    def _is_repeated(self, body: bytes, event: Mapping[str, object]) -> bool:
        """Whether this event came before, by its id, or where it has none by all it says."""
        own = event.get("id") if self._provider == "e2b" else None
        id = own[:200] if isinstance(own, str) and own else hashlib.sha256(body).hexdigest()
        if id in self._before:
            return True
        self._before[id] = None
        while len(self._before) > MOST_REMEMBERED:
            self._before.popitem(last=False)
        return False


def sign_e2b(secret: str, body: bytes) -> str:
    """Return the signature of a body as E2B makes it."""
    digest = hashlib.sha256(secret.encode() + body).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
