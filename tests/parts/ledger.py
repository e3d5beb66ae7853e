"""What agents wrote, where it is now, and whether what was said of it is true. Plain Python: files, tarballs, SQLite.

Every write is a word that no other write has. A sandbox, a tarball or a set-aside folder is then nothing but the set of words
in it, and each promise a sentence about sets. Nothing here asks the product what it meant.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sqlite3
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORD = re.compile(rb"\bw[0-9a-f]{12}\b")
SQLITE = b"SQLite format 3\0"
BESIDE_DATABASES = ("-wal", "-shm", "-journal")
OURS = "memory-sidecar"
Words = frozenset[str]
NONE: Words = frozenset()


class Broken(AssertionError):
    """A promise that was not kept."""


def words_in(top: Path, *, everywhere: bool = False) -> Words:
    """The words in a folder: in files, and in the rows of databases. ``everywhere``: also in the sidecar's own folders, and
    there a database may be unreadable."""
    found: set[str] = set()
    for folder, folders, files in os.walk(top):
        if not everywhere:
            folders[:] = [name for name in folders if OURS not in name and name != ".cache"]
        for name in files:
            place = Path(folder, name)
            if place.is_symlink() or name.endswith(BESIDE_DATABASES):
                continue
            try:
                found |= _words_of(place)
            except (sqlite3.DatabaseError, FileNotFoundError):
                if not everywhere:
                    raise
    return frozenset(found)


def _words_of(place: Path) -> set[str]:
    data = place.read_bytes()
    if data.startswith(SQLITE):
        return _rows_of(place)
    return {word.decode() for word in WORD.findall(data)}


def _rows_of(database: Path) -> set[str]:
    """The words in a database with its log, of which a copy is read: looking must not change anything."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy.db")
        shutil.copyfile(database, copy)
        log = database.with_name(f"{database.name}-wal")
        if log.exists():
            shutil.copyfile(log, f"{copy}-wal")
        with closing(sqlite3.connect(copy)) as connection:
            if connection.execute("PRAGMA quick_check").fetchone() != ("ok",):
                raise Broken(f"{database} is damaged")
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'observations'").fetchone():
                return set()
            return {title for (title,) in connection.execute("SELECT title FROM observations")}


def words_in_tarball(file: Path) -> tuple[Words, frozenset[str]]:
    """The words in a tarball of a home, and which memory systems it has anything of."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(file) as archive:
            archive.extractall(folder, filter="data")
        return words_in(Path(folder), everywhere=True), frozenset(map(system_of, os.listdir(folder)))


def system_of(name: str) -> str:
    """The memory system that something at the top of a home belongs to."""
    return {".claude-mem": "claude-mem", ".claude": "claude-code"}.get(name, "three-tier")


@dataclass(frozen=True, slots=True)
class Write:
    box: str
    at: float
    """When it was there to be seen."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One snapshot, as it was when it was first downloaded."""

    words: Words
    systems: frozenset[str]
    origin: str
    """What made it, where that was no export by itself: "saved-first", say."""


