"""Remove ``<private>…</private>`` from text, as a stream.

Tags may be in any case, have blanks and attributes, and be escaped as JSON escapes them, once or several times
(``\\u003cprivate\\u003e``, ``<\\/private>``). A tag opens as soon as a blank or ``>`` follows its name; its attributes
are removed with the block. Blocks may be nested: the outermost is removed with all it contains. Inside a JSON string a
block ends with that string at the latest, so that JSON stays JSON. If something follows that quote which cannot follow
it in JSON, the text was not JSON after all.

Not every tag opens a passage, because texts are written about tags:

- One in quotes (``"<private>"``) is only mentioned, and is no tag at all.
- One that is never closed opens a passage if it is at the beginning of a line, or in JSON: the passage was cut off, or its
  end was forgotten. It extends to the end of the text, or of the JSON string.
- Elsewhere, if the word "tag" or the like follows, it is mentioned too. If not, it may be either, and the rest of its
  paragraph is removed: what comes after may be private, but it may also be most of a memory.

The result depends on the text alone, however it is cut into pieces, and removing again changes nothing.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from functools import lru_cache
from typing import Callable, Dict, Iterator, List, Pattern, Tuple

MARK = b"[private]"
LONGEST_RUN = 32
"""Backslashes allowed before what they escape."""
HOLD = 8 * 1024
"""No tag is longer: this many bytes are held back until it is known what follows them."""
LOOKAHEAD = 4 << 20
"""So much is read to see whether a tag within a line is closed. If there is more, it is taken for the beginning of a long
passage."""
TAIL = 256
"""So many bytes before a tag are searched for the beginning of its line."""
CLOSED, UNCLOSED, MENTIONED = "private", "private-unclosed", "private-mentioned"

_LESS, _MORE = rb"(?:<|\\{1,32}u003[cC])", rb"(?:>|\\{1,32}u003[eE])"
_BLANK = rb"(?:[ \t\r\n\f\v]|\\{1,32}(?:[tnrf]|u00(?:0[9aAbBcCdD]|20)))"
_BLANKS = _BLANK + rb"{0,64}"
_WORD = rb"[pP][rR][iI][vV][aA][tT][eE]"
_TAIL = _BLANKS + _WORD + rb"(?:" + _BLANK + rb"|" + _MORE + rb")"
_OPEN = _LESS + _TAIL
_CLOSE = _LESS + _BLANKS + rb"\\{0,32}/" + _BLANKS + _WORD + _BLANKS + _MORE
_TAG = rb"(" + _OPEN + rb")|" + _CLOSE
# An opening tag in two forms, each with a beginning that can be searched quickly.
_PLAIN, _AS_JSON = rb"<" + _TAIL, rb"u003[cC](?<=\\u003.)" + _TAIL
_IN_STRING = rb'(?:[^"\\\n]+|\\.)*'
_ESCAPED = rb"(?s)\\."
_AFTER_STRING = rb'"[ \t\r]{0,64}(?:\n|[}\]]|\Z|[,:][ \t\r\n]{0,1024}(?:["{[0-9-]|true|false|null))'
_JSON_ENDS = (".json", ".jsonl", ".ndjson", ".jsonlines", ".geojson", ".ipynb")

_LINE_END = rb"(?:\r?\n|\r)"
# What may be before a passage on its line: signs of lists, quotations and headings.
_LINE_BEGINS = rb"(?:\A|\n|\r)[ \t>*+#-]{0,100}(?:[0-9]{1,3}[.)][ \t]{0,8})?(?:\[[ xX]\][ \t]{0,8})?\Z"
# The end of a line after which another paragraph begins: an empty line, or signs of a list, quotation, heading or table.
_PARAGRAPH_ENDS = _LINE_END + rb"(?=[ \t]{0,100}(?:[\r\n*+>#|`-]|[0-9]{1,3}[.)][ \t]|\Z))"
_MENTION = rb"[ ](?:tags?|blocks?|markers?|elements?|sections?|passages?|syntax)(?![A-Za-z0-9])"
_QUOTE = rb"\\{0,32}([\"'`])"

Found = Callable[[int, str], None]
"""A callback that receives the line of each tag, counted in the result, and what it was."""


@lru_cache(maxsize=None)
def _compile(text: bytes) -> Pattern[bytes]:
    """Compile on first use: compiling takes longer than searching most files."""
    return re.compile(text)


def may_hold(data: bytes) -> bool:
    """Return whether the data contains an opening tag that is not in quotes, or an escaped one."""
    return any(found for _, found in find_traces(data))


def find_traces(data: bytes) -> Iterator[Tuple[int, bool]]:
    """Yield where an opening tag is, and whether it is not in quotes, or escaped."""
    for tag in _compile(_AS_JSON).finditer(data):
        yield tag.start(), True
    for tag in _compile(_PLAIN).finditer(data):
        yield tag.start(), not _is_quoted(data[max(0, tag.start() - 1) : tag.start()], data, tag.end())


def _is_quoted(before: bytes, data: bytes, end: int) -> bool:
    """Return whether a tag that ends at ``end``, and has this before it, is in quotes."""
    quote = _compile(_QUOTE).match(data, end) if before.endswith((b'"', b"'", b"`")) else None
    return quote is not None and before.endswith(quote.group(1)) and not data[end - 1 : end].isspace()


def is_json(name: str) -> bool:
    """Return whether a file is to be read as JSON or JSON lines, by its name. Its beginning proves nothing: any text
    may begin so."""
    return name.lower().endswith(_JSON_ENDS)


def holds_json(data: bytes) -> bool:
    """Return whether a text in memory is JSON, or JSON lines."""
    text = data.decode("utf-8", "replace")
    return _is_json_text(text) or all(_is_json_text(line) for line in text.split("\n") if line.strip())


def _is_json_text(text: str) -> bool:
    try:
        json.loads(text, object_pairs_hook=lambda pairs: None)
    except (ValueError, RecursionError):
        return False
    return True


class PrivateFilter:
    """Feed it a text in pieces; it returns, piece by piece, the text without private passages."""

    def __init__(self, in_json: bool, found: Found) -> None:
        self._json = in_json
        self._found = found
        self._buffer = b""
        self._depth = 0
        self._bound = False
        """The block being removed ends with the JSON string it is in."""
        self._in_string = self._escaped = False
        self._end = -1
        """Where that string ends, in the current piece."""
        self._ahead: Dict[bytes, Tuple[int, int]] = {}
        """The next tag of either form in it, if it was searched for."""
        self._pairs: Dict[int, Tuple[int, int]] | None = None
        """Its blocks: where an opening tag ends, where it begins and where its closing tag ends."""
        self._skipped = b""
        """The last byte before the current piece, if it was removed."""
        self._line = 1
        self._tail = b""
        self._whole = True
        """The tail is all that was returned so far."""
        self._out: List[bytes] = []

    def feed(self, data: bytes, last: bool = False) -> bytes:
        """Take a piece and return what is certain to stay; with ``last``, all that is left."""
        buffer = self._buffer + data
        limit = len(buffer) if last else len(buffer) - HOLD
        at, self._end, self._ahead, self._pairs = 0, -1, {_PLAIN: (-1, -1), _AS_JSON: (-1, -1)}, None
        while at < limit or (last and self._depth):
            before = at, self._depth, self._bound
            at = self._feed_within(buffer, at, limit, last) if self._depth else self._feed_outside(buffer, at, last)
            if (at, self._depth, self._bound) == before:
                break
        self._buffer, self._skipped = buffer[at:], buffer[at - 1 : at] if at else self._skipped
        out, self._out = b"".join(self._out), []
        return out

    def _feed_outside(self, buffer: bytes, at: int, last: bool) -> int:
        """Pass text through up to the next opening tag, and decide what that is."""
        limit = len(buffer) if last else len(buffer) - HOLD
        begin, end = self._find_opening(buffer, at)
        if begin >= limit:
            self._emit(buffer[at:limit])
            return max(at, limit)
        start = _find_tag_start(buffer, begin)
        self._emit(buffer[at:start])
        if _is_quoted(self._tail[-1:], buffer, end):
            self._emit(buffer[start:end])
            return end
        # If a line ends within the tag, no JSON string continues after it.
        bound = self._in_string and _find_string_end(buffer, start, end) >= end
        mentions = _compile(_MENTION).match(buffer, end) is not None
        if not mentions and (self._json or self._begins_line()):
            self._depth, self._bound = 1, bound
            return end
        return self._pass_tag(buffer, (start, end), mentions, bound, last)

    def _find_opening(self, buffer: bytes, search: int) -> Tuple[int, int]:
        """Return where the next opening tag begins and ends, from ``search`` on; both are the piece's end if there is
        none."""
        for text in (_PLAIN, _AS_JSON):
            if self._ahead[text][0] >= search:
                continue
            tag = _compile(text).search(buffer, search)
            begin, end = tag.span() if tag is not None else (len(buffer), len(buffer))
            first = max(search, begin - LONGEST_RUN) if text is _AS_JSON and tag is not None else begin
            while begin > first and buffer[begin - 1 : begin] == b"\\":
                begin -= 1
            self._ahead[text] = begin, end
        return min(self._ahead.values())

    def _begins_line(self) -> bool:
        """Return whether nothing but signs of lists and quotations is before this place on its line."""
        found = _compile(_LINE_BEGINS).search(self._tail)
        return found is not None and (self._whole or found.start() > 0)

    def _pass_tag(self, buffer: bytes, tag: Tuple[int, int], mentions: bool, bound: bool, last: bool) -> int:
        """Pass a tag that may be only a mention: remove its block if it is closed, else the rest of its paragraph, or
        nothing. Return where to go on; where it begins if more of the text has to be known first."""
        start, end = tag
        scope = end + LOOKAHEAD
        if bound:
            scope = min(scope, _find_string_end(buffer, end, min(scope, len(buffer))))
        if not last and len(buffer) < scope + HOLD:
            return start
        if self._json and not (bound and _compile(_AFTER_STRING).match(buffer, scope)):
            self._depth, self._bound = 1, bound
            return end
        closing = self._find_blocks(buffer, start).get(end, (0, scope + 1))[1]
        if closing <= scope:
            self._end_passage(CLOSED)
            return closing
        if mentions:
            self._found(self._line, MENTIONED)
            self._emit(buffer[start:end])
            return end
        if scope < len(buffer):
            self._depth = 1
            return end
        self._end_passage(UNCLOSED)
        return self._find_paragraph_end(buffer, end)

    def _find_blocks(self, buffer: bytes, at: int) -> Dict[int, Tuple[int, int]]:
        """Return the blocks of the current piece, found once, from ``at`` on: a closing tag belongs to the last tag that
        is open."""
        if self._pairs is None:
            self._pairs = {}
            opened: List[Tuple[int, int]] = []
            for tag in _compile(_TAG).finditer(buffer, at):
                start = _find_tag_start(buffer, tag.start())
                if _is_quoted(buffer[max(0, start - 1) : start], buffer, tag.end()):
                    continue
                if tag.group(1):
                    opened.append(tag.span())
                elif opened:
                    start, end = opened.pop()
                    self._pairs[end] = start, tag.end()
        return self._pairs

    def _find_paragraph_end(self, buffer: bytes, at: int) -> int:
        """Return where the paragraph ends that ``at`` is in, but not within a block."""
        blocks = sorted(self._find_blocks(buffer, at).values())
        number = bisect_left(blocks, (at, 0))
        while True:
            found = _compile(_PARAGRAPH_ENDS).search(buffer, at)
            end = found.start() if found is not None else len(buffer)
            while number < len(blocks) and blocks[number][1] <= end:
                number += 1
            if number == len(blocks) or blocks[number][0] >= end:
                return end
            at = blocks[number][1]

    def _feed_within(self, buffer: bytes, at: int, limit: int, last: bool) -> int:
        """Skip a block up to its closing tag, the end of its JSON string, or the end of the text."""
        if self._bound and self._end < at:
            self._end = _find_string_end(buffer, at, len(buffer))
        end = self._end if self._bound else len(buffer)
        tag = _compile(_TAG).search(buffer, at, end)
        if tag is not None and (last or tag.start() < limit):
            start = _find_tag_start(buffer, tag.start())
            if not _is_quoted(buffer[start - 1 : start] if start else self._skipped, buffer, tag.end()):
                self._depth += 1 if tag.group(1) else -1
            if not self._depth:
                self._end_passage(CLOSED)
            return tag.end()
        if not self._bound:
            if last:
                self._depth = 0
                self._end_passage(UNCLOSED)
            return max(at, limit)
        if last or end < limit:
            self._bound = False
            if _compile(_AFTER_STRING).match(buffer, end):
                self._depth = 0
                self._end_passage(UNCLOSED)
                return end
            return at  # this is not JSON
        # A tag that begins in the string and ends after it counts if this is not JSON.
        return _find_string_end(buffer, at, max(at, limit - HOLD))

    def _end_passage(self, name: str) -> None:
        """Report the passage and put a mark in its place."""
        self._found(self._line, name)
        self._escaped = False
        self._out.append(MARK)
        self._keep_tail(MARK)

    def _keep_tail(self, data: bytes) -> None:
        self._whole = self._whole and len(self._tail) + len(data) <= TAIL
        self._tail = (self._tail + data[-TAIL:])[-TAIL:]

    def _emit(self, data: bytes) -> None:
        """Pass text through, and keep track of whether a JSON string is open. No string continues after a line's end."""
        if not data:
            return
        self._out.append(data)
        self._keep_tail(data)
        self._line += data.count(b"\n")
        if not self._json:
            return
        line = data.rfind(b"\n") + 1
        if line:
            data = data[line:]
            self._in_string = self._escaped = False
        if self._escaped and data:
            data = data[1:]
            self._escaped = False
        plain = _compile(_ESCAPED).sub(b"", data)
        self._escaped = plain.endswith(b"\\")
        self._in_string ^= bool(plain.count(b'"') & 1)


def _find_string_end(buffer: bytes, at: int, most: int) -> int:
    """Return where the JSON string that is open at ``at`` ends; a backslash without what it escapes is not part of it."""
    found = _compile(_IN_STRING).match(buffer, at, most)
    assert found is not None
    return found.end()


def _find_tag_start(buffer: bytes, at: int) -> int:
    """Return where a tag begins: of the backslashes before its "u003c", only those that escape it are part of it."""
    count = 0
    while buffer[at + count : at + count + 1] == b"\\":
        count += 1
    # The largest power of two that divides the count: each level of JSON escaping doubles the backslashes.
    return at + count - (count & -count)
