"""Characters that do not show, or do something to a terminal: which they are, and how to write them so that they show.

Names of files, labels, ids, and what sandboxes and servers say come from others. A line break among them can fake a line of
ours, an escape sequence can take a terminal over, and what is written from right to left or not at all reads as something else.
"""

from __future__ import annotations

import unicodedata

# What Unicode calls ignorable although it counts as a letter or a mark: joiners, fillers, variation selectors.
_UNSEEN = frozenset(
    (
        *(0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, *range(0x180B, 0x1810), 0x3164),
        *(*range(0xFE00, 0xFE10), 0xFFA0, *range(0xE0100, 0xE01F0)),
    )
)


def is_unseen(character: str) -> bool:
    """Whether a character leaves no trace of its own where it is shown: formatting, joiners, fillers."""
    return ord(character) in _UNSEEN or unicodedata.category(character) == "Cf"


def make_printable(text: str) -> str:
    """A text on one line that does nothing but show: whatever else is in it is written as its escape, ``\\x1b``.

    That is all controls, line breaks, marks of direction, characters without width, blanks other than " ", lone surrogates
    and what has no meaning (private use, unassigned).
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
