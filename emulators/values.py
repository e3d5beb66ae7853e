"""JSON values on their way in and out."""

from __future__ import annotations

from datetime import UTC, datetime


def moment(seconds: float) -> str:
    """Seconds since the epoch as both providers write a time."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def texts(value: object) -> dict[str, str]:
    """An object of strings; anything else is an empty one."""
    return {str(name): str(text) for name, text in value.items()} if isinstance(value, dict) else {}
