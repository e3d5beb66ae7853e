"""The order in which a layout's memory is read first, as data: the steps of a brief."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sidecar.host.values import dataclass
from sidecar.layouts.sources import MESSAGE

DATE = "{date}"
_WORD = re.compile(r"\{(\w+)\}")
MOST_NEWEST = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class BriefStep:
    """What is read next. Within a tier, the steps of a layout follow each other; hot files of all layouts come first."""

    files: tuple[str, ...]
    """Patterns, from the root on, in the order of reading. ``{date}`` is a day."""
    kinds: tuple[str, ...] = ()
    """Only records of these kinds. Default: all but messages."""
    sections: tuple[str, ...] = ()
    """Only sections below headings that begin so, in this order."""
    newest: int = 0
    """Only so many records, the newest first. Default: all, in the order of the file; of a database 20."""
    days: int = 0
    """Only the files of so many days, the newest first: for ``{date}``, counted back from the snapshot. Default: 1."""
    tokens: int = 0
    """Of the budget at most so much. Default: all of it."""
    pointed: bool = False
    """Only files in a folder that one of the layout's ``pointers`` names."""
    same_project: bool = False
    """Only records of the project that the first record before this step is of, if it is of one."""


def find_brief_faults(steps: tuple[BriefStep, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield what is wrong with the steps of a brief, each with its position in the table."""
    for number, step in enumerate(steps):
        at = ("brief", number)
        if not step.files:
            yield (*at, "files"), "brief needs the files that a step is about."
        for pattern in step.files:
            if not pattern or pattern.startswith("/") or ".." in pattern.split("/"):
                yield (*at, "files"), f"{pattern!r} is not a pattern relative to the root."
            if others := [word for word in _WORD.findall(pattern) if word != "date"]:
                yield (*at, "files"), f"{pattern!r}: '{{{others[0]}}}' stands for nothing; only '{DATE}' does."
        for key in ("newest", "days", "tokens"):
            if not 0 <= getattr(step, key) <= (MOST_NEWEST if key != "tokens" else 1_000_000):
                yield (*at, key), f"brief: {key} must be a number from 0 on, and not that large."
        if step.days and not any(DATE in pattern for pattern in step.files):
            yield (*at, "days"), f"brief: days is about files with '{DATE}' in their pattern."
        if MESSAGE in step.kinds:
            yield (*at, "kinds"), "brief: messages are never part of a brief."
