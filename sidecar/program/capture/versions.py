"""The version of the program that a layout's memory belongs to, if the program says it."""

from __future__ import annotations

import glob
import json
import os
import re
from typing import Any

from sidecar.format.patterns import compile_patterns
from sidecar.program.capture.roots import Root, Surroundings, list_own_places
from sidecar.program.sqlite.backup import query_number

LONGEST = 1 << 20


def find_version(layout: dict[str, Any], home: str) -> str:
    """Return the highest version installed in this sandbox; "" if none is found."""
    rule = layout.get("version")
    if not rule:
        return ""
    moved, usual = list_own_places(rule, Surroundings(home))
    found = []
    for place in moved[:1] or usual:
        for pattern in rule["files"]:
            for path in glob.glob(os.path.join(glob.escape(place), pattern)):
                try:
                    with open(path, encoding="utf-8") as file:
                        found.append(json.loads(file.read(LONGEST))["version"])
                except (OSError, ValueError, KeyError, TypeError, RecursionError):
                    continue
    return max(
        (text for text in found if isinstance(text, str) and text[:1].isdecimal()), key=parse_version, default=""
    )


def parse_version(text: str) -> tuple[list[int], bool, str]:
    """Return a sort key for versions: "9.1" before "10.0-beta" before "10.0"."""
    core, dash, rest = text.partition("-")
    return [int(number) for number in re.findall(r"\d{1,9}", core)], not dash, rest


def describe_older_schema(root: Root, relative: str, new: str) -> str:
    """Return a warning if the database in place has an older schema than the ``new`` one: its program may be older too.
    Else ""."""
    old = os.path.join(root.folder, relative)
    for name, query in root.layout.get("schemas", {}).items() if os.path.isfile(old) else ():
        if compile_patterns([name]).match(relative):
            theirs, ours = query_number(new, query), query_number(old, query)
            if 0 < ours < theirs:
                return (
                    "%s/%s has schema %d; the one that was here had %d. An older %s may be installed here, which would damage"
                    " this memory: see that it is up to date before it is used."
                    % (root.name, relative, theirs, ours, root.layout["name"])
                )
    return ""
