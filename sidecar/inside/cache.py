"""What this sandbox last restored or exported, so that an export need only look for what changed since.

A cache: when it is absent, damaged or about a snapshot the sidecar does not know, the export is full.
"""

from __future__ import annotations

import hashlib
import json
import marshal
import os
import sys
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from . import lineage as history
from . import places
from .index import Entry

# A change within one tick of the file system's clock can leave the times as they were; such entries are read again.
TICK_NS, COARSE_TICK_NS = 100_000_000, 2_000_000_000
PREFIX = "index-"
# By the quickest means there is, and only what changed: memories have thousands of files, and most stay as they are.
VERSION = "4 %d.%d" % sys.version_info[:2]
FULL_SHARE = 8
"""A file of changes that has more than one in so many of the rows is written whole again."""


class Known(NamedTuple):
    """An entry with the stat signature it had when it was read, and a database's first page without its counters.

    As it comes from the cache, it is a plain tuple of the same: nearly all of them are only written down again.
    """

    entry: Entry
    signature: list[Any]
    first_page: str = ""


Row = Tuple[Tuple[Any, ...], List[Any], str]


def signature(status: os.stat_result) -> list[int]:
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

    def known(self, path: str) -> Known | None:
        row = self.entries.get(path)
        return Known(Entry._make(row[0]), row[1], row[2]) if row is not None else None

    def same(self, path: str, signature: list[Any]) -> Known | None:
        """What is known of ``path``, if its signature is still that and old enough to be believed."""
        known = self.known(path)
        if known is None or known.signature != signature or not signature:
            return None
        rows = signature if isinstance(signature[0], list) else [signature]
        changed = max(row[-1] for row in rows if row)
        tick = TICK_NS if changed % 1_000_000_000 else COARSE_TICK_NS
        return known if changed < self.taken - tick else None


def lineage(folder: str, known: list[str]) -> list[str]:
    """The snapshots among ``known`` that this sandbox was restored from or exported since, newest first."""
    wanted = set(known)
    return [snapshot for snapshot in reversed(history.read(folder)) if snapshot in wanted]


def load(folder: str, snapshots: list[str]) -> Base | None:
    """The cached index of the first of these; ``None`` when there is none or it is damaged."""
    try:
        return _load(folder, snapshots[0]) if snapshots else None
    except (OSError, ValueError, TypeError, KeyError, IndexError, EOFError):
        return None


def begin(folder: str, base: Base, reader: bool = False) -> None:
    """The memory here is that snapshot, whatever it was before (a restore)."""
    _write_index(folder, base)
    history.write(folder, [base.snapshot], reader)
    _tidy(folder, {base.snapshot})


def hold(folder: str, reader: bool) -> None:
    """The memory here stays as it is, to be read only or to be written."""
    if history.is_reader(folder) != reader:
        history.write(folder, history.read(folder), reader)


def go_on(folder: str, base: Base, before: Base | None) -> None:
    """The memory here grew into that snapshot (an export). The index of ``before`` stays too: it may yet not be stored."""
    if before is not None and before.snapshot != base.snapshot:
        base = base._replace(full=before.full or before.snapshot, changed=_changed(base, before))
    if len(base.changed or ()) * FULL_SHARE > len(base.entries):
        base = base._replace(full="", changed=None)
    _write_index(folder, base)
    lines = [line for line in history.read(folder) if line != base.snapshot] + [base.snapshot]
    history.write(folder, lines, history.is_reader(folder))
    _tidy(folder, {base.snapshot, base.full} | ({before.snapshot, before.full} if before is not None else set()))


def _changed(base: Base, before: Base) -> dict[str, Row | None]:
    old, new = before.entries, base.entries
    changed = dict(before.changed or {})
    changed.update((path, row) for path, row in new.items() if old.get(path) is not row)
    changed.update((path, None) for path in old if path not in new)
    return changed


def _write_index(folder: str, base: Base) -> None:
    entries = base.entries if base.changed is None else base.changed
    rows = marshal.dumps({path: row and (tuple(row[0]), row[1], row[2]) for path, row in entries.items()})
    head = {
        "cache": VERSION,
        "snapshot": base.snapshot,
        "taken": base.taken,
        "rules": base.rules,
        "full": base.full,
        "policy": base.policy,
        "sha256": hashlib.sha256(rows).hexdigest(),
    }
    _write(os.path.join(folder, PREFIX + base.snapshot), json.dumps(head).encode("ascii") + b"\n" + rows)


def _write(target: str, data: bytes) -> None:
    places.write_file(target, data)


def _tidy(folder: str, keep: set[str]) -> None:
    for name in os.listdir(folder):
        if name.startswith(PREFIX) and name[len(PREFIX) :] not in keep:
            places.remove(os.path.join(folder, name))


def _load(folder: str, snapshot: str) -> Base:
    head, rows = _read(folder, snapshot)
    base = Base(snapshot, head["taken"], rows, head["rules"], head["full"], policy=head.get("policy", ""))
    if not base.full:
        return base
    above, entries = _read(folder, base.full)
    if above["full"]:
        raise ValueError("changes of changes")
    for path, row in rows.items():
        if row is None:
            entries.pop(path, None)
        else:
            entries[path] = row
    return base._replace(entries=entries, changed=rows)


def _read(folder: str, snapshot: str) -> tuple[dict[str, Any], dict[str, Any]]:
    with open(places.open_file(os.path.join(folder, PREFIX + snapshot)), "rb") as file:
        head, rows = json.loads(file.readline()), file.read()
    # Only what was written here, by a Python like this one, is taken apart.
    if head["cache"] != VERSION or head["snapshot"] != snapshot or head["sha256"] != hashlib.sha256(rows).hexdigest():
        raise ValueError("another cache")
    return head, marshal.loads(rows)
