"""Restore, inside the sandbox: examine what is there, stage beside the target, check everything, then swap.

A sandbox that has what is requested, or more, is left unchanged. If something would be lost that no snapshot has,
nothing is done and the answer says what it is: the sidecar saves it and asks again.
"""

from __future__ import annotations

import hashlib
import os
import time
from functools import partial
from typing import Any, BinaryIO, Callable

from sidecar.format import index
from sidecar.format.index import list_folders, merge_indexes
from sidecar.format.patterns import PathSet
from sidecar.format.protocol import (
    FoundDatabase,
    FoundRoot,
    PackPart,
    RestoreAnswer,
    RestoreQuestion,
    Rules,
    SkippedPath,
    UploadedBundle,
    WithheldRoot,
)
from sidecar.format.refusal import Refusal
from sidecar.format.roots import get_root
from sidecar.program import cache, notes, places
from sidecar.program.capture import project_folders
from sidecar.program.capture.versions import describe_older_schema, find_version, parse_version
from sidecar.program.capture.walk import SQLITE_TAILS, FoundPath
from sidecar.program.child import Ask, Child, Tell
from sidecar.program.privacy import settings_files
from sidecar.program.restore import set_aside
from sidecar.program.restore.coverage import Coverage
from sidecar.program.restore.destinations import name_root_folders, place_roots
from sidecar.program.restore.holdings import Holdings, OldFile, format_some
from sidecar.program.restore.staging import Section, Staged, Unpacker
from sidecar.program.restore.swap import PendingNotes, Swap, is_folder
from sidecar.program.scratch import Scratch
from sidecar.program.sqlite import backup
from sidecar.program.worker import worker
from sidecar.program.worker.holders import Holder, find_holders
from sidecar.program.worker.worker import wait_until_drained

WORKER_SECONDS = 15.0
LONGEST_SETTINGS = 16 << 20
WHOLE = (
    "This sandbox holds %s: a part of %s cannot take its place, as nothing else would be exported from here any more."
)
REPLACED = "What was exported from here last (%s) never became the head, and is not here any more: it stands beside it."


