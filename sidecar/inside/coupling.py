"""Paths that only make sense together: a size limit keeps all of them or none."""

from __future__ import annotations

from typing import Any, Iterable

from .rules import compiled


class Coupling:
    """The coupled sets of one layout, ready to ask."""

    def __init__(self, layout: dict[str, Any]) -> None:
        self._members = [compiled(row["paths"]).match for row in layout.get("coupled", [])]

    def sets(self, paths: Iterable[str]) -> list[list[str]]:
        """Groups of these paths, relative to their root, that must stay or go together. No path is in two groups."""
        names = list(paths)
        groups: list[list[str]] = []
        for member in self._members:
            group = dict.fromkeys(name for name in names if member(name))
            for other in [other for other in groups if not group.keys().isdisjoint(other)]:
                groups.remove(other)
                group.update(dict.fromkeys(other))
            if len(group) > 1:
                groups.append(list(group))
        return groups
