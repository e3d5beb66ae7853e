"""Reading a memory: what ``log``, ``records``, ``diff``, ``history`` and ``blame`` cost, beside a restore of it."""

from __future__ import annotations

from pathlib import Path

from benchmarks import homes
from benchmarks.measure import Run, sidecar
from benchmarks.table import Section, seconds, size

ROUNDS = 3


def grow(folder: Path, database: int, count: int) -> None:
    """Make ``count`` snapshots of a claude-mem-like memory, a conversation between each two."""
    words = homes.Words(6, max(2 << 20, min(database, 16 << 20)))
    (folder / "tmp").mkdir(parents=True)
    homes.claude_mem(folder / "home", database, words)
    for number in range(count):
        if number:
            homes.converse(folder / "home", words)
        _run(folder, "export", "m", f"--sandbox=local:{folder}/home", f"--conversation=c{number}", expect="committed")


def _run(folder: Path, *words: str, expect: str = "") -> Run:
    return sidecar(*words, store=f"file:{folder}/store", temporary=folder / "tmp", expect=expect)


def _restore(folder: Path, number: int) -> Run:
    home = folder / f"restored-{number}"
    home.mkdir()
    return _run(folder, "restore", "m", f"--sandbox=local:{home}", expect="complete")


def measure(folder: Path, database: int, count: int) -> Section:
    grow(folder, database, count)
    return compare(folder, count)


def compare(folder: Path, count: int) -> Section:
    """Measure each way of reading, and a restore, on what ``grow`` made."""
    section = Section(
        f"Reading {count} snapshots of a database of {size(homes.database_of(folder / 'home').stat().st_size)}"
    )
    restore = min((_restore(folder, number) for number in range(ROUNDS)), key=lambda run: run.seconds)
    section.add("restore", f"{seconds(restore.seconds)}, peak {size(restore.peak)}")
    ways = {
        "log": ("log", "m"),
        "records, all": ("records", "m"),
        "diff to the parent": ("diff", "m"),
        "history of the database": ("history", "m", "claude-mem/claude-mem.db"),
        "blame": ("blame", "m"),
    }
    for name, words in ways.items():
        run = min((_run(folder, *words) for _ in range(ROUNDS)), key=lambda run: run.seconds)
        section.add(
            name, f"{seconds(run.seconds)}, peak {size(run.peak)}", f"{run.seconds / restore.seconds:.1f} × a restore"
        )
    return section
