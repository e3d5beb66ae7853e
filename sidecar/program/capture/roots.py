"""Find where a layout's roots are in this sandbox.

A root is one folder that contains memory, under a name that is stored: ``claude-mem``, ``project``, ``project-2``. Only
names are stored, never absolute paths; ``hint`` says where the folder was (``~/app``, or an absolute path outside the
home).
"""

from __future__ import annotations

import json
import os
from typing import Any, Dict, FrozenSet, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from sidecar.format.patterns import Rules, compile_patterns, is_secret
from sidecar.format.protocol import LayoutRules, RestoreQuestion, RootHint
from sidecar.format.refusal import Refusal
from sidecar.program import places
from sidecar.program.capture.project_folders import FileName, FolderNames, find_project_paths
from sidecar.program.capture.projects import find_projects, is_marked, list_markers
from sidecar.program.places import Containment, is_in

MOST_PROJECTS = 5000
"""The highest number a project's root can have."""
LONGEST_SETTINGS = 1 << 20
FILE_ENDS = (".json", ".jsonl")
"""Name endings of files that a variable or a setting may name as memory."""
LEADS_OUT = "%s is a link that leads out of its project, and was left out."
NOT_THERE = "%s is said to be %s, and was left out: it must not be there."
MOVED_AWAY = (
    "%s is said to be %s now; what this memory has of it is in %s, and that was exported: move it, or restore again."
)
SEVERAL = "%s is said to be %s as well, and was taken from %s alone."
UNREADABLE = "%s may not be read by this user, and was left out."


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


def make_hint(folder: str, home: str) -> str:
    """Return how a folder is written in a manifest: relative to the home as ``~/…`` if it is in it."""
    if folder == home:
        return "~"
    return "~" + folder[len(home) :] if folder.startswith(home.rstrip("/") + "/") else folder


def resolve_hint(hint: str, home: str) -> str:
    """Return the path that a hint stands for in this home."""
    return home + hint[1:] if hint == "~" or hint.startswith("~/") else hint


class FoundRoots(NamedTuple):
    """The roots in this sandbox, the folders of all projects, and warnings."""

    roots: List[Root]
    projects: List[str]
    warnings: List[str]


class PlacedRoots(NamedTuple):
    """Where the roots of a snapshot belong, and the roots that wait until their project exists."""

    roots: List[Root]
    withheld: List[Root]


def list_own_places(
    spec: dict[str, Any],
    home: str,
    folders: Sequence[str] = (),
    roots: Dict[str, str] | None = None,
    found: Iterable[str] = (),
) -> tuple[list[str], list[str]]:
    """Return the places that variables and settings name, and the usual ones. ``folders`` are those of the projects,
    among them those ``found`` by search; ``roots`` are the folders of other roots."""
    moved, usual = [], []
    for entry in spec.get("env", []):
        name, _, below = entry.partition("/")
        if os.environ.get(name):
            moved.append(os.path.join(home, os.path.expanduser(os.environ[name]), below))
    for entry in spec.get("settings", []):
        moved += _read_setting(entry, home, folders, roots or {}, found)
    for path in spec["paths"]:
        if path.startswith("./"):
            # A link in a repository may lead anywhere, so the real path must be in the project.
            ways = [(project, os.path.join(project, path[2:])) for project in folders or [home]]
            usual += [place for project, place in ways if is_in(os.path.realpath(place), project)]
        else:
            usual.append(os.path.join(home, resolve_hint(path, home)))
    return moved, usual


def _read_setting(
    entry: str, home: str, projects: Sequence[str], roots: Dict[str, str], inside: Iterable[str]
) -> List[str]:
    """Return the places that a setting names: ``~/FILE:KEY``, ``./FILE:KEY`` in each project, or ``ROOT/FILE:KEY``."""
    path, _, key = entry.rpartition(":")
    top, _, file = path.partition("/")
    tops: Sequence[str] = {"~": [home], ".": projects}.get(top, [roots[top]] if top in roots else [])
    found = []
    for folder in tops:
        try:
            value = json.loads(places.read_file(os.path.realpath(os.path.join(folder, file)), LONGEST_SETTINGS))
        except (OSError, Refusal, ValueError, RecursionError):
            continue  # missing, or without the setting
        for text in _pick_values(value, key.split(".")):
            place = os.path.join(folder if top == "." else home, resolve_hint(text, home))
            # The author of a repository that was only found must not decide what of the home is memory.
            if top != "." or folder not in inside or is_in(os.path.realpath(place), folder):
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


def _choose_own_folder(
    spec: dict[str, Any],
    home: str,
    folders: Sequence[str],
    roots: Dict[str, str],
    hint: str = "",
    was: str = "",
    found: Iterable[str] = (),
) -> tuple[str, str]:
    """Return the folder of a root that is not a project, and the file's name if the root is one file; "" if there is
    none.

    Of the places that its variable and its layout name, it is the first that contains the root. If none does, or a
    place to restore to is wanted (``hint`` says where it was): what the variable says, the usual place it was in, or
    the first. ``was`` is where this sandbox had it before.
    """
    moved, usual = list_own_places(spec, home, folders, roots, found)
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


