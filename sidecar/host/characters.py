"""Characters that are invisible or control a terminal: find them, and escape them so that they are visible.

File names, labels, ids, and messages of sandboxes and servers come from other parties. A line break among them can fake
a line of the sidecar's output, an escape sequence can take over a terminal, and right-to-left or invisible characters
make a text read as something else.
"""

from __future__ import annotations

import unicodedata

# Characters that Unicode calls ignorable although they count as letters or marks: joiners, fillers, variation
# selectors.
_UNSEEN = frozenset(
    (
        *(0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, *range(0x180B, 0x1810), 0x3164),
        *(*range(0xFE00, 0xFE10), 0xFFA0, *range(0xE0100, 0xE01F0)),
    )
)


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
