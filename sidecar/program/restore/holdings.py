"""What a sandbox has: which memories own the folders that a restore replaces, and what of them no snapshot has.

A memory owns a folder if it was restored into it or exported from it, and no other was restored over it since. Files
are compared with what the memory last restored or exported, by size and time (not by inode: a sandbox that was paused
or copied may have other inodes), and by contents if only the time differs. What differs from every stored snapshot is
*unsaved*. If nothing can be compared (the index cannot be read, or its snapshot is not in the store), all of it is
unsaved. A file in a folder that no memory owns is *foreign*: it came with the sandbox.
"""

from __future__ import annotations

import hashlib
import os
import stat
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from sidecar.format import digests, index
from sidecar.format.patterns import compile_patterns
from sidecar.format.protocol import (
    MOST_LOST,
    MOST_UNSAVED,
    MOST_UNSAVED_PROJECTS,
    LayoutRules,
    RestoreQuestion,
    UnsavedMemory,
)
from sidecar.format.refusal import Refusal
from sidecar.format.roots import get_root, get_stem, make_hint, split_number
from sidecar.program import cache, notes, places
from sidecar.program.capture import project_folders
from sidecar.program.capture.roots import Root
from sidecar.program.capture.walk import FoundPath, Skipped, read_link_target, walk
from sidecar.program.restore.swap import CHANGED, is_folder
from sidecar.program.scratch import Scratch
from sidecar.program.sqlite import backup

SHRUNK_TO, SHRUNK_FROM = 0.5, 64 * 1024
"""A database of at least this size that lost more than half of it was replaced by another one, and is not ahead of
anything."""


class Holding(NamedTuple):
    """A memory that was restored or exported in this sandbox."""

    key: str
    """The name of its cache folder."""
    folder: str
    lineage: List[str]
    """The snapshots it was restored from and exported to, newest first."""
    stored: List[str]
    """Those of them that are in the store, if known here."""
    sure: bool
    """Whether the sidecar has said which of them are stored. A restore is noted only for a stored snapshot, but an
    export may have been cut short after it was noted."""
    base: Optional[cache.Base]
    """What is known of the newest snapshot that is stored and complete."""
    roots: Optional[Dict[str, str]]
    """Where its roots are. ``None``: an earlier version's notes, which do not say."""
    memory: str = ""
    sandbox: str = ""
    reader: bool = False
    part: Sequence[str] = ()
    """The patterns of the part of it that is here; empty: all of it."""
    noted: float = 0.0
    """When it was last restored or exported."""

    def name_of(self, root: Root) -> str:
        """Return the memory's name for the root in this folder; "" if it does not own the folder."""
        if self.roots is not None:
            return next((name for name, folder in self.roots.items() if folder == root.place), "")
        return root.name if self.base is None or root.name in _list_roots(self.base) else ""


class OldFile(NamedTuple):
    """A file or link that a restore removes, and what is known of it."""

    found: FoundPath
    holding: Optional[Holding]
    """The memory it belongs to; ``None``: it came with the sandbox."""
    path: str
    """Its path in that memory."""
    saved: bool
    """A stored snapshot has it unchanged."""
    savable: bool
    """An export can save it; not so a link that leads out of the memory."""
    own: str = ""
    """Its path in the memory that is being restored, if that owns the folder too."""
    steady: bool = False
    """It is unchanged from what that memory has in the store."""
    signature: Sequence[Any] = ()
    """The stat signature of a database and its logs, when it was examined."""


def find_holdings(scratch: Scratch, question: RestoreQuestion, roots: List[Root]) -> List[Holding]:
    """Return the memories that this sandbox restored or exported and still has, if they can be in these roots' folders.
    The one being restored comes first."""
    own = os.path.basename(scratch.memory)
    names = [own] + sorted(name for name in os.listdir(scratch.base) if name != own)
    folders = {root.place for root in roots}
    found = []
    for name in names[: MOST_UNSAVED + 1]:
        folder = os.path.join(scratch.base, name)
        snapshots = notes.read_lineage(folder)[::-1] if is_folder(folder) else []
        noted = notes.read(folder) if snapshots or name == own else None
        if not (snapshots or noted) or (noted is not None and not noted.current):
            continue
        if noted is not None and name != own and not folders.intersection(noted.roots.values()):
            continue
        stored = question.stored.get(name)
        known = snapshots if stored is None else [snapshot for snapshot in snapshots if snapshot in stored]
        base = cache.load_base(folder, [snapshot for snapshot in known if snapshot not in question.unusable])
        # The index of a restore has no rules in it, and only stored snapshots are restored.
        sure = stored is not None or (len(snapshots) == 1 and base is not None and not base.rules)
        holding = Holding(name, folder, snapshots, known, sure, base, noted.roots if noted else None)
        if noted is not None:
            holding = holding._replace(memory=noted.memory, sandbox=noted.sandbox)
        reader, part = notes.is_reader(folder), notes.read_part(folder)
        found.append(holding._replace(reader=reader, part=part, noted=_read_noted_time(folder)))
    return found


