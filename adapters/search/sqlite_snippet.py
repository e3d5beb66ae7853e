"""Show where in a text the words stand.

FTS5 has ``snippet()`` for that, but its time grows with the square of the matches, and what a sandbox wrote may be one word
thirty thousand times.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice

SEARCHED = 50_000
"""How far into a text is looked, in characters."""
BEFORE, AFTER = 60, 180
"""Characters around the first match that are shown."""
MOST_PHRASES = 50
MOST_FRAGMENTS = 2
_LETTER = r"[^\W_]"


def compile_phrases(phrases: Sequence[str]) -> re.Pattern[str] | None:
    """Return what finds the phrases in a text; ``None`` if there are none."""
    if not phrases:
        return None
    written = (r"[\W_]+".join(map(re.escape, phrase.split())) for phrase in phrases[:MOST_PHRASES])
    return re.compile(rf"(?<!{_LETTER})(?:{'|'.join(written)})(?!{_LETTER})", re.IGNORECASE)


def make_snippet(text: str, phrases: re.Pattern[str] | None) -> str:
    """Return the parts of a text with the first matches, which are between ``**``; else its beginning."""
    text = text[:SEARCHED]
    fragments: list[str] = []
    end = 0
    while phrases and len(fragments) < MOST_FRAGMENTS and (match := phrases.search(text, end)):
        start = max(end, _go_to_blank(text, match.start() - BEFORE, match.start()))
        end = _go_to_blank(text, match.end() + AFTER, match.end())
        fragments.append(phrases.sub(r"**\g<0>**", text[start:end]))
    return " ".join(" … ".join(fragments or [text[: _go_to_blank(text, AFTER, 0)]]).split())


def _go_to_blank(text: str, place: int, near: int) -> int:
    """Return where a word begins or ends, from ``place`` on towards ``near``; ``place`` itself if none does."""
    if place <= 0 or place >= len(text):
        return max(0, min(place, len(text)))
    step = 1 if place < near else -1
    return next((at for at in islice(range(place, near, step), AFTER) if text[at].isspace()), place)