def describe_absent(named: list[str] | None, home: str) -> list[str]:
    """Return warnings about projects that were named and do not exist."""
    folders = list_project_folders(named, home) if named is not None else []
    return [
        "There is no folder %s to look for a project in." % folder for folder in folders if not os.path.isdir(folder)
    ]


Known = Sequence[Tuple[str, str]]
"""Roots that this memory has had, each with its folder here; if two contradict each other the first is right."""


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
    roots, warnings = _find_own_roots(layouts, folders, home, known, contained)
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
        more, told = _find_own_roots(late, folders, home, known, contained, roots, found)
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
                name = spec["name"] if number == 1 else "%s-%d" % (spec["name"], number)
                rules = Rules(layout, spec, project in marked)
                root = _make_root(name, here[project], home, layout, spec, rules)
                hint = make_hint(os.path.join(project, spec.get("below", "")).rstrip("/"), home)
                roots.append(root._replace(hint=hint, found=project in found))
    return FoundRoots(_relate_roots(_contain_roots(roots, contained)), folders, warnings)


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
        spec = by_name.get(name) or by_name.get(split_number(name)[0])
        project = _strip_below(folder, spec.get("below", "")) if spec is not None else ""
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
    moved, usual = list_own_places(spec, home)
    return [] if spec.get("project") or spec.get("file") else moved + usual


def _find_own_roots(
    layouts: list[dict[str, Any]],
    projects: Sequence[str],
    home: str,
    known: Known,
    contained: Containment,
    there: Sequence[Root] = (),
    found: Iterable[str] = (),
) -> tuple[list[Root], list[str]]:
    """Return the roots that are not in a project, and warnings about those that are where they may not be.

    ``there`` are roots found before. What the settings of the projects ``found`` name counts only inside those
    projects.
    """
    roots: List[Root] = []
    warnings: List[str] = []
    before = dict(reversed(known))
    folders: Dict[str, str] = {}
    specs = [(layout, spec) for layout in layouts for spec in layout["roots"] if not spec.get("project")]
    # Settings may name any place, and what is in another root belongs to that root, so these come last.
    for layout, spec in sorted(specs, key=lambda pair: bool(pair[1].get("settings"))):
        name, was = spec["name"], before.get(spec["name"], "")
        folder, file = _choose_own_folder(spec, home, projects, folders, was=was, found=found)
        folders[name] = folder
        if spec.get("settings") and folder:
            others = [root for root in [*there, *roots] if is_in(folder, root.folder)]
            others = [root for root in others if not isinstance(root.keys, FileName)]
            if _is_taken(others, os.path.join(folder, file or "x.md")):
                continue
            if others or not _may_be_at(folder, file, home, contained):
                if os.path.lexists(os.path.join(folder, file)):
                    warnings.append(NOT_THERE % (name, os.path.join(folder, file).rstrip("/")))
                continue
            place = os.path.join(folder, file).rstrip("/")
            if was not in ("", place) and _is_filled(was) and os.path.isdir(was) != bool(file) and contained.holds(was):
                warnings.append(MOVED_AWAY % (name, place, was))
                folder, file = (os.path.dirname(was), os.path.basename(was)) if file else (was, "")
            place = os.path.join(folder, file).rstrip("/")
            moved = {os.path.realpath(other) for other in list_own_places(spec, home, projects, folders, found)[0]}
            for other in sorted(moved - {place, was}):
                warnings += [SEVERAL % (name, other, place)] if _is_filled(other) else []
        if folder and os.path.isdir(folder):
            roots.append(_make_root(name, folder, home, layout, spec, Rules(layout, _narrow_to_file(spec, file)), file))
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


def _may_be_at(folder: str, file: str, home: str, contained: Containment) -> bool:
    """Return whether a place that a setting names can be memory: not the whole home or a parent of it, nor a file that
    does not look like memory."""
    if not contained.holds(folder):
        return False
    if file:
        return file.endswith(FILE_ENDS) and not is_secret(file) and not set("*?{}") & set(file)
    return not is_in(home, folder)


def _narrow_to_file(spec: dict[str, Any], file: str) -> dict[str, Any]:
    """Return the spec of a root, narrowed to one file if it is one."""
    return dict(spec, keep=[file]) if file else spec


def _make_root(
    name: str, folder: str, home: str, layout: dict[str, Any], spec: dict[str, Any], rules: Rules, file: str = ""
) -> Root:
    """Build a root from its layout's description; ``file`` is set if the root is a single file."""
    whole = bool(spec.get("below") or not spec.get("project")) and not file
    keys = FileName(file, spec["file"]) if file else FolderNames()
    return Root(name, folder, make_hint(folder, home), layout, rules, whole, keys, owned=bool(spec.get("owned")))


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


def _contain_roots(roots: list[Root], contained: Containment) -> list[Root]:
    """Check that each root is where it may be, and add the excluded paths in it. Raise Refusal."""
    for root in roots:
        contained.check(root.name, root.folder)
    return [root._replace(apart=contained.inner(root.folder)) for root in roots]


