"""Which names are memory: a layout's patterns, compiled.

``*`` and ``?`` stay within one part of a path, ``**`` spans any number of parts, ``{a,b}`` is either. A ``keep`` pattern is
anchored at the root. A pattern without a slash under ``never`` or ``secrets`` matches at any depth, and one that ends in
a slash a folder with all it holds.
"""

from __future__ import annotations

import re
from typing import Any, Iterable, Pattern


def alternatives(pattern: str) -> list[str]:
    """A pattern's braces written out: "a{b,c}" -> ["ab", "ac"]."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if not found:
        return [pattern]
    head, tail = pattern[: found.start()], pattern[found.end() :]
    return [full for choice in found.group(1).split(",") for full in alternatives(head + choice + tail)]


def _part(pattern: str) -> str:
    return "".join("[^/]*" if c == "*" else "[^/]" if c == "?" else re.escape(c) for c in pattern)


def _regex(pattern: str, anywhere: bool) -> str:
    folder = pattern.endswith("/")
    parts = pattern.strip("/").split("/")
    out = "(?:.*/)?" if anywhere and len(parts) == 1 else ""
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if part == "**":
            out += ".+" if last else "(?:.*/)?"
        else:
            out += _part(part) + ("" if last else "/")
    return out + ("(?:/.*)?" if folder else "")


def compiled(patterns: Iterable[str], anywhere: bool = False) -> Pattern[str]:
    """One expression that fully matches whatever any of the patterns names (nothing, when there are none)."""
    texts = [_regex(full, anywhere) for pattern in patterns for full in alternatives(pattern)]
    return re.compile("(?:" + "|".join(texts) + r")\Z" if texts else r"(?!)", re.DOTALL)


class Rules:
    """The patterns of one layout, ready to ask."""

    def __init__(self, layout: dict[str, Any]) -> None:
        keep = [full for pattern in layout["keep"] + layout["databases"] for full in alternatives(pattern)]
        self.keep = compiled(keep).match
        self.database = compiled(layout["databases"]).match
        self.never = compiled(layout["never"], anywhere=True).match
        self.secret = compiled(layout["secrets"], anywhere=True).match
        self.careful = compiled(layout.get("careful", []), anywhere=True).match
        self.filters: dict[str, list[str]] = layout.get("filters", {})
        self._emptied = [(compiled([name]).match, tables) for name, tables in layout.get("emptied", {}).items()]
        self._folders = [
            [re.compile(_part(p) + r"\Z", re.DOTALL) if p != "**" else None for p in k.split("/")] for k in keep
        ]

    def allows(self, relative: str, folder: bool) -> bool:
        """Whether a path is memory: kept, and neither it nor a folder it is in ever forbidden."""
        parts = relative.split("/")
        ways = ["/".join(parts[: number + 1]) for number in range(len(parts))]
        if any(self.never(way) or self.secret(way) for way in ways):
            return False
        return bool(self.keep(relative + "/x" if folder else relative))

    def emptied(self, relative: str) -> list[str]:
        """The tables of a database that hold secrets."""
        return [table for names, tables in self._emptied if names(relative) for table in tables]

    def may_hold(self, folder: str) -> bool:
        """Whether anything kept can lie below this folder: a walk need not enter others."""
        parts = folder.split("/")
        return any(self._leads(wanted, parts) for wanted in self._folders)

    @staticmethod
    def _leads(wanted: list[Pattern[str] | None], parts: list[str]) -> bool:
        for number, part in enumerate(parts):
            if number >= len(wanted) - 1:
                return number < len(wanted) and wanted[number] is None
            expression = wanted[number]
            if expression is None:
                return True
            if not expression.match(part):
                return False
        return True
