"""Files whose status alone says that they are unchanged since the base: usually nearly all. They are taken at once.

An export with thousands of files and few changes spends most of its time here: each file costs one look-up and one
``stat``. The layout's rules are not applied again to what they accepted before, so this is used only if the rules are
the same.
"""

from __future__ import annotations

import os
from typing import Dict

from sidecar.format.index import SIZE
from sidecar.program.cache import COARSE_TICK_NS, TICK_NS, Base, Row
from sidecar.program.limits.fit import Totals

SECOND_NS = 1_000_000_000


class UnchangedFiles:
    """The unchanged files that a walk passed over, and their total size."""

    def __init__(self, base: Base, largest: int) -> None:
        self.rows: Dict[str, Row] = {}
        self.tallies: Dict[str, Totals] = {}
        """Totals by layout."""
        self._base = base
        self._largest = largest

    def others(self, layout: str, prefix: str, names: list[os.DirEntry[str]]) -> list[os.DirEntry[str]]:
        """Take the unchanged files of one folder of a layout; return the other entries, for the walk to examine."""
        known, before = self._base.entries, self._base.taken
        fine, coarse = before - TICK_NS, before - COARSE_TICK_NS
        rows, rest, total, largest = self.rows, [], 0, self._largest
        for entry in names:
            path = prefix + entry.name
            row = known.get(path)
            if row is None or not row[1]:
                rest.append(entry)
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                rest.append(entry)
                continue
            size, changed = status.st_size, status.st_ctime_ns
            if (
                row[1] == [status.st_dev, status.st_ino, size, status.st_mtime_ns, changed]
                and changed < (fine if changed % SECOND_NS else coarse)
                and row[0][SIZE] == size <= largest
            ):
                rows[path] = row
                total += size
            else:
                rest.append(entry)
        if len(rest) < len(names):
            tally = self.tallies.get(layout, Totals())
            self.tallies[layout] = tally.with_added(total, prefix.count("/"), len(names) - len(rest))
        return rest
