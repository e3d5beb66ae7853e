"""What this sandbox last restored or exported, so that an export need only look for what changed since.

A cache: when it is absent, damaged or about a snapshot the sidecar does not know, the export is full.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any, Dict, NamedTuple, Optional

from sidecar.format.index import Entry
from sidecar.program import lineage as history
from sidecar.program import places, rows

Row = rows.Row

# A change within one tick of the file system's clock can leave the times as they were; such entries are read again.
TICK_NS, COARSE_TICK_NS = 100_000_000, 2_000_000_000
PREFIX = "index-"
# By a quick means, and only what changed: memories have thousands of files, and most stay as they are. Up to version 4
# it was Python's own (marshal), which takes whatever it is given: nothing written so is read any more.
VERSION = "5 " + sys.byteorder
MOST_BYTES = 128 << 20
"""Of a file: some 600,000 rows. Larger ones are not kept, and not believed: then exports are full."""
FULL_SHARE = 8
"""A file of changes that has more than one in so many of the rows is written whole again."""


class KnownEntry(NamedTuple):
    """An entry with the stat signature it had when it was read, and a database's first page without its counters.

    As it comes from the cache, it is a plain tuple of the same: nearly all of them are only written down again.
    """

    entry: Entry
    signature: list[Any]
    first_page: str = ""


def compute_signature(status: os.stat_result) -> list[int]:
    """What changes when a file does."""
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


class Base(NamedTuple):
    """What is known of a snapshot. ``changed`` is how its entries differ from those in the file of the snapshot ``full``,
    ``None`` standing for what is gone; ``rules`` names the layouts by which they were found."""

    snapshot: str
    taken: int
    entries: Dict[str, Row]
    rules: str = ""
    full: str = ""
    changed: Optional[Dict[str, Optional[Row]]] = None
    policy: str = ""
    """By which what is private was taken out of all of them; under another they have to be read again."""

    def known(self, path: str) -> KnownEntry | None:
        row = self.entries.get(path)
        return KnownEntry(Entry._make(row[0]), row[1], row[2]) if row is not None else None

    def find_unchanged(self, path: str, signature: list[Any]) -> KnownEntry | None:
        """What is known of ``path``, if its signature is still that and old enough to be believed."""
        known = self.known(path)
        if known is None or known.signature != signature or not signature:
            return None
        rows = signature if isinstance(signature[0], list) else [signature]
        changed = max(row[-1] for row in rows if row)
        tick = TICK_NS if changed % 1_000_000_000 else COARSE_TICK_NS
        return known if changed < self.taken - tick else None


def find_lineage(folder: str, known: list[str]) -> list[str]:
    """The snapshots among ``known`` that this sandbox was restored from or exported since, newest first."""
    wanted = set(known)
    return [snapshot for snapshot in reversed(history.read(folder)) if snapshot in wanted]


def load_base(folder: str, snapshots: list[str]) -> Base | None:
    """The cached index of the first of these; ``None`` when there is none or it is damaged."""
    try:
        return _load_base(folder, snapshots[0]) if snapshots else None
    except (OSError, ValueError, RecursionError):
        return None


def write_restored(folder: str, base: Base, reader: bool = False) -> None:
    """The memory here is that snapshot, whatever it was before (a restore)."""
    _write_index(folder, base)
    history.write(folder, [base.snapshot], reader)
    _remove_others(folder, {base.snapshot})


def set_reader(folder: str, reader: bool) -> None:
    """The memory here stays as it is, to be read only or to be written."""
    if history.is_reader(folder) != reader:
        history.write(folder, history.read(folder), reader)


def write_exported(folder: str, base: Base, before: Base | None, origin: str = "") -> None:
    """The memory here grew into that snapshot (an export). The index of ``before`` stays too: it may yet not be stored; and
    that of ``origin``, the newest that was head: what was exported since may never be."""
    if before is not None and before.snapshot != base.snapshot:
        base = base._replace(full=before.full or before.snapshot, changed=_compute_changes(base, before))
    if len(base.changed or ()) * FULL_SHARE > len(base.entries):
        base = base._replace(full="", changed=None)
    _write_index(folder, base)
    lines = [line for line in history.read(folder) if line != base.snapshot] + [base.snapshot]
    history.write(folder, lines, history.is_reader(folder))
    keep = {base.snapshot, base.full} | ({before.snapshot, before.full} if before is not None else set())
    first = load_base(folder, [origin]) if origin and origin not in keep else None
    _remove_others(folder, keep | ({first.snapshot, first.full} if first is not None else set()))


def _compute_changes(base: Base, before: Base) -> dict[str, Row | None]:
    old, new = before.entries, base.entries
    changed = dict(before.changed or {})
    changed.update((path, row) for path, row in new.items() if old.get(path) is not row)
    changed.update((path, None) for path in old if path not in new)
    return changed


def _write_index(folder: str, base: Base) -> None:
    sizes, body = rows.dump(base.entries if base.changed is None else base.changed)
    head = {
        "cache": VERSION,
        "snapshot": base.snapshot,
        "taken": base.taken,
        "rules": base.rules,
        "full": base.full,
        "policy": base.policy,
        "sections": sizes,
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    if len(body) < MOST_BYTES:
        places.write_file(os.path.join(folder, PREFIX + base.snapshot), json.dumps(head).encode("ascii") + b"\n" + body)


def _remove_others(folder: str, keep: set[str]) -> None:
    for name in os.listdir(folder):
        if name.startswith(PREFIX) and name[len(PREFIX) :] not in keep:
            places.remove(os.path.join(folder, name))


def _load_base(folder: str, snapshot: str) -> Base:
    head, entries, gone = _read_index(folder, snapshot)
    base = Base(snapshot, head["taken"], entries, head["rules"], head["full"], policy=head["policy"])
    if not base.full:
        if gone:
            raise ValueError("gone from nothing")
        return base
    above, whole, nothing = _read_index(folder, base.full)
    if above["full"] or nothing:
        raise ValueError("changes of changes")
    whole.update(entries)
    for path in gone:
        whole.pop(path, None)
    changed: Dict[str, Optional[Row]] = dict(entries)
    changed.update(dict.fromkeys(gone))
    return base._replace(entries=whole, changed=changed)


HEAD = {
    "cache": str,
    "snapshot": str,
    "taken": int,
    "rules": str,
    "full": str,
    "policy": str,
    "sections": list,
    "sha256": str,
}


def _read_index(folder: str, snapshot: str) -> tuple[dict[str, Any], dict[str, Row], list[str]]:
    """One file: its head, its rows, and what it says is gone. Raise OSError or ValueError."""
    if "/" in snapshot or "\0" in snapshot:
        raise ValueError("no name of a snapshot")
    data = places.read_file(os.path.join(folder, PREFIX + snapshot), MOST_BYTES + rows.LONGEST_LINE)
    end = data.find(b"\n", 0, rows.LONGEST_LINE)
    body = memoryview(data)[end + 1 :]
    head = rows.parse(data[:end])
    if type(head) is not dict or {name: type(value) for name, value in head.items()} != HEAD:
        raise ValueError("another head")
    # Only what was written here, by a machine like this one, is taken apart; and only as it was written.
    if head["cache"] != VERSION or head["snapshot"] != snapshot or head["sha256"] != hashlib.sha256(body).hexdigest():
        raise ValueError("another cache")
    return (head, *rows.load(head["sections"], body))
