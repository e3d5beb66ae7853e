"""Where a snapshot's roots belong in this sandbox, and what folders that are named after project paths are called here."""

from __future__ import annotations

import os
from typing import Dict, Iterable, List, NamedTuple, Tuple

from sidecar.format.protocol import LayoutRules, RestoreQuestion
from sidecar.format.refusal import Refusal
from sidecar.format.roots import get_stem, resolve_hint, split_number, strip_below
from sidecar.program.capture import project_folders
from sidecar.program.capture.roots import (
    Root,
    Surroundings,
    choose_own_folder,
    choose_project,
    contain_roots,
    find_working_folder,
    list_project_folders,
    make_root,
    may_be_at,
    relate_roots,
)
from sidecar.program.places import Containment, is_in

KEPT = (
    "%s keeps the name it had: nobody knows which project it is of, and here that may be called something else. Name the"
    " project with --project when it is exported."
)
APART = "%s is kept as %s: another project's folder has its name here."


class PlacedRoots(NamedTuple):
    """Where the roots of a snapshot belong, and the roots that wait until their project exists."""

    roots: List[Root]
    withheld: List[Root]


def place_roots(
    question: RestoreQuestion, layouts: List[LayoutRules], home: str, contained: Containment
) -> PlacedRoots:
    """Decide where a snapshot's roots belong here: by their layout's own rule, or in their project.

    Projects that are named are matched with the snapshot's: first those at the same path, then the n-th with the n-th.
    Other projects go where they were relative to the home, or, if they were outside it, to the working folder; with
    ``withhold``, nowhere until their folder exists. Raise Refusal if a layout is not known, or a root would be where it
    may not be.
    """
    projects = question.projects
    specs = {spec["name"]: (layout, spec) for layout in layouts for spec in layout["roots"]}
    given, found = list_project_folders(projects, home) if projects is not None else [], []
    for root in question.roots:
        if ".." in root.hint.split("/"):
            raise Refusal("unsafe-path", "The snapshot's root %r points out of its place." % root.name)
        key = get_stem(root.name, specs)
        if key not in specs:
            raise Refusal("unknown-layout", "The snapshot has a root %r that no layout here knows." % root.name)
        found.append((root, *specs[key], split_number(root.name)[1] if key != root.name else 1))
    hints: Dict[int, List[str]] = {}
    for root, _, spec, number in found:
        if spec.get("project"):
            hints.setdefault(number, []).append(strip_below(root.hint, spec.get("below", "")))
    named = assign_projects(hints, given, home)
    roots: List[Root] = []
    withheld: List[Root] = []
    folders: Dict[str, str] = {}
    for root, layout, spec, number in sorted(found, key=lambda row: bool(row[2].get("settings"))):
        file, waits = "", False
        if not spec.get("project"):
            top = project_of(spec["paths"], spec.get("below", ""), root.hint) if projects is None else ""
            project = resolve_hint(top, home)
            tops = list_project_folders(projects, home) + ([project] if top else [])
            folder, file = choose_own_folder(spec, Surroundings(home, tops, roots=folders), root.hint)
            waits = bool(top and question.withhold) and is_in(folder, project) and not os.path.isdir(project)
            if spec.get("settings") and not may_be_at(folder, file, home, contained):
                # A setting of this sandbox names a place that cannot be memory: the root goes where it was.
                plain = dict(spec, settings=[], env=[])
                folder, file = choose_own_folder(plain, Surroundings(home, roots=folders), root.hint)
                if not may_be_at(folder, file, home, contained):
                    raise Refusal("unsafe-path", "The snapshot's root %r would be %s." % (root.name, folder))
            folders[spec["name"]] = folder
        elif number in named:
            folder = os.path.realpath(os.path.join(named[number], spec.get("below", "")))
        else:
            below = spec.get("below", "")
            folder = choose_project(root.hint, below, question.project_hints, home)
            waits = question.withhold and not os.path.isdir(strip_below(folder, below))
        placed = make_root(root.name, folder, root.hint, (layout, spec), file)
        (withheld if waits else roots).append(placed)
    _check_apart(roots)
    return PlacedRoots(relate_roots(contain_roots(roots, contained)), withheld)


