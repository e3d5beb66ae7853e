"""Hide names: ids and host names in object keys become opaque text of one length, which only the store's name key
reverts.

The same name always becomes the same text, so an object is found without a table; a name under ``memories/`` and the
same name under ``attachments/`` become different ones.

The construction is a synthetic initialization vector (SIV, Rogaway and Shrimpton 2006), with HMAC-SHA256 for both of
its parts: a tag over the name, in which a change of one bit changes everything, seeds the stream that encrypts the
name. AES-SIV would do the same, but needs a library that takes more memory than everything else that encryption does.
"""

from __future__ import annotations

import base64
import hmac
import re
from collections.abc import Collection, Mapping
from functools import lru_cache

SHORTEST = 80
"""Every name is padded to this many bytes: that of an attachment, the longest there is, just fits."""
STEP = 16
ROOTS = ("memories", "attachments", "conversations", "instances", "outbox")
"""The first parts of keys whose second part is hidden."""
CALLS = "calls"
"""Below a memory: named after what callers choose, so hidden too."""
TAG = 16
_OPAQUE = re.compile(r"[a-z2-7]{154,}\Z")


def is_opaque(name: str) -> bool:
    """Return whether a name looks like a hidden one. No id is that long."""
    return _OPAQUE.match(name) is not None


class HiddenNames:
    """Hides and shows names.

    ``key``: one half for the tags, one for the streams. ``plain``, by root: the names that existed before encryption,
    which stay as they are.
    """

    def __init__(self, key: bytes, plain: Mapping[str, Collection[str]]) -> None:
        self._for_tags, self._for_streams = key[: len(key) // 2], key[len(key) // 2 :]
        self._plain = {root: frozenset(names) for root, names in plain.items()}
        # A listing names one memory thousands of times.
        self._hide = lru_cache(4096)(self._compute_hidden)
        self._show = lru_cache(4096)(self._reveal)

    def hide(self, key: str) -> str:
        """Return the key under which the store keeps ``key``; also for a prefix."""
        parts = key.split("/")
        if parts[0] not in ROOTS or len(parts) < 2 or not parts[1] or self._stays_plain(parts[0], parts[1]):
            return key
        if parts[0] == "memories" and len(parts) > 3 and parts[2] == CALLS and parts[3]:
            parts[3] = self._hide(CALLS, parts[3])
        parts[1] = self._hide(parts[0], parts[1])
        return "/".join(parts)

    def shown(self, key: str) -> str:
        """Return the plain key of the object that the store keeps under ``key``; a key that is not hidden is returned
        as it is."""
        parts = key.split("/")
        if parts[0] not in ROOTS or len(parts) < 2 or not is_opaque(parts[1]):
            return key
        parts[1] = self._show(parts[0], parts[1])
        if parts[0] == "memories" and len(parts) > 3 and parts[2] == CALLS and is_opaque(parts[3]):
            parts[3] = self._show(CALLS, parts[3])
        return "/".join(parts)

    def is_ours(self, key: str) -> bool:
        """Return whether the plain key of a stored ``key`` leads back to it: it was made with this name key."""
        return self.hide(self.shown(key)) == key

    def _stays_plain(self, root: str, name: str) -> bool:
        return name in self._plain.get(root, ())

    def _compute_hidden(self, root: str, name: str) -> str:
        """Pad a name and compute its hidden form: the tag, then the encrypted name, in base 32."""
        data = name.encode()
        data = data.ljust(max(SHORTEST, -(-(len(data) + 1) // STEP) * STEP), b"\0")
        tag = hmac.digest(self._for_tags, root.encode() + b"\0" + data, "sha256")[:TAG]
        return base64.b32encode(tag + self._cover(tag, data)).decode().rstrip("=").lower()

    def _reveal(self, root: str, text: str) -> str:
        """Return the plain name of a hidden one, or the text itself if it was not made with this name key."""
        try:
            sealed = base64.b32decode(text.upper() + "=" * (-len(text) % 8))
            name = self._cover(sealed[:TAG], sealed[TAG:]).rstrip(b"\0").decode()
        except ValueError:
            return text
        # Anything other than what this name key would have produced is foreign.
        return name if hmac.compare_digest(self._hide(root, name), text) else text

    def _cover(self, tag: bytes, data: bytes) -> bytes:
        """Encrypt or decrypt: XOR with the stream that the tag seeds."""
        stream = b""
        while len(stream) < len(data):
            stream += hmac.digest(self._for_streams, tag + len(stream).to_bytes(8, "big"), "sha256")
        return bytes(one ^ other for one, other in zip(data, stream, strict=False))
