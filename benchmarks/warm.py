"""Warm exports: what a conversation costs, what nothing new costs, and what a few of many small files cost."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import homes
from benchmarks.measure import Run, bytes_in, changed_pages, copy_database, gzipped, sidecar
from benchmarks.table import Section, seconds, size

ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Conversation:
    """One warm export: bytes the store gained, the changed pages and their size compressed, and the time it took."""

    added: int
    pages: int
    gzip_6: int
    gzip_9: int
    packs: int
    seconds: float

    @property
    def ratio(self) -> float:
        return self.added / self.gzip_6


def conversations(folder: Path, database: int, count: int) -> list[Conversation]:
    """Export after each of ``count`` conversations with a claude-mem-like memory whose database has that many bytes."""
    home, store = folder / "home", folder / "store"
    (folder / "tmp").mkdir(parents=True)
    words = homes.Words(3, max(2 << 20, min(database, 16 << 20)))
    homes.claude_mem(home, database, words)
    _export(folder)
    old, new = folder / "old.db", folder / "new.db"
    copy_database(homes.database_of(home), old)
    found = []
    for _ in range(count):
        homes.converse(home, words)
        before = bytes_in(store)
        run = _export(folder)
        added = bytes_in(store) - before
        copy_database(homes.database_of(home), new)
        pages = changed_pages(old, new)
        packs = sidecar("log", "warm", store=f"file:{store}", temporary=folder / "tmp").receipt["snapshots"][0]["packs"]
        found.append(Conversation(added, len(pages), gzipped(pages, 6), gzipped(pages, 9), packs, run.seconds))
        new.replace(old)
    return found


def _export(folder: Path, expect: str = "committed") -> Run:
    return sidecar(
        "export",
        "warm",
        f"--sandbox=local:{folder}/home",
        store=f"file:{folder}/store",
        temporary=folder / "tmp",
        expect=expect,
    )


def measure_conversations(folder: Path, database: int, count: int) -> Section:
    found = conversations(folder, database, count)
    section = Section(
        f"A database of {size(homes.database_of(folder / 'home').stat().st_size)}, 30 observations at a time"
    )
    for number, row in enumerate(found, 1):
        folded = " (folded)" if number > 1 and row.packs <= found[number - 2].packs else ""
        section.add(
            f"conversation {number}",
            f"{size(row.added)} added, {row.ratio:.2f} ×, {seconds(row.seconds)}{folded}",
            f"changed pages {size(row.pages)}, gzip -6 {size(row.gzip_6)}, gzip -9 {size(row.gzip_9)}",
        )
    ratio = sum(row.added for row in found) / sum(row.gzip_6 for row in found)
    section.add(
        "median", f"{statistics.median(row.ratio for row in found):.2f} ×", "of gzip -6; 1.30 × is the most we allow"
    )
    section.add("all together", f"{ratio:.2f} ×, {size(sum(row.added for row in found))}")
    before = bytes_in(folder / "store")
    run = _export(folder, "unchanged")
    added = bytes_in(folder / "store") - before
    trips = run.receipt["round_trips"]
    section.add("nothing new", f"{seconds(run.seconds)}, round trips: {trips}, {added} B added")
    return section


def measure_small_files(folder: Path, count: int) -> Section:
    home, store, temporary = folder / "home", folder / "store", folder / "tmp"
    temporary.mkdir(parents=True)
    places = homes.small_files(home, count, homes.Words(4, 4 << 20))
    _export(folder)
    time.sleep(0.2)  # files younger than a tick of the clock are read again
    _export(folder, "unchanged")
    runs, walks, added = [], [], []
    for number in range(ROUNDS):
        for place in places[number :: len(places) // 3][:3]:
            place.write_text(place.read_text() + "\nchanged")
        before = bytes_in(store)
        runs.append(_export(folder))
        added.append(bytes_in(store) - before)
        walks.append(_walk(home))
    section = Section(f"{count:,} small files, 3 of them changed, {ROUNDS} times")
    walk = statistics.median(walks)
    inside = [run.receipt["duration_ms"] / 1000 for run in runs]
    section.add(
        "export",
        f"{seconds(statistics.median(run.seconds for run in runs))}, at most {size(max(added))} added",
        f"os.walk and lstat: {seconds(walk)}",
    )
    section.add(
        "of it the export itself",
        f"{seconds(statistics.median(inside))}, at most {seconds(max(inside))}",
        f"3 × the walk and 0.20 s: {seconds(3 * walk + 0.2)}",
    )
    same = _export(folder, "unchanged")
    section.add("nothing new", f"{seconds(same.seconds)}, round trips: {same.receipt['round_trips']}")
    return section


def _walk(home: Path) -> float:
    started = time.monotonic()
    for folder, _, names in os.walk(home):
        for name in names:
            os.lstat(f"{folder}/{name}")
    return time.monotonic() - started
