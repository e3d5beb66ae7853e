"""The roots of a memory in this sandbox: which folder each one is, by the rules of its layout."""

from __future__ import annotations

import json
import os
from types import MappingProxyType
from typing import Any, Container, Dict, FrozenSet, Iterator, List, Mapping, NamedTuple, Sequence, Tuple

from sidecar.format.patterns import Rules, is_secret
from sidecar.format.refusal import Refusal
from sidecar.format.roots import get_stem, resolve_hint, strip_below
from sidecar.program import places
from sidecar.program.capture.project_folders import FileName, FolderNames
from sidecar.program.places import Containment, is_in

LONGEST_SETTINGS = 1 << 20
FILE_ENDS = (".json", ".jsonl")
"""Name endings of files that a variable or a setting may name as memory."""
Kind = Tuple[Dict[str, Any], Dict[str, Any]]
"""A layout, and its description of one root."""


class Root(NamedTuple):
    """A named root, its folder in this sandbox, and the layout it belongs to (a project can contain roots of several)."""

    name: str
    folder: str
    hint: str
    layout: dict[str, Any]
    rules: Rules
    whole: bool  # an agent's folder, not a project: what is left out of it is worth reporting
    keys: FolderNames = FolderNames()
    apart: FrozenSet[str] = frozenset()
    """Paths in it that are excluded: the sidecar's own files."""
    owned: bool = False
    """The folder belongs to the memory system alone."""
    before: Tuple[Any, ...] = ()
    """The rules of roots in the same folder or in a parent of it: a path belongs to the first root that takes it."""
    beside: Tuple[Rules, ...] = ()
    """The rules of roots in the same folder that come after it."""
    found: bool = False
    """It belongs to a project that was found, not named: a problem with it does not fail the export."""

    @property
    def place(self) -> str:
        """Its folder, or its file if the root is a single file."""
        return os.path.join(self.folder, self.keys.here) if isinstance(self.keys, FileName) else self.folder

    def path(self, relative: str) -> str:
        """Return the path in the memory (``root/relative``) of the local path ``relative``."""
        return self.name + "/" + self.keys.stored(relative)


class OuterRules:
    """The rules of a root, applied to paths below one of its subfolders."""

    def __init__(self, rules: Rules, below: str) -> None:
        self._rules, self._below = rules, below + "/"

    def takes(self, relative: str) -> bool:
        return self._rules.takes(self._below + relative)

    def leaves_out(self, relative: str) -> Any:
        """Return whether the outer root leaves it out; not if a walk of that root never gets there."""
        path = self._below + relative
        return self._rules.may_hold(path.rpartition("/")[0]) and self._rules.leaves_out(path)

    def keeps_all_below(self, relative: str) -> Any:
        return self._rules.keeps_all_below(self._below + relative)

    def may_hold(self, relative: str) -> bool:
        return self._rules.may_hold(self._below + relative)


class Surroundings(NamedTuple):
    """What a layout's places are relative to in this sandbox."""

    home: str
    projects: Sequence[str] = ()
    """The folders of the projects."""
    found: Container[str] = ()
    """Those of them that were not named, but found by search."""
    roots: Mapping[str, str] = MappingProxyType({})
    """The folders of other roots, by their names."""


def list_own_places(spec: dict[str, Any], around: Surroundings) -> tuple[list[str], list[str]]:
    """Return the places that variables and settings name, and the usual ones."""
    home = around.home
    moved, usual = [], []
    for entry in spec.get("env", []):
        name, _, below = entry.partition("/")
        if os.environ.get(name):
            moved.append(os.path.join(home, os.path.expanduser(os.environ[name]), below))
    for entry in spec.get("settings", []):
        moved += _read_setting(entry, around)
    for path in spec["paths"]:
        if path.startswith("./"):
            # A link in a repository may lead anywhere, so the real path must be in the project.
            ways = [(project, os.path.join(project, path[2:])) for project in around.projects or [home]]
            usual += [place for project, place in ways if is_in(os.path.realpath(place), project)]
        else:
            usual.append(os.path.join(home, resolve_hint(path, home)))
    return moved, usual


def _read_setting(entry: str, around: Surroundings) -> List[str]:
    """Return the places that a setting names: ``~/FILE:KEY``, ``./FILE:KEY`` in each project, or ``ROOT/FILE:KEY``."""
    path, _, key = entry.rpartition(":")
    top, _, file = path.partition("/")
    home, roots = around.home, around.roots
    tops: Sequence[str] = {"~": [home], ".": around.projects}.get(top, [roots[top]] if top in roots else [])
    found = []
    for folder in tops:
        try:
            value = json.loads(places.read_file(os.path.realpath(os.path.join(folder, file)), LONGEST_SETTINGS))
        except (OSError, Refusal, ValueError, RecursionError):
            continue  # missing, or without the setting
        for text in _pick_values(value, key.split(".")):
            place = os.path.join(folder if top == "." else home, resolve_hint(text, home))
            # The author of a repository that was only found must not decide what of the home is memory.
            if top != "." or folder not in around.found or is_in(os.path.realpath(place), folder):
                found.append(place)
    return found


def _pick_values(value: Any, keys: List[str]) -> List[str]:
    """Return the values at a path of keys; ``*`` stands for any key."""
    if not keys:
        return [value] if isinstance(value, str) and _is_path(value) else []
    if not isinstance(value, dict):
        return []
    inner = value.values() if keys[0] == "*" else [value[keys[0]]] if keys[0] in value else []
    return [text for each in inner for text in _pick_values(each, keys[1:])]


