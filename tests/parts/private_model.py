"""What is left of a text without its private passages, worked out one character at a time, with the whole text at hand.

The product reads pieces and jumps from tag to tag; this one does neither.
"""

from __future__ import annotations

import re

LESS, MORE = r"(?:<|\\{1,32}u003c)", r"(?:>|\\{1,32}u003e)"
BLANK = r"(?:[ \t\r\n\f\v]|\\{1,32}(?:[tnrf]|u0009|u000a|u000b|u000c|u000d|u0020))"
OPENING = re.compile(rf"{LESS}{BLANK}{{0,64}}private(?:{BLANK}|{MORE})".encode(), re.I)
CLOSING = re.compile(rf"{LESS}{BLANK}{{0,64}}\\{{0,32}}/{BLANK}{{0,64}}private{BLANK}{{0,64}}{MORE}".encode(), re.I)


def without_private(text: bytes, json: bool) -> tuple[bytes, int]:
    """The text as it should be exported, and how many passages were taken out."""
    out, at, taken, in_string, escaped = bytearray(), 0, 0, False, False
    while at < len(text):
        run = at
        while text[run : run + 1] == b"\\":
            run += 1
        run = run if run - at <= 32 else at
        opening = OPENING.match(text, at) if text[at : at + 1] in b"<\\" and not _mid_run(text, at) else None
        if opening is not None:
            keep = (run - at) - ((run - at) & -(run - at))
            out += text[at : at + keep]
            out += b"[private]"
            taken += 1
            in_one = in_string and _string_end(text, at + keep) >= opening.end()
            at, escaped = _block_end(text, opening.end(), _string_end(text, opening.end()) if in_one else -1), False
            continue
        out += text[at : at + 1]
        if json:
            in_string, escaped = _next(in_string, escaped, text[at])
        at += 1
    return bytes(out), taken


def _mid_run(text: bytes, at: int) -> bool:
    return text[at : at + 1] == b"\\" and at > 0 and text[at - 1 : at] == b"\\"


def _next(in_string: bool, escaped: bool, byte: int) -> tuple[bool, bool]:
    if byte == 10:
        return False, False
    if escaped:
        return in_string, False
    if byte == 92:
        return in_string, True
    return (not in_string if byte == 34 else in_string), False


def _string_end(text: bytes, at: int) -> int:
    while at < len(text) and text[at] not in b'"\n':
        if text[at] == 92 and (at + 1 >= len(text) or text[at + 1] == 10):
            return at
        at += 2 if text[at] == 92 else 1
    return at


def _json_goes_on(text: bytes, at: int) -> bool:
    """Whether what is there can follow a string of JSON, or JSON lines."""
    if text[at : at + 1] != b'"':
        return False
    rest = text[at + 1 :].lstrip(b" \t\r")
    if len(text) - at - 1 - len(rest) > 64:
        return False
    if rest[:1] in (b"", b"\n", b"}", b"]"):
        return True
    value = rest[1:].lstrip(b" \t\r\n")
    begins = (b'"', b"{", b"[", b"-", *(b"%d" % digit for digit in range(10)), b"true", b"false", b"null")
    return rest[:1] in (b",", b":") and len(rest) - 1 - len(value) <= 1024 and value.startswith(begins)


def _block_end(text: bytes, at: int, string_end: int) -> int:
    """Where a block ends whose first tag ended at ``at``; in a JSON string that is one, no later than it."""
    bound = string_end if string_end >= 0 and _json_goes_on(text, string_end) else len(text)
    depth = 1
    while at < bound:
        if opening := OPENING.match(text, at, bound):
            depth, at = depth + 1, opening.end()
        elif closing := CLOSING.match(text, at, bound):
            depth, at = depth - 1, closing.end()
            if not depth:
                return at
        else:
            at += 1
    return bound
