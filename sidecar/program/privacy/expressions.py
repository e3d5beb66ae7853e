"""Regular expressions that are compiled when they are first used: compiling takes longer than searching most files."""

from __future__ import annotations

import re
from typing import Pattern


class Expression:
    """A regular expression for bytes. Call it to get it compiled."""

    __slots__ = ("_compiled", "text")

    def __init__(self, text: bytes) -> None:
        self.text = text
        self._compiled: Pattern[bytes] | None = None

    def __call__(self) -> Pattern[bytes]:
        if self._compiled is None:
            self._compiled = re.compile(self.text)
        return self._compiled
