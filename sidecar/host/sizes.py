"""Sizes as people write them (4096, "500 MB", "2 GiB"), and counts as they read them ("1 file", "2,000 files")."""

from __future__ import annotations

import re

_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*\Z", re.IGNORECASE)
HOW = 'Write a number of bytes, or a text such as "500 MB" or "2 GiB".'


def parse_size(text: str) -> int:
    """Return the number of bytes that a text means. Raise ``ValueError`` if it is not a size."""
    found = _WRITTEN.match(text)
    if found is None or (found[3] and not found[2]):
        raise ValueError(text)
    power = " kmgt".index(found[2].lower() or " ")
    return round(float(found[1]) * (1024 if found[3] else 1000) ** power) if power else int(float(found[1]))


def format_count(count: int, word: str) -> str:
    """Format a count with its noun: "1 file", "2,000 files"."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"
