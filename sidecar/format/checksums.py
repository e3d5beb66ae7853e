"""Small JSON objects that carry their own SHA-256, in canonical form.

Decoding encodes the contents again and compares the bytes, so a change of any single byte is detected, also one that
JSON itself would ignore.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any


def _encode_canonical(value: dict[str, Any]) -> bytes:
    """Encode as JSON with sorted names and no blanks: one value has exactly one encoding."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def encode_checksummed(value: dict[str, Any]) -> bytes:
    """Return the object's canonical JSON with its SHA-256 added as ``sha256``."""
    return _encode_canonical({**value, "sha256": hashlib.sha256(_encode_canonical(value)).hexdigest()}) + b"\n"


def decode_checksummed(data: bytes) -> dict[str, Any]:
    """Return the object that ``encode_checksummed`` wrote, without its checksum. Raise ValueError if any byte differs."""
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