def _is_path(text: str) -> bool:
    """Return whether a text can be a path on this system."""
    try:
        return bool(text) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def choose_own_folder(spec: dict[str, Any], around: Surroundings, hint: str = "", was: str = "") -> tuple[str, str]:
    """Return the folder of a root that is not a project, and the file's name if the root is one file; "" if there is
    none.

    Of the places that its variable and its layout name, it is the first that contains the root. If none does, or a
    place to restore to is wanted (``hint`` says where it was): what the variable says, the usual place it was in, or
    the first. ``was`` is where this sandbox had it before.
    """
    home, (moved, usual) = around.home, list_own_places(spec, around)
    below, marker, file = spec.get("below", ""), spec.get("holds", ""), spec.get("file", "")
    if file:
        place = os.path.realpath(moved[0] if moved else os.path.join(resolve_hint(hint, home) or usual[0], file))
        return os.path.dirname(place), os.path.basename(place)
    if moved and (hint or not marker):
        return os.path.realpath(os.path.join(moved[0], below)), ""
    found = [place for place in moved + usual if os.path.isdir(os.path.join(place, marker))]
    if not found and was and os.path.isdir(was):
        return was, ""
    if not found and hint:
        held = [place for place in usual if os.path.join(place, below).rstrip("/") == resolve_hint(hint, home)]
        ways = [(path[1:] + "/" + below).rstrip("/") for path in spec["paths"] if path.startswith("./")]
        found = held or [
            place
            for way in ways
            if hint.endswith(way)
            for place in usual
            if (place + "/" + below).rstrip("/").endswith(way)
        ]
    if not found and (not usual or (marker and not hint)):
        return os.path.realpath(resolve_hint(hint, home)) if hint else "", ""
    return os.path.realpath(os.path.join((found or usual)[0], below)), ""


def may_be_at(folder: str, file: str, home: str, contained: Containment) -> bool:
    """Return whether a place that a setting names can be memory: not the whole home or a parent of it, nor a file that
    does not look like memory."""
    if not contained.holds(folder):
        return False
    if file:
        return file.endswith(FILE_ENDS) and not is_secret(file) and not set("*?{}") & set(file)
    return not is_in(home, folder)


def make_root(name: str, folder: str, hint: str, kind: Kind, file: str = "", marked: bool = True) -> Root:
    """Build a root from its layout's description. ``file`` is set if the root is a single file; ``marked`` says whether
    its project has a marker."""
    layout, spec = kind
    rules = Rules(layout, dict(spec, keep=[file]) if file else spec, marked)
    whole = bool(spec.get("below") or not spec.get("project")) and not file
    keys = FileName(file, spec["file"]) if file else FolderNames()
    return Root(name, folder, hint, layout, rules, whole, keys, owned=bool(spec.get("owned")))


def contain_roots(roots: list[Root], contained: Containment) -> list[Root]:
    """Check that each root is where it may be, and add the excluded paths in it. Raise Refusal."""
    for root in roots:
        contained.check(root.name, root.folder)
    return [root._replace(apart=contained.inner(root.folder)) for root in roots]


def relate_roots(roots: list[Root]) -> list[Root]:
    """Let roots that share a folder, or contain one another, know each other's rules.

    A path belongs to the outer root. Within one folder the order depends on names alone, so that it is the same
    whichever layouts are asked for.
    """

    def rank(root: Root) -> Tuple[str, int, str]:
        names = [spec["name"] for spec in root.layout["roots"]]
        return root.layout["name"], names.index(get_stem(root.name, names)), root.name

    by_folder: Dict[str, List[Root]] = {}
    for root in sorted(roots, key=rank):
        by_folder.setdefault(root.folder, []).append(root)
    order = {root.name: number for number, root in enumerate(roots)}
    shared = []
    for root in roots:
        same = by_folder[root.folder]
        at = same.index(root)
        rules = [each.rules for each in same]
        outer = [each for folder in _iterate_parents(root.folder) for each in by_folder.get(folder, ())]
        above = [
            OuterRules(each.rules, root.folder[len(each.folder) :].strip("/"))
            for each in sorted(outer, key=lambda each: order[each.name])
        ]
        shared.append(root._replace(before=(*above, *rules[:at]), beside=tuple(rules[at + 1 :])))
    return shared


def _iterate_parents(folder: str) -> Iterator[str]:
    """Yield the folders that a folder is in, from the inside."""
    while folder != "/":
        folder = os.path.dirname(folder)
        yield folder


def find_working_folder(home: str) -> str:
    """Return the working folder; the home if the working folder was removed."""
    try:
        return os.path.realpath(os.getcwd())
    except OSError:
        return home


def list_project_folders(named: list[str] | None, home: str) -> list[str]:
    """Return the project folders: those named, else the working folder and the home."""
    folders = (
        [find_working_folder(home), home]
        if named is None
        else [os.path.join(home, resolve_hint(path, home)) for path in named]
    )
    return list(dict.fromkeys(os.path.realpath(folder) for folder in folders))


def choose_project(hint: str, below: str, projects: List[str], home: str) -> str:
    """Return where a root of a project that was not named belongs: where it was in the home; else in the working
    folder, at the same relative path if it was in the export's working folder (the first of ``projects``)."""
    if hint.startswith("~"):
        return os.path.realpath(resolve_hint(hint, home))
    was, top = strip_below(hint, below), (projects or [""])[0].rstrip("/")
    inner = was[len(top) + 1 :] if top.startswith("/") and was.startswith(top + "/") else ""
    return os.path.realpath(os.path.join(find_working_folder(home), inner, below))
