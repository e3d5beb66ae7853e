"""Nothing good is ever overwritten by something worse."""

from __future__ import annotations

from collections.abc import Mapping

from sidecar.inside.index import FILE, Entry
from sidecar.inside.rules import compiled
from sidecar.layouts import Layout
from sidecar.limits import Guards
from sidecar.receipts import Reason
from sidecar.snapshots.manifest import Manifest

Entries = Mapping[str, Entry]


def judge(
    new: Manifest,
    entries: Entries,
    head: Manifest | None,
    head_entries: Entries,
    layouts: Mapping[str, Layout],
    guards: Guards,
) -> Reason | None:
    """Why this snapshot should not become the head, or ``None``. ``head`` is what it would replace."""
    if new.files == 0:
        return Reason(code="empty", message="The sandbox holds no memory: nothing of any layout was found in it.")
    for database in new.databases:
        if database.check != "ok":
            return Reason(code="database-damaged", message=f"SQLite says of {database.path}: {database.check}")
    if head is None:
        return None
    if missing := _missing(entries, head, head_entries, layouts):
        return Reason(code="required-missing", message=f"{missing} is gone; the head has it.")
    if head.bytes >= guards.shrink_from_bytes and new.bytes < head.bytes * guards.shrink_to:
        return Reason(code="shrunk", message=f"It has {new.bytes:,} bytes; the head has {head.bytes:,}.")
    if head.files >= guards.shrink_from_files and new.files < head.files * guards.shrink_to:
        return Reason(code="shrunk", message=f"It has {new.files:,} files; the head has {head.files:,}.")
    return None


def _missing(entries: Entries, head: Manifest, head_entries: Entries, layouts: Mapping[str, Layout]) -> str:
    """A path that a layout cannot do without, which the head has and the new snapshot has not."""
    for root in head.roots:
        required = layouts[root.layout].required if root.layout in layouts else ()
        wanted = compiled(f"{root.name}/{pattern}" for pattern in required)
        for path, entry in head_entries.items():
            if entry.type == FILE and path not in entries and wanted.match(path):
                return path
    return ""
