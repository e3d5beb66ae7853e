"""What a restore replaces that no export has: nobody could bring it back, so it is said."""

from __future__ import annotations

import stat
from typing import Any, Iterable

from . import databases, index
from .cache import Base
from .roots import Root
from .swap import is_folder
from .walk import Found, Skipped, walk

MOST_SHOWN = 5


def unsaved(roots: Iterable[Root], before: Base | None) -> list[str]:
    """What to say of files that are not as this sandbox last restored or exported them, and are to go. Of one that did
    neither (``None``) nothing is known: what is there came with it."""
    if before is None:
        return []
    there = [root for root in roots if is_folder(root.folder)]
    gone = sorted(found.path for root in there for found in walk(root, Skipped()) if _differs(found, before))
    shown = ", ".join(gone[:MOST_SHOWN]) + (" and others" if len(gone) > MOST_SHOWN else "")
    return ["What was here and not exported yet is replaced or gone: %s." % shown] if gone else []


def _differs(found: Found, before: Base) -> bool:
    """By size and time: a sandbox that was paused, or copied, may give the same file another number."""
    known = before.known(found.path)
    if known is None:
        return not stat.S_ISDIR(found.status.st_mode)
    if known.entry.type != index.FILE:
        return False
    if known.entry.database and known.signature:
        return _sizes_and_times(known.signature) != _sizes_and_times(databases.signature(found.place))
    was = known.signature[2:4] or [known.entry.size, known.entry.mtime]  # a seed left what was there
    return was != [found.status.st_size, found.status.st_mtime_ns]


def _sizes_and_times(rows: list[Any]) -> list[Any]:
    return [row[2:4] for row in rows if row and row[2]]  # who only reads a database leaves an empty log
