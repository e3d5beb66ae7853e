"""Names that tell nothing: ids and host names in keys become text of one length that only the store's name key turns back.

The same name always becomes the same text, so an object is found without a table; and a name under ``memories/`` and the
same name under ``attachments/`` become different ones.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Mapping
from functools import lru_cache

SHORTEST = 80
"""Bytes that every name is filled up to: one of an attachment, the longest there is, just fits."""
STEP = 16
ROOTS = ("memories", "attachments", "instances", "outbox")
"""The first parts of keys whose second part is hidden."""
CALLS = "calls"
"""Below a memory: named after what callers choose, so hidden too."""
_OPAQUE = re.compile(r"[a-z2-7]{154,}\Z")


def is_opaque(name: str) -> bool:
    """Whether a name looks like a hidden one. No id is that long."""
    return _OPAQUE.match(name) is not None


class Names:
    """``plain``, by root: the names that were there before anything was hidden, and stay as they are."""

    def __init__(self, key: bytes, plain: Mapping[str, Collection[str]]) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESSIV

        self._cipher = AESSIV(key)
        self._plain = {root: frozenset(names) for root, names in plain.items()}
        # A listing names one memory thousands of times.
        self._hide = lru_cache(4096)(self._hidden)
        self._show = lru_cache(4096)(self._shown)

    def hidden(self, key: str) -> str:
        """The key under which a store keeps what we call ``key``; also of a prefix."""
        parts = key.split("/")
        if parts[0] not in ROOTS or len(parts) < 2 or not parts[1] or self._stays(parts[0], parts[1]):
            return key
        if parts[0] == "memories" and len(parts) > 3 and parts[2] == CALLS and parts[3]:
            parts[3] = self._hide(CALLS, parts[3])
        parts[1] = self._hide(parts[0], parts[1])
        return "/".join(parts)

    def shown(self, key: str) -> str:
        """What we call the object that a store keeps under ``key``; one that is not hidden keeps its name."""
        parts = key.split("/")
        if parts[0] not in ROOTS or len(parts) < 2 or not is_opaque(parts[1]):
            return key
        parts[1] = self._show(parts[0], parts[1])
        if parts[0] == "memories" and len(parts) > 3 and parts[2] == CALLS and is_opaque(parts[3]):
            parts[3] = self._show(CALLS, parts[3])
        return "/".join(parts)

    def _stays(self, root: str, name: str) -> bool:
        return name in self._plain.get(root, ())

    def _hidden(self, root: str, name: str) -> str:
        data = name.encode()
        length = max(SHORTEST, -(-(len(data) + 1) // STEP) * STEP)
        sealed = self._cipher.encrypt(data.ljust(length, b"\0"), [root.encode()])
        return base64.b32encode(sealed).decode().rstrip("=").lower()

    def _shown(self, root: str, text: str) -> str:
        from cryptography.exceptions import InvalidTag

        try:
            sealed = base64.b32decode(text.upper() + "=" * (-len(text) % 8))
            return self._cipher.decrypt(sealed, [root.encode()]).rstrip(b"\0").decode()
        except (ValueError, InvalidTag):
            return text  # somebody else's