@dataclass(slots=True)
class Ledger:
    """``call`` runs a command of the command line against the store and answers with its document and exit code."""

    call: Callable[..., tuple[int, dict[str, Any]]]
    folder: Path
    place: Path
    """Where the store is."""
    store: str = "first"
    """Which of the stores is in place now: one can be moved away."""
    written: dict[str, Write] = field(default_factory=dict)
    forgotten: set[str] = field(default_factory=set)
    """Removed by the agents themselves: cleaned up, rotated, overwritten."""
    snapshots: dict[tuple[str, str, str], Kept] = field(default_factory=dict)
    heads: dict[tuple[str, str], str] = field(default_factory=dict)
    _seen: dict[tuple[str, str], object] = field(default_factory=dict)

    def kept(self, *, beside: str = "", origin: str = "") -> Words:
        """All that is in any snapshot, but for those of the memory ``beside``, or those of such an ``origin``."""
        rows = [kept for (_, memory, _), kept in self.snapshots.items() if memory != beside]
        return frozenset().union(*(kept.words for kept in rows if not origin or kept.origin != origin))

    def words_of(self, memory: str, snapshot: str | None) -> Words:
        if not snapshot:
            return NONE
        key = (self.store, memory, snapshot)
        if key not in self.snapshots:
            raise Broken(f"{snapshot} of {memory} was named, and is not there")
        return self.snapshots[key].words

    def systems_of(self, memory: str, snapshot: str) -> frozenset[str]:
        """The memory systems that a snapshot has anything of."""
        return self.snapshots[self.store, memory, snapshot].systems

    def head(self, memory: str) -> str:
        return self.heads.get((self.store, memory), "")

    def head_words(self, memory: str) -> Words:
        return self.words_of(memory, self.head(memory))

    def look(self, memory: str, *, moved_by_a_person: bool = False, accepted: bool = False) -> str:
        """See what the store has of a memory now, and that nothing good was replaced by something worse. Return the head."""
        stamp = self._stamp(memory)
        if stamp == self._seen.get((self.store, memory)):
            return self.head(memory)
        self._seen[self.store, memory] = stamp
        code, log = self.call("log", memory)
        rows = {row["snapshot"]: row for row in log.get("snapshots", [])}
        if code != 0 and (log.get("error", {}).get("code") != "memory-not-found" or self._known(memory)):
            raise Broken(f"log {memory} failed: {log}")
        for snapshot in self._known(memory) - rows.keys():
            raise Broken(f"{snapshot} of {memory} was there, and is gone")
        for snapshot in rows.keys() - self._known(memory):
            if rows[snapshot]["standing"] == "damaged":
                raise Broken(f"{snapshot} of {memory} is damaged: {rows[snapshot]['problem']}")
            self.snapshots[self.store, memory, snapshot] = Kept(
                *self.download(memory, snapshot), rows[snapshot]["origin"]
            )
        before, now = self.head(memory), log.get("head") or ""
        self.heads[self.store, memory] = now
        if before and before != now and not moved_by_a_person:
            lost = self.words_of(memory, before) - self.words_of(memory, now) - self.forgotten
            if lost and not accepted:
                raise Broken(f"the head of {memory} moved from {before} to {now or 'nothing'} and lost {some(lost)}")
            if lost and not rows[before]["pinned"]:
                raise Broken(f"{before} of {memory} was replaced by what guards objected to, and is not pinned")
        return now

    def _stamp(self, memory: str) -> object:
        """Another whenever anything of a memory was written."""
        files = [place for place in (self.place / "memories" / memory).rglob("*") if not place.name.startswith(".")]
        stamp = []
        for place in files:
            with contextlib.suppress(FileNotFoundError):
                about = place.stat()
                stamp.append((str(place), about.st_mtime_ns, about.st_size, about.st_ino))
        return sorted(stamp)

    def _known(self, memory: str) -> set[str]:
        return {snapshot for store, name, snapshot in self.snapshots if (store, name) == (self.store, memory)}

    def download(self, memory: str, snapshot: str) -> tuple[Words, frozenset[str]]:
        file = self.folder / f"{snapshot}.tar"
        code, said = self.call("download", memory, snapshot, "-o", str(file))
        if code != 0:
            raise Broken(f"{snapshot} of {memory} cannot be downloaded: {said}")
        found = words_in_tarball(file)
        file.unlink()
        return found

    def check_whole(self) -> None:
        """Every snapshot that ever was is there and has what it had."""
        for (store, memory, snapshot), kept in self.snapshots.items():
            if store == self.store and self.download(memory, snapshot) != (kept.words, kept.systems):
                raise Broken(f"{snapshot} of {memory} has changed")


def some(words: Iterable[str]) -> str:
    listed = sorted(words)
    return f"{len(listed)} words ({', '.join(listed[:4])}{', …' if len(listed) > 4 else ''})"
