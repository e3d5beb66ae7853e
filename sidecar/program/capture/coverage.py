"""What the rules of a snapshot covered: nothing else may go when it is restored.

Layouts learn. A snapshot that was made when a layout did not know of a file says nothing about that file, so a restore of it
must not take the file away. The manifest keeps the rules it was made by, for each root.
"""

from __future__ import annotations

from typing import Any, Dict, Optional

from sidecar.format.patterns import Rules
from sidecar.program.capture.roots import split_number


class Coverage:
    """The rules of each root, by its layout's name for it. What nothing is known of is covered as a whole."""

    def __init__(self, covered: Optional[Dict[str, Any]]) -> None:
        self._rules = {
            name: Rules({"keep": rules["keep"], "databases": [], "never": rules["left"], "secrets": []})
            for name, rules in (covered or {}).items()
        }

    def has(self, root: str, relative: str) -> bool:
        rules = self._rules.get(root) or self._rules.get(split_number(root)[0])
        return rules is None or rules.allows(relative, False)
