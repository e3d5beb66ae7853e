"""Settings files travel without what is bound to a machine or secret.

The filtered text is a function of what is kept alone, so filtering a restored and merged file gives the same bytes again.
"""

from __future__ import annotations

import json
import re
from typing import Any, Pattern

from .rules import compiled


def _without(value: Any, drop: Pattern[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(inner, drop) for key, inner in value.items() if not drop.match(key)}
    if isinstance(value, list):
        return [_without(inner, drop) for inner in value]
    return value


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _text(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")


def filtered(data: bytes, drop: list[str]) -> bytes | None:
    """A JSON file's text without the keys that match ``drop``, at any depth; ``None`` when it is not a JSON object.

    A file that has none of them stays as it is, to the byte.
    """
    value = _parsed(data)
    if value is None:
        return None
    clean = _without(value, _keys(drop))
    return data if clean == value else _text(clean)


def merged(restored: bytes, present: bytes, drop: list[str]) -> bytes:
    """A restored settings file, with the dropped keys that the one in place has of its own."""
    value, here = _parsed(restored), _parsed(present)
    if value is None or here is None:
        return restored
    own = _keys(drop)
    value.update((key, inner) for key, inner in here.items() if own.match(key))
    return _text(value)


def _keys(drop: list[str]) -> Pattern[str]:
    return re.compile(compiled(drop).pattern, re.IGNORECASE | re.DOTALL)
