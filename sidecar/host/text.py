"""Text as people write and read it: sizes, durations, counts, the word that was probably meant, and characters that do
not show.

File names, labels, ids, and messages of sandboxes and servers come from other parties. A line break among them can fake
a line of the sidecar's output, an escape sequence can take over a terminal, and right-to-left or invisible characters
make a text read as something else.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from datetime import timedelta

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*\Z", re.IGNORECASE)
SIZE_HINT = 'Write a number of bytes, or a text such as "500 MB" or "2 GiB".'
LONGEST_DURATION = timedelta(days=365 * 1000)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdwy])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400, "y": 365 * 86400}
# Characters that Unicode calls ignorable although they count as letters or marks: joiners, fillers, variation
# selectors.
_UNSEEN = frozenset(
    (
        *(0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, *range(0x180B, 0x1810), 0x3164),
        *(*range(0xFE00, 0xFE10), 0xFFA0, *range(0xE0100, 0xE01F0)),
    )
)


def parse_size(text: str) -> int:
    """Return the number of bytes that a text means. Raise ``ValueError`` if it is not a size."""
    found = _SIZE.match(text)
    if found is None or (found[3] and not found[2]):
        raise ValueError(text)
    power = " kmgt".index(found[2].lower() or " ")
    return round(float(found[1]) * (1024 if found[3] else 1000) ** power) if power else int(float(found[1]))


def parse_duration(text: str) -> timedelta:
    """Parse a duration such as ``30d``, ``12h`` or ``1d12h``. Raise ``ValueError`` saying how to write it."""
    compact = text.strip()
    if not compact or _DURATION.sub("", compact).strip():
        raise ValueError('write a number and one of s, m, h, d, w, y, such as "12h" or "30d"')
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(compact))
    if seconds > LONGEST_DURATION.total_seconds():
        raise ValueError("nothing is kept for more than a thousand years")
    return timedelta(seconds=seconds)


def format_count(count: int, word: str) -> str:
    """Format a count with its noun: "1 file", "2,000 files"."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def find_nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return the known word that is most like a word; "" if none is near."""
    import difflib

    return next(iter(difflib.get_close_matches(word, list(known), 1, likeness)), "")


def suggest(word: str, known: Iterable[str], *, listed: bool = False) -> str:
    """Return a hint that names the nearest known word. If none is near: all of them if ``listed``, else ""."""
    known = list(known)
    if near := find_nearest(word, known):
        return f"Did you mean {near!r}?"
    return f"There are: {', '.join(known)}." if listed else ""


def is_unseen(character: str) -> bool:
    """Whether a character is invisible: formatting, joiners, fillers."""
    return ord(character) in _UNSEEN or unicodedata.category(character) == "Cf"


def make_printable(text: str) -> str:
    r"""Return a text on one line in which everything that is not printable is escaped, such as ``\x1b``: control
    characters, line breaks, direction marks, zero-width characters, blanks other than " ", lone surrogates, and private
    or unassigned characters."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
