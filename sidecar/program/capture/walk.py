"""Find a root's memory: one walk, no file opened.

What is left out is said: names a layout never exports, secrets, links that lead out, devices and sockets.
"""

from __future__ import annotations

import os
import re
import stat
from typing import TYPE_CHECKING, Iterable, Iterator, NamedTuple

from sidecar.format.patterns import is_secret
from sidecar.format.refusal import Refusal
from sidecar.program import places
from sidecar.program.capture.roots import Root
from sidecar.program.places import is_apart

if TYPE_CHECKING:
    from sidecar.program.capture.steady import UnchangedFiles

MAGIC = b"SQLite format 3\0"
SQLITE_TAILS = ("-wal", "-shm", "-journal")
TAIL_MAGICS = tuple(map(bytes.fromhex, ("d9d505f920a163d7", "377f0682", "377f0683", "18e22d00", "002de218")))
"""How a rollback journal, a log (of either byte order) and the index of a log (likewise) begin: sqlite.org/fileformat.html
and walformat.html."""
MOST_SKIPPED = 200
MOST_LOOKED_AT = 500
"""So many files that are not part of a layout are looked into."""
SECRET = "secret"
NOT_PART = "not part of the layout"
OWN = "the sidecar's own"
STAGE = re.compile(r"\.memory-sidecar-[0-9a-f]{12}\Z")
"""The names of folders that a restore stages in, which may lie in the root that it restores."""
MOST_OPEN = 64
"""Folders held open on the way down; deeper trees are entered from the top again."""
ENDLESS = 1 << 62
SLACK = 10_000
"""Links that lead out are found but do not count: only what is far beyond a limit ends the walk."""


class FoundPath(NamedTuple):
    """One path of a root that is memory: its travelling name, where it is, and what ``lstat`` said."""

    path: str
    place: str
    relative: str
    status: os.stat_result
    root: Root


class Skipped:
    """What was left out and why; long lists are counted, not kept."""

    def __init__(self, roots: Iterable[Root] = ()) -> None:
        self.rows: list[dict[str, str]] = []
        self.more = 0
        self.reasons: dict[str, int] = {}
        self.passed: dict[str, int] = {}
        """What was seen in each root and is not part of its layout. A folder counts once, and so does all that is in it."""
        self.databases: list[str] = []
        """Those among it."""
        self._looked_at = 0
        self._roots = {above for root in roots for above in _iterate_parents(root.folder)}

    def add(self, path: str, reason: str) -> None:
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if len(self.rows) < MOST_SKIPPED:
            self.rows.append({"path": path, "reason": reason})
        else:
            self.more += 1

    def add_passed_by(self, root: Root, relative: str, place: str, entry: os.DirEntry[str]) -> None:
        """Count what is not part of a root's layout, unless another root has it. A database among it is named."""
        folder = entry.is_dir(follow_symlinks=False)
        others = root.before + root.beside
        if place in self._roots or any(
            rules.may_hold(relative) if folder else rules.takes(relative) for rules in others
        ):
            return
        self.passed[root.name] = self.passed.get(root.name, 0) + 1
        if root.whole:
            self.add(root.path(relative) + "/" * folder, NOT_PART)
        if not folder and self._looked_at < MOST_LOOKED_AT and entry.is_file(follow_symlinks=False):
            self._looked_at += 1
            if has_header(place):
                self.databases.append(root.path(relative))


def _iterate_parents(folder: str) -> Iterator[str]:
    while len(folder) > 1:
        yield folder
        folder = folder.rpartition("/")[0]


def has_header(place: str) -> bool:
    """Whether a file begins as SQLite's databases do."""
    return _read_beginning(place) == MAGIC


def is_database_tail(root: Root, relative: str, siblings: set[str]) -> bool:
    """Whether a path is the -wal, -shm or -journal of a database beside it: part of that, never a file of its own."""
    if not relative.endswith(SQLITE_TAILS):
        return False
    stem = relative[: relative.rindex("-")]
    if stem.rpartition("/")[2] not in siblings:
        return False
    if root.rules.database(stem):
        return True
    begins = _read_beginning(os.path.join(root.folder, stem))
    if begins:
        return begins == MAGIC
    # SQLite begins a database as an empty file, and writes the tail first.
    tail = _read_beginning(os.path.join(root.folder, relative)) if begins is not None else None
    return tail is not None and (not tail or tail.startswith(TAIL_MAGICS))


def _read_beginning(place: str) -> bytes | None:
    """The first bytes of a regular file; ``None`` when it is none, or cannot be read."""
    try:
        with open(places.open_file(place), "rb") as file:
            return file.read(len(MAGIC)) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
    except (OSError, Refusal):
        return None


def walk(
    root: Root, skipped: Skipped, most: int = ENDLESS, steady: UnchangedFiles | None = None
) -> Iterator[FoundPath]:
    """Yield folders before what they hold, in name order. Raise Refusal when there are far more than ``most``.

    What ``steady`` knows to be as it was is not found again: it is left with ``steady``.
    """
    count = 0
    pending = [""]
    way: list[tuple[str, int]] = []
    try:
        while pending:
            held: list[str] = []
            found = _walk_folder(root, pending.pop(), way, skipped, held, steady)
            count += len(found)
            if count > most + SLACK:
                raise Refusal("limit-files", "This memory has more than %d files; limits.files allows fewer." % count)
            yield from found
            pending.extend(reversed(held))
    finally:
        for _, descriptor in way:
            os.close(descriptor)


