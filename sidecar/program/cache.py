"""The index of what this sandbox last restored or exported, so that an export only has to read what changed since.

It is a cache: if it is missing, damaged, or about a snapshot that the sidecar does not know, the export is full.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any, Dict, NamedTuple, Optional, Sequence

from sidecar.format.index import Entry
from sidecar.program import notes, places, rows

Row = rows.Row

# A change within one tick of the file system's clock can leave the times as they were. An entry that changed so shortly
# before the index was taken is read again. File systems whose times are whole seconds need the coarse tick.
TICK_NS, COARSE_TICK_NS = 100_000_000, 2_000_000_000
PREFIX = "index-"
# A compact format (rows.py) that stores only what changed: memories have thousands of files, and most stay as they are.
# Up to version 4 the format was Python's marshal, which is unsafe with untrusted input; such files are ignored.
VERSION = "5 " + sys.byteorder
MOST_BYTES = 128 << 20
"""Size limit of a cache file, about 600,000 rows. Larger ones are neither written nor read; the exports are then full."""
FULL_SHARE = 8
"""A file of changes with more than one eighth of all rows is written as a full file again."""


class KnownEntry(NamedTuple):
    """An entry with the stat signature it had when it was read, and the digest of a database's first page without
    counters.

    Loaded from the cache it is a plain tuple of the same values, because nearly all of them are only written back.
    """

    entry: Entry
    signature: list[Any]
    first_page: str = ""


def compute_signature(status: os.stat_result) -> list[int]:
    """Return the values of ``stat`` that change when a file's contents do."""
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


class Base(NamedTuple):
    """What is known of a snapshot.

    ``changed`` is how its entries differ from those in the full file of the snapshot ``full``, with ``None`` for
    removed paths; ``rules`` is a hash of the layouts by which the entries were found.
    """

    snapshot: str
    taken: int
    entries: Dict[str, Row]
    rules: str = ""
    full: str = ""
    changed: Optional[Dict[str, Optional[Row]]] = None
    policy: str = ""
    """The privacy policy under which all entries were scrubbed; under another one they have to be read again."""

    def known(self, path: str) -> KnownEntry | None:
        """Return what is known of a path, or ``None``."""
        row = self.entries.get(path)
        return KnownEntry(Entry._make(row[0]), row[1], row[2]) if row is not None else None

    def find_unchanged(self, path: str, signature: list[Any]) -> KnownEntry | None:
        """Return what is known of ``path`` if its stat signature is unchanged and old enough to be trusted, else ``None``."""
        known = self.known(path)
        if known is None or known.signature != signature or not signature:
            return None
        rows = signature if isinstance(signature[0], list) else [signature]
        changed = max(row[-1] for row in rows if row)
        tick = TICK_NS if changed % 1_000_000_000 else COARSE_TICK_NS
        return known if changed < self.taken - tick else None


def find_lineage(folder: str, known: list[str]) -> list[str]:
    """Return the snapshots among ``known`` that this sandbox was restored from or exported to, newest first."""
    wanted = set(known)
    return [snapshot for snapshot in reversed(notes.read_lineage(folder)) if snapshot in wanted]


def load_base(folder: str, snapshots: list[str]) -> Base | None:
    """Return the cached index of the first of these snapshots; ``None`` if there is none or it is damaged."""
    try:
        return _load_base(folder, snapshots[0]) if snapshots else None
    except (OSError, ValueError, RecursionError):
        return None


def write_restored(folder: str, base: Base, reader: bool = False, part: Sequence[str] = ()) -> None:
    """Record after a restore that the memory in this sandbox is this snapshot, or a part of it, whatever it was before."""
    _write_index(folder, base)
    notes.write_lineage(folder, [base.snapshot], reader, part)
    _remove_others(folder, {base.snapshot})


def set_reader(folder: str, reader: bool) -> None:
    """Change only whether the memory in this sandbox is a read-only copy."""
    if notes.is_reader(folder) != reader:
        notes.write_lineage(folder, notes.read_lineage(folder), reader)


def write_exported(folder: str, base: Base, before: Base | None, origin: str = "") -> None:
    """Record after an export that the memory in this sandbox has become this snapshot.

    The index of ``before`` is kept, because the new snapshot may not be stored in the end. So is the index of
    ``origin``, the newest snapshot that was head, because what was exported since may never become the head.
    """
    if before is not None and before.snapshot != base.snapshot:
        base = base._replace(full=before.full or before.snapshot, changed=_compute_changes(base, before))
    if len(base.changed or ()) * FULL_SHARE > len(base.entries):
        base = base._replace(full="", changed=None)
    _write_index(folder, base)
    lines = [line for line in notes.read_lineage(folder) if line != base.snapshot] + [base.snapshot]
    notes.write_lineage(folder, lines, notes.is_reader(folder), notes.read_part(folder))
    keep = {base.snapshot, base.full} | ({before.snapshot, before.full} if before is not None else set())
    first = load_base(folder, [origin]) if origin and origin not in keep else None
    _remove_others(folder, keep | ({first.snapshot, first.full} if first is not None else set()))


def _compute_changes(base: Base, before: Base) -> dict[str, Row | None]:
    """Return how the entries differ from the full file that ``before`` builds on."""
    old, new = before.entries, base.entries
    changed = dict(before.changed or {})
    changed.update((path, row) for path, row in new.items() if old.get(path) is not row)
    changed.update((path, None) for path in old if path not in new)
    return changed


def _write_index(folder: str, base: Base) -> None:
    """Write one cache file: a JSON line with a checksum, then the rows. It is skipped if it is over the size limit."""
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
    """Remove the cache files of all other snapshots."""
    for name in os.listdir(folder):
        if name.startswith(PREFIX) and name[len(PREFIX) :] not in keep:
            places.remove(os.path.join(folder, name))


def _load_base(folder: str, snapshot: str) -> Base:
    """Load a cache file and the full file it builds on. Raise OSError or ValueError."""
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
    """Read one cache file: its head, its rows, and the paths it removes. Raise OSError or ValueError."""
    if "/" in snapshot or "\0" in snapshot:
        raise ValueError("no name of a snapshot")
    data = places.read_file(os.path.join(folder, PREFIX + snapshot), MOST_BYTES + rows.LONGEST_LINE)
    end = data.find(b"\n", 0, rows.LONGEST_LINE)
    body = memoryview(data)[end + 1 :]
    head = rows.parse(data[:end])
    if type(head) is not dict or {name: type(value) for name, value in head.items()} != HEAD:
        raise ValueError("another head")
    # Accept only a file of this version and byte order, for this snapshot, whose checksum matches.
    if head["cache"] != VERSION or head["snapshot"] != snapshot or head["sha256"] != hashlib.sha256(body).hexdigest():
        raise ValueError("another cache")
    return (head, *rows.load(head["sections"], body))
