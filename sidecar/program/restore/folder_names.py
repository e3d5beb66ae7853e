"""Name the folders that are called after project paths as they must be called in this sandbox."""

from __future__ import annotations

from typing import Iterable

from sidecar.format.protocol import RestoreQuestion
from sidecar.program.capture import project_folders
from sidecar.program.capture.roots import Root, find_project_path, list_project_folders

KEPT = (
    "%s keeps the name it had: nobody knows which project it is of, and here that may be called something else. Name the"
    " project with --project when it is exported."
)
APART = "%s is kept as %s: another project's folder has its name here."


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
