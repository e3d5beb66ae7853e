"""Hold an export to its limits: by what was found before anything is read, and by what it really was afterwards.

Some sizes show only when they are read (a database has part of its pages in its log, a pack is as small as it compresses).
Where they make it too much, the export begins anew and knows them.
"""

from __future__ import annotations

import os
import stat
from typing import Any, Dict, Iterable

from . import databases, filters
from .coupling import Coupling
from .refusal import Refusal
from .rules import compiled
from .tiers import HOT, Tiers
from .trimming import Dropped, Limit, Row, plan
from .walk import Found, link_target

ROUNDS = 8
MOST_FOUND = 2_000_000
TIGHTER = 0.97
"""Of what a pack may weigh, aimed at this share: what is dropped may have compressed better than the rest."""


class Over(Exception):
    """It was more than it had looked like: begin again with what is known now."""


class Fit:
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
        self.may_carry = 0
        self.packed = 0
        self.rounds = 0

    def of(self, layout: str) -> dict[str, Any]:
        return self.layouts.get(layout, self.whole)

    def dropped(self, found: list[Found]) -> dict[str, Dropped]:
        """What of this to leave out, by path; nothing, as a rule. Raise Refusal when the rest is too much all the same."""
        whole = self.whole
        sizes = [one.status.st_size for one in found if stat.S_ISREG(one.status.st_mode)]
        if (
            not self.rounds
            and not self.layouts
            and sum(sizes) <= whole["bytes"]
            and max(sizes, default=0) <= whole["file_bytes"]
            and len(found) <= whole["files"]
            and max((one.path.count("/") for one in found), default=0) <= whole["depth"]
        ):
            return {}
        rules = {one.root.layout["name"]: _Tiers(one.root.layout) for one in found}
        tiers = {one.path: rules[one.root.layout["name"]] for one in found}
        try:
            planned = plan(
                list(self._rows(found)),
                self._limits(rules),
                lambda path: tiers[path].of(path.partition("/")[2]),
                _sets(found),
            )
        except Refusal as refusal:
            told = [databases.mostly_free(one.path, one.place) for one in found if _may_be_database(one)]
            raise Refusal(refusal.code, " ".join([refusal.message] + [words for words in told if words])) from None
        return {row.path.rstrip("/"): row for row in planned}

    def count(self, found: Found, size: int, total: int) -> None:
        """What a file had when it was read, and all of them so far. Raise Over when that is too much."""
        if size != found.status.st_size:
            self.sizes[found.path] = size
        if total > self.whole["bytes"] or (
            size > self.largest and size > self.of(found.root.layout["name"])["file_bytes"]
        ):
            self.sizes[found.path] = size
            raise Over

    def check_all(self, sizes: Dict[str, int], layout_of: dict[str, str], taken: tuple[int, int]) -> None:
        """What was read in the end, and what stays as it was. Raise Over when that is too much."""
        total = sum(sizes.values()) if taken[1] or self.layouts else 0
        over = taken[1] and (total > self.whole["bytes"] or len(sizes) > self.whole["files"])
        for name, table in self.layouts.items():
            own = [size for path, size in sizes.items() if layout_of.get(path.split("/")[0]) == name]
            over = over or sum(own) > table["bytes"] or len(own) > table["files"]
        if over:
            self.taken = taken
            raise Over

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
            self.packed, self.carried = size, carried
            self.may_carry = int(sum(carried.values()) * self.whole["packed_bytes"] / size * TIGHTER)
            raise Over

    def again(self) -> None:
        """Begin another round. Raise Refusal when there were too many: what is read does not hold still."""
        self.rounds += 1
        if self.rounds >= ROUNDS:
            raise Refusal("limit-bytes", "This memory grows over its limits faster than it can be read.", True)

    def _rows(self, found: Iterable[Found]) -> Iterable[Row]:
        for one in found:
            mode, layout = one.status.st_mode, one.root.layout["name"]
            if stat.S_ISREG(mode):
                yield Row(one.path, layout, self._size(one), one.status.st_mtime_ns)
            elif stat.S_ISDIR(mode):
                yield Row(one.path, layout, 0, one.status.st_mtime_ns, True)
            elif link_target(one.place, one.root, one.relative) is not None:
                yield Row(one.path, layout, 0, one.status.st_mtime_ns)

    def _size(self, one: Found) -> int:
        if one.path in self.sizes:
            return self.sizes[one.path]
        try:
            drop = one.root.rules.filters.get(one.relative)
            if drop is not None:
                with open(one.place, "rb") as file:
                    return len(filters.filtered(file.read(self.largest), drop) or b"")
            return databases.size(one.place) if _may_be_database(one) else one.status.st_size
        except OSError:
            return one.status.st_size

    def _limits(self, layouts: Iterable[str]) -> list[Limit]:
        whole, limits = self.whole, []
        for name in sorted(layouts):
            table, only = self.of(name), frozenset([name])
            own = "limits.layouts.%s." % name if name in self.layouts else "limits."
            says = {
                "file_bytes": "{path} has {have:,} bytes; {name} allows {most:,}.",
                "depth": "{path} is {have:,} parts deep; {name} allows {most:,}.",
                "bytes": "The files of layout %s have {have:,} bytes; {name} allows {most:,}." % name,
                "files": "Layout %s has {have:,} files, folders and links; {name} allows {most:,}." % name,
            }
            for key in ("file_bytes", "depth") + (("bytes", "files") if name in self.layouts else ()):
                limits.append(_limit(key, own, table, key in ("file_bytes", "depth"), only, 0, says[key]))
        files = "This memory has {have:,} files, folders and links; {name} allows {most:,}."
        limits.append(_limit("bytes", "limits.", whole, False, None, self.taken[0]))
        limits.append(_limit("files", "limits.", whole, False, None, self.taken[1], files))
        if self.packed:
            carried, says_packed = self.carried, "Its pack has %s bytes; {name} allows %s."
            limits.append(
                Limit(
                    "limits.packed_bytes",
                    "limit-packed",
                    self.may_carry,
                    "packed_bytes" in whole["trim"],
                    lambda row: carried.get(row.path, 0),
                    says=says_packed % (format(self.packed, ","), format(whole["packed_bytes"], ",")),
                )
            )
        return limits