def _descend(root: Root, way: list[tuple[str, int]], folder: str) -> int:
    """Open a folder from the one that holds it. ``way`` has the open folders from the root to the last one entered."""
    parent, _, name = folder.rpartition("/")
    while way and way[-1][0] != parent:
        os.close(way.pop()[1])
    place = os.path.join(root.folder, folder)
    if way and folder:
        descriptor = places.open_subfolder(way[-1][1], name, place, places.READ)
    else:
        descriptor = places.open_folder(place.rstrip("/"), places.READ)
    way.append((folder, descriptor))
    if len(way) > MOST_OPEN:
        os.close(way.pop(0)[1])
    return descriptor


def _walk_folder(
    root: Root,
    folder: str,
    way: list[tuple[str, int]],
    skipped: Skipped,
    held: list[str],
    steady: UnchangedFiles | None,
) -> list[FoundPath]:
    """One folder's memory; the folders to enter next are appended to ``held``."""
    rules, prefix = root.rules, folder + "/" if folder else ""
    try:
        with os.scandir(_descend(root, way, folder)) as scan:
            names = list(scan)
    except PermissionError:
        raise Refusal("unreadable", "Folder %s/%s may not be read by this user." % (root.name, folder)) from None
    except FileNotFoundError:
        return []
    here = os.path.join(root.folder, prefix)
    if root.apart:
        names = [entry for entry in names if not _is_reserved(root, prefix + entry.name, here + entry.name, skipped)]
    siblings = {entry.name for entry in names}
    called = None if root.keys.may_rename_in(folder) else root.path(prefix)
    if steady is not None and called is not None:
        names = steady.others(root.layout["name"], called, names)
    names.sort(key=lambda entry: entry.name)
    keep = _accept_all if folder and rules.keeps_all_below(folder) else rules.keep
    found: list[FoundPath] = []
    for entry in names:
        relative, place = prefix + entry.name, here + entry.name
        if rules.leaves_out(relative):
            _leave_out(root, relative, entry, skipped)
        elif entry.is_dir(follow_symlinks=False):
            if STAGE.match(entry.name) or any(others.keeps_all_below(relative) for others in root.before):
                continue
            if rules.may_hold(relative):
                held.append(relative)
                if keep(relative + "/x"):
                    path = root.path(relative) if called is None else called + entry.name
                    found.append(FoundPath(path, place, relative, entry.stat(follow_symlinks=False), root))
            else:
                skipped.add_passed_by(root, relative, place, entry)
        elif is_database_tail(root, relative, siblings):
            continue
        elif root.before and any(rules.takes(relative) for rules in root.before):
            continue  # another root has it
        elif keep(relative):
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode) and is_secret(relative):
                skipped.add(root.path(relative), SECRET)
            elif stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
                path = root.path(relative) if called is None else called + entry.name
                found.append(FoundPath(path, place, relative, status, root))
            else:
                skipped.add(root.path(relative), "not a file, folder or link")
        elif entry.is_symlink() and rules.may_hold(relative):
            skipped.add(root.path(relative), "a link, not a folder")
        else:
            skipped.add_passed_by(root, relative, place, entry)
    return found


def _is_reserved(root: Root, relative: str, place: str, skipped: Skipped) -> bool:
    """Whether a path is not for memories: it is left alone, and said to be."""
    if not is_apart(place, root.apart):
        return False
    if root.rules.keep(relative) or root.rules.may_hold(relative):
        skipped.add(root.path(relative), OWN)
    return True


def _accept_all(relative: str) -> bool:
    return True


def _leave_out(root: Root, relative: str, entry: os.DirEntry[str], skipped: Skipped) -> None:
    if any(rules.leaves_out(relative) for rules in root.before):
        return  # said there
    if root.rules.never(relative):
        _add_skipped(root, skipped, relative, entry, "never exported")
    else:
        skipped.add(root.path(relative), SECRET)


def _add_skipped(root: Root, skipped: Skipped, relative: str, entry: os.DirEntry[str], reason: str) -> None:
    if root.whole or root.rules.keep(relative):
        skipped.add(root.path(relative) + ("/" if entry.is_dir(follow_symlinks=False) else ""), reason)


def read_link_target(place: str, root: Root, relative: str) -> str | None:
    """A link's target, relative and inside its root; ``None`` when it leads out of it."""
    target = places.read_link(place)
    if os.path.isabs(target):
        target = os.path.relpath(target, os.path.dirname(place))
    inside = os.path.normpath(os.path.join(os.path.dirname(relative), target))
    if inside == ".." or inside.startswith("../") or os.path.isabs(inside) or _turns_back(place, target):
        return None
    return target


def _turns_back(place: str, target: str) -> bool:
    """Whether a target goes up again after it went through another link: nobody can tell by its text where it leads."""
    here, through = os.path.dirname(place), False
    for part in target.split("/"):
        if part == ".." and through:
            return True
        here = os.path.normpath(os.path.join(here, part))
        through = through or os.path.islink(here)
    return False