def _read_noted_time(folder: str) -> float:
    """Return when the memory was last restored or exported; 0 if that is not known."""
    try:
        return places.read_status(notes.locate_lineage(folder)).st_mtime
    except OSError:
        return 0.0


class Holdings:
    """The memories of a sandbox, and what of the folders of a restore belongs to them."""

    def __init__(
        self, scratch: Scratch, question: RestoreQuestion, layouts: List[LayoutRules], roots: List[Root], home: str
    ) -> None:
        self._question = question
        self._layouts = layouts
        self._home = home
        self.all = find_holdings(scratch, question, roots)
        mine = [one for one in self.all if one.folder == scratch.memory]
        self.own = mine[0] if mine else None

    def list_owners(self, root: Root) -> List[Tuple[Holding, str]]:
        """Return the memories that own a root's folder, each with its name for the root. A folder that no other memory
        owns is attributed to the one being restored, if that was in this sandbox: better one snapshot too many.
        """
        holders = [(one, name) for one in self.all for name in [one.name_of(root)] if name]
        return holders or ([(self.own, root.name)] if self.own is not None else [])

    def look(self, root: Root) -> Tuple[List[OldFile], List[str]]:
        """Return a root's files and links in this sandbox, and its folders. Raise Refusal if they may not be read."""
        old: List[OldFile] = []
        folders: List[str] = []
        if not is_folder(root.folder):
            return old, folders
        holders = [
            (one, name, project_folders.read_folder_names(one.folder, name, root.layout, root.keys))
            for one, name in self.list_owners(root)
        ]
        for found in walk(root, Skipped()):
            if stat.S_ISDIR(found.status.st_mode):
                folders.append(found.place)
                continue
            paths = [name + "/" + named.stored(found.relative) for _, name, named in holders]
            known = [
                one.base.known(path) if one.base is not None else None for (one, _, _), path in zip(holders, paths)
            ]
            logged = any(one is not None and one.entry.database for one in known)
            signature = backup.compute_database_signature(found.place) if logged else ()
            has = [one is not None and _is_unchanged(found, one, signature) for one in known]
            best = has.index(True) if True in has else 0
            one = OldFile(found, None, found.path, True in has, _is_savable(found), signature=signature)
            if holders:
                one = one._replace(holding=holders[best][0], path=paths[best])
            if holders and holders[0][0] is self.own:
                one = one._replace(own=paths[0], steady=has[0])
            old.append(one)
        return old, folders

    def check_unchanged(self, one: OldFile) -> None:
        """Raise Refusal if a database that a snapshot has was written to since it was examined."""
        if one.saved and one.signature and one.signature != backup.compute_database_signature(one.found.place):
            raise Refusal(CHANGED, "%s was written to while the memory was put in place." % one.path, True)

    @property
    def origin(self) -> str:
        """The newest snapshot that the memory here came from and that is or was its head; "" if there is none.

        What was exported since and did not become the head (because a guard refused it, for example) is stored beside
        it.
        """
        heads = self._question.heads
        return next((one for one in self.own.stored if one in heads), "") if self.own is not None else ""

    def is_ahead(self, roots: List[Root], old: List[OldFile]) -> bool:
        """Return whether this sandbox grew out of the requested snapshot (``keep`` has its id): it has that, or more.

        Not if it lost its memory: all files of a root of the snapshot are missing, or one that its layout requires; or,
        since the last export, a database was replaced by a much smaller one. Nor if a read-only copy is to become
        writable or the other way round, and it differs from the snapshot: what was written in a read-only copy never
        becomes the head by itself.
        """
        own = self.own
        if own is None or self.origin not in self._question.keep or list(own.part) != self._question.part:
            return False
        base = cache.load_base(own.folder, own.stored)
        exported = own.stored[0] != self.origin
        origin = cache.load_base(own.folder, [self.origin]) if exported else base
        here = {one.own: one.found for one in old if one.own}
        for root in roots:
            name = own.name_of(root)
            later = [one for one, _ in self.list_owners(root) if one.roots is None and one.noted > own.noted]
            if not name or later or not any(path.startswith(name + "/") for path in here):
                return False
            if origin is not None and not _has_needed(origin, name, root, here):
                return False
            if base is not None and not _has_databases(base, name, here):
                return False
        if own.reader == self._question.read_only:
            return bool(here)
        same = base is not None and all(one.steady or not one.savable for one in old) and _list_files(base) <= set(here)
        return same and not exported

    def unsaved(self, old: List[OldFile]) -> List[UnsavedMemory]:
        """Return each memory of which something would be lost, with what an export of it needs. A memory whose stored
        snapshots the sidecar has yet to name is included, with the snapshot that has all of it."""
        told = []
        for one in self.all:
            mine = [each for each in old if each.holding is not None and each.holding.key == one.key and each.savable]
            lost = sorted(each.path for each in mine if not each.saved)
            if lost or (mine and not one.sure):
                told.append(
                    UnsavedMemory(
                        memory=one.memory,
                        key=one.key,
                        sandbox=one.sandbox,
                        lineage=one.lineage[: notes.LONGEST_LINEAGE],
                        unchanged="" if lost or one.base is None else one.base.snapshot,
                        files=len(lost),
                        paths=lost[:MOST_LOST],
                        layouts=sorted({each.found.root.layout["name"] for each in mine}),
                        projects=self._list_projects(one, [each.found.root for each in mine]),
                    )
                )
        return told

    def _list_projects(self, holding: Holding, roots: List[Root]) -> Optional[List[str]]:
        """Return the projects to name in an export of a memory: those requested now, else those it was in, in order."""
        named = self._question.projects
        if named is not None and holding is self.own:
            return named
        folders = holding.roots if holding.roots is not None else {root.name: root.place for root in roots}
        specs = {spec["name"]: spec for layout in self._layouts for spec in layout["roots"]}
        projects: Dict[int, str] = {}
        for name, folder in folders.items():
            stem = get_stem(name, specs)
            number, spec = split_number(name)[1] if stem != name else 1, specs.get(stem, {})
            below = "/" + spec["below"] if spec.get("below") else ""
            if spec.get("project") and folder.endswith(below):
                projects[number] = make_hint(folder[: len(folder) - len(below)], self._home)
        return [projects[number] for number in sorted(projects)][:MOST_UNSAVED_PROJECTS] or None

    def displaced(self, roots: List[Root]) -> List[str]:
        """Return the cache folder names of other memories that a restore of these roots takes something from."""
        held = [one for root in roots for one, _ in self.list_owners(root)]
        return sorted({one.key for one in held if self.own is None or one.key != self.own.key})


