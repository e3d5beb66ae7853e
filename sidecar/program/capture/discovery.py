"""Find the roots of a memory in this sandbox, for an export: those of the layouts, and those of projects."""

from __future__ import annotations

import os
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from sidecar.format.patterns import Rules, compile_patterns
from sidecar.format.protocol import LayoutRules, RootHint
from sidecar.format.roots import MOST_PROJECTS, add_number, get_stem, make_hint, resolve_hint, split_number, strip_below
from sidecar.program.capture.project_folders import FileName, find_project_paths
from sidecar.program.capture.projects import find_projects, is_marked, list_markers
from sidecar.program.capture.roots import (
    Root,
    Surroundings,
    choose_own_folder,
    choose_project,
    contain_roots,
    find_working_folder,
    list_own_places,
    list_project_folders,
    make_root,
    may_be_at,
    relate_roots,
)
from sidecar.program.places import Containment, is_in

LEADS_OUT = "%s is a link that leads out of its project, and was left out."
NOT_THERE = "%s is said to be %s, and was left out: it must not be there."
MOVED_AWAY = (
    "%s is said to be %s now; what this memory has of it is in %s, and that was exported: move it, or restore again."
)
SEVERAL = "%s is said to be %s as well, and was taken from %s alone."
UNREADABLE = "%s may not be read by this user, and was left out."
Known = Sequence[Tuple[str, str]]
"""Roots that this memory has had, each with its folder here; if two contradict each other the first is right."""


class FoundRoots(NamedTuple):
    """The roots in this sandbox, the folders of all projects, and warnings."""

    roots: List[Root]
    projects: List[str]
    warnings: List[str]


def find_roots(
    layouts: list[dict[str, Any]],
    projects: list[str] | None,
    home: str,
    contained: Containment,
    known: Known = (),
    elsewhere: Sequence[dict[str, Any]] = (),
) -> FoundRoots:
    """Return every root of these layouts that exists here, in a stable order. A layout whose roots are missing adds
    none.

    A project keeps the number that its folder has among the ``known`` roots. Of the others, the n-th one named gets the
    n-th number if that is free, and one that was found gets the next. ``elsewhere`` are the roots of layouts that were
    not asked for: no project is searched there. Raise Refusal if a root is where it may not be.
    """
    folders, found = list_project_folders(projects, home), set()
    roots, warnings = _find_own_roots(layouts, Surroundings(home, folders), known, contained)
    specs = [spec for layout in layouts for spec in layout["roots"] if spec.get("project")]
    if projects is None:
        others = {os.path.realpath(place) for spec in elsewhere for place in _list_closed_places(spec, home)}
        closed = frozenset(others | {root.folder for root in roots if not isinstance(root.keys, FileName)}) - {*folders}
        keeps = [
            pattern
            for layout in layouts
            for spec in layout["roots"]
            if spec.get("project") and not spec.get("below")
            for pattern in spec.get("keep") or layout["keep"]
        ]
        search = find_projects(folders, specs, keeps, closed, contained)
        warnings += search.warnings
        nearest = _list_known_projects(known, specs, folders, contained) + search.folders
        found = set(nearest) - set(folders)
        folders += [folder for folder in dict.fromkeys(nearest) if folder in found]
        late = [dict(layout, roots=_list_unplaced(layout, roots)) for layout in layouts]
        more, told = _find_own_roots(late, Surroundings(home, folders, found), known, contained, roots)
        roots += [root._replace(layout=_find_layout(root, layouts)) for root in more]
        warnings += [line for line in told if line not in warnings]
    still = {place for _, place in known if os.path.isdir(place) and contained.holds(place)}
    markers = list_markers(specs)
    any_marker = {folder for folder in folders if folder in found or is_marked(folder, markers)}
    numbers: Dict[str, int] = {}
    for layout in layouts:
        for spec in layout["roots"]:
            if not spec.get("project"):
                continue
            # A root without markers of its own uses those of its layout, else any marker counts.
            own = [] if spec.get("markers") else list_markers(layout["roots"])
            marked = {folder for folder in any_marker if not own or is_marked(folder, own)}
            here: Dict[str, str] = {}
            for project in folders:
                place = os.path.join(project, spec.get("below", "")).rstrip("/")
                folder = os.path.realpath(place)
                if folder != place and _leads_out(project, folder, home, project in found):
                    warnings += [LEADS_OUT % place] if os.path.isdir(folder) else []
                    continue
                try:
                    is_root = _is_root(project, folder, layout, spec, project in marked)
                except OSError:
                    if project not in found:
                        raise
                    is_root = False
                    warnings.append(UNREADABLE % folder)
                if is_root and folder not in here.values():
                    here[project] = folder
            for project, number in _assign_numbers(
                spec["name"], here, known, folders if projects is not None else None, numbers, still
            ):
                numbers.setdefault(project, number)
                hint = make_hint(os.path.join(project, spec.get("below", "")).rstrip("/"), home)
                name, kind = add_number(spec["name"], number), (layout, spec)
                root = make_root(name, here[project], hint, kind, marked=project in marked)
                roots.append(root._replace(found=project in found))
    return FoundRoots(relate_roots(contain_roots(roots, contained)), folders, warnings)