WEIGHTS = {
    "bytes": lambda row: row.size,
    "file_bytes": lambda row: row.size,
    "files": lambda row: 1,
    "depth": lambda row: row.path.count("/"),
}


def _limit(key: str, own: str, table: dict[str, Any], each: bool, layouts: Any, taken: int, says: str = "") -> Limit:
    code = "limit-" + key.replace("_", "-")
    limit = Limit(own + key, code, table[key], key in table["trim"], WEIGHTS[key], each, layouts, taken)
    return limit._replace(says=says) if says else limit


class _Tiers:
    """A layout's tiers; what it cannot do without is hot, whatever they say."""

    def __init__(self, layout: dict[str, Any]) -> None:
        self._tiers = Tiers(layout)
        self._required = compiled(layout.get("required", [])).match

    def of(self, relative: str) -> str:
        return HOT if self._required(relative) else self._tiers.of(relative)


def _sets(found: Iterable[Found]) -> list[list[str]]:
    by_root: Dict[str, list[Found]] = {}
    for one in found:
        by_root.setdefault(one.root.name, []).append(one)
    return [
        [name + "/" + relative for relative in group]
        for name, rows in by_root.items()
        for group in Coupling(rows[0].root.layout).sets([row.relative for row in rows])
    ]


def _may_be_database(one: Found) -> bool:
    if not stat.S_ISREG(one.status.st_mode):
        return False
    return bool(one.root.rules.database(one.relative)) or os.path.exists(one.place + databases.WAL_TAIL)
