"""Where a layout's roots are in this sandbox.

A root is one folder that memory lives in, under a name that travels: ``claude-mem``, ``project``, ``project-2``. Only names
travel, never absolute paths; ``hint`` says where it was (``~/app``, or an absolute path outside the home).
"""

from __future__ import annotations

import os
from typing import Any, FrozenSet, Iterable, NamedTuple

from .containment import Containment
from .keys import Keys, paths_of
from .refusal import Refusal
from .rules import Rules, compiled

MOST_PROJECTS = 5000
"""As many folders as are looked into for projects."""


class Root(NamedTuple):
    """A named root, the folder it is here, and the layouts that read it (a project can hold several)."""

    name: str
    folder: str
    hint: str
    layout: dict[str, Any]
    rules: Rules
    whole: bool  # the folder belongs to the memory system alone, so that what is left out is worth a word
    keys: Keys = Keys()
    apart: FrozenSet[str] = frozenset()
    """What lies in it and is not for memories: the sidecar's own files."""

    def path(self, relative: str) -> str:
        """The travelling name of what is here at ``relative``."""
        return self.name + "/" + self.keys.stored(relative)


def numbered(name: str) -> tuple[str, int]:
    """The name a layout has for a root, and its number: ``project-2`` is the second ``project``. 0 for one without.

    Names come from sandboxes and stores: what is a digit in another script, or too large, is no number.
    """
    stem, _, digits = name.rpartition("-")
    if stem and digits.isascii() and digits.isdecimal() and len(digits) < 6 and digits[0] != "0":
        if 1 < int(digits) <= MOST_PROJECTS:
            return stem, int(digits)
    return name, 0


def hint_for(folder: str, home: str) -> str:
    if folder == home:
        return "~"
    return "~" + folder[len(home) :] if folder.startswith(home.rstrip("/") + "/") else folder


def at_hint(hint: str, home: str) -> str:
    return home + hint[1:] if hint == "~" or hint.startswith("~/") else hint


def own_places(spec: dict[str, Any], home: str, projects: list[str] | None = None) -> tuple[list[str], list[str]]:
    """The places that variables name, and the usual ones."""
    moved, usual = [], []
    for entry in spec.get("env", []):
        name, _, below = entry.partition("/")
        if os.environ.get(name):
            moved.append(os.path.join(home, os.path.expanduser(os.environ[name]), below))
    for path in spec["paths"]:
        if path.startswith("./"):
            usual += [os.path.join(project, path[2:]) for project in folders_named(projects, home) or [home]]
        else:
            usual.append(os.path.join(home, at_hint(path, home)))
    return moved, usual


def _own_folder(spec: dict[str, Any], home: str, projects: list[str] | None, hint: str = "") -> str:
    """The folder of a root that is not a project: of the places its variable and its layout name, the first that holds it.

    Where none does, or one is wanted to restore to (``hint`` says where it was): what the variable says, the usual place
    it was in, or the first.
    """
    moved, usual = own_places(spec, home, projects)
    below, marker = spec.get("below", ""), spec.get("holds", "")
    if moved and (hint or not marker):
        return os.path.realpath(os.path.join(moved[0], below))
    found = [place for place in moved + usual if os.path.isdir(os.path.join(place, marker))]
    if not found and hint:
        was = [place for place in usual if os.path.join(place, below) == at_hint(hint, home)]
        ways = [path[1:] + "/" + below for path in spec["paths"] if path.startswith("./")]
        found = was or [
            place for way in ways if hint.endswith(way) for place in usual if (place + "/" + below).endswith(way)
        ]
    return os.path.realpath(os.path.join((found or usual)[0], below))


def folders_named(named: list[str] | None, home: str) -> list[str]:
    """The project folders: those named, else the working folder and the home."""
    folders = [os.getcwd(), home] if named is None else [os.path.join(home, at_hint(path, home)) for path in named]
    return list(dict.fromkeys(os.path.realpath(folder) for folder in folders))


def absent(named: list[str] | None, home: str) -> list[str]:
    """What to say of projects that were named and are not there."""
    folders = folders_named(named, home) if named is not None else []
    return [
        "There is no folder %s to look for a project in." % folder for folder in folders if not os.path.isdir(folder)
    ]


def find_roots(
    layouts: list[dict[str, Any]], projects: list[str] | None, home: str, contained: Containment
) -> list[Root]:
    """Every root of these layouts that exists here, in a stable order. A layout whose roots are absent adds none.

    The n-th project named has the n-th project root; without names, roots are numbered as they are found. Raise Refusal
    for one that is where it may not be.
    """
    roots: list[Root] = []
    for layout in layouts:
        rules = Rules(layout)
        for spec in layout["roots"]:
            whole = bool(spec.get("below") or not spec.get("project"))
            if not spec.get("project"):
                folder = _own_folder(spec, home, projects)
                if os.path.isdir(folder):
                    roots.append(Root(spec["name"], folder, hint_for(folder, home), layout, rules, whole))
                continue
            number = 0
            for project in folders_named(projects, home):
                folder = os.path.realpath(os.path.join(project, spec.get("below", "")))
                there = os.path.isdir(folder) and _holds_any(folder, layout)
                number += there or projects is not None
                if there:
                    name = spec["name"] if number == 1 else "%s-%d" % (spec["name"], number)
                    roots.append(Root(name, folder, hint_for(folder, home), layout, rules, whole))
    return _contained(roots, contained)


