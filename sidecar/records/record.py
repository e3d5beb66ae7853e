"""A record: one thing that a memory remembers, as a row that can be searched."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime

READER = 4
"""Grows when the same snapshot is read into other records, or into other words: rows of an earlier
reader are written again."""
TEXT_BYTES = 200_000
"""What is kept of a text. Postgres can index no more of one than a megabyte of words and their places, which is up to five
times what a text has."""
TITLE_LENGTH = 500
NAME_LENGTH = 500
KEY_LENGTH = 250
PATH_LENGTH = 4000
MILLISECONDS_FROM = 100_000_000_000
"""Seconds since the epoch are below this for three thousand years; more are milliseconds."""

_UNFIT = re.compile("[\x00\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """``key`` tells it from all others of its kind in its memory, and stays the same from snapshot to snapshot."""

    kind: str
    key: str
    title: str = ""
    text: str = ""
    project: str = ""
    session: str = ""
    at: datetime | None = None
    path: str = ""
    """The file of the snapshot it was read from."""

    @property
    def digest(self) -> bytes:
        """The same for equal contents. No part holds a NUL, so none runs into the next."""
        at = self.at.isoformat() if self.at else ""
        parts = (self.kind, self.key, self.title, self.text, self.project, self.session, at, self.path)
        return hashlib.sha256("\0".join(parts).encode()).digest()


def build_record(
    kind: str,
    key: str,
    *,
    title: str,
    text: str,
    path: str,
    project: str = "",
    session: str = "",
    at: datetime | None = None,
) -> Record:
    """A record of whatever a sandbox wrote: every part fit for a database, and none longer than is sensible."""
    text = clean_text(text).strip()
    return Record(
        kind=kind,
        key=bound_key(clean_text(key)),
        title=join_lines(clean_text(title) or text[:TITLE_LENGTH], TITLE_LENGTH),
        text=cut_text(text, TEXT_BYTES),
        project=clean_text(project)[:NAME_LENGTH],
        session=clean_text(session)[:NAME_LENGTH],
        at=at,
        path=clean_text(escape_path(path))[:PATH_LENGTH],
    )


def clean_text(text: str) -> str:
    """A text without NULs and halves of characters, which no database takes."""
    if text.isascii() and "\0" not in text:
        return text
    return _UNFIT.sub("\ufffd", text)


def cut_text(text: str, most: int) -> str:
    """The beginning of a text that has at most so many bytes, whole characters only."""
    if len(text) * 4 <= most:
        return text
    data = text.encode()
    return text if len(data) <= most else data[:most].decode("utf-8", "ignore")


def join_lines(text: str, most: int) -> str:
    line = " ".join(text[: most * 4].split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def bound_key(key: str) -> str:
    """A key as it is, or, when it is long, its beginning and a hash of the whole."""
    if len(key) <= KEY_LENGTH:
        return key
    return f"{key[: KEY_LENGTH - 33]}~{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def make_unique(key: str, used: Counter[str]) -> str:
    """The key, with a number when an earlier one of its file has it."""
    used[key] += 1
    found = key
    while used[key] > 1 and used[found := f"{key}#{used[key]}"]:
        used[key] += 1
    used[found] += found != key
    return found


def escape_path(path: str) -> str:
    """A path as text; bytes that are none are escaped, so that two paths stay two."""
    try:
        data = path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # no path that a file system has
        data = path.encode("utf-8", "backslashreplace")
    return data.decode("utf-8", "backslashreplace")


def parse_time(value: str) -> datetime | None:
    """A time as programs write it: seconds or milliseconds since the epoch, or ISO. Anything else is no time."""
    try:
        try:
            number = float(value)
        except ValueError:
            found = datetime.fromisoformat(value.strip())
            return (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)
        return datetime.fromtimestamp(number / 1000 if abs(number) >= MILLISECONDS_FROM else number, UTC)
    except (ValueError, OverflowError, OSError):
        return None
