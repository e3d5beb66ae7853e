"""Which places of a machine a run may touch.

In a sandbox of a provider that is the sandbox's own business: there is nothing else in it. A folder on this machine
(``local:``) is a sandbox among other things, and a link in it may lead to them. There the sidecar says beneath which folders
every root must lie, after all links were followed, and what no root may be in: its store, its keys, its own files.
"""

from __future__ import annotations

import os
from typing import Any, Dict, FrozenSet, List, NamedTuple, Optional

from .refusal import Refusal


class Containment(NamedTuple):
    """Real paths. ``beneath``: ``None`` when roots may be anywhere. ``apart``: ends in ``*`` where it is a beginning."""

    beneath: Optional[List[str]]
    apart: FrozenSet[str]

    def check(self, name: str, place: str) -> None:
        """Raise Refusal unless ``name`` may be at this real path."""
        if any(is_in(place, other) for other in self.apart):
            raise Refusal(
                "root-overlaps",
                "%s is %s here, where the sidecar keeps its own files or other memories." % (name, place),
            )
        if self.beneath is not None and not any(is_in(place, folder) for folder in self.beneath):
            raise Refusal(
                "root-outside", "%s is %s here, outside of this sandbox: beyond %s." % (name, place, self.beneath[0])
            )

    def holds(self, place: str) -> bool:
        """Whether a root may be at this real path."""
        try:
            self.check("", place)
            return True
        except Refusal:
            return False

    def may_lead_to_project(self, place: str) -> bool:
        """Whether a project lies in this folder, or will once it is made. The home, which comes first, is always there."""
        return self.beneath is None or any(is_in(folder, place) for folder in self.beneath[1:])

    def inner(self, folder: str) -> FrozenSet[str]:
        """What lies in this folder and is not for memories."""
        return frozenset(place for place in self.apart if is_in(place, folder))


def parse_containment(request: Dict[str, Any], *own: str) -> Containment:
    """What a request says of it; ``own`` is the sidecar's folder in this sandbox, where no memory is."""
    told = request.get("contained") or {"beneath": None, "apart": []}
    return Containment(told["beneath"], frozenset([*own, *told["apart"]]))


def is_apart(place: str, apart: FrozenSet[str]) -> bool:
    """Whether this very path is one of those that are not for memories."""
    return place in apart or any(place.startswith(one[:-1]) for one in apart if one.endswith("*"))


def is_in(place: str, folder: str) -> bool:
    """Whether a real path is that folder or lies in it; of one that ends in ``*``, whether it begins so."""
    if folder.endswith("*"):
        return place.startswith(folder[:-1])
    return place == folder or place.startswith(folder.rstrip(os.sep) + os.sep)
