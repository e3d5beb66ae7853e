"""Export, inside the sandbox: find the memory, pack what changed since the base, and describe what was found."""

from __future__ import annotations

import hashlib
import json
import stat
import time
from stat import S_ISREG
from typing import TYPE_CHECKING

from sidecar.format import index
from sidecar.format.patterns import PathSet, is_secret
from sidecar.format.protocol import MOST_DATABASES, ExportAnswer, ExportQuestion, FoundRoot, Rules
from sidecar.format.roots import get_root, get_stem
from sidecar.program import cache, notes
from sidecar.program.capture import project_folders
from sidecar.program.capture.builder import ExportBuilder
from sidecar.program.capture.discovery import (
    FoundRoots,
    describe_absent,
    find_known_roots,
    find_roots,
    match_keyed_folders,
    name_projects,
)
from sidecar.program.capture.roots import Root
from sidecar.program.capture.unchanged import UnchangedFiles
from sidecar.program.capture.versions import find_version
from sidecar.program.capture.walk import FoundPath, Skipped, walk
from sidecar.program.limits.fit import ExportLimits
from sidecar.program.scratch import Scratch

if TYPE_CHECKING:
    from sidecar.program.limits.trim import Dropped


WAITS = "waits for its restore"
TOO_LARGE = "larger than limits.file_bytes"
GAVE_WAY = "another one was here when the memory was restored"
OUTSIDE = "outside the part of the memory that was restored here"
PARTIAL = "Only a part of the memory was restored here. What is outside of it was not taken (paths: %d)."
MOST_WARNINGS = 100


class BaseUnusable(Exception):
    """The base was made under another privacy policy and contains something that must not leave: a snapshot that builds
    on it would keep it.

    Not raised if the base has layouts that were not asked for: only the base has those.
    """