def _contained(roots: list[Root], contained: Containment) -> list[Root]:
    """The roots, each where it may be, and with what in it is not for memories. Raise Refusal."""
    for root in roots:
        contained.check(root.name, root.folder)
    return [root._replace(apart=contained.inner(root.folder)) for root in roots]


def _holds_any(folder: str, layout: dict[str, Any]) -> bool:
    firsts = {pattern.split("/")[0] for pattern in layout["keep"] + layout["databases"]}
    plain = {first for first in firsts if not set("*?{") & set(first)}
    if any(os.path.lexists(os.path.join(folder, name)) for name in plain):
        return True
    wanted = compiled(firsts - plain).match if firsts - plain else None
    return wanted is not None and any(wanted(name) for name in os.listdir(folder))


def place_roots(
    wanted: list[dict[str, str]],
    layouts: list[dict[str, Any]],
    projects: list[str] | None,
    home: str,
    contained: Containment,
) -> list[Root]:
    """Where a snapshot's roots belong here: by their layout's own rule, the n-th project for the n-th project root.

    Without projects, a project root goes where it was relative to the home, or, when it was elsewhere, to the working folder.
    Raise Refusal when a layout is not known, or a root would be where it may not be.
    """
    specs = {spec["name"]: (layout, spec) for layout in layouts for spec in layout["roots"]}
    given = folders_named(projects, home) if projects is not None else []
    roots: list[Root] = []
    for root in wanted:
        if ".." in root["hint"].split("/"):
            raise Refusal("unsafe-path", "The snapshot's root %r points out of its place." % root["name"])
        base, number = numbered(root["name"])
        key = base if number and base in specs else root["name"]
        if key not in specs:
            raise Refusal("unknown-layout", "The snapshot has a root %r that no layout here knows." % root["name"])
        layout, spec = specs[key]
        if not spec.get("project"):
            folder = _own_folder(spec, home, projects, root["hint"])
        else:
            order = number - 1 if key != root["name"] else 0
            below = spec.get("below", "")
            if order < len(given):
                folder = os.path.realpath(os.path.join(given[order], below))
            elif root["hint"].startswith("~"):
                folder = os.path.realpath(at_hint(root["hint"], home))
            else:
                folder = os.path.realpath(os.path.join(os.getcwd(), below))
        whole = bool(spec.get("below") or not spec.get("project"))
        roots.append(Root(root["name"], folder, root["hint"], layout, Rules(layout), whole))
    folders = [root.folder for root in roots]
    if len(set(folders)) != len(folders):
        raise Refusal("roots-collide", "Two roots of the snapshot would land in one folder; name each with --project.")
    return _contained(roots, contained)


def projects_here(named: list[str] | None, home: str) -> list[str]:
    """What to call the projects of an export: those named, else the working folder, unless that is only the home."""
    folders = folders_named(named, home) if named is not None else [os.path.realpath(os.getcwd())]
    return [hint_for(folder, home) for folder in folders if named is not None or folder != home]


def path_here(hint: str, projects: list[str], named: list[str] | None, home: str) -> str:
    """Where a project is here that was at ``hint``, when those of the export were ``projects``: with the n-th one named, else
    where it was in the home, or, outside of it, in the working folder; else it has not moved."""
    given = folders_named(named, home) if named is not None else []
    for number, project in sorted(enumerate(projects), key=lambda pair: -len(pair[1])):
        if hint == project or (project != "~" and hint.startswith(project.rstrip("/") + "/")):
            rest = hint[len(project) :]
            if number < len(given):
                return given[number] + rest
            if named is None and not project.startswith("~"):
                return os.path.realpath(os.getcwd()) + rest
    return os.path.realpath(at_hint(hint, home))


def keyed_here(roots: list[Root], named: list[str] | None, home: str, paths: Iterable[str]) -> dict[str, str]:
    """Which project each folder among ``paths`` is that is named after one, by its travelling name."""
    known = [*folders_named(named, home), os.path.realpath(os.getcwd()), home]
    rows = {}
    for root in roots:
        keyed = root.layout.get("keyed", {})
        for name, path in paths_of(root.folder, root.keys, keyed, known).items() if keyed else ():
            rows["/".join([root.name, keyed["folder"], name])] = hint_for(path, home)
    held = {"/".join(path.split("/")[:3]) for path in paths} if rows else set()
    return {path: hint for path, hint in rows.items() if path in held}
