"""Put a brief into the sandbox, where its agent finds it: a file below the home that is no memory.

It never replaces a file that is not a brief of ours, known by its first line. Where it was put is noted, so that the next
restore of the same memory removes it: what it says would be of another snapshot by then.
"""

from __future__ import annotations

import os
import stat
from typing import Any, Dict, Iterator, List, Optional, Sequence

from sidecar.format.patterns import Rules
from sidecar.format.protocol import LayoutRules, RestoreAnswer, RestoreQuestion
from sidecar.format.refusal import Refusal
from sidecar.program import places
from sidecar.program.capture.roots import (
    Root,
    Surroundings,
    choose_own_folder,
    list_own_places,
    list_project_folders,
    make_root,
    may_be_at,
)
from sidecar.program.scratch import Scratch

SIGNATURE = "<!-- memory-sidecar brief -->"
NOTE = "brief"
LONGEST_PATH = 1024


def is_suitable(path: str) -> bool:
    """Return whether a path below the home may be that of a brief: relative, plain, and without a way out."""
    parts = path.split("/")
    plain = path.isprintable() and "\\" not in path and len(path.encode("utf-8", "replace")) <= LONGEST_PATH
    return plain and not {"", ".", ".."}.intersection(parts) and all(len(part.encode()) <= 255 for part in parts)


def find_taker(path: str, layouts: Sequence[Dict[str, Any]]) -> str:
    """Return the layout that would take a file at this path below the home for memory; "" if none would. Any folder may
    be a project."""
    parts = path.split("/")
    for layout in layouts:
        for root in layout["roots"]:
            tops = [one[2:] for one in root.get("paths", []) if one.startswith("~/")]
            ways = ["/".join(parts[number:]) for number in range(len(parts))] if root.get("project") else []
            ways += [path[len(top) + 1 :] for top in tops if path.startswith(top + "/")]
            for near in (one[2:] + "/" for one in root.get("paths", []) if one.startswith("./")):
                ways += [("/" + path).split("/" + near, 1)[1]] if "/" + near in "/" + path else []
            below = root.get("below", "").strip("/")
            ways = [way[len(below) + 1 :] for way in ways if way.startswith(below + "/")] if below else ways
            rules = Rules(layout, root)
            if any(way and rules.takes(way) for way in ways):
                return str(layout["name"])
    return ""


def refresh(
    scratch: Scratch,
    question: RestoreQuestion,
    answer: RestoreAnswer,
    roots: Sequence[Root],
    layouts: Sequence[LayoutRules],
    home: str,
) -> None:
    """Remove the brief of an earlier restore, and put the one of this restore in place. What is in the way becomes a
    warning: the memory is in place in any case. ``roots`` are those of this restore, ``layouts`` all that are known."""
    note = os.path.join(scratch.memory, NOTE)
    asked = question.brief
    try:
        before = places.read_file(note, LONGEST_PATH).decode("utf-8")
    except (OSError, Refusal, ValueError):
        before = ""
    try:
        if before and is_suitable(before) and not (asked and asked.path == before):
            place = os.path.join(home, before)
            if _is_ours(place):
                places.remove(place)
        if before:
            places.remove(note)
        if asked is not None:
            place = os.path.join(home, asked.path)
            known = _list_own_roots(layouts, question.projects, place, home) if is_suitable(asked.path) else ()
            _put(scratch, asked.path, asked.text, [*roots, *known], home)
            places.write_file(note, asked.path.encode("utf-8"))
            answer.brief = True
    except (OSError, Refusal) as problem:
        answer.warnings.append("The brief could not be put into the sandbox: %s." % str(problem).rstrip("."))


def _list_own_roots(
    layouts: Sequence[LayoutRules], named: Optional[List[str]], place: str, home: str
) -> Iterator[Root]:
    """Yield every root that is not a project's, wherever variables, settings and layouts say that it would be here: the
    next export would find it there, also if this snapshot has nothing of it. Of what projects say, that of those above
    the place counts."""
    projects, above, found = list_project_folders(named, home), os.path.dirname(place), []
    while places.is_in(above, home) and above not in found:
        found.append(above)
        above = os.path.dirname(above)
    folders: Dict[str, str] = {}
    found = [folder for folder in found if folder not in projects]
    around = Surroundings(home, [*projects, *found], found, folders)
    specs = [(layout, spec) for layout in layouts for spec in layout["roots"] if not spec.get("project")]
    for layout, spec in sorted(specs, key=lambda pair: bool(pair[1].get("settings"))):
        folders[spec["name"]] = choose_own_folder(spec, around)[0]
        file, below = spec.get("file", ""), spec.get("below", "")
        moved, usual = list_own_places(spec, around)
        for one in [*moved, *(os.path.join(folder, file) for folder in usual)]:
            real = os.path.realpath(one if file else os.path.join(one, below))
            folder, name = os.path.split(real) if file else (real, "")
            if places.is_in(place, folder) and (
                not spec.get("settings") or may_be_at(folder, name, home, places.contain(None))
            ):
                yield make_root(spec["name"], folder, "", (layout, spec), name)


def _put(scratch: Scratch, path: str, text: str, roots: Sequence[Root], home: str) -> None:
    """Write a brief. Raise OSError or Refusal."""
    if not is_suitable(path):
        raise Refusal("unsafe-path", "%r is not a path below the home" % path)
    place = os.path.join(home, path)
    scratch.contained.check("The brief", place)
    if places.is_in(place, scratch.base):
        raise Refusal("in-the-way", "%s is in the sidecar's own folder" % place)
    for root in roots:
        if places.is_in(place, root.folder) and root.rules.takes(place[len(root.folder) :].strip("/")):
            raise Refusal("in-the-way", "%s would be memory, of the root %s" % (place, root.name))
    if places.exists(place) and not _is_ours(place):
        raise Refusal("in-the-way", "%s is there already, and is no brief" % place)
    folder = os.path.dirname(place)
    missing = []
    while len(folder) > len(home) and not places.exists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for one in reversed(missing):
        places.make_folder(one, 0o755)
        scratch.give_to_user(one)
    places.write_file(place, text.encode("utf-8", "replace"))
    scratch.give_to_user(place)


def _is_ours(place: str) -> bool:
    """Return whether there is a regular file at a real path that begins as a brief does."""
    try:
        if not stat.S_ISREG(places.read_status(place).st_mode):
            return False
        with open(places.open_file(place), "rb") as file:
            return file.readline(len(SIGNATURE) + 2).rstrip(b"\r\n") == SIGNATURE.encode("ascii")
    except FileNotFoundError:
        return False
