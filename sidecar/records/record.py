"""A record: one thing that a memory says.

Readers yield an ``Item`` for each: cheap, so that millions of rows can be compared, and made into a ``Record`` only
where somebody looks at it.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple

from sidecar.host.values import dataclass

READER = 5
"""The version of the readers. It is raised when the same snapshot is read into different records or texts; records of
an earlier version are then written again."""
TEXT_BYTES = 200_000
"""How much of a text is kept. Postgres can index at most a megabyte of words and positions per text, and they can take
up to five times the size of the text."""
TITLE_LENGTH = 500
NAME_LENGTH = 500
KEY_LENGTH = 250
PATH_LENGTH = 4000
MILLISECONDS_FROM = 100_000_000_000
"""Seconds since the epoch stay below this for three thousand years; a larger number is milliseconds."""

_UNFIT = re.compile("[\x00\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """``key`` identifies a record among those of its kind in its memory, and stays the same from snapshot to snapshot."""

    kind: str
    key: str
    title: str = ""
    text: str = ""
    project: str = ""
    session: str = ""
    at: datetime | None = None
    path: str = ""
    """The file in the snapshot that it was read from."""

    @property
    def id(self) -> str:
        """A short name for a record, the same as long as its kind and key are."""
        return name_record(self.kind, self.key)

    @property
    def digest(self) -> bytes:
        """Equal for equal contents. No part contains a NUL, so the parts cannot run into each other."""
        at = self.at.isoformat() if self.at else ""
        parts = (self.kind, self.key, self.title, self.text, self.project, self.session, at, self.path)
        return hashlib.sha256("\0".join(parts).encode()).digest()


class Item(NamedTuple):
    """A record as its file has it.

    ``identity`` is what tells it from others of its kind in the file; if it is empty, its contents do. ``gap`` are the
    line breaks before a section: they are part of its source, and of nobody's contents.
    """

    kind: str
    identity: str
    digest: bytes
    """Equal for equal contents."""
    build: Callable[[str], Record]
    """Makes the record, given its key."""
    source: bytes = b""
    """Exactly what stands in the file, where that can be told."""
    gap: bytes = b""


DIGEST_BYTES = 16


def digest_contents(data: bytes) -> bytes:
    """Return the digest of an item's contents."""
    return hashlib.sha256(data).digest()[:DIGEST_BYTES]


def name_record(kind: str, key: str) -> str:
    """Return the short name of the record with this kind and key."""
    return hashlib.sha256(f"{kind}\0{key}".encode()).hexdigest()[:16]


def clean_record(written: Record) -> Record:
    """Return a record of what a sandbox wrote: every part is valid for a database and limited in length."""
    text = clean_text(written.text).strip()
    return replace(
        written,
        key=bound_key(clean_text(written.key)),
        title=join_lines(clean_text(written.title) or text[:TITLE_LENGTH], TITLE_LENGTH),
        text=cut_text(text, TEXT_BYTES),
        project=clean_text(written.project)[:NAME_LENGTH],
        session=clean_text(written.session)[:NAME_LENGTH],
        path=clean_text(escape_path(written.path))[:PATH_LENGTH],
    )


def clean_text(text: str) -> str:
    """Replace NULs and lone surrogates, which no database accepts."""
    if text.isascii() and "\0" not in text:
        return text
    return _UNFIT.sub("\ufffd", text)


def cut_text(text: str, most: int) -> str:
    """Return the beginning of a text, at most ``most`` bytes, in whole characters."""
    if len(text) * 4 <= most:
        return text
    data = text.encode()
    return text if len(data) <= most else data[:most].decode("utf-8", "ignore")


def join_lines(text: str, most: int) -> str:
    """Return a text on one line, cut to ``most`` characters."""
    line = " ".join(text[: most * 4].split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def bound_key(key: str) -> str:
    """Return the key; if it is too long, its beginning and a hash of the whole."""
    if len(key) <= KEY_LENGTH:
        return key
    return f"{key[: KEY_LENGTH - 33]}~{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def make_unique(key: str, used: Counter[str]) -> str:
    """Return the key, with a number appended if it was used before in its file."""
    used[key] += 1
    found = key
    while used[key] > 1 and used[found := f"{key}#{used[key]}"]:
        used[key] += 1
    used[found] += found != key
    return found


def escape_path(path: str) -> str:
    """Return a path as text. Bytes that are not valid text are escaped, so that different paths stay different."""
    try:
        data = path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # not a path that a file system can have
        data = path.encode("utf-8", "backslashreplace")
    return data.decode("utf-8", "backslashreplace")


def parse_time(value: str) -> datetime | None:
    """Parse a time as programs write it: seconds or milliseconds since the epoch, or ISO. Return ``None`` for anything
    else."""
    try:
        try:
            number = float(value)
        except ValueError:
            found = datetime.fromisoformat(value.strip())
            return (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)
        return datetime.fromtimestamp(number / 1000 if abs(number) >= MILLISECONDS_FROM else number, UTC)
    except (ValueError, OverflowError, OSError):
        return None
