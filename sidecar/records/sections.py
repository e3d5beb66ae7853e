"""Read Markdown memory: each section under a heading is a record, and each task in a list.

A file is cut into pieces that follow each other without a gap. A piece begins where the text of the one before ends: the
line breaks before a heading belong to that heading, so that appending a section changes no other. What is after the
last text of a file belongs to no piece.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from sidecar.host.values import dataclass
from sidecar.records.files import MemoryFile
from sidecar.records.record import Item, Record, clean_record, digest_contents

LARGEST_FILE = 32 << 20
"""The rest of a larger file is not read."""
BETWEEN = " › "
FRONT_MATTER = "---"
TITLE_BYTES = 2000
FRONT_MATTER_LINES = 500
LONG_RULE = 4
"""A line of so many dashes below a line of text makes that a heading; a shorter one is a rule, unless it is as long as
the text. (CommonMark makes a heading of both, which is seldom what a person meant by ``---``.)"""

_LINE = re.compile(rb"([^\r\n]*)(\r\n|\n|\r|\Z)")
_HEADING = re.compile(rb" {0,3}(#{1,6})(?=[ \t]|\Z)")
_UNDERLINE = re.compile(rb" {0,3}(=+|-+)[ \t]*\Z")
_PLAIN = re.compile(rb" {0,3}(?![-*+>#|=`~\s]|\d+[.)])")
_FENCE = re.compile(rb" {0,3}(`{3,}|~{3,})")
_TASK = re.compile(rb"[ \t]*[-*+][ \t]+\[([ xX~/-])\][ \t]+(\S.*)")
_SETTING = re.compile(rb"[^\s#:][^:]*:(\s|\Z)")
_BOM = b"\xef\xbb\xbf"


@dataclass(slots=True)
class Piece:
    """Part of a file: ``start`` to ``end``; its first line begins at ``line``, the text below it at ``body``."""

    kind: str
    headings: tuple[str, ...]
    start: int
    line: int
    body: int
    end: int = 0
    task: str = ""
    front: bool = False

    @property
    def identity(self) -> str:
        """A section's path of headings, or a task's text."""
        if self.front:
            return FRONT_MATTER
        return f"- {self.task}" if self.kind == "task" else BETWEEN.join(self.headings)


class _Splitter:
    """Cuts one file into pieces, line by line."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._path: list[tuple[int, str]] = []
        self._piece: Piece | None = None
        self._end = 0
        """Where the last text so far ends."""
        self._fence = b""

    def split(self) -> Iterator[Piece]:
        position = len(_BOM) if self._data.startswith(_BOM) else 0
        if front := self._find_front_matter(position):
            yield front
            position = self._end = front.end
            position = _LINE.match(self._data, position).end()  # type: ignore[union-attr]
        before, above, alone = b"", position, False
        # The line before, where it begins, and whether it stands below a blank line or at the beginning.
        while position < len(self._data):
            found = _LINE.match(self._data, position)
            assert found is not None
            line, start, stop, position = found[1], found.start(), found.end(1), found.end()
            if not line.strip():
                before, alone = b"", False
                continue
            begun = self._look_at(line, start, position, before if alone else b"", above)
            if begun is not None:
                if self._piece is not None:
                    yield self._piece
                self._piece = begun
            assert self._piece is not None
            self._piece.end = self._end = stop
            before, above, alone = line, start, not before
        if self._piece is not None:
            yield self._piece

    def _look_at(self, line: bytes, start: int, after: int, above: bytes, above_at: int) -> Piece | None:
        """Return the piece that begins with this line, or with the line above if this one makes it a heading."""
        mark = _match_fence(line)
        if self._fence:
            if mark and mark[1].startswith(self._fence) and not line.strip(b" `~\t"):
                self._fence = b""
            return None
        if mark:
            self._fence = mark[1]
        elif heading := _HEADING.match(line):
            return self._begin_section(len(heading[1]), line[heading.end() :], start, after)
        elif above and (level := _find_level(line, above)):
            return self._split_above(level, above, above_at, after)
        elif task := _TASK.match(line):
            return Piece("task", self._titles, self._end, start, start, task=_decode_title(task[2]))
        piece = self._piece
        if piece is None or (piece.kind == "task" and not line[:1].isspace()):
            return Piece("section", self._titles, self._end, start, start)
        return None

    def _split_above(self, level: int, above: bytes, above_at: int, after: int) -> Piece | None:
        """Take the line above, the last of the piece so far, as a heading."""
        piece = self._piece
        assert piece is not None
        if piece.line == above_at:  # it is all that the piece has, so the piece becomes the section
            self._enter(level, above)
            piece.headings, piece.body = self._titles, after
            return None
        self._end = piece.end = _find_text_end(self._data, piece.start, above_at)
        return self._begin_section(level, above, above_at, after)

    def _begin_section(self, level: int, title: bytes, start: int, after: int) -> Piece:
        self._enter(level, title)
        return Piece("section", self._titles, self._end, start, after)

    def _enter(self, level: int, title: bytes) -> None:
        self._path = [*(one for one in self._path if one[0] < level), (level, _clean_title(title))]

    @property
    def _titles(self) -> tuple[str, ...]:
        return tuple(title for _, title in self._path)

    def _find_front_matter(self, start: int) -> Piece | None:
        """Return the front matter, which begins with a setting. Other text between two rules is not."""
        position = start
        for number in range(FRONT_MATTER_LINES):
            found = _LINE.match(self._data, position)
            assert found is not None
            line, position = found[1], found.end()
            if number == 0 and line.rstrip() != b"---":
                return None
            if number == 1 and not _SETTING.match(line):
                return None
            if number > 1 and line.rstrip() in (b"---", b"..."):
                first = _LINE.match(self._data, start)
                assert first is not None
                return Piece("section", (), 0, start, first.end(), found.end(1), front=True)
            if position >= len(self._data):
                return None
        return None


