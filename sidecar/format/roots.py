"""Roots as a memory stores them: their names, the paths below them, and where their folders were.

A root is one folder that contains memory, under a name that is stored: ``claude-mem``, ``project``, ``project-2``. Every
path of a memory begins with the name of its root. Absolute paths are never stored in names; a ``hint`` says where the
folder was (``~/app``, or an absolute path outside the home).
"""

from __future__ import annotations

from typing import Container

MOST_PROJECTS = 5000
"""The highest number a project's root can have."""


def get_root(path: str) -> str:
    """Return the name of the root that a path of a memory is in."""
    return path.partition("/")[0]


def split_number(name: str) -> tuple[str, int]:
    """Split a root's name into the layout's name for it and its number: ``project-2`` is the second ``project``; 0 if
    none.

    Names come from sandboxes and stores, so digits of other scripts and numbers that are too large do not count.
    """
    stem, _, digits = name.rpartition("-")
    if stem and digits.isascii() and digits.isdecimal() and len(digits) < 6 and digits[0] != "0":
        if 1 < int(digits) <= MOST_PROJECTS:
            return stem, int(digits)
    return name, 0


def get_stem(name: str, known: Container[str]) -> str:
    """Return the layout's name for a root: the name itself if it is one of those ``known``, else without its number."""
    return name if name in known else split_number(name)[0]


def add_number(stem: str, number: int) -> str:
    """Return the name of the root of the n-th project."""
    return stem if number == 1 else "%s-%d" % (stem, number)


def make_hint(folder: str, home: str) -> str:
    """Return how a folder is written in a manifest: relative to the home as ``~/…`` if it is in it."""
    if folder == home:
        return "~"
    return "~" + folder[len(home) :] if folder.startswith(home.rstrip("/") + "/") else folder


def resolve_hint(hint: str, home: str) -> str:
    """Return the path that a hint stands for in this home."""
    return home + hint[1:] if hint == "~" or hint.startswith("~/") else hint


def strip_below(path: str, below: str) -> str:
    """Return the folder of a project, given that of a root which is ``below`` it (``.cm``); the path itself if it is not
    there."""
    return (path[: -len(below) - 1] or "/") if below and path.endswith("/" + below) else path
