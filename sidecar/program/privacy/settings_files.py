"""Settings files travel without what is bound to a machine or secret.

The filtered text is a function of what is kept alone, so filtering a restored and merged file gives the same bytes again.
"""

from __future__ import annotations

import json
import re
from typing import Any, Callable, Pattern

from sidecar.format.patterns import compile_patterns

_SECRET = re.compile(r"(key|token|secret|password)\Z", re.IGNORECASE)


def _parse_object(data: bytes, made: Callable[[list[tuple[str, Any]]], Any] = dict) -> dict[str, Any] | None:
    """A JSON object, with each in it ``made`` of its keys and values; ``None`` when it is none."""
    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=made)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _encode(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")


def drop_keys(data: bytes, drop: list[str]) -> bytes | None:
    """A JSON file's text without the keys that match ``drop``, at any depth; ``None`` when it is not a JSON object.

    A file that has none of them stays as it is, to the byte.
    """
    keys, as_it_is = _compile_keys(drop), True

    def without(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal as_it_is
        clean = {key: value for key, value in pairs if not keys.match(key)}
        as_it_is = as_it_is and len(clean) == len(pairs)  # what is there twice is hidden by the second
        return clean

    value = _parse_object(data, without)
    if value is None:
        return None
    return data if as_it_is else _encode(value)


def list_secret_keys(data: bytes, drop: list[str]) -> list[str]:
    """Which of the keys that are dropped hold a secret, not only something of this machine."""
    keys = _compile_keys(drop)
    found: dict[str, None] = {}

    def noted(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found.update((key, None) for key, value in pairs if value and keys.match(key) and _SECRET.search(key))
        return {}

    _parse_object(data, noted)
    return list(found)


def merge_settings(restored: bytes, present: bytes, drop: list[str]) -> bytes:
    """A restored settings file, with the dropped keys that the one in place has of its own."""
    value, here = _parse_object(restored), _parse_object(present)
    if value is None or here is None:
        return restored
    own = _compile_keys(drop)
    value.update((key, inner) for key, inner in here.items() if own.match(key))
    return _encode(value)


def _compile_keys(drop: list[str]) -> Pattern[str]:
    return re.compile(compile_patterns(drop).pattern, re.IGNORECASE | re.DOTALL)
