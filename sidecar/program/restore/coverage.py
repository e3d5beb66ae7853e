"""What the rules of a snapshot covered: a restore may remove nothing else.

Layouts learn. A snapshot made when a layout did not know a file says nothing about that file, so restoring it must not
remove the file. The manifest keeps the rules of each root by which the snapshot was made.
"""

from __future__ import annotations

from typing import Dict

from sidecar.format import protocol
from sidecar.format.patterns import Rules
from sidecar.format.roots import get_stem


class Coverage:
    """The rules of each root, by the layout's name for it. A root without recorded rules is covered as a whole."""

    def __init__(self, covered: Dict[str, protocol.Coverage]) -> None:
        self._rules = {
            name: Rules({"keep": rules.keep, "databases": [], "never": rules.left, "secrets": []})
            for name, rules in covered.items()
        }

    def has(self, root: str, relative: str) -> bool:
        """Return whether the snapshot's rules covered this path."""
        rules = self._rules.get(get_stem(root, self._rules))
        return rules is None or rules.allows(relative, False)
