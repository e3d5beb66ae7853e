"""Search for projects that were not named: folders below the home and the working folder that contain a layout's
marker.

The search is bounded in depth and in the number of folders, takes the nearest first, and follows no link. It does not
enter folders that are no place for projects (``NEVER_IN``, virtual environments), nor folders that already belong to a
memory.
"""

from __future__ import annotations

import os
import stat
from typing import Any, Dict, FrozenSet, Iterable, List, NamedTuple, Optional, Set, Tuple

from sidecar.program.places import Containment, is_apart, is_in

DEEPEST = 4
MOST_FOLDERS = 5000
MOST_FOUND = 100
NEVER_IN = frozenset([".git", "node_modules"])
ENVIRONMENT = ("pyvenv.cfg", "conda-meta")
"""Names that show that a folder is a virtual environment."""
FULL = "Projects were looked for in %s folders, the nearest first, and in no more: name those beyond with --project."
MANY = "%d projects were found, and the %d nearest were taken: name the others with --project."
UNMARKED = (
    "%s holds Markdown, and was not taken: nothing says that it is memory. If it is, name its project with --project."
)
NOTES = "memory"
"""A folder that is memory in a project, but may be anything where no marker is."""
MOST_TOLD = 5
DEEPER = "%s lies more than %d folders deep, and was not taken: name it with --project."
MOST_PEEKED = 500
"""At most this many of the deepest folders are examined for projects that are just too deep."""

Marker = Tuple[str, bool]
"""A path in a project's folder, and whether it must be a folder."""


class FoundProjects(NamedTuple):
    """The projects that were found, nearest first, and warnings about bounds that were reached."""

    folders: List[str]
    warnings: List[str]


def list_markers(specs: Iterable[Dict[str, Any]]) -> List[Marker]:
    """Return the markers of these project roots."""
    return [(name.rstrip("/"), name.endswith("/")) for spec in specs for name in spec.get("markers", [])]


def is_marked(folder: str, markers: Iterable[Marker]) -> bool:
    """Return whether a folder contains any of these markers. A link to a folder does not count: it may lead anywhere."""
    return any(_exists_as(os.path.join(folder, name), is_folder) for name, is_folder in markers)


def _exists_as(place: str, folder: bool) -> bool:
    """Return whether a path exists and is a folder (or is not)."""
    try:
        return stat.S_ISDIR(os.lstat(place).st_mode) == folder
    except OSError:
        return False


def find_inner_folders(folder: str, specs: Iterable[Dict[str, Any]], keeps: Iterable[str]) -> Set[str]:
    """Return the folders of a project that belong to its memory as a whole: no other project is searched there."""
    below = {os.path.join(folder, spec["below"]) for spec in specs if spec.get("below")}
    kept = {pattern[:-3] for pattern in keeps if pattern.endswith("/**") and not set("*?{") & set(pattern[:-3])}
    return below | {os.path.join(folder, name) for name in kept}


