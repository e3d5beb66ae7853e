"""Where a layout's roots are in this sandbox.

A root is one folder that memory lives in, under a name that travels: ``claude-mem``, ``project``, ``project-2``. Only names
travel, never absolute paths; ``hint`` says where it was (``~/app``, or an absolute path outside the home).
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from .refusal import Refusal
from .rules import Rules


class Root(NamedTuple):
    """A named root, the folder it is here, and the layouts that read it (a project can hold several)."""

    name: str
    folder: str
    hint: str
    layout: dict[str, Any]
    rules: Rules

    @property
    def whole(self) -> bool:
        """Whether the folder belongs to the memory system alone, so that what is left out is worth a word."""
        return bool(not self.layout["roots"][0].get("project"))


def hint_for(folder: str, home: str) -> str:
    if folder == home:
        return "~"
    return "~" + folder[len(home) :] if folder.startswith(home.rstrip("/") + "/") else folder


def at_hint(hint: str, home: str) -> str:
    return home + hint[1:] if hint == "~" or hint.startswith("~/") else hint


def _own_folder(spec: dict[str, Any], home: str) -> str:
    """The folder of a root that is not a project: its variable, else the first usual place that holds it, else the first."""
    places = [os.path.join(home, at_hint(path, home)) for path in spec["paths"]]
    moved = [os.environ[name] for name in spec.get("env", []) if os.environ.get(name)]
    if moved:
        return os.path.realpath(os.path.join(home, os.path.expanduser(moved[0])))
    marker = spec.get("holds", "")
    found = [place for place in places if os.path.isdir(os.path.join(place, marker))]
    return os.path.realpath((found or places)[0])


def _projects(named: list[str] | None, home: str) -> list[str]:
    folders = [os.getcwd(), home] if named is None else [os.path.join(home, at_hint(path, home)) for path in named]
    return list(dict.fromkeys(os.path.realpath(folder) for folder in folders))


def find_roots(layouts: list[dict[str, Any]], projects: list[str] | None, home: str) -> list[Root]:
    """Every root of these layouts that exists here, in a stable order. A layout whose roots are absent adds none."""
    roots: list[Root] = []
    for layout in layouts:
        rules = Rules(layout)
        for spec in layout["roots"]:
            if not spec.get("project"):
                folder = _own_folder(spec, home)
                if os.path.isdir(folder):
                    roots.append(Root(spec["name"], folder, hint_for(folder, home), layout, rules))
                continue
            number = 0
            for project in _projects(projects, home):
                folder = os.path.realpath(os.path.join(project, spec.get("below", "")))
                if os.path.isdir(folder) and _holds_any(folder, layout):
                    number += 1
                    name = spec["name"] if number == 1 else "%s-%d" % (spec["name"], number)
                    roots.append(Root(name, folder, hint_for(folder, home), layout, rules))
    return roots


def _holds_any(folder: str, layout: dict[str, Any]) -> bool:
    firsts = {pattern.split("/")[0] for pattern in layout["keep"] + layout["databases"]}
    rules = [Rules({"keep": [first], "databases": [], "never": [], "secrets": []}) for first in firsts]
    with os.scandir(folder) as names:
        return any(rule.keep(entry.name) for entry in names for rule in rules)


def place_roots(
    wanted: list[dict[str, str]], layouts: list[dict[str, Any]], projects: list[str] | None, home: str
) -> list[Root]:
    """Where a snapshot's roots belong here: by their layout's own rule, the n-th project for the n-th project root.

    Without projects, a project root goes where it was relative to the home, or, when it was elsewhere, to the working folder.
    Raise Refusal when a layout is not known.
    """
    specs = {spec["name"]: (layout, spec) for layout in layouts for spec in layout["roots"]}
    given = _projects(projects, home) if projects is not None else []
    roots: list[Root] = []
    for root in wanted:
        if ".." in root["hint"].split("/"):
            raise Refusal("unsafe-path", "The snapshot's root %r points out of its place." % root["name"])
        base, _, number = root["name"].rpartition("-")
        key = base if number.isdigit() and base in specs else root["name"]
        if key not in specs:
            raise Refusal("unknown-layout", "The snapshot has a root %r that no layout here knows." % root["name"])
        layout, spec = specs[key]
        if not spec.get("project"):
            folder = _own_folder(spec, home)
        else:
            order = int(number) - 1 if key != root["name"] else 0
            below = spec.get("below", "")
            if order < len(given):
                folder = os.path.realpath(os.path.join(given[order], below))
            elif root["hint"].startswith("~"):
                folder = os.path.realpath(at_hint(root["hint"], home))
            else:
                folder = os.path.realpath(os.path.join(os.getcwd(), below))
        roots.append(Root(root["name"], folder, root["hint"], layout, Rules(layout)))
    folders = [root.folder for root in roots]
    if len(set(folders)) != len(folders):
        raise Refusal("roots-collide", "Two roots of the snapshot would land in one folder; name each with --project.")
    return roots