def _leads_out(project: str, folder: str, home: str, found: bool) -> bool:
    """Return whether a link leads a project's folder to where no memory of that project can be: the link may come from
    any cloned repository. A project that was named may have its memory on a volume."""
    if is_in(project, folder) or found:
        return True
    return is_in(folder, home) and not is_in(folder, project)


def _list_known_projects(
    known: Known, specs: List[Dict[str, Any]], folders: List[str], contained: Containment
) -> List[str]:
    """Return the folders of projects that this memory has had. They are not searched for, so the search's bounds do not
    leave them out."""
    by_name = {spec["name"]: spec for spec in specs}
    found = []
    for name, folder in known:
        spec = by_name.get(get_stem(name, by_name))
        project = strip_below(folder, spec.get("below", "")) if spec is not None else ""
        if project and project != "/" and os.path.isdir(project) and contained.holds(project):
            found.append(os.path.realpath(project))
    return [folder for folder in dict.fromkeys(found) if folder not in folders]


def _list_unplaced(layout: Dict[str, Any], roots: List[Root]) -> List[Dict[str, Any]]:
    """Return the roots that a project's settings may place, and that have no place yet."""
    names = {root.name for root in roots}
    return [spec for spec in layout["roots"] if spec.get("settings") and spec["name"] not in names]


def _find_layout(root: Root, layouts: List[Dict[str, Any]]) -> Dict[str, Any]:
    return next(layout for layout in layouts if layout["name"] == root.layout["name"])


def _list_closed_places(spec: dict[str, Any], home: str) -> List[str]:
    """Return the places of a root that was not asked for, in which no project is searched."""
    moved, usual = list_own_places(spec, Surroundings(home))
    return [] if spec.get("project") or spec.get("file") else moved + usual


def _find_own_roots(
    layouts: list[dict[str, Any]],
    around: Surroundings,
    known: Known,
    contained: Containment,
    there: Sequence[Root] = (),
) -> tuple[list[Root], list[str]]:
    """Return the roots that are not in a project, and warnings about those that are where they may not be.

    ``there`` are roots found before. What the settings of projects found by search name counts only inside those
    projects.
    """
    roots: List[Root] = []
    warnings: List[str] = []
    before = dict(reversed(known))
    folders: Dict[str, str] = {}
    around = around._replace(roots=folders)
    specs = [(layout, spec) for layout in layouts for spec in layout["roots"] if not spec.get("project")]
    # Settings may name any place, and what is in another root belongs to that root, so these come last.
    for layout, spec in sorted(specs, key=lambda pair: bool(pair[1].get("settings"))):
        name, was = spec["name"], before.get(spec["name"], "")
        folder, file = choose_own_folder(spec, around, was=was)
        folders[name] = folder
        if spec.get("settings") and folder:
            others = [root for root in [*there, *roots] if is_in(folder, root.folder)]
            others = [root for root in others if not isinstance(root.keys, FileName)]
            if _is_taken(others, os.path.join(folder, file or "x.md")):
                continue
            if others or not may_be_at(folder, file, around.home, contained):
                if os.path.lexists(os.path.join(folder, file)):
                    warnings.append(NOT_THERE % (name, os.path.join(folder, file).rstrip("/")))
                continue
            place = os.path.join(folder, file).rstrip("/")
            if was not in ("", place) and _is_filled(was) and os.path.isdir(was) != bool(file) and contained.holds(was):
                warnings.append(MOVED_AWAY % (name, place, was))
                folder, file = (os.path.dirname(was), os.path.basename(was)) if file else (was, "")
            place = os.path.join(folder, file).rstrip("/")
            moved = {os.path.realpath(other) for other in list_own_places(spec, around)[0]}
            for other in sorted(moved - {place, was}):
                warnings += [SEVERAL % (name, other, place)] if _is_filled(other) else []
        if folder and os.path.isdir(folder):
            roots.append(make_root(name, folder, make_hint(folder, around.home), (layout, spec), file))
    return roots, warnings


def _is_taken(others: List[Root], place: str) -> bool:
    """Return whether a root that contains a place takes what is there."""
    return any(root.rules.takes(place[len(root.folder) :].strip("/")) for root in others)


