"""Find a root's memory in one walk, without opening files.

What is left out is reported: names that a layout never exports, secrets, links that lead out, devices and sockets.
"""

from __future__ import annotations

import os
import re
import stat
from typing import TYPE_CHECKING, Iterable, Iterator, NamedTuple

from sidecar.format.patterns import is_secret
from sidecar.format.protocol import SkippedPath
from sidecar.format.refusal import Refusal
from sidecar.program import places
from sidecar.program.capture.roots import Root
from sidecar.program.places import is_apart

if TYPE_CHECKING:
    from sidecar.program.capture.unchanged import UnchangedFiles

MAGIC = b"SQLite format 3\0"
SQLITE_TAILS = ("-wal", "-shm", "-journal")
TAIL_MAGICS = tuple(map(bytes.fromhex, ("d9d505f920a163d7", "377f0682", "377f0683", "18e22d00", "002de218")))
"""First bytes of a rollback journal, a WAL (either byte order) and a WAL index (likewise): sqlite.org/fileformat2.html,
sections 3 and 4, and sqlite.org/walformat.html."""
MOST_SKIPPED = 200
MOST_LOOKED_AT = 500
"""At most this many files that are not part of a layout are opened to look for a database."""
SECRET = "secret"
NOT_PART = "not part of the layout"
OWN = "the sidecar's own"
STAGE = re.compile(r"\.memory-sidecar-[0-9a-f]{12}\Z")
"""The names of a restore's staging folders, which may be in the root that it restores."""
MOST_OPEN = 64
"""Folders kept open on the way down; deeper trees are entered from the top again."""
ENDLESS = 1 << 62
SLACK = 10_000
"""Links that lead out are found but do not count, so only a number far over the limit ends the walk."""


class FoundPath(NamedTuple):
    """One path of a root that is memory: its path in the memory, its local path, and its ``lstat``."""

    path: str
    place: str
    relative: str
    status: os.stat_result
    root: Root


class Skipped:
    """What was left out and why; beyond a bound it is only counted."""

    def __init__(self, roots: Iterable[Root] = ()) -> None:
        self.rows: list[SkippedPath] = []
        self.more = 0
        self.reasons: dict[str, int] = {}
        self.passed: dict[str, int] = {}
        """How many paths of each root are not part of its layout. A folder counts once, with all that is in it."""
        self.databases: list[str] = []
        """The databases among them."""
        self._looked_at = 0
        self._roots = {above for root in roots for above in _iterate_parents(root.folder)}

    def add(self, path: str, reason: str) -> None:
        """Record that a path was left out."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if len(self.rows) < MOST_SKIPPED:
            self.rows.append(SkippedPath(path, reason))
        else:
            self.more += 1

    def add_passed_by(self, root: Root, relative: str, place: str, entry: os.DirEntry[str]) -> None:
        """Count a path that is not part of a root's layout, unless another root has it. A database is named."""
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
    """Yield a folder and its parents."""
    while len(folder) > 1:
        yield folder
        folder = folder.rpartition("/")[0]


def has_header(place: str) -> bool:
    """Return whether a file begins like a SQLite database."""
    return _read_beginning(place) == MAGIC


def is_database_tail(root: Root, relative: str, siblings: set[str]) -> bool:
    """Return whether a path is the -wal, -shm or -journal of a database beside it: part of that database, never a file
    of its own."""
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
    # SQLite creates a database as an empty file and writes its journal or log first.
    tail = _read_beginning(os.path.join(root.folder, relative)) if begins is not None else None
    return tail is not None and (not tail or tail.startswith(TAIL_MAGICS))


def _read_beginning(place: str) -> bytes | None:
    """Return the first bytes of a regular file; ``None`` if it is not one or cannot be read."""
    try:
        with open(places.open_file(place), "rb") as file:
            return file.read(len(MAGIC)) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
    except (OSError, Refusal):
        return None


def walk(
    root: Root, skipped: Skipped, most: int = ENDLESS, steady: UnchangedFiles | None = None
) -> Iterator[FoundPath]:
    """Yield folders before their contents, in name order. Raise Refusal if there are far more than ``most``.

    Files that ``steady`` knows to be unchanged are not yielded; they are recorded in ``steady``.
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
    """Open a folder relative to its parent. ``way`` has the open folders from the root to the last one entered."""
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
    """Return one folder's memory; the folders to enter next are appended to ``held``."""
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
            continue  # it belongs to another root
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
    """Return whether a path is excluded because it is the sidecar's own; it is reported if the layout would keep it."""
    if not is_apart(place, root.apart):
        return False
    if root.rules.keep(relative) or root.rules.may_hold(relative):
        skipped.add(root.path(relative), OWN)
    return True


def _accept_all(relative: str) -> bool:
    return True


def _leave_out(root: Root, relative: str, entry: os.DirEntry[str], skipped: Skipped) -> None:
    """Report a path that is never exported or secret, unless another root reports it."""
    if any(rules.leaves_out(relative) for rules in root.before):
        return  # reported for that root
    if root.rules.never(relative):
        _add_skipped(root, skipped, relative, entry, "never exported")
    else:
        skipped.add(root.path(relative), SECRET)


def _add_skipped(root: Root, skipped: Skipped, relative: str, entry: os.DirEntry[str], reason: str) -> None:
    if root.whole or root.rules.keep(relative):
        skipped.add(root.path(relative) + ("/" if entry.is_dir(follow_symlinks=False) else ""), reason)


def read_link_target(place: str, root: Root, relative: str) -> str | None:
    """Return a link's target, relative and inside its root; ``None`` if it leads out of the root."""
    target = places.read_link(place)
    if os.path.isabs(target):
        target = os.path.relpath(target, os.path.dirname(place))
    inside = os.path.normpath(os.path.join(os.path.dirname(relative), target))
    if inside == ".." or inside.startswith("../") or os.path.isabs(inside) or _turns_back(place, target):
        return None
    return target


def _turns_back(place: str, target: str) -> bool:
    """Return whether a target goes up again after it passed another link: its text then does not tell where it leads."""
    here, through = os.path.dirname(place), False
    for part in target.split("/"):
        if part == ".." and through:
            return True
        here = os.path.normpath(os.path.join(here, part))
        through = through or os.path.islink(here)
    return False
