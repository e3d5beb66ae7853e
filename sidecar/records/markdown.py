"""Read Markdown memory: each section under a heading is a record."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from sidecar.records.record import Record, clean_record, escape_path, make_unique

LARGEST_FILE = 8 << 20
"""The rest of a larger file is not read."""
BETWEEN = " › "

_HEADING = re.compile(r" {0,3}(#{1,6})(?=[ \t]|\Z)")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_SETTING = re.compile(r"[^\s#:][^:]*:(\s|\Z)")
_LINE_END = re.compile("\r\n|\n|\r")


def read_sections(place: str, path: str, project: str, mtime: int) -> Iterator[Record]:
    """Yield the sections of a file as records; ``mtime``, in nanoseconds, is their time."""
    with Path(place).open("rb") as file:
        text = file.read(LARGEST_FILE).decode("utf-8-sig", "replace")
    name, at = path.rpartition("/")[2], _parse_mtime(mtime)
    used: Counter[str] = Counter()
    for headings, body in split_sections(text):
        title = BETWEEN.join(filter(None, headings)) or name
        if not body.strip() and not any(headings):
            continue
        key = make_unique(f"{escape_path(path)}#{BETWEEN.join(headings)}", used)
        yield clean_record(Record(kind="section", key=key, title=title, text=body, project=project, at=at, path=path))


def split_sections(text: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each heading with its parent headings, outermost first, and the text up to the next heading.

    Text before the first heading has none. Front matter is left out; in fenced code nothing is a heading.
    """
    path: list[tuple[int, str]] = []
    body: list[str] = []
    fence = ""
    for line in _strip_front_matter(_LINE_END.split(text)):
        mark = _match_fence(line)
        if fence:
            closes = mark and mark[1].startswith(fence) and not line.strip(" `~\t")
            fence = "" if closes else fence
        elif mark:
            fence = mark[1]
        elif heading := _HEADING.match(line):
            yield tuple(title for _, title in path), "\n".join(body)
            level, body = len(heading[1]), []
            path = [*(above for above in path if above[0] < level), (level, _clean_title(line[heading.end() :]))]
            continue
        body.append(line)
    yield tuple(title for _, title in path), "\n".join(body)


def _match_fence(line: str) -> re.Match[str] | None:
    mark = _FENCE.match(line)
    return None if mark is None or (mark[1][0] == "`" and "`" in line[mark.end() :]) else mark


def _clean_title(rest: str) -> str:
    """Return a heading's text without closing ``#`` marks."""
    words = rest.strip(" \t")
    bare = words.rstrip("#")
    return bare.rstrip(" \t") if not bare or bare[-1] in " \t" else words


def _strip_front_matter(lines: list[str]) -> list[str]:
    """Remove front matter, which begins with a setting. Other text between two rules is kept."""
    if lines[0].rstrip() != "---" or not _SETTING.match("".join(lines[1:2])):
        return lines
    ends = (number for number, line in enumerate(lines[1:], 1) if line.rstrip() in ("---", "..."))
    end = next(ends, None)
    return lines if end is None else lines[end + 1 :]


def _parse_mtime(mtime: int) -> datetime | None:
    try:
        return datetime.fromtimestamp(mtime // 1_000_000_000, UTC)
    except (ValueError, OverflowError, OSError):
        return None
