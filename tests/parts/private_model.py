"""What is left of a text without its private passages, worked out one character at a time, with the whole text at hand.

The product reads pieces and jumps from tag to tag; this one does neither.
"""

from __future__ import annotations

import re

LESS, MORE = r"(?:<|\\{1,32}u003c)", r"(?:>|\\{1,32}u003e)"
BLANK = r"(?:[ \t\r\n\f\v]|\\{1,32}(?:[tnrf]|u0009|u000a|u000b|u000c|u000d|u0020))"
OPENING = re.compile(rf"{LESS}{BLANK}{{0,64}}private(?:{BLANK}|{MORE})".encode(), re.I)
CLOSING = re.compile(rf"{LESS}{BLANK}{{0,64}}\\{{0,32}}/{BLANK}{{0,64}}private{BLANK}{{0,64}}{MORE}".encode(), re.I)


BEGINS_LINE = re.compile(rb"(?:\A|[\r\n])[ \t>*+#-]*(?:[0-9]{1,3}[.)][ \t]*)?(?:\[[ xX]\][ \t]*)?\Z")
PARAGRAPH_END = re.compile(rb"(?:\r?\n|\r)(?=[ \t]*(?:[\r\n*+>#|`-]|[0-9]{1,3}[.)][ \t]|\Z))")
WORD = re.compile(rb" (?:(?:tag|block|marker|element|section|passage)s?|syntax)(?![A-Za-z0-9])")


def without_private(text: bytes, json: bool) -> tuple[bytes, int]:
    """The text as it should be exported, and how many passages were taken out."""
    out, at, taken, in_string, escaped = bytearray(), 0, 0, False, False
    while at < len(text):
        start, end = _tag(OPENING, text, at)
        passage = 0
        if end:
            for byte in text[at:start]:
                out.append(byte)
                in_string, escaped = _next(in_string, escaped, byte) if json else (False, False)
            passage = _passage_end(text, start, end, json, in_string, bytes(out))
            at = start
        if passage:
            out += b"[private]"
            taken += 1
            at, escaped = passage, False
            continue
        for byte in text[at : end or at + 1]:
            out.append(byte)
            in_string, escaped = _next(in_string, escaped, byte) if json else (False, False)
        at = end or at + 1
    return bytes(out), taken


def _tag(kind: re.Pattern[bytes], text: bytes, at: int, bound: int | None = None) -> tuple[int, int]:
    """Where a tag begins and ends that is at this place, or after the first backslashes there; (0, 0) if there is none,
    or if it is in quotes."""
    found = kind.match(text, at, len(text) if bound is None else bound)
    if found is None or text[at : at + 1] not in b"<\\" or _mid_run(text, at):
        return 0, 0
    run = at
    while text[run : run + 1] == b"\\":
        run += 1
    count = run - at
    start, end = at + count - (count & -count), found.end()
    quote = re.compile(rb"\\{0,32}([\"'`])").match(text, end)
    if quote and start and text[start - 1 : start] == quote[1] and text[end - 1] not in b" \t\r\n\f\v":
        return 0, 0
    return start, end


def _passage_end(text: bytes, start: int, at: int, json: bool, in_string: bool, before: bytes) -> int:
    """Where the passage ends whose tag is from ``start`` to ``at``; 0 if the tag is only mentioned."""
    in_one = in_string and _string_end(text, start) >= at and _json_goes_on(text, _string_end(text, at))
    bound = _string_end(text, at) if in_one else len(text)
    mentions = WORD.match(text, at) and (in_one or not json)
    if not mentions and (json or (BEGINS_LINE.search(before) and not WORD.match(text, at))):
        return _block_end(text, at, bound) or bound
    closed = _block_end(text, at, bound)
    if closed or mentions:
        return closed
    while at < len(text) and not PARAGRAPH_END.match(text, at):
        _, end = _tag(OPENING, text, at)
        at = (_block_end(text, end, len(text)) if end else 0) or at + 1
    return at


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


def _block_end(text: bytes, at: int, bound: int) -> int:
    """Where a block ends whose first tag ended at ``at``; 0 if it is not closed before ``bound``."""
    depth = 1
    while at < bound:
        if (end := _tag(OPENING, text, at, bound)[1]) or (end := _tag(CLOSING, text, at, bound)[1]):
            depth, at = depth + (1 if _tag(OPENING, text, at, bound)[1] else -1), end
            if not depth:
                return at
        else:
            at += 1
    return 0
