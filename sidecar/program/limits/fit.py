"""Hold an export to its limits: by what was found before anything is read, and by what it really was afterwards.

Some sizes show only when they are read (a database has part of its pages in its log, a pack is as small as it compresses).
Where they make it too much, the export begins anew and knows them.
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Any, Dict, NamedTuple

from sidecar.format.patterns import compile_patterns
from sidecar.format.refusal import Refusal
from sidecar.program.capture.walk import FoundPath

if TYPE_CHECKING:
    from sidecar.program.limits.trim import Dropped

ROUNDS = 8
MOST_FOUND = 2_000_000
TIGHTER = 0.97
"""Of what a pack may weigh, aimed at this share: what is dropped may have compressed better than the rest. Each round aims
lower, the last but one at nothing but what is hot, so that the last can say whether that is too much."""


class OverLimit(Exception):
    """It was more than it had looked like: begin again with what is known now."""


class Totals(NamedTuple):
    """How much some paths are."""

    bytes: int = 0
    paths: int = 0
    deepest: int = 0

    def with_added(self, size: int, depth: int, paths: int = 1) -> Totals:
        return Totals(self.bytes + size, self.paths + paths, max(self.deepest, depth))


class ExportLimits:
    """The limits of one export, and what its rounds have learnt."""

    def __init__(self, limits: dict[str, Any]) -> None:
        self.whole = limits
        self.layouts: Dict[str, dict[str, Any]] = limits["layouts"]
        trims = limits["trim"] or any(table["trim"] for table in self.layouts.values())
        self.most_found = MOST_FOUND if trims else limits["files"]
        self.largest = min([limits["file_bytes"]] + [table["file_bytes"] for table in self.layouts.values()])
        self.sizes: Dict[str, int] = {}
        self.taken = (0, 0)
        """Bytes and entries of layouts that were not asked for, and stay as they are."""
        self.carried: Dict[str, int] = {}
        """What each file weighed in the last pack it was in."""
        self.carried_last = self.may_carry = 0
        self.packed = 0
        self.rounds = 0

    def of(self, layout: str) -> dict[str, Any]:
        return self.layouts.get(layout, self.whole)

    def holds(self, found: list[FoundPath], steady: Dict[str, Totals]) -> bool:
        """Whether all of this, and what is steady, is within the limits by names and sizes, as far as is known by now."""
        if self.rounds:
            return False
        tallies = dict(steady)
        for one in found:
            layout, status = one.root.layout["name"], one.status
            size = status.st_size if stat.S_ISREG(status.st_mode) else 0
            if size > self.largest and size > self.of(layout)["file_bytes"]:
                return False
            tallies[layout] = tallies.get(layout, Totals()).with_added(size, one.path.count("/"))
        for layout, tally in tallies.items():
            limits = self.of(layout)
            if tally.bytes > limits["bytes"] or tally.paths > limits["files"] or tally.deepest > limits["depth"]:
                return False
        total, count = sum(tally.bytes for tally in tallies.values()), sum(tally.paths for tally in tallies.values())
        return bool(total <= self.whole["bytes"] and count <= self.whole["files"])

    def leaves_out(self, found: FoundPath) -> bool:
        """Whether a file is too large by itself, and is none that its layout knows: it is no reason to save nothing."""
        size, layout = self.sizes.get(found.path, found.status.st_size), found.root.layout
        limits = self.of(layout["name"])
        if size <= self.largest or size <= limits["file_bytes"] or not stat.S_ISREG(found.status.st_mode):
            return False
        if "file_bytes" in limits["trim"] or found.root.rules.names(found.relative):
            return False
        needed = layout.get("required", []) + layout.get("tiers", {}).get("hot", [])
        return not compile_patterns(needed).match(found.relative)

    def dropped(self, found: list[FoundPath]) -> dict[str, Dropped]:
        """What of this to leave out, by path. Raise Refusal when the rest is too much all the same."""
        from sidecar.program.limits.plan import plan_drops

        return plan_drops(self, found)

    def count(self, found: FoundPath, size: int, total: int) -> None:
        """What a file had when it was read, and all of them so far. Raise Over when that is too much."""
        if size != found.status.st_size:
            self.sizes[found.path] = size
        if total > self.whole["bytes"] or (
            size > self.largest and size > self.of(found.root.layout["name"])["file_bytes"]
        ):
            self.sizes[found.path] = size
            raise OverLimit

    def check_all(self, sizes: Dict[str, int], layout_of: dict[str, str], taken: tuple[int, int]) -> None:
        """What was read in the end, and what stays as it was. Raise Over when that is too much."""
        total = sum(sizes.values()) if taken[1] or self.layouts else 0
        over = taken[1] and (total > self.whole["bytes"] or len(sizes) > self.whole["files"])
        for name, table in self.layouts.items():
            own = [size for path, size in sizes.items() if layout_of.get(path.split("/")[0]) == name]
            over = over or sum(own) > table["bytes"] or len(own) > table["files"]
        if over:
            self.taken = taken
            raise OverLimit

    def check_pack(self, size: int, carried: Dict[str, int]) -> None:
        """A finished pack and what is in it. Raise Over to pack less, Refusal when there is no room for it in the store."""
        room = self.whole["room"]
        if room is not None and size > room:
            raise Refusal(
                "limit-memory-bytes",
                "This export would add %s bytes; limits.memory_bytes leaves room for %s."
                % (format(size, ","), format(room, ",")),
            )
        if size > self.whole["packed_bytes"]:
            self.carried.update(carried)
            self.packed, self.carried_last = size, sum(carried.values())
            share = TIGHTER * max(0, 1 - self.rounds / (ROUNDS - 2))
            self.may_carry = int(self.carried_last * self.whole["packed_bytes"] / size * share)
            raise OverLimit

    def start_round(self) -> None:
        """Begin another round. Raise Refusal when there were too many: what is read does not hold still."""
        self.rounds += 1
        if self.rounds >= ROUNDS:
            code, over = ("limit-packed", "limits.packed_bytes") if self.packed else ("limit-bytes", "its limits")
            raise Refusal(code, "This memory grows over %s faster than it can be read." % over, True)
