"""Export, inside the sandbox: find the memory, copy what changed since the base into a pack, say what was found."""

from __future__ import annotations

import hashlib
import json
import time
from typing import TYPE_CHECKING, Any

from . import cache, index, keys, notes
from . import lineage as history
from .fitting import Fit
from .roots import Root, absent, find_roots, keyed_here, numbered, projects_here
from .rules import is_secret
from .scratch import Scratch
from .steady import Steady
from .taking import Taking
from .versions import version_here
from .walk import Found, Skipped, walk

if TYPE_CHECKING:
    from .trimming import Dropped


class Anew(Exception):
    """The base was made by another policy, and holds what must not leave: a snapshot that builds on it would keep it.

    Not where the base has layouts that were not asked for: they are nowhere else.
    """


class Export:
    """One run. ``request`` is what the sidecar asked for; ``answer`` is what it is told."""

    def __init__(self, request: dict[str, Any], scratch: Scratch, home: str, fit: Fit) -> None:
        self.request = request
        self.scratch = scratch
        self.fit = fit
        self.home = home
        self.roots: list[Root] = [
            root._replace(keys=keys.recalled(scratch.memory, root.name, root.layout))
            for root in find_roots(request["layouts"], request["projects"], home, scratch.contained)
        ]
        self.lineage = cache.lineage(scratch.memory, request["known"])
        usable = bool(self.lineage) and self.lineage[0] not in request.get("unusable", [])
        self.base = cache.load(scratch.memory, self.lineage) if usable else None
        self.rules = hashlib.sha256(json.dumps(request["layouts"], sort_keys=True).encode()).hexdigest()
        self.policy: str = request["privacy"]["policy"]
        self.looked_at = self.base is not None and self.base.policy == self.policy
        if self.base is not None and not self.looked_at:
            self.base = self.base._replace(taken=0)  # nothing counts as unchanged: all is read again
        self.started = time.time_ns()
        self.dropped: dict[str, Dropped] = {}
        self.stays = (0, 0)
        """Bytes and entries of layouts that were not asked for."""
        self.taking = Taking(request, scratch, fit, self.base, self.looked_at)
        self.noted = notes.read(scratch.memory)
        """What this sandbox had noted of the memory before this export."""

    def run(self) -> dict[str, Any]:
        answer = self._run()
        noted, warnings = self._note()
        answer.update(noted, warnings=answer["warnings"] + warnings)
        return answer

    def _run(self) -> dict[str, Any]:
        self.taking.warnings += absent(self.request["projects"], self.home)
        for root in self.roots:
            if "worker" in root.layout:
                from .drain import drained

                self.taking.warnings += drained(root, self.request["worker_wait"], "they are not in this snapshot")
        for one in self._found():
            if one.path not in self.dropped:
                self.taking.take(one)
        gone = sorted(self._gone())
        if self.stays[1] or self.fit.layouts:
            sizes = {path: row[0][index.SIZE] for path, row in self.taking.entries.items()}
            self.fit.check_all(sizes, {root.name: root.layout["name"] for root in self.roots}, self.stays)
        screened = self.taking.screened
        if screened is not None and screened.report.refused:
            self.taking.bundle.abandon()
            return self._answer("refused")
        if self.base is not None and not self.looked_at and not self.stays[1]:
            if (screened is not None and screened.took) or any(map(is_secret, gone)):
                raise Anew
        if self.base is not None and not self.taking.changes and not gone:
            if self.taking.refreshed:
                self._remember(self.base.snapshot)
            return self._answer("unchanged")
        answer = self._finish(gone)
        self._remember(self.request["snapshot"])
        return answer

    def _found(self) -> list[Found]:
        """What there is, but for what is as before, which is taken at once, and what there is no room for."""
        if self.base is not None and self.base.rules == self.rules and not self.fit.rounds:
            steady = Steady(self.base, self.fit.largest)
            found = self._walk(steady)
            if self.fit.holds(found, steady.tallies):
                self.taking.entries = steady.rows
                self.taking.total = sum(tally.bytes for tally in steady.tallies.values())
                return found
            self.taking.skipped = Skipped()
        self.taking.refreshed = self.base is not None and self.base.rules != self.rules
        found = self._walk(None)
        if not self.fit.holds(found, {}):
            self.dropped = self.fit.dropped(found)
        return found

    def _walk(self, steady: Steady | None) -> list[Found]:
        return [one for root in self.roots for one in walk(root, self.taking.skipped, self.fit.most_found, steady)]

    def _gone(self) -> list[str]:
        """What the base has and the sandbox has not. Roots of layouts that were not asked for stay as the base has them."""
        asked = {spec["name"] for layout in self.request["layouts"] for spec in layout["roots"]}
        gone = []
        for path, row in self.base.entries.items() if self.base is not None else ():
            if path in self.taking.entries:
                continue
            root = path.split("/")[0]
            if root in asked or numbered(root)[0] in asked:
                gone.append(path)
            else:
                self.taking.entries[path] = row
                self.taking.total += row[0][index.SIZE]
                self.stays = self.stays[0] + row[0][index.SIZE], self.stays[1] + 1
        return gone

    def _remember(self, snapshot: str) -> None:
        base = cache.Base(snapshot, self.started, self.taking.entries, rules=self.rules, policy=self._policy())
        heads = self.request.get("notes", {}).get("heads", [])
        origin = next((one for one in self.lineage if one in heads), "")
        cache.go_on(self.scratch.memory, base, self.base, origin)

    def _policy(self) -> str:
        """By which all of this was looked at: not, where parts stay as a base has them that was looked at by another."""
        return self.policy if self.looked_at or not self.stays[1] else ""

    def _finish(self, gone: list[str]) -> dict[str, Any]:
        kind = "delta" if self.base is not None else "full"
        told = self.taking.bundle.finish(index.Index(kind, self.taking.changes, gone))
        self.fit.check_pack(told["bundle"]["bytes"], self.taking.bundle.carried)
        return dict(
            self._answer("changed"),
            projects=projects_here(self.request["projects"], self.home),
            keyed=keyed_here(self.roots, self.request["projects"], self.home, self.taking.entries),
            versions={root.name: version_here(root.layout, self.home) for root in self.roots},
            **told,
        )

    def _note(self) -> tuple[dict[str, Any], list[str]]:
        """Write down what is known now. Return what was known before, and what to say.

        An export that is refused because another memory is in these folders does not make this one live there."""
        told = self.request.get("notes")
        if told is None:
            return {}, []
        folders = {root.name: root.folder for root in self._held()}
        others = list(notes.read_others(self.scratch.base, self.scratch.memory).values())
        objection = notes.objection(told, self.noted, others, folders, self.lineage)
        now = notes.after_export(told, self.noted, folders)
        if objection and objection not in told["allow"]:
            now = self.noted or now._replace(current=False)
        warnings = notes.keep(self.scratch.memory, now) if now != self.noted else []
        holders = notes.holders_of(told, others, folders)
        before = {
            "notes": self.noted and self.noted.as_dict(),
            "others": [other.as_dict() for other in holders[: notes.MOST_TOLD]],
            "folders": folders,
        }
        return before, warnings

    def _held(self) -> list[Root]:
        """The roots that something was found in."""
        return [root for root in self.roots if any(path.startswith(root.name + "/") for path in self.taking.entries)]

    def _answer(self, status: str) -> dict[str, Any]:
        taking, screened = self.taking, self.taking.screened
        return {
            "status": status,
            "base": self.base.snapshot if self.base is not None else "",
            "lineage": self.lineage,
            "reader": history.is_reader(self.scratch.memory),
            "files": sum(row[0][index.TYPE] == index.FILE for row in taking.entries.values()),
            "bytes": taking.total,
            "roots": [{"name": root.name, "layout": root.layout["name"], "hint": root.hint} for root in self._held()],
            "databases": taking.databases,
            "skipped": taking.skipped.rows,
            "skipped_more": taking.skipped.more,
            "warnings": (taking.warnings + (screened.report.warnings if screened is not None else []))[:100],
            "policy": self._policy(),
            **(screened.report.answer() if screened is not None else {}),
            **self._left_out(),
        }

    def _left_out(self) -> dict[str, Any]:
        if not self.dropped:
            return {}
        from .trimming import report

        return report(self.dropped.values())
