"""Determine which limits are exceeded and what to leave out. Needed only if a limit is reached, or set for a layout."""

from __future__ import annotations

import os
import stat
from typing import Any, Dict, Iterable

from sidecar.format.patterns import compile_patterns
from sidecar.format.protocol import LimitTable
from sidecar.format.refusal import Refusal
from sidecar.program import places
from sidecar.program.capture.roots import Root
from sidecar.program.capture.walk import FoundPath, read_link_target
from sidecar.program.limits.fit import ExportLimits
from sidecar.program.limits.tiers import HOT, TierRules
from sidecar.program.limits.trim import Dropped, Limit, Row, plan_trimming
from sidecar.program.privacy import settings_files
from sidecar.program.sqlite import backup


def plan_drops(fit: ExportLimits, found: list[FoundPath]) -> dict[str, Dropped]:
    """Return what to leave out, by path. Raise Refusal if the rest is still over a limit."""
    roots = {one.root.name: _Needs(one.root) for one in found}
    by_path = {one.path: one for one in found}
    try:
        dropped = plan_trimming(
            _iterate_rows(fit, found, roots),
            _build_limits(fit, {one.root.layout["name"] for one in found}),
            lambda path: roots[by_path[path].root.name].of(by_path[path].relative),
            _find_sets(found, roots),
        )
    except Refusal as refusal:
        told = [backup.describe_free_pages(one.path, one.place) for one in found if _may_be_database(one)]
        raise Refusal(refusal.code, " ".join([refusal.message] + [words for words in told if words])) from None
    return {row.path.rstrip("/"): row for row in dropped}


def _iterate_rows(fit: ExportLimits, found: Iterable[FoundPath], roots: Dict[str, _Needs]) -> Iterable[Row]:
    """Yield what each path weighs; links that lead out do not count."""
    for one in found:
        mode, layout = one.status.st_mode, one.root.layout["name"]
        if stat.S_ISREG(mode):
            time = roots[one.root.name].time_of(one.relative, one.status.st_mtime_ns)
            yield Row(one.path, layout, _measure(fit, one), time)
        elif stat.S_ISDIR(mode):
            yield Row(one.path, layout, 0, one.status.st_mtime_ns, True)
        elif read_link_target(one.place, one.root, one.relative) is not None:
            yield Row(one.path, layout, 0, one.status.st_mtime_ns)


def _measure(fit: ExportLimits, one: FoundPath) -> int:
    """Return a file's size as it will be exported, if that can be known without copying it."""
    if one.path in fit.sizes:
        return fit.sizes[one.path]
    try:
        drop = one.root.rules.filters.get(one.relative)
        if drop is not None:
            with open(places.open_file(one.place), "rb") as file:
                return len(settings_files.drop_keys(file.read(fit.largest), drop) or b"")
        return backup.measure(one.place)[0] if _may_be_database(one) else one.status.st_size
    except OSError:
        return one.status.st_size


def _build_limits(fit: ExportLimits, layouts: Iterable[str]) -> list[Limit]:
    """Return all limits of the export, those of its layouts first."""
    whole, limits = fit.whole, []
    for name in sorted(layouts):
        table, only = fit.of(name), frozenset([name])
        own = "limits.layouts.%s." % name if name in fit.layouts else "limits."
        says = {
            "file_bytes": "{path} has {have:,} bytes; {name} allows {most:,}.",
            "depth": "{path} is {have:,} parts deep; {name} allows {most:,}.",
            "bytes": "The files of layout %s have {have:,} bytes; {name} allows {most:,}." % name,
            "files": "Layout %s has {have:,} files, folders and links; {name} allows {most:,}." % name,
        }
        for key in OF_EACH_FILE + (("bytes", "files") if name in fit.layouts else ()):
            limits.append(_build_limit(key, own, table, only, says=says[key]))
    files = "This memory has {have:,} files, folders and links; {name} allows {most:,}."
    limits.append(_build_limit("bytes", "limits.", whole, taken=fit.taken[0]))
    limits.append(_build_limit("files", "limits.", whole, taken=fit.taken[1], says=files))
    if fit.packed:
        carried, says_packed = fit.carried, "Its pack has %s bytes; {name} allows %s."
        limits.append(
            Limit(
                "limits.packed_bytes",
                "limit-packed",
                fit.may_carry,
                "packed_bytes" in whole.trim,
                lambda row: carried.get(row.path, 0),
                says=says_packed % (format(fit.packed, ","), format(whole.packed_bytes, ",")),
                surely=fit.carried_last,
            )
        )
    return limits


WEIGHTS = {
    "bytes": lambda row: row.size,
    "file_bytes": lambda row: row.size,
    "files": lambda row: 1,
    "depth": lambda row: row.path.count("/"),
}


OF_EACH_FILE = ("file_bytes", "depth")


def _build_limit(key: str, own: str, table: LimitTable, layouts: Any = None, taken: int = 0, says: str = "") -> Limit:
    code, each = "limit-" + key.replace("_", "-"), key in OF_EACH_FILE
    limit = Limit(own + key, code, getattr(table, key), key in table.trim, WEIGHTS[key], each, layouts, taken)
    return limit._replace(says=says) if says else limit


class _Needs:
    """The tiers of a root. What its layout requires is hot, whatever its tiers say."""

    def __init__(self, root: Root) -> None:
        self._tiers = TierRules(root.layout, root.folder, root.owned)
        self._required = compile_patterns(root.layout.get("required", [])).match
        self.sets = self._tiers.sets
        self.time_of = self._tiers.time_of

    def of(self, relative: str) -> str:
        return HOT if self._required(relative) else self._tiers.of(relative)


def _find_sets(found: Iterable[FoundPath], roots: Dict[str, _Needs]) -> list[list[str]]:
    """Return the sets of paths in the memory that are kept or dropped together."""
    by_root: Dict[str, Dict[str, str]] = {}
    for one in found:
        by_root.setdefault(one.root.name, {})[one.relative] = one.path
    return [
        [paths[relative] for relative in together.paths]
        for name, paths in by_root.items()
        for together in roots[name].sets(paths)
    ]


def _may_be_database(one: FoundPath) -> bool:
    """Return whether a file is a declared database, or has a write-ahead log beside it."""
    if not stat.S_ISREG(one.status.st_mode):
        return False
    return bool(one.root.rules.database(one.relative)) or os.path.exists(one.place + backup.WAL_TAIL)
