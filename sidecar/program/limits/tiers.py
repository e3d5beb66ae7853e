"""Tiers: how much an agent needs a file. They give the order of a restore, and in reverse what is dropped over a limit.

A path that no tier of its layout names is ``warm``, or ``cold`` in a folder that the memory system owns. Besides
patterns there are daily files, which get colder with time, the session written to last, files that point at a folder,
and sets of paths that are kept or dropped together.
"""

from __future__ import annotations

import datetime
import json
import os
import re
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Pattern, Tuple

from sidecar.format.patterns import Rules, compile_patterns, expand_braces
from sidecar.format.refusal import Refusal
from sidecar.program import places

HOT, WARM, COLD, REBUILDABLE = "hot", "warm", "cold", "rebuildable"
TIERS = (HOT, WARM, COLD, REBUILDABLE)
WARM_DAYS = 1
EPOCH = datetime.date(1970, 1, 1).toordinal()
DAY_NS = 86_400 * 10**9
LONGEST_POINTER = 1 << 20
_WORD = re.compile(r"\{(\w+)\}")
_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)")


class FileSet(NamedTuple):
    """Paths that are kept or dropped together, with the tier of the one that is needed most."""

    tier: str
    paths: List[str]


class TierRules:
    """The tiers of one layout, or of one root of it if its ``folder`` is given.

    Without a folder, pointer files and the active session are not known.
    """

    def __init__(self, layout: dict[str, Any], folder: str = "", owned: bool = False) -> None:
        tiers = layout.get("tiers", {})
        self._others = COLD if owned else WARM
        self._matches = [(tier, compile_patterns(tiers.get(tier, [])).match) for tier in TIERS]
        self._dated = [_compile_bound(pattern) for pattern in tiers.get("dated", [])]
        self._coupled = [[_compile_bound(p) for p in coupled["paths"]] for coupled in layout.get("coupled", [])]
        self._active = (
            {_find_newest(folder, _iterate_files(folder, layout, tiers.get("active", [])))} - {""} if folder else set()
        )
        self._pointed: list[tuple[str, str]] = []
        for pointer in layout.get("pointers", []) if folder else []:
            self._pointed += _read_pointers(folder, pointer, sorted(_iterate_files(folder, layout, [pointer["file"]])))

    def of(self, relative: str) -> str:
        """Return the first tier that names this path, which is relative to its root."""
        if relative in self._active or any(_is_in(relative, folder) for _, folder in self._pointed):
            return HOT
        if self._matches[0][1](relative):
            return HOT
        day = self._find_day(relative)
        if day is not None:
            return _choose_day_tier(day)
        return next((tier for tier, names in self._matches if names(relative)), self._others)

    def time_of(self, relative: str, mtime: int) -> int:
        """Return how new a file is: a daily file by the date in its name, others by their ``mtime``."""
        day = _parse_date(self._find_day(relative) or "")
        return mtime if day is None else (day.toordinal() - EPOCH) * DAY_NS

    def _find_day(self, relative: str) -> str | None:
        """Return the date in a daily file's name; ``None`` if it is not a daily file."""
        found = next(filter(None, (pattern.match(relative) for pattern in self._dated)), None)
        return found.groupdict().get("date", "") if found else None

    def sets(self, paths: Iterable[str]) -> list[FileSet]:
        """Return the sets of a root's paths that are kept or dropped together; each path is in at most one."""
        groups: Dict[Tuple[Any, ...], List[str]] = {}
        sides: Dict[Tuple[Any, ...], set[int]] = {}
        for path in paths:
            for group, side in self._find_groups(path):
                groups.setdefault(group, []).append(path)
                sides.setdefault(group, set()).add(side)
        whole = [members for group, members in groups.items() if len(sides[group]) > 1]
        return [FileSet(self._find_hottest(members), members) for members in _join_groups(whole)]

    def _find_groups(self, path: str) -> list[tuple[tuple[Any, ...], int]]:
        """Return the groups a path belongs to, and which side of each it is."""
        found: list[tuple[tuple[Any, ...], int]] = []
        for number, patterns in enumerate(self._coupled):
            for side, pattern in enumerate(patterns):
                bound = pattern.match(path)
                if bound:
                    found.append(((number, *sorted(bound.groupdict().items())), side))
        for file, folder in self._pointed:
            if path == file or _is_in(path, folder):
                found.append((("pointer", file), int(path != file)))
        return found

    def _find_hottest(self, paths: list[str]) -> str:
        return min((self.of(path) for path in paths), key=TIERS.index)


