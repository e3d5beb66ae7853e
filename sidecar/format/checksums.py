"""Small JSON objects that notice a flipped byte: canonical text with its own SHA-256 inside.

The text must be exactly what encoding its contents again gives, so no byte can change without being seen.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any


def _encode_canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def encode_checksummed(value: dict[str, Any]) -> bytes:
    """Encode an object, adding its ``sha256``."""
    return _encode_canonical({**value, "sha256": hashlib.sha256(_encode_canonical(value)).hexdigest()}) + b"\n"


def decode_checksummed(data: bytes) -> dict[str, Any]:
    """Decode what ``encode_checksummed`` wrote. Raise ValueError when a single byte of it is different."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("not JSON any more") from None
    if not isinstance(value, dict):
        raise ValueError("not an object")
    value.pop("sha256", None)
    if encode_checksummed(value) != data:
        raise ValueError("its contents do not match its checksum")
    return value
