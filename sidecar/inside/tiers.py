"""How much an agent needs a file: the order in which things are restored, and, from the end, dropped when there is too much.

A path that no tier of its layout names is ``warm``.
"""

from __future__ import annotations

from typing import Any

from .rules import compiled

HOT, WARM, COLD, REBUILDABLE = "hot", "warm", "cold", "rebuildable"
TIERS = (HOT, WARM, COLD, REBUILDABLE)


class Tiers:
    """The tiers of one layout, ready to ask."""

    def __init__(self, layout: dict[str, Any]) -> None:
        tiers = layout.get("tiers", {})
        self._matches = [(tier, compiled(tiers.get(tier, [])).match) for tier in TIERS]

    def of(self, relative: str) -> str:
        """The first tier that names this path, relative to its root."""
        return next((tier for tier, names in self._matches if names(relative)), WARM)