def split_pieces(data: bytes) -> Iterator[Piece]:
    """Yield the pieces of a Markdown text. In fenced code nothing is a heading or a task."""
    return _Splitter(data).split()


def read_sections(file: MemoryFile) -> Iterator[Item]:
    """Yield the sections and tasks of a file; when the file was written is their time."""
    with file.open() as stream:
        data = stream.read(LARGEST_FILE)
    return split_sections(file, data)


def split_sections(file: MemoryFile, data: bytes) -> Iterator[Item]:
    """Yield the sections and tasks of a text as those of a file."""
    for piece in split_pieces(data):
        source = data[piece.start : piece.end]
        gap = data[piece.start : piece.line]
        text = data[piece.line : piece.end]
        build = partial(_build_record, file, piece, text)
        yield Item(piece.kind, piece.identity, digest_contents(text), build, source, gap)


def read_ending(place: str) -> bytes:
    """Return what is after the last text of a file, and belongs to none of its pieces."""
    with Path(place).open("rb") as stream:
        data = stream.read(LARGEST_FILE)
        rest = stream.read(1)
    start = len(_BOM) if data.startswith(_BOM) else 0
    end = _find_text_end(data, start, len(data))
    return data[end if end > start else 0 :] + rest


def _build_record(file: MemoryFile, piece: Piece, text: bytes, key: str) -> Record:
    body = text if piece.kind == "task" else text[piece.body - piece.line :]
    title = BETWEEN.join(filter(None, piece.headings)) or file.name
    if piece.front:
        title, body = f"{file.name} (front matter)", body.rstrip()[:-3]
    words = body.decode("utf-8", "replace").removeprefix("\ufeff")
    written = Record(
        kind=piece.kind,
        key=key,
        title=piece.task or title,
        text="\n".join(words.splitlines()) if "\r" in words else words,
        project=file.project,
        at=file.at,
        path=file.path,
    )
    return clean_record(written)


def _match_fence(line: bytes) -> re.Match[bytes] | None:
    mark = _FENCE.match(line)
    return None if mark is None or (mark[1][:1] == b"`" and b"`" in line[mark.end() :]) else mark


def _find_level(line: bytes, above: bytes) -> int:
    """Return the level that this line, as an underline, makes of the line above it; 0 if it is none."""
    mark = _UNDERLINE.match(line)
    if mark is None or not _PLAIN.match(above) or _TASK.match(above):
        return 0
    if mark[1][:1] == b"=":
        return 1
    return 2 if len(mark[1]) >= LONG_RULE or len(mark[1]) == len(above.strip()) else 0


def _find_text_end(data: bytes, start: int, stop: int) -> int:
    """Return where the last text before ``stop`` ends: what is after it are blank lines, and the end of its line."""
    end = len(data[start:stop].rstrip()) + start
    if end == start and not data[start : start + 1].strip():
        return start
    # Blanks at the end of the last line are part of it.
    found = re.compile(rb"[^\r\n]*").match(data, end, stop)
    return found.end() if found else end


def _clean_title(rest: bytes) -> str:
    """Return a heading's text without closing ``#`` marks."""
    words = rest.strip(b" \t")
    bare = words.rstrip(b"#")
    return _decode_title(bare.rstrip(b" \t") if not bare or bare[-1:] in b" \t" else words)


def _decode_title(words: bytes) -> str:
    return words[:TITLE_BYTES].decode("utf-8", "replace").strip()
