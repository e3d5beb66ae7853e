"""Which version of its program a layout's memory belongs to, where the program says so."""

from __future__ import annotations

import glob
import json
import os
import re
from typing import Any

from .roots import own_places

LONGEST = 1 << 20


def version_here(layout: dict[str, Any], home: str) -> str:
    """The highest version installed here; "" when none is to be seen."""
    rule = layout.get("version")
    if not rule:
        return ""
    moved, usual = own_places(rule, home)
    found = []
    for place in moved[:1] or usual:
        for pattern in rule["files"]:
            for path in glob.glob(os.path.join(glob.escape(place), pattern)):
                try:
                    with open(path, encoding="utf-8") as file:
                        found.append(json.loads(file.read(LONGEST))["version"])
                except (OSError, ValueError, KeyError, TypeError, RecursionError):
                    continue
    return max((text for text in found if isinstance(text, str) and text[:1].isdigit()), key=rank, default="")


def rank(text: str) -> tuple[list[int], bool, str]:
    """Versions in order: "9.1" before "10.0-beta" before "10.0"."""
    core, dash, rest = text.partition("-")
    return [int(number) for number in re.findall(r"\d{1,9}", core)], not dash, rest