def _compile_bound(pattern: str) -> Pattern[str]:
    """Compile a pattern in which ``{word}`` stands for some text within one part of a path, the same at each occurrence."""
    words = dict.fromkeys(_WORD.findall(pattern))
    text = compile_patterns(expand_braces(_WORD.sub("\0\\1\0", pattern))).pattern
    for word in words:
        mark = re.escape("\0") + word + re.escape("\0")
        shape = _DATE.pattern.replace("(", "").replace(")", "") if word == "date" else "[^/]+"
        text = text.replace(mark, "(?P<%s>%s)" % (word, shape), 1).replace(mark, "(?P=%s)" % word)
    return re.compile(text, re.DOTALL)


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def _choose_day_tier(text: str) -> str:
    """Return the tier of a daily file. Today's and yesterday's by this sandbox's clock are warm, and so are those from
    the future."""
    day = _parse_date(text)
    if day is None:
        return WARM
    return WARM if (datetime.date.today() - day).days <= WARM_DAYS else COLD


def _parse_date(text: str) -> datetime.date | None:
    try:
        return datetime.date(*map(int, text.split("-")))
    except (TypeError, ValueError):
        return None


def _iterate_files(folder: str, layout: dict[str, Any], patterns: list[str]) -> Iterator[str]:
    """Yield the files of a root that these patterns name and its layout does not leave out."""
    rules = Rules(dict(layout, keep=patterns, databases=[]))
    for place, folders, files in os.walk(folder) if patterns else ():
        prefix = os.path.relpath(place, folder) + "/" if place != folder else ""
        folders[:] = [name for name in folders if rules.may_hold(prefix + name)]
        yield from (prefix + name for name in files if rules.allows(prefix + name, False))


def _find_newest(folder: str, paths: Iterable[str]) -> str:
    """Return the file written to last."""
    newest, when = "", -1.0
    for path in paths:
        try:
            changed = os.lstat(os.path.join(folder, path)).st_mtime
        except OSError:
            continue
        if changed > when:
            newest, when = path, changed
    return newest


def _read_pointers(folder: str, pointer: dict[str, Any], paths: list[str]) -> list[tuple[str, str]]:
    """Return each pointer file with the folder it names. A pointer that leads out of its folder in the root is ignored."""
    found = []
    for path in paths:
        try:
            value = json.loads(places.read_file(os.path.join(folder, path), LONGEST_POINTER))
            named = next(filter(None, (value.get(key) for key in pointer["keys"])), "")
            target = os.path.normpath(pointer["folder"].replace("{}", named))
        except (OSError, Refusal, ValueError, AttributeError, TypeError, RecursionError):
            continue
        top = pointer["folder"].split("{}")[0]
        if named and target.startswith(top) and target.rstrip("/") != top.rstrip("/"):
            found.append((path, target))
    return found


def _join_groups(groups: list[list[str]]) -> list[list[str]]:
    """Join groups that share a path (union-find)."""
    above: dict[str, str] = {}

    def top(path: str) -> str:
        while above.setdefault(path, path) != path:
            above[path] = path = above[above[path]]
        return path

    for members in groups:
        first = top(members[0])
        for path in members:
            above[top(path)] = first
    joined: dict[str, list[str]] = {}
    for path in above:
        joined.setdefault(top(path), []).append(path)
    return list(joined.values())
