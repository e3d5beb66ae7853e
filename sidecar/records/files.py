"""The files of a memory as its readers get them, and what they raise."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import BinaryIO

from sidecar.format.index import Entry
from sidecar.format.roots import get_root, strip_below
from sidecar.host.files import Spool
from sidecar.host.values import dataclass
from sidecar.store.manifest import Manifest

MOST_IN_MEMORY = 16 << 20
LARGEST_IN_MEMORY = 256 << 10
"""A larger file is kept on disk."""


class Unreadable(Exception):
    """Part of a snapshot that cannot be read as records; the message says why."""


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """A file on this machine, with the path that it has in its snapshot."""

    place: str
    path: str
    project: str = ""
    """Where the project was that it belongs to."""
    mtime: int = 0
    """In nanoseconds."""
    data: bytes | None = None
    """What is in it, if that is in memory; then there is nothing at ``place``."""

    def open(self) -> BinaryIO:
        """Open it to read."""
        return open(self.place, "rb") if self.data is None else io.BytesIO(self.data)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def at(self) -> datetime | None:
        """When it was written; ``None`` if that makes no sense."""
        try:
            return datetime.fromtimestamp(self.mtime // 1_000_000_000, UTC)
        except (ValueError, OverflowError, OSError):
            return None


def make_files(
    places: Mapping[str, str], entries: Mapping[str, Entry], hints: Mapping[str, str]
) -> dict[str, MemoryFile]:
    """Return staged files as readers get them. ``hints`` says where each root was."""
    return {
        path: MemoryFile(place, path, strip_below(hints.get(get_root(path), ""), ".cm"), entries[path].mtime)
        for path, place in places.items()
        if path in entries
    }


class KeptFiles:
    """Files that are kept while the pack that carries them is checked, so that it need not be unpacked to read them."""

    def __init__(self, scratch: Spool, wanted: set[str]) -> None:
        self.wanted = wanted
        """Their paths."""
        self._scratch = scratch
        self._room = MOST_IN_MEMORY
        self._data: dict[str, io.BytesIO] = {}
        self._files: dict[str, BinaryIO] = {}

    def open(self, entry: Entry) -> BinaryIO | None:
        """Return where the contents of a file are to be written; ``None`` if it is not kept."""
        path = entry.path
        if path not in self.wanted:
            return None
        if entry.size <= min(LARGEST_IN_MEMORY, self._room):
            self._room -= entry.size
            return self._data.setdefault(path, io.BytesIO())
        return self._files.setdefault(path, self._scratch.new().open("xb"))

    def read(self, manifest: Manifest, entries: Mapping[str, Entry]) -> dict[str, MemoryFile]:
        """Return the files as readers get them."""
        for file in self._files.values():
            file.close()
        places = {**dict.fromkeys(self._data, ""), **{path: file.name for path, file in self._files.items()}}
        files = make_files(places, entries, {root.name: root.hint for root in manifest.roots})
        return {
            path: replace(file, data=self._data[path].getvalue()) if path in self._data else file
            for path, file in files.items()
        }