def project_of(paths: Iterable[str], below: str, hint: str) -> str:
    """Return the project in the home that contained a root of the ``./…`` kind, by its hint; "" if none did."""
    ways = [(path[1:] + "/" + below).rstrip("/") for path in paths if path.startswith("./")]
    tops = [hint[: -len(way)] for way in ways if hint.endswith(way)]
    return next((top for top in tops if top.startswith("~/")), "")


def _check_apart(roots: List[Root]) -> None:
    """Raise Refusal if two roots of the same kind would share a folder."""
    seen: Dict[Tuple[str, str], str] = {}
    for root in roots:
        stem = split_number(root.name)[0]
        if seen.setdefault((stem, root.folder), root.name) != root.name:
            raise Refusal(
                "roots-collide", "Two roots of the snapshot would land in one folder; name each with --project."
            )


def assign_projects(hints: Dict[int, List[str]], given: List[str], home: str) -> Dict[int, str]:
    """Decide which of the folders ``given`` is the n-th project, if the snapshot's were at these ``hints``: the one at
    the same path, else the n-th, else the next that is left."""
    left, found = list(given), {}
    for number in sorted(hints):
        before = {os.path.realpath(resolve_hint(hint, home)) for hint in hints[number]}
        same = [folder for folder in left if folder in before]
        if same:
            found[number] = same[0]
            left.remove(same[0])
    for number in sorted(hints):
        if number not in found and number <= len(given) and left:
            wish = given[number - 1]
            found[number] = wish if wish in left else left[0]
            left.remove(found[number])
    return found


def find_project_path(hint: str, projects: list[str], named: list[str] | None, home: str) -> str:
    """Return where a project that was at ``hint`` is here, if the export's were ``projects``: in the one named for it,
    else where it was in the home, or in the working folder if it was outside the home; else at the same path.
    """
    given = list_project_folders(named, home) if named is not None else []
    here = assign_projects({number: [project] for number, project in enumerate(projects, 1)}, given, home)
    for number, project in sorted(enumerate(projects, 1), key=lambda pair: -len(pair[1])):
        if hint == project or (project != "~" and hint.startswith(project.rstrip("/") + "/")):
            rest = hint[len(project) :]
            if number in here:
                return here[number] + rest
            if named is None and not project.startswith("~"):
                return find_working_folder(home) + rest
    return os.path.realpath(resolve_hint(hint, home))


def name_root_folders(
    roots: list[Root], paths: Iterable[str], question: RestoreQuestion, home: str
) -> tuple[list[Root], list[str]]:
    """Return the roots with their folders named after the paths that projects have here, and warnings about the others."""
    named, hints, projects = question.projects, question.keyed, question.project_hints
    if named and not projects and len(set(hints.values())) == 1:
        projects = list(set(hints.values()))  # the only project there is must be the one that is named now
    here = {path: find_project_path(hint, projects, named, home) for path, hint in hints.items()}
    moved = {path for path, hint in hints.items() if here[path] != find_project_path(hint, [], named, home)}
    placed, told = [], []
    for root in roots:
        keyed = root.layout.get("keyed")
        if keyed:
            top = "/".join([root.name, keyed["folder"], ""])
            names = sorted({path[len(top) :].split("/")[0] for path in paths if path.startswith(top)})
            ordered = sorted((path not in moved, path) for path in here if path.startswith(top))
            mine = {path[len(top) :]: here[path] for _, path in ordered}
            root = root._replace(keys=project_folders.name_folders(keyed, names, mine))
            known = root.keys.known
            told += [APART % (top + name, key.local) for name, key in known.items() if key.local.endswith("~")]
            strange = [
                name for name in names if name not in known and not _belongs_here(name, keyed["longest"], named, home)
            ]
            told += [KEPT % (top + name) for name in strange]
        placed.append(root)
    return placed, told


def _belongs_here(name: str, longest: int, named: list[str] | None, home: str) -> bool:
    """Return whether a folder that keeps its name has the name of a project here, or may have one in this home."""
    slugs = [
        project_folders.make_slug(folder, longest)
        for folder in list_project_folders(named, home) + list_project_folders(None, home)
    ]
    return name in slugs or name.startswith(project_folders.make_slug(home, longest) + "-")