def format_some(paths: List[str]) -> str:
    """Return a few of many paths, for a sentence."""
    more = len(paths) - MOST_LOST
    return ", ".join(paths[:MOST_LOST]) + (" and %d more" % more if more > 0 else "")


def _is_unchanged(found: FoundPath, known: cache.KnownEntry, signature: Sequence[Any]) -> bool:
    """Return whether a file or link is unchanged since it was last restored or exported; a database (with this stat
    signature) together with its logs."""
    if stat.S_ISLNK(found.status.st_mode):
        return known.entry.type == index.LINK and _read_target(found) == known.entry.target
    if known.entry.type != index.FILE:
        return False
    if known.entry.database and known.signature:
        same = _pick_sizes_and_times(known.signature) == _pick_sizes_and_times(signature)
    else:
        was = known.signature[2:4] or [known.entry.size, known.entry.mtime]  # a seed left what was there
        same = bool(was == [found.status.st_size, found.status.st_mtime_ns])
    return same or _has_contents(found, known.entry, known.first_page, signature)


def _pick_sizes_and_times(rows: Sequence[Any]) -> List[Any]:
    return [row[2:4] for row in rows if row and row[2]]  # a process that only reads a database leaves an empty log


def _has_contents(found: FoundPath, entry: index.Entry, first_page: str, signature: Sequence[Any]) -> bool:
    """Return whether a file of which only the time differs has the contents of a snapshot: it was touched, or a
    database's log was merged into it, as its worker does when it is stopped."""
    if found.status.st_size != entry.size or not entry.block or any(row and row[2] for row in signature[1:]):
        return False
    try:
        with open(places.open_file(found.place), "rb") as file:
            digest, sums, _ = digests.digest_stream(file, entry.size, entry.block)
            file.seek(0)
            first = hashlib.sha256(backup.blank_counters(file.read(entry.block))).hexdigest()
    except OSError:
        return False
    counted = entry.database and sums[digests.SUM_BYTES :] == entry.sums[digests.SUM_BYTES :] and first == first_page
    return digest == entry.digest or counted


def _is_savable(found: FoundPath) -> bool:
    """Return whether an export can save it: not a link that leads out of its root."""
    return not stat.S_ISLNK(found.status.st_mode) or _read_target(found) is not None


def _read_target(found: FoundPath) -> Optional[str]:
    try:
        return read_link_target(found.place, found.root, found.relative)
    except OSError:
        return None


def _list_roots(base: cache.Base) -> Set[str]:
    return {get_root(path) for path in base.entries}


def _list_files(base: cache.Base) -> Set[str]:
    return {path for path, row in base.entries.items() if row[0][index.TYPE] != index.DIR}


def _has_needed(origin: cache.Base, name: str, root: Root, here: Dict[str, FoundPath]) -> bool:
    """Return whether a root still has some of the files it had, and all that its layout requires."""
    had = {path for path in _list_files(origin) if path.startswith(name + "/")}
    needed = compile_patterns(root.layout.get("required", [])).match
    lost = any(needed(path[len(name) + 1 :]) for path in had if path not in here)
    return not lost and not (had and had.isdisjoint(here))


def _has_databases(base: cache.Base, name: str, here: Dict[str, FoundPath]) -> bool:
    """Return whether a root's databases still have about the size they had."""
    for path in _list_files(base):
        known = base.known(path) if path.startswith(name + "/") and path in here else None
        if known is None or not known.entry.database or known.entry.size < SHRUNK_FROM:
            continue
        try:
            size, _ = backup.measure(here[path].place)
        except OSError:
            return False
        if size < known.entry.size * SHRUNK_TO:
            return False
    return True