def _relate_roots(roots: list[Root]) -> list[Root]:
    """Let roots that share a folder, or contain one another, know each other's rules.

    A path belongs to the outer root. Within one folder the order depends on names alone, so that it is the same
    whichever layouts are asked for.
    """

    def rank(root: Root) -> Tuple[str, int, str]:
        stem = split_number(root.name)[0]
        names = [spec["name"] for spec in root.layout["roots"]]
        return root.layout["name"], names.index(root.name if root.name in names else stem), root.name

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


def _holds_any(folder: str, patterns: Iterable[str]) -> bool:
    """Return whether a folder has an entry that could be the beginning of one of the patterns."""
    firsts = {pattern.split("/")[0] for pattern in patterns}
    plain = {first for first in firsts if not set("*?{") & set(first)}
    if any(os.path.lexists(os.path.join(folder, name)) for name in plain):
        return True
    wanted = compile_patterns(firsts - plain).match if firsts - plain else None
    return wanted is not None and any(wanted(name) for name in os.listdir(folder))


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
        base, number = split_number(root.name)
        key = base if number and base in specs else root.name
        if key not in specs:
            raise Refusal("unknown-layout", "The snapshot has a root %r that no layout here knows." % root.name)
        found.append((root, *specs[key], number if key != root.name else 1))
    hints: Dict[int, List[str]] = {}
    for root, _, spec, number in found:
        if spec.get("project"):
            hints.setdefault(number, []).append(_strip_below(root.hint, spec.get("below", "")))
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
            folder, file = _choose_own_folder(spec, home, tops, folders, root.hint)
            waits = bool(top and question.withhold) and is_in(folder, project) and not os.path.isdir(project)
            if spec.get("settings") and not _may_be_at(folder, file, home, contained):
                # A setting of this sandbox names a place that cannot be memory: the root goes where it was.
                folder, file = _choose_own_folder(dict(spec, settings=[], env=[]), home, [], folders, root.hint)
                if not _may_be_at(folder, file, home, contained):
                    raise Refusal("unsafe-path", "The snapshot's root %r would be %s." % (root.name, folder))
            folders[spec["name"]] = folder
        elif number in named:
            folder = os.path.realpath(os.path.join(named[number], spec.get("below", "")))
        else:
            below = spec.get("below", "")
            folder = choose_project(root.hint, below, question.project_hints, home)
            waits = question.withhold and not os.path.isdir(_strip_below(folder, below))
        rules = Rules(layout, _narrow_to_file(spec, file))
        placed = _make_root(root.name, folder, home, layout, spec, rules, file)._replace(hint=root.hint)
        (withheld if waits else roots).append(placed)
    _check_apart(roots)
    return PlacedRoots(_relate_roots(_contain_roots(roots, contained)), withheld)


def project_of(paths: Iterable[str], below: str, hint: str) -> str:
    """Return the project in the home that contained a root of the ``./…`` kind, by its hint; "" if none did."""
    ways = [(path[1:] + "/" + below).rstrip("/") for path in paths if path.startswith("./")]
    tops = [hint[: -len(way)] for way in ways if hint.endswith(way)]
    return next((top for top in tops if top.startswith("~/")), "")


def _strip_below(path: str, below: str) -> str:
    """Remove the part of a path that a root adds to its project's folder."""
    return (path[: -len(below) - 1] or "/") if below and path.endswith("/" + below) else path


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


def choose_project(hint: str, below: str, projects: List[str], home: str) -> str:
    """Return where a root of a project that was not named belongs: where it was in the home; else in the working
    folder, at the same relative path if it was in the export's working folder (the first of ``projects``)."""
    if hint.startswith("~"):
        return os.path.realpath(resolve_hint(hint, home))
    was, top = _strip_below(hint, below), (projects or [""])[0].rstrip("/")
    inner = was[len(top) + 1 :] if top.startswith("/") and was.startswith(top + "/") else ""
    return os.path.realpath(os.path.join(find_working_folder(home), inner, below))


def find_known_roots(
    layouts: list[LayoutRules], noted: Dict[str, str], head: List[RootHint], projects: List[str], home: str
) -> Known:
    """Return the roots that a memory has had and where they are here: from this sandbox's notes, then where those of
    the head were."""
    specs = {spec["name"]: spec for layout in layouts for spec in layout["roots"]}
    known = list(noted.items())
    for root in head:
        name, hint = root.name, root.hint
        spec = specs.get(name) or specs.get(split_number(name)[0]) or {}
        place = os.path.realpath(resolve_hint(hint, home))
        if spec.get("project") and not hint.startswith("~") and not os.path.isdir(place):
            place = choose_project(hint, spec.get("below", ""), projects, home)
        known.append((name, place))
    return known


def name_projects(named: list[str] | None, home: str) -> list[str]:
    """Return the hints of an export's projects: those named, else the working folder unless it is the home."""
    folders = list_project_folders(named, home) if named is not None else [find_working_folder(home)]
    return [make_hint(folder, home) for folder in folders if named is not None or folder != home]


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