def find_projects(
    starts: List[str],
    specs: List[Dict[str, Any]],
    keeps: List[str],
    closed: FrozenSet[str],
    contained: Containment,
) -> FoundProjects:
    """Find the projects below these folders, which are real paths (and projects themselves if they contain memory).

    ``specs`` are the project roots of all layouts and ``keeps`` the patterns they keep; ``closed`` are folders of other
    roots. The root of the file system is not searched: a process that works there is in no particular project.
    """
    markers = list_markers(specs)
    firsts = frozenset(name.split("/")[0] for name, _ in markers)
    files = [name for name, is_folder in markers if not is_folder and "/" not in name]
    leaves = _Leaves()
    layer = [start for start in starts if start != "/" and not any(is_in(start, folder) for folder in closed)]
    found: List[str] = []
    seen, taken, looked_at, warnings = set(starts), set(closed), 0, []
    unmarked: List[str] = []
    deepest: List[str] = []
    for depth in range(DEEPEST + 1):
        inner: List[str] = []
        deepest = layer if depth == DEEPEST else []
        for folder in layer[: MOST_FOLDERS - looked_at]:
            leaf = depth > 0 and leaves.has(folder)
            if leaf or depth == DEEPEST:
                # Testing for a few names costs less than listing the folder, and raises no exceptions.
                likely = any(os.access(folder + "/" + name, os.F_OK) for name in (files if leaf else firsts))
                if (
                    likely
                    and is_marked(folder, markers)
                    and not any(map(os.path.lexists, _list_environment_files(folder)))
                ):
                    found.append(folder)
                continue
            names, likely = _list_subfolders(folder, firsts, leaves)
            marked = likely and is_marked(folder, markers)
            if marked and folder not in starts:
                found.append(folder)
            elif NOTES in names and not marked and folder not in starts and _holds_notes(folder + "/" + NOTES):
                unmarked.append(folder + "/" + NOTES)
            if marked or folder in starts:
                taken |= find_inner_folders(folder, specs, keeps)
            inner += [folder + "/" + name for name in names]
        cut = len(layer) > MOST_FOLDERS - looked_at
        looked_at += len(layer)
        if cut:
            warnings.append(FULL % format(MOST_FOLDERS, ","))
            break
        layer = [place for place in inner if place not in seen and place not in taken]
        layer = [place for place in layer if not is_apart(place, contained.apart)]
        layer.sort(key=lambda place: ("/." in place, place))
        seen.update(layer)
    known = frozenset(found)
    peeked = [folder for folder in deepest if folder not in known][:MOST_PEEKED]
    deeper = [folder + "/" + name for folder in peeked for name in _list_subfolders(folder, firsts)[0]]
    warnings += [DEEPER % (place, DEEPEST) for place in deeper if is_marked(place, markers)][:MOST_TOLD]
    if len(found) > MOST_FOUND:
        warnings.append(MANY % (len(found), MOST_FOUND))
    warnings += [
        UNMARKED % place for place in unmarked[:MOST_TOLD] if not any(is_in(place, folder) for folder in found)
    ]
    return FoundProjects(found[:MOST_FOUND], warnings)


class _Leaves:
    """Recognise folders without subfolders by their link count: on most file systems it is 2 plus one for each
    subfolder.

    Whether a file system counts so is learnt from the folders that were listed; it is trusted only for a device that
    was right every time.
    """

    def __init__(self) -> None:
        self._counts: Dict[int, bool] = {}

    def has(self, folder: str) -> bool:
        """Return whether a folder surely has no subfolders."""
        try:
            status = os.lstat(folder)
        except OSError:
            return False
        return status.st_nlink == 2 and self._counts.get(status.st_dev, False)

    def learn(self, folder: str, inner: int) -> None:
        """Compare the link count with the real number of subfolders. An empty folder proves nothing."""
        if inner:
            status = os.lstat(folder)
            right = status.st_nlink == inner + 2
            self._counts[status.st_dev] = self._counts.get(status.st_dev, True) and right


def _list_environment_files(folder: str) -> List[str]:
    return [os.path.join(folder, name) for name in ENVIRONMENT]


def _holds_notes(folder: str) -> bool:
    """Return whether it contains Markdown other than a README."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return any(name.endswith(".md") and name.lower() != "readme.md" for name in names)


def _list_subfolders(folder: str, firsts: FrozenSet[str], leaves: Optional[_Leaves] = None) -> Tuple[List[str], bool]:
    """Return the subfolders of a folder, and whether it may contain a marker; nothing for a virtual environment."""
    names: List[str] = []
    likely, wanted, inner = False, firsts.union(ENVIRONMENT), 0
    try:
        with os.scandir(folder) as scan:
            for entry in scan:
                name = entry.name
                if name in wanted:
                    if name in ENVIRONMENT:
                        return [], False
                    likely = True
                if entry.is_dir(follow_symlinks=False):
                    inner += 1
                    if name not in NEVER_IN:
                        names.append(name)
        if leaves is not None:
            leaves.learn(folder, inner)
    except OSError:  # not readable for this user, or deleted
        return [], False
    return names, likely
