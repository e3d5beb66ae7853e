"""Settings files are exported without keys that are specific to a machine or secret.

The filtered text depends only on what is kept, so filtering a restored and merged file gives the same bytes again.
"""

from __future__ import annotations

import json
import re
from typing import Any, Callable, Pattern

from sidecar.format.patterns import compile_patterns

_SECRET = re.compile(r"(key|token|secret|password)\Z", re.IGNORECASE)


def _parse_object(data: bytes, made: Callable[[list[tuple[str, Any]]], Any] = dict) -> dict[str, Any] | None:
    """Parse a JSON object, building each object in it with ``made``; ``None`` if it is not valid."""
    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=made)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _encode(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")


def drop_keys(data: bytes, drop: list[str]) -> bytes | None:
    """Return a JSON file's text without the keys that match ``drop``, at any depth; ``None`` if it is not a JSON
    object.

    A file without such keys is returned unchanged, to the byte.
    """
    keys, as_it_is = _compile_keys(drop), True

    def without(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal as_it_is
        clean = {key: value for key, value in pairs if not keys.match(key)}
        as_it_is = as_it_is and len(clean) == len(pairs)  # a duplicate key is hidden by the second one
        return clean

    value = _parse_object(data, without)
    if value is None:
        return None
    return data if as_it_is else _encode(value)


def list_secret_keys(data: bytes, drop: list[str]) -> list[str]:
    """Return which of the dropped keys contain a secret, not only a setting of this machine."""
    keys = _compile_keys(drop)
    found: dict[str, None] = {}

    def noted(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found.update((key, None) for key, value in pairs if value and keys.match(key) and _SECRET.search(key))
        return {}

    _parse_object(data, noted)
    return list(found)


def merge_settings(restored: bytes, present: bytes, drop: list[str]) -> bytes:
    """Return a restored settings file with the dropped keys that the file in place has."""
    value, here = _parse_object(restored), _parse_object(present)
    if value is None or here is None:
        return restored
    own = _compile_keys(drop)
    value.update((key, inner) for key, inner in here.items() if own.match(key))
    return _encode(value)


def _compile_keys(drop: list[str]) -> Pattern[str]:
    """Compile the patterns of dropped keys, ignoring case."""
    return re.compile(compile_patterns(drop).pattern, re.IGNORECASE | re.DOTALL)