def _is_filled(place: str) -> bool:
    """Return whether it is a file that is not empty, or a folder with anything in it."""
    try:
        return bool(os.listdir(place)) if os.path.isdir(place) else os.path.getsize(place) > 0
    except OSError:
        return False


def _is_root(project: str, folder: str, layout: dict[str, Any], spec: dict[str, Any], marked: bool) -> bool:
    """Return whether a project's folder is this root: it contains something that the root keeps."""
    if not os.path.isdir(folder) or (spec.get("marked") and not is_marked(project, list_markers([spec]))):
        return False
    if spec.get("owned"):
        return bool(os.listdir(folder))
    return _holds_any(folder, Rules(layout, spec, marked).patterns)


def _assign_numbers(
    stem: str,
    here: Dict[str, str],
    known: Known,
    named: Optional[List[str]],
    others: Dict[str, int],
    still: Iterable[str],
) -> List[Tuple[str, int]]:
    """Return the number of each project's root of this name, in the order of the projects.

    ``others`` are the numbers of other roots of the same projects, ``still`` the places of known roots that still
    exist.
    """
    before: Dict[int, str] = {}
    for name, folder in known:
        base, number = split_number(name)
        if name == stem or (number and base == stem):
            before.setdefault(number or 1, folder)
    numbers: Dict[str, int] = {}
    for project, folder in here.items():
        same = [number for number in sorted(before) if before[number] == folder]
        if same:
            numbers[project] = same[0]
    for project in here:
        if project not in numbers:
            taken = set(numbers.values())
            if named is None:
                taken |= set(before)
                wish = others.get(project, 1)
            else:
                # Another project of the memory that still exists keeps its number: it is only not named this time.
                taken |= {number for number, place in before.items() if place not in here.values() and place in still}
                wish = named.index(project) + 1
            free = [wish, *range(1, MOST_PROJECTS)]
            numbers[project] = next(number for number in free if number not in taken)
    return [(project, numbers[project]) for project in here]


def _holds_any(folder: str, patterns: Iterable[str]) -> bool:
    """Return whether a folder has an entry that could be the beginning of one of the patterns."""
    firsts = {pattern.split("/")[0] for pattern in patterns}
    plain = {first for first in firsts if not set("*?{") & set(first)}
    if any(os.path.lexists(os.path.join(folder, name)) for name in plain):
        return True
    wanted = compile_patterns(firsts - plain).match if firsts - plain else None
    return wanted is not None and any(wanted(name) for name in os.listdir(folder))


def find_known_roots(
    layouts: list[LayoutRules], noted: Dict[str, str], head: List[RootHint], projects: List[str], home: str
) -> Known:
    """Return the roots that a memory has had and where they are here: from this sandbox's notes, then where those of
    the head were."""
    specs = {spec["name"]: spec for layout in layouts for spec in layout["roots"]}
    known = list(noted.items())
    for root in head:
        name, hint = root.name, root.hint
        spec = specs.get(get_stem(name, specs), {})
        place = os.path.realpath(resolve_hint(hint, home))
        if spec.get("project") and not hint.startswith("~") and not os.path.isdir(place):
            place = choose_project(hint, spec.get("below", ""), projects, home)
        known.append((name, place))
    return known


def describe_absent(named: list[str] | None, home: str) -> list[str]:
    """Return warnings about projects that were named and do not exist."""
    folders = list_project_folders(named, home) if named is not None else []
    return [
        "There is no folder %s to look for a project in." % folder for folder in folders if not os.path.isdir(folder)
    ]


def name_projects(named: list[str] | None, home: str) -> list[str]:
    """Return the hints of an export's projects: those named, else the working folder unless it is the home."""
    folders = list_project_folders(named, home) if named is not None else [find_working_folder(home)]
    return [make_hint(folder, home) for folder in folders if named is not None or folder != home]


def match_keyed_folders(roots: list[Root], folders: list[str], home: str, paths: Iterable[str]) -> dict[str, str]:
    """Return which project each folder among ``paths`` is named after, by its path in the memory. ``folders`` are those
    of the known projects."""
    known = list(dict.fromkeys([*folders, find_working_folder(home), home]))
    rows = {}
    for root in roots:
        keyed = root.layout.get("keyed", {})
        for name, path in find_project_paths(root.folder, root.keys, keyed, known).items() if keyed else ():
            rows["/".join([root.name, keyed["folder"], name])] = make_hint(path, home)
    held = {"/".join(path.split("/")[:3]) for path in paths} if rows else set()
    return {path: hint for path, hint in rows.items() if path in held}
