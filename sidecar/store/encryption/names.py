"""Names that tell nothing: ids and host names in keys become text of one length that only the store's name key turns back.

The same name always becomes the same text, so an object is found without a table; and a name under ``memories/`` and the
same name under ``attachments/`` become different ones.

How: a synthetic initialization vector (SIV, Rogaway and Shrimpton 2006), with HMAC-SHA256 for both of its parts. A tag over
the name, which a change of one bit changes wholly, begins the stream that covers the name. AES-SIV would do the same and
take a library to load that needs more memory than all else that sealing does.
"""

from __future__ import annotations

import base64
import hmac
import re
from collections.abc import Collection, Mapping
from functools import lru_cache

SHORTEST = 80
"""Bytes that every name is filled up to: one of an attachment, the longest there is, just fits."""
STEP = 16
ROOTS = ("memories", "attachments", "conversations", "instances", "outbox")
"""The first parts of keys whose second part is hidden."""
CALLS = "calls"
"""Below a memory: named after what callers choose, so hidden too."""
TAG = 16
_OPAQUE = re.compile(r"[a-z2-7]{154,}\Z")


def is_opaque(name: str) -> bool:
    """Whether a name looks like a hidden one. No id is that long."""
    return _OPAQUE.match(name) is not None


class HiddenNames:
    """``key``: one half for the tags, one for the streams. ``plain``, by root: the names that were there before anything
    was hidden, and stay as they are."""

    def __init__(self, key: bytes, plain: Mapping[str, Collection[str]]) -> None:
        self._for_tags, self._for_streams = key[: len(key) // 2], key[len(key) // 2 :]
        self._plain = {root: frozenset(names) for root, names in plain.items()}
        # A listing names one memory thousands of times.
        self._hide = lru_cache(4096)(self._compute_hidden)
        self._show = lru_cache(4096)(self._reveal)

    def hide(self, key: str) -> str:
        """The key under which a store keeps what we call ``key``; also of a prefix."""
        parts = key.split("/")
        if parts[0] not in ROOTS or len(parts) < 2 or not parts[1] or self._stays_plain(parts[0], parts[1]):
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

    def is_ours(self, key: str) -> bool:
        """Whether what a store keeps under ``key`` is found again under what it is shown as."""
        return self.hide(self.shown(key)) == key

    def _stays_plain(self, root: str, name: str) -> bool:
        return name in self._plain.get(root, ())

    def _compute_hidden(self, root: str, name: str) -> str:
        data = name.encode()
        data = data.ljust(max(SHORTEST, -(-(len(data) + 1) // STEP) * STEP), b"\0")
        tag = hmac.digest(self._for_tags, root.encode() + b"\0" + data, "sha256")[:TAG]
        return base64.b32encode(tag + self._cover(tag, data)).decode().rstrip("=").lower()

    def _reveal(self, root: str, text: str) -> str:
        try:
            sealed = base64.b32decode(text.upper() + "=" * (-len(text) % 8))
            name = self._cover(sealed[:TAG], sealed[TAG:]).rstrip(b"\0").decode()
        except ValueError:
            return text
        # Anything but what we would have written ourselves is somebody else's.
        return name if hmac.compare_digest(self._hide(root, name), text) else text

    def _cover(self, tag: bytes, data: bytes) -> bytes:
        """What covers also uncovers."""
        stream = b""
        while len(stream) < len(data):
            stream += hmac.digest(self._for_streams, tag + len(stream).to_bytes(8, "big"), "sha256")
        return bytes(one ^ other for one, other in zip(data, stream, strict=False))
