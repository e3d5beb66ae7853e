"""What this process has read or written of a store, so that it need not be read again.

Only bytes that a listing vouches for are used: it names a version for every object, and an object with the same version
has the same bytes. Of stores whose listings name none (a disk) nothing is kept.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import field, replace

from sidecar.host.values import dataclass
from sidecar.ids import MemoryKeys
from sidecar.ports import ObjectInfo

MOST_BYTES = 32 << 20
"""All that is kept together."""
LARGEST = 4 << 20
"""A larger object is not kept."""
MOST_UNPROVEN = 256 << 10
"""All that is kept before a listing has named a version: of a disk, which never does."""
MOST_SEEN = 20_000
MOST_RECENT = 100
RECENT_SECONDS = 60.0
"""For so long it is not asked again what others stored beside the head of such a memory. A snapshot that is not known is
not built on; that makes an export larger, never wrong."""
TRUSTED_SECONDS = 600.0
"""For so long an object that was listed is taken to be there, of a memory that has too many objects to list them all."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """An object as it was read or written. ``version`` is empty if it is not known yet."""

    data: bytes
    version: str


@dataclass(slots=True)
class Recall:
    """The objects that were used last, by key."""

    large: set[str] = field(default_factory=set)
    """Memories that have too many objects to list them all."""
    _kept: OrderedDict[str, _Kept] = field(default_factory=OrderedDict)
    _bytes: int = 0
    _seen: OrderedDict[str, tuple[int, float]] = field(default_factory=OrderedDict)
    """The sizes of packs that were listed, and when."""
    _recent: dict[str, tuple[float, list[ObjectInfo]]] = field(default_factory=dict)
    """The snapshots of large memories that were stored lately, and when they were listed."""
    _useful: bool = False
    """Listings name versions."""

    def keep(self, key: str, data: bytes, version: str = "") -> None:
        """Keep an object that was just read or written. The ``version`` of one that was written may not be known."""
        self.drop(key)
        most = MOST_BYTES if self._useful else MOST_UNPROVEN
        if len(data) > min(most, LARGEST):
            return
        self._kept[key] = _Kept(data, version)
        self._bytes += len(data)
        while self._bytes > most:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= len(oldest.data)

    def drop(self, key: str) -> None:
        if (kept := self._kept.pop(key, None)) is not None:
            self._bytes -= len(kept.data)

    def compare(self, versions: Mapping[str, str]) -> None:
        """Drop what a listing shows with another version."""
        self._useful = self._useful or bool(versions)
        for key in versions.keys() & self._kept.keys():
            kept, version = self._kept[key], versions[key]
            if not kept.version and _is_digest(version, kept.data):
                self._kept[key] = replace(kept, version=version)
            elif kept.version != version:
                self.drop(key)

    def find(self, key: str, version: str) -> bytes | None:
        """Return an object's bytes if it has this version."""
        kept = self._kept.get(key)
        if kept is None or kept.version != version:
            return None
        self._kept.move_to_end(key)
        return kept.data

    def peek(self, key: str) -> bytes | None:
        """Return an object's bytes as they were, whatever they are now."""
        kept = self._kept.get(key)
        return kept.data if kept is not None else None

    def find_recent(self, memory: str) -> list[ObjectInfo] | None:
        """Return the snapshots that were stored lately, if they were listed a moment ago."""
        when, infos = self._recent.get(memory, (float("-inf"), []))
        return infos if time.monotonic() - when < RECENT_SECONDS else None

    def keep_recent(self, memory: str, infos: list[ObjectInfo]) -> None:
        """Keep a listing of the snapshots that were stored lately."""
        if self._useful:
            self._recent[memory] = time.monotonic(), infos
            while len(self._recent) > MOST_RECENT:
                del self._recent[next(iter(self._recent))]

    def add_recent(self, memory: str, info: ObjectInfo) -> None:
        """Add a snapshot that was just stored to that listing."""
        if memory in self._recent:
            self._recent[memory][1].append(info)

    def forget(self, memory: str) -> None:
        """Drop all that is known of a memory: something of it was not as it was thought to be."""
        prefix = MemoryKeys.of(memory).prefix
        for key in [key for key in self._kept if key.startswith(prefix)]:
            self.drop(key)
        for key in [key for key in self._seen if key.startswith(prefix)]:
            del self._seen[key]
        self._recent.pop(memory, None)

    def note_seen(self, key: str, size: int) -> None:
        """Note that a listing has just shown an object."""
        if self._useful:
            self._seen.pop(key, None)
            self._seen[key] = size, time.monotonic()
            if len(self._seen) > MOST_SEEN:
                self._seen.popitem(last=False)

    def seen(self, key: str) -> int | None:
        """Return the size of an object that was listed a short time ago."""
        size, when = self._seen.get(key, (0, float("-inf")))
        return size if time.monotonic() - when < TRUSTED_SECONDS else None


def _is_digest(version: str, data: bytes) -> bool:
    """Whether a version is the MD5 of these bytes, as for objects that S3 got in one piece."""
    return version.strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest()


@dataclass(frozen=True, slots=True)
class Recalled:
    """What is recalled for one operation, by what its listing said."""

    recall: Recall
    versions: Mapping[str, str]
    partial: bool = False
    """The listing was not complete: what was seen a short time ago counts too."""

    def find(self, key: str) -> bytes | None:
        """Return an object's bytes if it is as this process knows it."""
        if version := self.versions.get(key):
            return self.recall.find(key, version)
        if self.partial and self.recall.seen(key) is not None:
            return self.recall.peek(key)
        return None

    def keep(self, key: str, data: bytes) -> None:
        """Keep an object that was just read."""
        if self.partial or key in self.versions:
            self.recall.keep(key, data, self.versions.get(key, ""))
            self.recall.note_seen(key, len(data))

    def may_keep(self, size: int) -> bool:
        """Whether an object of that size is kept."""
        return bool(self.versions) and size <= LARGEST
