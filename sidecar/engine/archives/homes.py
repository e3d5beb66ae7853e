"""The paths of a snapshot's roots in a tarball of a home, and which folders of such a tarball are part of a memory."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping

from sidecar.format.patterns import compile_patterns
from sidecar.layouts import Layout, find_spec
from sidecar.store.manifest import Manifest

Layouts = Mapping[str, Layout]


def lay_out_home(manifest: Manifest, layouts: Layouts) -> tuple[dict[str, str], list[str]]:
    """Return the path of each root in a home (the usual one of its layout, or where its project was), and the projects'
    paths."""
    usual: dict[str, str] = {}
    numbers: dict[str, int] = {}
    belows: dict[str, str] = {}
    for root in manifest.roots:
        spec, number = find_spec(root.name, layouts.get(root.layout))
        if spec is None:
            usual[root.name] = _make_relative(root.hint)
        elif spec.paths:
            usual[root.name] = posixpath.join(spec.paths[0].removeprefix("~/"), spec.below)
        else:
            numbers[root.name], belows[root.name] = number, f"/{spec.below}" if spec.below else ""
    folders = {
        root.name: root.hint.removesuffix(belows[root.name]) or "/" for root in manifest.roots if root.name in belows
    }
    projects = _order_projects(manifest.projects, folders, numbers)
    places = assign_project_places(projects)
    return usual | {name: (places[was] + belows[name]).lstrip("/") for name, was in folders.items()}, projects


def assign_project_places(projects: list[str]) -> dict[str, str]:
    """Return the path of each project in a tarball of a home: its path in the home, or its absolute path without the
    slash."""
    places: dict[str, str] = {}
    taken: set[str] = set()
    for project in dict.fromkeys(projects):
        place = _make_relative(project)
        while place in taken:  # /work and ~/work
            place += "-2"
        places[project] = place
        taken.add(place)
    return places


def _make_relative(hint: str) -> str:
    return hint.removeprefix("~").strip("/")


def _order_projects(named: list[str], folders: Mapping[str, str], numbers: Mapping[str, int]) -> list[str]:
    """Return the projects' folders so that the n-th belongs to the n-th roots: in the order they were named, if a root
    agrees or there is none, then the others."""
    order: list[str] = []
    for number, project in enumerate(named, 1):
        there = [folder for name, folder in folders.items() if numbers[name] == number]
        order.append(project if project in there or not there else there[0])
    return list(dict.fromkeys([*order, *(folders[name] for name in sorted(folders, key=numbers.__getitem__))]))


Placements = Mapping[str, str]
"""Folders of a tarball, and the path of each in a home."""


def find_placements(names: list[str], layouts: Layouts, projects: list[str] | None) -> Placements:
    """Find the folders of a tarball that are part of a memory: a layout's usual folder at any depth, else the folder of
    its database. For project layouts: the folders of ``projects``, else the shallowest folder outside of those that
    contains any of the layout's files."""
    roots = [
        (layout, root) for layout in layouts.values() for root in layout.roots if projects is None or not root.project
    ]
    placements = {place: place for place in assign_project_places(projects or []).values()}
    for layout, root in roots:
        usual = [path.removeprefix("~/").removeprefix("./") for path in root.paths]
        ways = [posixpath.join(path, root.below).rstrip("/") for path in usual] or [root.below]
        prefixes = {
            name[: at + len(way)] for way in ways if way for name in names if (at := _find_folder(name, way)) >= 0
        }
        if not prefixes and projects is None and not root.project and len(layout.roots) == 1:
            databases = compile_patterns(layout.databases)
            prefixes = {posixpath.dirname(name) for name in names if databases.match(posixpath.basename(name))}
        if prefixes:
            placements.setdefault(min(prefixes, key=lambda prefix: (len(prefix), prefix)), ways[0])
    others = [name for name in names if place_member(name, placements) is None]
    for layout, root in roots:
        if root.project and not root.below:
            firsts = compile_patterns(pattern.split("/")[0] for pattern in layout.keep + layout.databases)
            found = [posixpath.dirname(name) for name in others if firsts.match(posixpath.basename(name))]
            if found:
                placements.setdefault(min(found, key=lambda p: (p.count("/"), len(p))), "")
    return placements


def _find_folder(name: str, folder: str) -> int:
    """Return the position at which ``folder`` occurs in ``name`` as whole parts; -1 if it does not."""
    return f"/{name}/".find(f"/{folder}/")


def place_member(name: str, placements: Placements) -> str | None:
    """Return the path of a tarball's member in a home; ``None`` if it is not part of the memory."""
    above = name
    while above:
        above = above.rpartition("/")[0]
        if above in placements:
            return posixpath.join(placements[above], name[len(above) :].lstrip("/"))
    return None
