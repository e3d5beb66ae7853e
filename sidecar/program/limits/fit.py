"""Keep an export within its limits: by what was found before anything is read, and by the real sizes afterwards.

Some sizes are known only after reading (a database has some of its pages in its log, a pack is as small as it
compresses). If they exceed a limit, the export starts again with that knowledge.
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Dict, NamedTuple

from sidecar.format.patterns import compile_patterns
from sidecar.format.protocol import Limits, LimitTable
from sidecar.format.refusal import Refusal
from sidecar.format.roots import get_root
from sidecar.program.capture.walk import FoundPath

if TYPE_CHECKING:
    from sidecar.program.limits.trim import Dropped

ROUNDS = 8
MOST_FOUND = 2_000_000
TIGHTER = 0.97
"""The share of the allowed pack size to aim at, because what is dropped may have compressed better than the rest. Each
round aims lower, the last but one at hot files only, so that the last can say whether those alone are too much.
"""


class OverLimit(Exception):
    """The export exceeded a limit only when it was read: start again with what is known now."""


class Totals(NamedTuple):
    """How much some paths are together."""

    bytes: int = 0
    paths: int = 0
    deepest: int = 0

    def with_added(self, size: int, depth: int, paths: int = 1) -> Totals:
        """Return the totals with some paths added."""
        return Totals(self.bytes + size, self.paths + paths, max(self.deepest, depth))


class ExportLimits:
    """The limits of one export, and what its rounds have learnt."""

    def __init__(self, limits: Limits) -> None:
        self.whole = limits
        self.layouts = limits.layouts
        trims = limits.trim or any(table.trim for table in self.layouts.values())
        self.most_found = MOST_FOUND if trims else limits.files
        self.largest = min([limits.file_bytes] + [table.file_bytes for table in self.layouts.values()])
        self.sizes: Dict[str, int] = {}
        self.taken = (0, 0)
        """Bytes and entries of layouts that were not asked for, and stay as they are."""
        self.carried: Dict[str, int] = {}
        """What each file weighed in the last pack it was in."""
        self.carried_last = self.may_carry = 0
        self.packed = 0
        self.rounds = 0

    def of(self, layout: str) -> LimitTable:
        """Return the limits of a layout."""
        return self.layouts.get(layout, self.whole)

    def holds(self, found: list[FoundPath], steady: Dict[str, Totals]) -> bool:
        """Return whether the paths found and the unchanged ones are within the limits, by the names and sizes known now."""
        if self.rounds:
            return False
        tallies = dict(steady)
        for one in found:
            layout, status = one.root.layout["name"], one.status
            size = status.st_size if stat.S_ISREG(status.st_mode) else 0
            if size > self.largest and size > self.of(layout).file_bytes:
                return False
            tallies[layout] = tallies.get(layout, Totals()).with_added(size, one.path.count("/"))
        for layout, tally in tallies.items():
            limits = self.of(layout)
            if tally.bytes > limits.bytes or tally.paths > limits.files or tally.deepest > limits.depth:
                return False
        total, count = sum(tally.bytes for tally in tallies.values()), sum(tally.paths for tally in tallies.values())
        return total <= self.whole.bytes and count <= self.whole.files

    def leaves_out(self, found: FoundPath) -> bool:
        """Return whether a file is left out because it alone is too large. Only a file that its layout does not know by
        name: it is no reason to save nothing."""
        size, layout = self.sizes.get(found.path, found.status.st_size), found.root.layout
        limits = self.of(layout["name"])
        if size <= self.largest or size <= limits.file_bytes or not stat.S_ISREG(found.status.st_mode):
            return False
        if "file_bytes" in limits.trim or found.root.rules.names(found.relative):
            return False
        needed = layout.get("required", []) + layout.get("tiers", {}).get("hot", [])
        return not compile_patterns(needed).match(found.relative)

    def dropped(self, found: list[FoundPath]) -> dict[str, Dropped]:
        """Return what to leave out, by path. Raise Refusal if the rest is still over a limit."""
        from sidecar.program.limits.plan import plan_drops

        return plan_drops(self, found)

    def count(self, found: FoundPath, size: int, total: int) -> None:
        """Record a file's real size and the total so far. Raise OverLimit if a limit is exceeded."""
        if size != found.status.st_size:
            self.sizes[found.path] = size
        if total > self.whole.bytes or (size > self.largest and size > self.of(found.root.layout["name"]).file_bytes):
            self.sizes[found.path] = size
            raise OverLimit

    def check_all(self, sizes: Dict[str, int], layout_of: dict[str, str], taken: tuple[int, int]) -> None:
        """Check the final sizes, together with what stays as it was. Raise OverLimit if a limit is exceeded."""
        total = sum(sizes.values()) if taken[1] or self.layouts else 0
        over = bool(taken[1]) and (total > self.whole.bytes or len(sizes) > self.whole.files)
        for name, table in self.layouts.items():
            own = [size for path, size in sizes.items() if layout_of.get(get_root(path)) == name]
            over = over or sum(own) > table.bytes or len(own) > table.files
        if over:
            self.taken = taken
            raise OverLimit

    def check_pack(self, size: int, carried: Dict[str, int]) -> None:
        """Check a finished pack. Raise OverLimit to pack less, Refusal if the store has no room for it."""
        room = self.whole.room
        if room is not None and size > room:
            raise Refusal(
                "limit-memory-bytes",
                "This export would add %s bytes; limits.memory_bytes leaves room for %s."
                % (format(size, ","), format(room, ",")),
            )
        if size > self.whole.packed_bytes:
            self.carried.update(carried)
            self.packed, self.carried_last = size, sum(carried.values())
            share = TIGHTER * max(0, 1 - self.rounds / (ROUNDS - 2))
            self.may_carry = int(self.carried_last * self.whole.packed_bytes / size * share)
            raise OverLimit

    def start_round(self) -> None:
        """Begin another round. Raise Refusal if there were too many: the memory changes faster than it is read."""
        self.rounds += 1
        if self.rounds >= ROUNDS:
            code, over = ("limit-packed", "limits.packed_bytes") if self.packed else ("limit-bytes", "its limits")
            raise Refusal(code, "This memory grows over %s faster than it can be read." % over, True)
