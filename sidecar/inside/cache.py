"""What this sandbox last restored or exported, so that an export need only look for what changed since.

A cache: when it is absent, damaged or about a snapshot the sidecar does not know, the export is full.
"""

from __future__ import annotations

import base64
import json
import os
from typing import Any, Iterable, Iterator, NamedTuple

from .index import Entry

# A change within one tick of the file system's clock can leave the times as they were; such entries are read again.
TICK_NS, COARSE_TICK_NS = 100_000_000, 2_000_000_000
PREFIX, LINEAGE = "index-", "lineage"
LONGEST_LINEAGE = 100


class Known(NamedTuple):
    """An entry with the stat signature it had when it was read, and a database's first page without its counters."""

    entry: Entry
    signature: list[Any]
    first_page: str = ""


class Base(NamedTuple):
    snapshot: str
    taken: int
    entries: dict[str, Known]

    def same(self, path: str, signature: list[Any]) -> Known | None:
        """What is known of ``path``, if its signature is still that and old enough to be believed."""
        known = self.entries.get(path)
        if known is None or known.signature != signature or not signature:
            return None
        rows = signature if isinstance(signature[0], list) else [signature]
        changed = max(row[-1] for row in rows if row)
        tick = TICK_NS if changed % 1_000_000_000 else COARSE_TICK_NS
        return known if changed < self.taken - tick else None


def lineage(folder: str, known: list[str]) -> list[str]:
    """The snapshots among ``known`` that this sandbox was restored from or exported since, newest first."""
    try:
        with open(os.path.join(folder, LINEAGE), encoding="ascii") as file:
            lines = file.read().split()
    except (FileNotFoundError, ValueError):
        return []
    wanted = set(known)
    return [snapshot for snapshot in reversed(lines) if snapshot in wanted]


def load(folder: str, snapshots: list[str]) -> Base | None:
    """The cached index of the first of these; ``None`` when there is none or it is damaged."""
    try:
        return _load(os.path.join(folder, PREFIX + snapshots[0]), snapshots[0]) if snapshots else None
    except (OSError, ValueError, TypeError, KeyError, IndexError):
        return None


def begin(folder: str, base: Base) -> None:
    """The memory here is that snapshot, whatever it was before (a restore)."""
    _write_index(folder, base)
    _write_lineage(folder, [base.snapshot])
    _tidy(folder, {base.snapshot})


def go_on(folder: str, base: Base, keep: str) -> None:
    """The memory here grew into that snapshot (an export). Its index and that of ``keep`` stay: it may yet not be stored."""
    _write_index(folder, base)
    try:
        with open(os.path.join(folder, LINEAGE), encoding="ascii") as file:
            lines = file.read().split()
    except (FileNotFoundError, ValueError):
        lines = []
    lines = [line for line in lines if line != base.snapshot] + [base.snapshot]
    _write_lineage(folder, lines[-LONGEST_LINEAGE:])
    _tidy(folder, {base.snapshot, keep})


def _write_lineage(folder: str, lines: list[str]) -> None:
    _write(os.path.join(folder, LINEAGE), [line + "\n" for line in lines])


def _write_index(folder: str, base: Base) -> None:
    _write(os.path.join(folder, PREFIX + base.snapshot), _lines(base))


def _lines(base: Base) -> Iterator[str]:
    encode = json.JSONEncoder(separators=(",", ":")).encode
    yield encode({"cache": 1, "snapshot": base.snapshot, "taken": base.taken}) + "\n"
    for known in base.entries.values():
        entry = known.entry._replace(sums=b"")
        sums = base64.b64encode(known.entry.sums).decode()
        yield encode([entry[:7], sums, entry[8:], known.signature, known.first_page]) + "\n"
    yield "end\n"


def _write(target: str, lines: Iterable[str]) -> None:
    with open(target + ".new", "w", encoding="ascii") as file:
        file.writelines(lines)
    os.replace(target + ".new", target)


def _tidy(folder: str, keep: set[str]) -> None:
    for name in os.listdir(folder):
        if name.startswith(PREFIX) and name[len(PREFIX) :] not in keep:
            os.unlink(os.path.join(folder, name))


def _load(path: str, snapshot: str) -> Base:
    with open(path, encoding="ascii") as file:
        head = json.loads(file.readline())
        if head["cache"] != 1 or head["snapshot"] != snapshot:
            raise ValueError("another cache")
        entries: dict[str, Known] = {}
        for line in file:
            if line == "end\n":
                return Base(snapshot, head["taken"], entries)
            front, sums, back, signature, first_page = json.loads(line)
            entry = Entry._make(front + [base64.b64decode(sums)] + back)
            entries[entry.path] = Known(entry, signature, first_page)
    raise ValueError("cut short")
