"""A database that SQLite cannot read, as bytes: whether it holds what must not leave, or may.

A value goes on from page to page, and here nobody can follow it. So a tag that a page's end cuts in two is told by its parts:
one is the beginning of a page, after the number of the next, and the other is anywhere.
"""

from __future__ import annotations

import re
from typing import Set

from .scrubbing import CHUNK, OVERLAP, PrivacyPolicy

WORD = b"private"
EDGE = 512
"""Pages of any size begin at a multiple of it."""
NUMBER = 4
_OPEN = re.compile(rb"(?i)(?:<|003c)\s{0,64}(p(?:r(?:i(?:v(?:a(?:t(?:e(?![a-z]))?)?)?)?)?)?)")
_WHOLE = re.compile(rb"(?i)(?:0{0,2}3?c)?\s{0,64}private[\s>\\]")
_REST = re.compile(rb"(?i)(r?i?v?a?t?e)[\s>\\]")


def may_hold(place: str, policy: PrivacyPolicy) -> bool:
    """Whether something in a damaged database must not leave, or nobody can say."""
    begins: Set[int] = set()
    """How much of the word there is somewhere, at the beginning of a tag."""
    ends: Set[int] = set()
    """How much of it was missing where a page begins with the rest."""
    tail = b""
    with open(place, "rb") as file:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            data = tail + chunk
            tail = chunk[-OVERLAP:]
            narrow = data.replace(b"\0", b"")  # wide text as well
            if policy.may_concern(data) or policy.may_concern(narrow):
                return True
            if not policy.remove:
                continue
            for found in (*_OPEN.finditer(data), *_OPEN.finditer(narrow)):
                begins.update(range(1, len(found.group(1)) + 1))
            for edge in range(len(data) - len(chunk), len(data), EDGE):
                start = data[edge + NUMBER : edge + NUMBER + 128].replace(b"\0", b"")
                rest = _REST.match(start)
                if rest is not None and WORD.endswith(rest.group(1).lower()):
                    ends.add(len(WORD) - len(rest.group(1)))
                elif _WHOLE.match(start):
                    return True
    return len(WORD) in begins or bool(begins & ends)