class Restore:
    """One restore. Until ``swap.commit`` nothing of the target changes."""

    def __init__(self, question: RestoreQuestion, rules: Rules, scratch: Scratch, home: str) -> None:
        self.question = question
        self.scratch = scratch
        self.home = home
        layouts = rules.select(question.layouts)
        self.roots, self.withheld = place_roots(question, layouts, home, scratch.contained)
        self.left_alone: dict[str, index.Entry] = {}
        """Entries of the snapshot in roots that are not touched: withheld, or already here."""
        self.before: cache.Base | None = None
        """What is already here, if only withheld roots are restored."""
        self.coming: frozenset[str] = frozenset()
        """The paths to be placed, once they are known."""
        self.by_name = {root.name: root for root in self.roots}
        self.seed = question.mode == "seed"
        self.skipped: list[SkippedPath] = []
        self.warnings: list[str] = []
        self.stages = {root.name: _name_stage(root.folder) for root in self.roots}
        self.holdings = Holdings(scratch, question, layouts, self.roots, home)
        self.here: list[OldFile] = []
        self.old: list[OldFile] = []
        """Of what is here, what the snapshot's own rules covered: that is removed."""
        self.covers = Coverage(question.covered)
        self.part = PathSet(question.part)
        """The paths that are restored, if that is only a part; nothing else is touched."""
        self.old_folders: list[str] = []
        self.aside = set_aside.SetAside(scratch, question.snapshot, question.set_aside_bytes)
        self.movable: dict[str, bool] = {}
        self.removed = 0
        self.unversioned: set[str] = set()

    def run(self) -> RestoreAnswer:
        """Restore and return the answer, with status "complete", "kept", "unsaved" or "clear"."""
        self._find_old()
        self._check_part()
        if self._keeps_all():
            return self._leave_as_is()
        unsaved = self._answer_unsaved()
        if unsaved:
            return unsaved
        if self.question.ask:
            return self._build_answer("clear")
        self._check_versions()
        swap = Swap(self.scratch.journal, list(self.stages.values()), self.scratch.owner, self.scratch.contained)
        done = False
        try:
            swap.begin()
            entries, staged = self._unpack()
            self.coming = frozenset(entries)
            self._name_folders(entries)
            checks = self._check_databases(staged, entries)
            self._prepare(staged, entries)
            holders = self._stop_workers(entries)
            try:
                self._find_old()  # again: there may have been writes since, for example by the workers before they stopped
                unsaved = self._answer_unsaved()
                if unsaved:
                    return unsaved
                self._compare_schemas(staged, entries)
                placed = self._plan(swap, entries, staged)
                swap.commit()
            finally:
                self.warnings += worker.start_again(holders)
            done = True
            self._try_note(lambda: self._remember(entries, staged, placed))
        finally:
            if done:
                self._try_note(swap.end)  # else the next run does it
            else:
                swap.end()
                self.aside.forget()  # nothing was moved there, or it is back in its place
        self._clear_old_folders(entries)
        if self.aside.files:
            self.aside.give_to_user()
            self.aside.make_room()
        files = [entries[path] for path in placed if entries[path].type == index.FILE]
        files += [entry for path, entry in self.left_alone.items() if entry.type == index.FILE and self._is_here(path)]
        answer = self._build_answer("complete")
        answer.files = len(files)
        answer.bytes = sum(entry.size for entry in files)
        answer.databases = checks
        answer.skipped = self.skipped
        answer.warnings = self.warnings + self._replaced() + self._describe_discarded()
        answer.roots = self._describe_roots()
        answer.withheld = self._describe_withheld()
        answer.set_aside = self.aside.tell() if self.aside.files else None
        return answer

    def _build_answer(self, status: str) -> RestoreAnswer:
        return RestoreAnswer(status, self.question.memory, self.question.snapshot)

    def _try_note(self, note: Callable[[], None]) -> None:
        """Write notes, with a warning if that fails: the memory is in place, so a full disk does not make the restore
        incomplete."""
        try:
            note()
        except OSError as problem:
            told = "What is in place now could not be noted here (%s): the next export may bring all of it." % problem
            self.warnings += [told] if told not in self.warnings else []

    def _find_old(self) -> None:
        """Find what is there and what of it is to be removed. A seed removes nothing."""
        self.here, self.old_folders = [], []
        for root in [] if self.seed else self.roots:
            here, folders = self.holdings.look(root)
            if self.part:
                here = [one for one in here if self.part.has(one.found.path)]
                names = {folder: os.path.relpath(folder, root.folder) for folder in folders}
                folders = [folder for folder in folders if self.part.has(root.name + "/" + names[folder])]
            self.here += here
            self.old_folders += folders
        self.old = [one for one in self.here if self._must_go(one.found)]

    def _check_part(self) -> None:
        """Raise Refusal if a part is to be restored where there is more, or another part: the notes would then say that
        only this part is looked after here, and what was written elsewhere would never be saved."""
        if not self.part or self.question.discard:
            return
        own = self.holdings.own
        if own is not None and own.lineage and list(own.part) != self.question.part:
            raise Refusal(
                "other-part", WHOLE % ("another part of it" if own.part else "all of it", self.question.memory)
            )
        owners = [one for root in self.roots for one, _ in self.holdings.list_owners(root) if one is not own]
        if owners:
            raise Refusal("other-part", WHOLE % (owners[0].memory or "another memory", self.question.memory))

    def _must_go(self, found: FoundPath) -> bool:
        """Return whether a file in this sandbox is removed: not if the snapshot's rules did not cover it, nor if the
        snapshot's file yields to the one in place."""
        if found.root.rules.yields(found.relative):
            return False
        return found.path in self.coming or self.covers.has(found.root.name, found.relative)

    def _keeps_all(self) -> bool:
        """Return whether everything here stays unchanged. Withheld roots whose projects exist now are added to what stays."""
        if self.seed or self.question.discard or self.question.saved:  # saved so that it can be replaced
            return False
        noted = notes.read(self.scratch.memory)
        late = set(noted.withheld) & set(self.by_name) if noted is not None else set()
        rest = [root for root in self.roots if root.name not in late]
        ahead = self.holdings.is_ahead(rest, [one for one in self.here if one.found.root.name not in late])
        own = self.holdings.own
        if not (ahead and late):
            return ahead
        if own is None or own.stored[0] != self.question.snapshot or own.base is None:
            # What is here was exported since, and the withheld roots of the snapshot would not match it.
            self.withheld = self.withheld + [root for root in self.roots if root.name in late]
            self.roots = rest
            return True
        self.before = own.base
        self.roots = [root for root in self.roots if root.name in late]
        self.by_name = {root.name: root for root in self.roots}
        self.stages = {name: stage for name, stage in self.stages.items() if name in late}
        self._find_old()
        return False

    def _leave_as_is(self) -> RestoreAnswer:
        """Leave everything unchanged, except for whether the memory is a read-only copy. Return the answer."""
        own = self.holdings.own
        assert own is not None
        cache.set_reader(self.scratch.memory, self.question.read_only)
        self._write_notes()
        origin, newest = self.holdings.origin, own.stored[0]
        changed = sorted(one.own for one in self.here if one.savable and not one.steady)
        if newest != origin:
            self.warnings.append("What was exported from here since then (%s) is stored beside the head." % newest)
        if changed:
            self.warnings.append("Changed here since then, and not exported yet: %s." % format_some(changed))
        answer = self._build_answer("kept")
        answer.holds = origin
        answer.files = len(self.here)
        answer.bytes = sum(one.found.status.st_size for one in self.here)
        answer.warnings = self.warnings
        answer.roots = self._describe_roots()
        answer.withheld = self._describe_withheld()
        return answer

    def _answer_unsaved(self) -> RestoreAnswer | None:
        """Return the answer that makes the sidecar save first what would be lost; ``None`` if nothing would be, or all
        that can be saved is: the rest is set aside."""
        if self.seed or self.question.discard or self.question.saved or self.before is not None:
            return None  # what came with a project that was withheld until now is set aside
        answer = self._build_answer("unsaved")
        answer.unsaved = self.holdings.unsaved(self.old)
        return answer if answer.unsaved else None

    def _replaced(self) -> list[str]:
        """Return a warning if what was last exported from here is stored but not in the head. What was just saved is
        reported anyway."""
        own, heads = self.holdings.own, self.question.heads
        if self.seed or self.question.saved or own is None or not own.stored or not heads:
            return []
        last = own.stored[0]
        return [] if last in heads or last == self.question.snapshot else [REPLACED % last]

    def _describe_discarded(self) -> list[str]:
        """Return a warning about unsaved files that were discarded on request."""
        gone = sorted(one.path for one in self.old if not one.saved) if self.question.discard else []
        return ["What was here and in no snapshot is gone, as was asked for: %s." % format_some(gone)] if gone else []

    def _describe_roots(self) -> list[FoundRoot]:
        return [FoundRoot(root.name, root.layout["name"], root.folder) for root in self.roots]

    def _describe_withheld(self) -> list[WithheldRoot]:
        files = [get_root(path) for path, entry in self.left_alone.items() if entry.type == index.FILE]
        return [WithheldRoot(root.name, root.hint, files.count(root.name)) for root in self.withheld]

    def _is_here(self, path: str) -> bool:
        """Return whether a path's root is restored, not withheld."""
        return get_root(path) not in {root.name for root in self.withheld}

    def _check_versions(self) -> None:
        """Raise Refusal if the program here is older than the one that wrote this memory: it could damage it."""
        for root in self.roots:
            theirs, ours = self.question.versions.get(root.name, ""), find_version(root.layout, self.home)
            if not (theirs and ours):
                self.unversioned.add(root.name)
            elif parse_version(ours) < parse_version(theirs) and not self.question.force:
                raise Refusal(
                    "plugin-older",
                    "This memory is of %s %s; here is %s, which could damage it." % (root.layout["name"], theirs, ours),
                )

    def _compare_schemas(self, staged: dict[str, Staged], entries: dict[str, index.Entry]) -> None:
        """Compare database schemas if versions cannot be compared. It is only a warning, because a newer program may be
        installed that has not been started yet."""
        for path, entry in entries.items():
            name, _, relative = path.partition("/")
            if entry.database and name in self.unversioned and not self.seed:
                self.warnings += filter(None, [describe_older_schema(self.by_name[name], relative, staged[path].place)])

    def _locate(self, path: str) -> str:
        """Return the local path of a path in the memory."""
        name, _, relative = path.partition("/")
        root = self.by_name[name]
        return os.path.join(root.folder, root.keys.local(relative))

    def _name_folders(self, entries: dict[str, index.Entry]) -> None:
        """Give the roots' folders the names that belong to this sandbox's projects."""
        self.roots, told = name_root_folders(self.roots, entries, self.question, self.home)
        self.by_name = {root.name: root for root in self.roots}
        self.warnings += told

    def _unpack(self) -> tuple[dict[str, index.Entry], dict[str, Staged]]:
        """Unpack all packs into the staging folders. Return the entries and the checked files."""
        path, at = self._get_bundle()
        with open(path, "rb") as bundle:
            sections: list[tuple[index.Index, int, PackPart]] = []
            for pack in self.question.packs:
                pack_index = index.read(Section(bundle, at, pack.index_bytes))  # type: ignore[arg-type]
                at += pack.index_bytes
                sections.append((pack_index, at, pack))
                at += pack.bytes
            entries = self._drop_forbidden(merge_indexes(section[0] for section in sections))
            unpacker = Unpacker(entries, {name: os.path.join(stage, "new") for name, stage in self.stages.items()})
            for pack_index, start, pack in sections:
                unpacker.apply(Section(bundle, start, pack.bytes), pack.codec, pack_index)  # type: ignore[arg-type]
        return entries, unpacker.checked()

    def _get_bundle(self) -> tuple[str, int]:
        """Return the file with all packs and indexes, uploaded or downloaded now, and where in it they begin."""
        if self.question.links is not None:
            from sidecar.program import links  # late: it loads what HTTP needs, and most restores need none

            path = os.path.join(self.scratch.work, "bundle")
            links.fetch(self.question.links, path)
            return path, 0
        claim = self.question.bundle
        if claim is None or not os.path.exists(claim.path):
            # Some SDKs send a command again if its answer was lost; the first run has used up the upload.
            raise Refusal("upload-damaged", "The upload is not there any more.", True)
        with open(claim.path, "rb") as bundle:
            _check_bundle(bundle, claim)
        return claim.path, claim.start

    def _drop_forbidden(self, entries: dict[str, index.Entry]) -> dict[str, index.Entry]:
        """Remove entries that must never be restored, whatever a snapshot contains."""
        kept = {}
        for path, entry in entries.items():
            name, _, relative = path.partition("/")
            root = self.by_name.get(name)
            if root is None and (self.before is not None or not self._is_here(path)):
                self.left_alone[path] = entry
            elif root is not None and root.rules.allows(root.keys.local(relative), entry.type == index.DIR):
                kept[path] = entry
            else:
                self.skipped.append(SkippedPath(path, "never restored"))
        return kept

    def _check_databases(self, staged: dict[str, Staged], entries: dict[str, index.Entry]) -> list[FoundDatabase]:
        """Check the staged databases. Raise Refusal if one is damaged, unless forced."""
        rows = []
        for path, entry in entries.items():
            if not entry.database:
                continue
            place = staged[path].place
            sketch = self._plan_sketch(path, entry, place)
            # On another core while this one checks.
            aside = Child(partial(_work_aside, sketch)) if sketch and entry.size > backup.LARGE else None
            try:
                check = backup.quick_check(place)
                if check == "ok" and sketch and (aside is None or not aside.hear()):
                    sketch()
            finally:
                if aside is not None:
                    aside.wait()
            rows.append(FoundDatabase(path, "staged", check))
            if check != "ok" and not self.question.force:
                raise Refusal("database-damaged", "The database %s is damaged in this snapshot: %s" % (path, check))
        return rows

    def _plan_sketch(self, path: str, entry: index.Entry, place: str) -> Callable[[], bool] | None:
        """Return what keeps digests of a database's rows, so that the next export can count which came, changed and went;
        ``None`` if there is nothing to keep."""
        name, _, relative = path.partition("/")
        layout = self.by_name[name].layout
        if not layout.get("tables"):
            return None
        from sidecar.program.sqlite import sketches

        tables = sketches.choose_tables(layout, relative)
        if not tables or sketches.has(self.scratch.memory, entry.digest, tables):
            return None

        def sketch() -> bool:
            found = sketches.sketch_database(place, tables)
            if found is not None:
                sketches.write(self.scratch.memory, entry.digest, tables, found)
            return True

        return sketch

    def _prepare(self, staged: dict[str, Staged], entries: dict[str, index.Entry]) -> None:
        """Set the modes, times and owner of staged files, and merge in the settings keys that belong to this sandbox."""
        for path, file in staged.items():
            entry, root = entries[path], self.by_name[get_root(path)]
            drop = root.rules.filters.get(path.split("/", 1)[1])
            theirs = self._read_present(path) if drop is not None else None
            if drop is not None and theirs is not None:
                merged = settings_files.merge_settings(places.read_file(file.place, LONGEST_SETTINGS), theirs, drop)
                places.write_file(file.place, merged)
            descriptor = places.open_file(file.place)
            try:
                os.fchmod(descriptor, entry.mode)
                os.utime(descriptor, ns=(entry.mtime, entry.mtime))
            finally:
                os.close(descriptor)
            self.scratch.give_to_user(file.place)

    def _read_present(self, path: str) -> bytes | None:
        """Return a small file that is in place now; ``None`` if there is none to read."""
        try:
            return places.read_file(self._locate(path), LONGEST_SETTINGS)
        except (OSError, Refusal):
            return None

    def _plan(self, swap: Swap, entries: dict[str, index.Entry], staged: dict[str, Staged]) -> list[str]:
        """Plan every move; return the paths that will be placed."""
        self._plan_removals(swap, entries)
        for root in self.roots:
            swap.folder(root.folder, _read_mode(root.folder))
        for folder in list_folders(entries):
            if not (self.seed and is_folder(self._locate(folder.path))):
                swap.folder(self._locate(folder.path), folder.mode)
        placed: list[str] = []
        taken: set[str] = set()
        for path, entry in entries.items():
            place = self._locate(path)
            if entry.type == index.DIR:
                continue
            name, _, relative = path.partition("/")
            if (self.seed or self.by_name[name].rules.yields(relative)) and places.exists(place):
                self.skipped.append(SkippedPath(path, "already there"))
                continue
            if place in taken:
                self.skipped.append(SkippedPath(path, "another root of the snapshot has it too"))
                self.warnings.append("%s is in the snapshot twice, as %s too: the first was placed." % (place, path))
                continue
            taken.add(place)
            swap.folder(os.path.dirname(place))
            swap.put(staged[path].place if entry.type == index.FILE else self._stage_link(entry, len(placed)), place)
            placed.append(path)
        displaced = () if self.seed else tuple(self.holdings.displaced(self.roots))
        swap.noted = PendingNotes(
            self.question.snapshot, self.question.read_only, displaced, self._build_notes(), self.question.part
        )
        return placed

    def _plan_removals(self, swap: Swap, entries: dict[str, index.Entry]) -> None:
        """Plan the removal of old memory (``replace``); what nothing else has is set aside. The old log of a database
        is removed with it in any mode, because it would damage the new database."""
        spare = not self.question.discard
        for one in self.old:
            found = one.found
            self._plan_removal(
                swap, found.root.name, found.place, found.relative, found.status, spare and not one.saved
            )
        old = {one.found.place for one in self.old}
        for one in self.old:
            self._plan_logs(
                swap, one.found.root.name, one.found.place, one.found.relative, old, spare and not one.saved
            )
            self.holdings.check_unchanged(one)
        for path, entry in entries.items():
            name, _, relative = path.partition("/")
            place = self._locate(path)
            if entry.database and place not in old and not (self.seed and places.exists(place)):
                self._plan_logs(swap, name, place, self.by_name[name].keys.local(relative), old, spare)
        if self.aside.files:
            swap.use_aside_folder(self.aside.folder)

    def _plan_logs(self, swap: Swap, name: str, place: str, relative: str, old: set[str], spare: bool) -> None:
        """Plan what happens to the logs beside a database. The shared-memory file (-shm) contains nothing of its own."""
        for tail in SQLITE_TAILS:
            log = place + tail
            if log not in old and places.exists(log):
                status = places.read_status(log)
                seen = None if tail == backup.SHM_TAIL else status
                spared = spare and seen is not None and status.st_size > 0
                self._plan_removal(swap, name, log, relative + tail, seen, spared)

    def _plan_removal(self, swap: Swap, name: str, place: str, relative: str, seen: Any, spare: bool) -> None:
        """Plan to move an old file away, as it was ``seen``; with ``spare`` it is set aside."""
        stage = self.stages[name]
        if spare:
            target = self.aside.keep(name, relative, seen)
            if name not in self.movable:
                self.movable[name] = self.aside.can_move_from(stage)
            if self.movable[name]:
                swap.remove(place, target)  # whatever is still written to it is kept as well
                return
            set_aside.copy_entry(place, target, seen)
        self.removed += 1
        swap.remove(place, os.path.join(stage, "old", str(self.removed)), seen)

    def _stage_link(self, entry: index.Entry, number: int) -> str:
        """Create a link in the staging folder and return its path."""
        place = os.path.join(self.stages[get_root(entry.path)], "new", "link-%d" % number)
        places.make_link(entry.target, place)
        self.scratch.give_to_user(place)
        return place

    def _stop_workers(self, entries: dict[str, index.Entry]) -> list[Holder]:
        """Wait for the processes that have a database open which is about to be replaced, and stop them. Return them.
        Raise Refusal if one does not stop."""
        stopped: list[Holder] = []
        for root in self.roots:
            mine = [
                self._locate(path) for path, e in entries.items() if e.database and path.startswith(root.name + "/")
            ]
            holders = find_holders(mine) if mine and not self.seed else []
            if not holders:
                continue
            self.warnings += wait_until_drained(root, self.question.worker_wait, "it was stopped without")
            shutdown = root.layout.get("worker")
            settings = dict(shutdown, settings=os.path.join(root.folder, shutdown["settings"])) if shutdown else None
            left = worker.stop_holders(holders, shutdown=settings, timeout=WORKER_SECONDS)
            if left:
                self.warnings += worker.start_again([holder for holder in holders if holder not in left] + stopped)
                raise Refusal(
                    "worker-running", "Process %d keeps %s open and did not stop." % (left[0].pid, mine[0]), True
                )
            stopped += holders
        return stopped

    def _clear_old_folders(self, entries: dict[str, index.Entry]) -> None:
        """Remove old folders that are empty now and not part of the snapshot."""
        wanted = {self._locate(folder.path) for folder in list_folders(entries)}
        for folder in sorted(set(self.old_folders) - wanted, reverse=True):
            try:
                places.remove_folder(folder)
            except OSError:
                continue  # it still contains something that is not memory

    def _remember(self, entries: dict[str, index.Entry], staged: dict[str, Staged], placed: list[str]) -> None:
        """Write the index of what is here now, so that the next export carries only what changes from now on."""
        known: dict[str, cache.Row] = {}
        ours = set(placed)
        for path, entry in entries.items():
            signature: list[Any] = []
            first_page = ""
            if entry.type == index.FILE:
                entry = entry._replace(sums=staged[path].sums)
                if path in ours and entry.database:
                    signature = backup.compute_database_signature(self._locate(path))
                    with open(places.open_file(self._locate(path)), "rb") as file:
                        first = file.read(backup.read_page_size(self._locate(path)))
                    first_page = hashlib.sha256(backup.blank_counters(first)).hexdigest()
                elif path in ours:
                    signature = cache.compute_signature(places.read_status(self._locate(path)))
            known[path] = cache.KnownEntry(entry, signature, first_page)
        base = cache.Base(self.question.snapshot, time.time_ns(), known, policy=self.question.policy)
        if self.before is not None:
            base = self.before._replace(entries=dict(self.before.entries, **known), full="", changed=None)
        else:
            known.update((path, cache.KnownEntry(entry, [])) for path, entry in self.left_alone.items())
            project_folders.write_folder_names(
                self.scratch.memory, {root.name: root.keys for root in self.roots if root.keys.known}
            )
        cache.write_restored(self.scratch.memory, base, self.question.read_only, self.question.part)
        self._write_notes()

    def _write_notes(self) -> None:
        self.warnings += notes.write_or_warn(self.scratch.memory, self._build_notes())

    def _build_notes(self) -> notes.Notes:
        """Return the notes to write once the memory is in place."""
        withheld = [root.name for root in self.withheld]
        told, reader = self.question.identity, self.question.read_only
        return notes.build_after_restore(told, reader, self._map_root_folders(), withheld)

    def _map_root_folders(self) -> dict[str, str]:
        """Return the folder of each root, those that were already here included."""
        noted = notes.read(self.scratch.memory) if self.before is not None else None
        return dict(noted.roots if noted is not None else {}, **{root.name: root.place for root in self.roots})


def _work_aside(work: Callable[[], bool], tell: Tell, ask: Ask) -> None:
    """Do it in a child, and tell that it is done."""
    tell(work())


def _name_stage(folder: str) -> str:
    """Return a name for a staging folder on the file system that ``folder`` is, or will be, on."""
    parent = folder
    while not is_folder(parent):
        parent = os.path.dirname(parent)
    return os.path.join(parent, ".memory-sidecar-" + os.urandom(6).hex())


def _read_mode(folder: str) -> int:
    return places.read_status(folder).st_mode & 0o777 if is_folder(folder) else 0o755


def _check_bundle(bundle: BinaryIO, claim: UploadedBundle) -> None:
    """Raise Refusal if an upload has not the size and hash that were sent."""
    digest, size = hashlib.sha256(), 0
    bundle.seek(claim.start)
    for chunk in iter(lambda: bundle.read(1 << 20), b""):
        digest.update(chunk)
        size += len(chunk)
    if size != claim.bytes or digest.hexdigest() != claim.sha256:
        raise Refusal("upload-damaged", "%d bytes of %d arrived, or not the ones sent." % (size, claim.bytes), True)