class Export:
    """One export. ``unusable`` are the snapshots that it must not build on; ``run`` returns the answer.

    ``follows``: copies of databases are read while they are written. ``run`` raises CopyMisread if that went wrong.
    """

    def __init__(
        self,
        question: ExportQuestion,
        rules: Rules,
        scratch: Scratch,
        home: str,
        fit: ExportLimits,
        unusable: list[str],
        follows: bool = True,
    ) -> None:
        self.question = question
        self.layouts = rules.select(question.layouts)
        self.elsewhere = rules.list_others(question.layouts)
        self.scratch = scratch
        self.fit = fit
        self.home = home
        self.noted = notes.read(scratch.memory)
        """The memory's notes in this sandbox before this export."""
        found = self._find_roots()
        self.projects = found.projects
        self.roots: list[Root] = [
            root._replace(keys=project_folders.read_folder_names(scratch.memory, root.name, root.layout, root.keys))
            for root in found.roots
        ]
        self.withheld = frozenset(self.noted.withheld if self.noted is not None else ())
        """Roots that were not restored because their projects were missing: what the base has of them stays."""
        self.part = PathSet(notes.read_part(scratch.memory))
        """The paths that were restored, if that was only a part: nothing else is exported."""
        self.outside = 0
        self.lineage = cache.find_lineage(scratch.memory, question.known)
        usable = bool(self.lineage) and self.lineage[0] not in unusable
        self.base = cache.load_base(scratch.memory, self.lineage) if usable else None
        rows = self.base.entries.items() if self.base is not None and self.part else ()
        self.above = {path for path, row in rows if row[0][index.TYPE] == index.DIR}
        """The folders of the base, which are those above the part too."""
        self.rules = hashlib.sha256(json.dumps(self.layouts, sort_keys=True).encode()).hexdigest()
        self.policy = question.privacy.policy
        self.looked_at = self.base is not None and self.base.policy == self.policy
        if self.base is not None and not self.looked_at:
            self.base = self.base._replace(taken=0)  # nothing counts as unchanged: all is read again
        self.started = time.time_ns()
        self.dropped: dict[str, Dropped] = {}
        self.kept: set[str] = set()
        """Paths that stay as the base has them although something else is in their place in this sandbox."""
        self.stays = (0, 0)
        """Bytes and entries of layouts that were not asked for."""
        self.taking = ExportBuilder(question, scratch, fit, self.base, self.looked_at, follows)
        self.taking.skipped = Skipped(self.roots)
        self.taking.warnings += found.warnings

    def _find_roots(self) -> FoundRoots:
        """Find the roots in this sandbox, without projects that belong to other memories."""
        question, home = self.question, self.home
        # A copy of a sandbox, for example one made from a template, has the notes of its original.
        mine = self.noted is not None and self.noted.current and self.noted.sandbox == question.identity.sandbox
        noted = self.noted.roots if mine and self.noted is not None else {}
        known = find_known_roots(self.layouts, noted, question.roots, question.project_hints, home)
        found = find_roots(self.layouts, question.projects, home, self.scratch.contained, known, self.elsewhere)
        return self._drop_other_projects(found, {place for _, place in known})

    def _drop_other_projects(self, finding: FoundRoots, own: set[str]) -> FoundRoots:
        """Remove projects that were not named and that belong to another memory, according to this sandbox's notes."""
        if not any(root.found for root in finding.roots):
            return finding
        others = notes.list_others_here(
            self.question.identity, notes.read_others(self.scratch.base, self.scratch.memory).values()
        )
        owners = {place: other.memory for other in others for place in other.roots.values()}
        theirs = [root for root in finding.roots if root.found and root.place in owners and root.place not in own]
        warnings = ["%s holds the memory %s, and was left out." % (root.hint, owners[root.place]) for root in theirs]
        roots = [root for root in finding.roots if root not in theirs]
        return finding._replace(roots=roots, warnings=finding.warnings + warnings)

    def run(self) -> ExportAnswer:
        """Export, then write the notes. Return the answer.

        A trial leaves the notes and the cache as they are: what it brings is looked at and not stored. What still works
        on a copy then is ended by ``ExportBuilder.end``.
        """
        try:
            answer = self._run()
        except BaseException:
            self.taking.end()
            raise
        if not self.question.trial:
            self._write_notes(answer)
        return answer

    def _run(self) -> ExportAnswer:
        """Collect all paths and finish the bundle; the answer's status is "changed", "unchanged" or "refused"."""
        self.taking.warnings += describe_absent(self.question.projects, self.home)
        for root in self.roots:
            if "worker" in root.layout:
                from sidecar.program.worker.worker import wait_until_drained

                self.taking.warnings += wait_until_drained(
                    root, self.question.worker_wait, "they are not in this snapshot"
                )
        self._take_all()
        gone = sorted(self._list_gone())
        if self.stays[1] or self.fit.layouts:
            sizes = {path: row[0][index.SIZE] for path, row in self.taking.entries.items()}
            self.fit.check_all(sizes, {root.name: root.layout["name"] for root in self.roots}, self.stays)
        screened = self.taking.screened
        if screened is not None and screened.report.refused:
            self.taking.bundle.abandon()
            return self._build_answer("refused")
        if self.base is not None and not self.looked_at and not self.stays[1] and not self.part:
            if (screened is not None and screened.took) or any(map(is_secret, gone)):
                raise BaseUnusable
        self.taking.confirm()  # before the bundle is finished: meanwhile the copies are given back to the disk
        if self.base is not None and not self.taking.changes and not gone:
            if self.taking.refreshed:
                self._remember(self.base.snapshot)
            return self._build_answer("unchanged")
        answer = self._finish(gone)
        self._remember(self.question.snapshot)
        return answer

    def _take_all(self) -> None:
        """Take every path. The first database is copied first: its copy is checked while other files are read."""
        found = [
            one for one in self._find_paths() if one.path not in self.dropped and not self._keeps_base_version(one)
        ]
        databases = {
            one.path: one for one in found if one.root.rules.database(one.relative) and S_ISREG(one.status.st_mode)
        }
        self.taking.copy_first(databases.values())
        fresh = [one for one in found if self.taking.find_known(one) is None]
        if fresh:
            self.taking.screen.look_over(fresh)
        for one in found:
            if one.path not in databases:
                self.taking.take(one)
        for one in databases.values():
            self.taking.take(one)

    def _find_paths(self) -> list[FoundPath]:
        """Return the paths to read. Files unchanged since the base are taken at once, and what is over a limit is dropped."""
        if self.base is not None and self.base.rules == self.rules and not self.fit.rounds:
            steady = UnchangedFiles(self.base, self.fit.largest)
            found = self._walk(steady)
            if self.fit.holds(found, steady.tallies):
                self.taking.entries = steady.rows
                self.taking.total = sum(tally.bytes for tally in steady.tallies.values())
                return found
            self.taking.skipped = Skipped(self.roots)
        self.taking.refreshed = self.base is not None and self.base.rules != self.rules
        found = self._walk(None)
        if not self.fit.holds(found, {}):
            self.dropped = self.fit.dropped(found)
        return found

    def _walk(self, steady: UnchangedFiles | None) -> list[FoundPath]:
        """Walk all roots, without files that are over the size limit."""
        found = (one for root in self.roots for one in walk(root, self.taking.skipped, self.fit.most_found, steady))
        return [one for one in found if self._is_in_part(one) and not self._is_too_large(one)]

    def _is_in_part(self, found: FoundPath) -> bool:
        """Return whether a path is exported, if only a part of the memory is here. Files that are not are reported."""
        if not self.part or self.part.has(found.path) or found.path in self.above:
            return True
        if not stat.S_ISDIR(found.status.st_mode):
            self.taking.skipped.add(found.path, OUTSIDE)
            self.outside += 1
        return False

    def _is_too_large(self, found: FoundPath) -> bool:
        """Return whether a file is left out because of its size alone; it is reported."""
        if not self.fit.leaves_out(found):
            return False
        self.taking.skipped.add(found.path, TOO_LARGE)
        told = "%s has %s bytes, and was left out alone: limits.file_bytes allows %s." % (
            found.path,
            format(self.fit.sizes.get(found.path, found.status.st_size), ","),
            format(self.fit.of(found.root.layout["name"]).file_bytes, ","),
        )
        self.taking.warnings += [told] if told not in self.taking.warnings else []
        return True

    def _keeps_base_version(self, found: FoundPath) -> bool:
        """Return whether the base's version stays because the file in this sandbox never was that version: a project
        that was cloned before its memory was restored, or a file that yielded to the sandbox's own."""
        known = self.base.known(found.path) if self.base is not None else None
        if known is None or known.signature or known.entry.type != index.FILE:
            return False
        withheld = found.root.name in self.withheld
        if not withheld and not found.root.rules.yields(found.relative):
            return False
        self.kept.add(found.path)
        self.taking.skipped.add(found.path, WAITS if withheld else GAVE_WAY)
        if withheld:
            told = "%s waits for its restore: what is there now does not replace what the memory has." % found.root.hint
            self.taking.warnings += [told] if told not in self.taking.warnings else []
        return True

    def _list_gone(self) -> list[str]:
        """Return what the base has and the sandbox has not. Roots of layouts that were not asked for, and roots
        withheld from this sandbox, stay as the base has them."""
        asked = {spec["name"] for layout in self.layouts for spec in layout["roots"]}
        gone = []
        for path, row in self.base.entries.items() if self.base is not None else ():
            if path in self.taking.entries:
                continue
            root = get_root(path)
            if path not in self.kept and root not in self.withheld and get_stem(root, asked) in asked:
                gone.append(path)
            else:
                self.taking.entries[path] = row
                self.taking.total += row[0][index.SIZE]
                self.stays = self.stays[0] + row[0][index.SIZE], self.stays[1] + 1
        return gone

    def _remember(self, snapshot: str) -> None:
        """Write the cache's index for this snapshot."""
        if self.question.trial:
            return
        base = cache.Base(snapshot, self.started, self.taking.entries, rules=self.rules, policy=self._name_policy())
        origin = next((one for one in self.lineage if one in self.question.identity.heads), "")
        cache.write_exported(self.scratch.memory, base, self.base, origin)

    def _name_policy(self) -> str:
        """Return the policy under which all entries were scrubbed; "" if some stay from a base that was scrubbed under
        another one."""
        return self.policy if self.looked_at or not (self.stays[1] or self.part) else ""

    def _finish(self, gone: list[str]) -> ExportAnswer:
        """Complete the bundle and return the answer that describes it."""
        answer = self._build_answer("changed")
        kind = "delta" if self.base is not None else "full"
        self.taking.bundle.finish(index.Index(kind, self.taking.changes, gone), answer)
        assert answer.bundle is not None
        self.fit.check_pack(answer.bundle.bytes, self.taking.bundle.carried)
        answer.projects = name_projects(self.question.projects, self.home)
        answer.keyed = match_keyed_folders(self.roots, self.projects, self.home, self.taking.entries)
        answer.versions = {root.name: find_version(root.layout, self.home) for root in self.roots}
        return answer

    def _write_notes(self, answer: ExportAnswer) -> None:
        """Write the notes, and put the notes as they were before into the answer.

        An export that is refused because another memory owns these folders does not make this memory their owner.
        """
        told = self.question.identity
        folders = {root.name: root.place for root in self._list_held_roots()}
        others = list(notes.read_others(self.scratch.base, self.scratch.memory).values())
        objection = notes.find_objection(told, self.noted, others, folders, self.lineage)
        now = notes.build_after_export(told, self.noted, folders)
        if objection and objection not in told.allow:
            now = self.noted or now._replace(current=False)
        answer.warnings += notes.write_or_warn(self.scratch.memory, now) if now != self.noted else []
        answer.notes = self.noted.tell() if self.noted is not None else None
        answer.others = [other.tell() for other in notes.find_owners(told, others, folders)[: notes.MOST_TOLD]]
        answer.folders = folders

    def _list_held_roots(self) -> list[Root]:
        """Return the roots in which something was found."""
        names = {get_root(path) for path in self.taking.entries}
        return [root for root in self.roots if root.name in names]

    def _build_answer(self, status: str) -> ExportAnswer:
        """Return the answer, without what only a finished bundle has."""
        taking, question = self.taking, self.question
        answer = ExportAnswer(
            status,
            question.memory,
            question.snapshot,
            base=self.base.snapshot if self.base is not None else "",
            lineage=self.lineage,
            reader=notes.is_reader(self.scratch.memory),
            part=self.part.patterns,
            files=sum(row[0][index.TYPE] == index.FILE for row in taking.entries.values()),
            bytes=taking.total,
            roots=[FoundRoot(root.name, root.layout["name"], root.hint) for root in self._list_held_roots()],
            databases=taking.databases,
            counted=taking.counted,
            skipped=taking.skipped.rows,
            skipped_more=taking.skipped.more,
            not_taken=taking.skipped.passed,
            databases_not_taken=taking.skipped.databases[:MOST_DATABASES],
            warnings=list(taking.warnings),
            policy=self._name_policy(),
        )
        if taking.screened is not None:
            taking.screened.report.tell(answer)
        if self.outside:
            answer.warnings.append(PARTIAL % self.outside)
        if self.dropped:
            from sidecar.program.limits.trim import describe_dropped

            describe_dropped(self.dropped.values(), answer)
        del answer.warnings[MOST_WARNINGS:]
        return answer
