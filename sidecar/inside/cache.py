"""What this sandbox last restored or exported, so that an export need only look for what changed since.

A cache: when it is absent, damaged or about a snapshot the sidecar does not know, the export is full.
"""

from __future__ import annotations

import base64
import json
import os
from typing import Any, NamedTuple

from .index import Entry

# A change within one tick of the file system's clock can leave the times as they were; such entries are read again.
TICK_NS, COARSE_TICK_NS = 100_000_000, 2_000_000_000
PREFIX = "index-"


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
    """The snapshots among ``known`` that this sandbox was restored from or exported, newest first."""
    names = [name for name in os.listdir(folder) if name.startswith(PREFIX) and name[len(PREFIX) :] in set(known)]
    names.sort(key=lambda name: os.stat(os.path.join(folder, name)).st_mtime_ns, reverse=True)
    return [name[len(PREFIX) :] for name in names]


def load(folder: str, snapshots: list[str]) -> Base | None:
    """The cached index of the first of these; ``None`` when there is none or it is damaged."""
    try:
        return _load(os.path.join(folder, PREFIX + snapshots[0]), snapshots[0]) if snapshots else None
    except (OSError, ValueError, TypeError, KeyError, IndexError):
        return None


def store(folder: str, base: Base, keep: list[str]) -> None:
    """Write a cached index and forget all others but those in ``keep``."""
    target = os.path.join(folder, PREFIX + base.snapshot)
    temporary = target + ".new"
    encode = json.JSONEncoder(separators=(",", ":")).encode
    with open(temporary, "w", encoding="ascii") as file:
        file.write(encode({"cache": 1, "snapshot": base.snapshot, "taken": base.taken}) + "\n")
        for known in base.entries.values():
            entry = known.entry._replace(sums=b"")
            sums = base64.b64encode(known.entry.sums).decode()
            file.write(encode([entry[:7], sums, entry[8:], known.signature, known.first_page]) + "\n")
        file.write("end\n")
    os.replace(temporary, target)
    for name in os.listdir(folder):
        if name.startswith(PREFIX) and name[len(PREFIX) :] not in [base.snapshot] + keep:
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
