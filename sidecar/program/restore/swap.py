"""Put staged files in the place of a memory's old ones: all of them, or none.

Every move is written to a journal first, durably. A run that fails undoes its moves. A run that is killed is undone by
the next run, or, if everything was in place by then, recorded as done. The journal's states are "staging" (nothing
moved yet), "swapping" (some moves done, to be undone in reverse) and "done" (only notes and clean-up are left). An old
file goes to a staging folder, which is removed at the end, or is set aside for good. The journal is in the sandbox,
where the agent can write to it, so its paths are validated like the paths of roots.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from typing import Any, Dict, List, Optional, Sequence, Tuple

from sidecar.format.refusal import Refusal
from sidecar.program import notes, places
from sidecar.program.capture.walk import STAGE
from sidecar.program.places import Containment

LONGEST_JOURNAL = 1 << 30
SET_ASIDE = "set-aside"
CHANGED = "memory-changed"
PART = "part"


class PendingNotes:
    """What to record once everything is in place, by this run or the next one."""

    def __init__(
        self,
        snapshot: str = "",
        reader: bool = False,
        displaced: Tuple[str, ...] = (),
        memory: Optional[notes.Notes] = None,
        part: Sequence[str] = (),
    ) -> None:
        self.snapshot = snapshot
        self.reader = reader
        self.part = part
        self.displaced = displaced
        """Cache folders of memories from which something was taken."""
        self.memory = memory


class Swap:
    """A plan of moves between folders of one file system. ``commit`` carries it out."""

    def __init__(self, journal: str, stages: list[str], owner: tuple[int, int], contained: Containment) -> None:
        self._journal = journal
        self._contained = contained
        self._stages = stages
        self._owner = owner
        self._moves: list[tuple[str, str]] = []
        self._made: list[str] = []
        self._modes: dict[str, int] = {}
        self._new: set[str] = set()
        self._away: dict[str, Optional[os.stat_result]] = {}
        self._asides: list[str] = []
        self.noted = PendingNotes()

    def begin(self) -> None:
        """Create the staging folders. From here on, a killed run is cleaned up by the next one."""
        self._write_journal("staging")
        for stage in self._stages:
            places.make_folder(stage, 0o700)
            for inner in ("new", "old"):
                places.make_folder(os.path.join(stage, inner), 0o700)

    def remove(self, place: str, aside: str, seen: Optional[os.stat_result] = None) -> None:
        """Plan to move an old file out of the way; ``commit`` fails if it is not as it was ``seen``."""
        self._moves.append((place, aside))
        self._away[place] = seen

    def use_aside_folder(self, folder: str) -> None:
        """Note a folder to which some old files go, and where they stay."""
        self._asides.append(folder)

    def folder(self, place: str, mode: int | None = None) -> None:
        """Plan to have a folder with its parents, with this mode if one is given. Raise Refusal if something else is
        there."""
        missing = []
        folder = place
        while folder not in self._modes and not is_folder(folder):
            if places.exists(folder) and folder not in self._away:
                raise Refusal("in-the-way", "%s is not a folder and not part of the memory." % folder)
            missing.append(folder)
            folder = os.path.dirname(folder)
        for path in reversed(missing):
            self._made.append(path)
            self._new.add(path)
            self._modes[path] = 0o755
        if mode is not None:
            self._modes[place] = mode

    def put(self, staged: str, place: str) -> None:
        """Plan to move a staged file here, never through a link. Raise Refusal if something is in the way."""
        parent = os.path.dirname(place)
        if parent not in self._new and places.exists(place) and place not in self._away:
            raise Refusal("in-the-way", "%s is in the way and not part of the memory." % place)
        self._moves.append((staged, place))

    def commit(self) -> None:
        """Carry out the plan. Raise Refusal if that fails; then everything is as it was."""
        # The whole plan is on disk before the first move: from here on, the next run can undo whatever this one moved.
        self._write_journal("swapping")
        try:
            moves = iter(self._moves)
            pending = next(moves, None)
            while pending is not None and pending[0] in self._away:
                with contextlib.suppress(FileNotFoundError):  # it was deleted in the meantime
                    places.rename(*pending)
                pending = next(moves, None)
            for folder in self._made:
                places.make_folder(folder)
                self._give_to_user(folder)
            while pending is not None:
                if places.exists(pending[1]):
                    raise Refusal(CHANGED, "%s was made while the memory was put in place." % pending[1], True)
                places.rename(*pending)
                pending = next(moves, None)
            self._check_unchanged()
        except (OSError, Refusal) as problem:
            settle(self._journal, self._contained)
            if isinstance(problem, Refusal) and problem.code == CHANGED:
                raise
            raise Refusal("swap-failed", "The memory could not be put in place: %s." % problem) from None
        # The point of no return: from here on, the next run completes the notes and clean-up instead of undoing.
        self._write_journal("done")
        for folder, mode in sorted(self._modes.items(), reverse=True):
            descriptor = places.open_folder(folder, places.READ)
            try:
                os.fchmod(descriptor, mode)
            finally:
                os.close(descriptor)

    def _check_unchanged(self) -> None:
        """Raise Refusal if an old file was written to between the last look at it and its move. This is checked last: a
        process that had it open when it was moved is done by then."""
        for place, aside in self._moves:
            seen = self._away.get(place)
            if seen is None or not places.exists(aside):
                continue
            now = places.read_status(aside)
            if (seen.st_size, seen.st_mtime_ns) != (now.st_size, now.st_mtime_ns):
                raise Refusal(CHANGED, "%s was written to while the memory was put in place." % place, True)

    def end(self) -> None:
        """Clean up, whatever happened: undo an unfinished swap, or record a finished one."""
        settle(self._journal, self._contained)

    def _give_to_user(self, place: str) -> None:
        """Give a path to the owner of the home, if this runs as root in another user's home."""
        if os.geteuid() == 0 and self._owner[0] != 0:
            places.change_owner(place, self._owner)

    def _write_journal(self, state: str) -> None:
        """Write the whole plan with its state, and sync it to disk."""
        plan = {
            "state": state,
            "stages": self._stages,
            "asides": self._asides,
            "made": self._made,
            "moves": self._moves,
            "snapshot": self.noted.snapshot,
            # A version that does not know parts finds no truth value here, and refuses the journal.
            "reader": PART if self.noted.part else self.noted.reader,
            "part": list(self.noted.part),
            "displaced": list(self.noted.displaced),
            "notes": self.noted.memory and self.noted.memory.as_dict(),
        }
        places.write_file(self._journal, json.dumps(plan).encode("ascii"), durable=True)


def settle(journal: str, contained: Containment) -> bool:
    """Bring a swap to an end, by its journal: undo one that is not complete, record one that is, and remove its staging
    folders. Return True if it was not complete.

    Raise Refusal if the journal names
    paths where nothing may be moved; then nothing is.
    """
    try:
        plan = json.loads(places.read_file(journal, LONGEST_JOURNAL))
    except (FileNotFoundError, ValueError, RecursionError):
        return False
    memory = os.path.dirname(journal)
    _check_journal(plan, contained, os.path.join(os.path.dirname(memory), SET_ASIDE))
    if plan["state"] == "swapping":
        # In reverse, because new files were moved to where old ones had been. The journal does not say how far the run
        # got, so each move is recognised by what exists: it happened if its target does. If both ends of a new file's
        # move exist, the target is another process's file and the staged one was never moved.
        for source, target in reversed(plan["moves"]):
            is_new = any(source.startswith(stage + "/") for stage in plan["stages"])
            if not places.exists(target) or (is_new and places.exists(source)):
                continue  # it was not moved yet
            if places.exists(source):
                _step_aside(source, memory)
            places.rename(target, source)
        for folder in reversed(plan["made"]):
            try:
                places.remove_folder(folder)
            except OSError:
                continue  # never created, or another process put something into it
    if plan["state"] != "done":
        for folder in plan.get("asides", []):
            places.remove_tree(folder)  # what was moved here is back, and what was copied never left its place
    for stage in plan["stages"]:
        if is_folder(stage):
            with contextlib.suppress(OSError, Refusal):
                places.remove_tree(stage)
    if plan["state"] == "done":
        _write_pending_notes(plan, memory)  # last, because the disk may have been full until now
    places.remove(journal)
    return bool(plan["state"] != "done")


def _step_aside(place: str, memory: str) -> None:
    """Set aside a file that was created in the place of one that a swap had moved away: it must not keep that one from
    coming back, and must not be lost either."""
    top = os.path.join(os.path.dirname(memory), SET_ASIDE)
    folder = time.strftime("%Y%m%dT%H%M%SZ-undone-", time.gmtime()) + os.urandom(4).hex()
    places.make_folders(os.path.dirname(memory), SET_ASIDE + "/" + folder)
    places.rename(place, os.path.join(top, folder, os.path.basename(place)))


def _write_pending_notes(plan: Dict[str, Any], memory: str) -> None:
    """Record what is in place now, unless the run that put it there did."""
    snapshot, part = plan.get("snapshot", ""), plan.get("part", [])
    reader = bool(plan.get("reader", False))
    kind = notes.is_reader(memory), notes.read_part(memory)
    if snapshot and (notes.read_lineage(memory) != [snapshot] or kind != (reader, part)):
        notes.write_lineage(memory, [snapshot], reader, part)
    noted = notes.parse_value(plan.get("notes"))
    if noted is not None and notes.read(memory) != noted:
        notes.write(memory, noted)
    for name in plan.get("displaced", []):
        mark_displaced(os.path.join(os.path.dirname(memory), name))


def mark_displaced(folder: str) -> None:
    """Record that a memory is no longer complete in this sandbox: another was restored over it."""
    if not is_folder(folder):
        return
    noted = notes.read(folder)
    if noted is not None and noted.current:
        notes.write(folder, noted._replace(current=False))
    notes.forget_lineage(folder)


def _check_journal(plan: Dict[str, Any], contained: Containment, set_aside: str) -> None:
    """Raise Refusal unless a swap in this sandbox could have written this journal."""
    try:
        stages: List[str] = [_parse_place(stage) for stage in plan["stages"]]
        asides: List[str] = [_parse_place(aside) for aside in plan.get("asides", [])]
        moved = [[_parse_place(source), _parse_place(target)] for source, target in plan["moves"]]
        made = [_parse_place(folder) for folder in plan["made"]]
        if not all(STAGE.match(os.path.basename(stage)) for stage in stages) or not isinstance(plan["state"], str):
            raise ValueError("a folder that is not for staging")
        if any(os.path.dirname(aside) != set_aside for aside in asides):
            raise ValueError("a folder that is not for what is set aside")
        ours = [folder + "/" for folder in stages + asides]
        named = [[end for end in ends if not end.startswith(tuple(ours))] for ends in moved]
        if any(len(ends) == 2 for ends in named):
            raise ValueError("a move that neither begins nor ends in a staging folder")
        _check_noted(plan)
    except (KeyError, TypeError, ValueError) as problem:
        raise Refusal("journal-damaged", "What a restore left behind cannot be read: %s." % problem) from None
    # A project that did not exist had to be created with its parents, and was staged beside the first of those.
    above = {*made, *map(os.path.dirname, stages)}
    for place in [place for ends in named for place in ends] + [
        place for place in above if not contained.may_lead_to_project(place)
    ]:
        contained.check("A file that a restore has moved", place)


def _check_noted(plan: Dict[str, Any]) -> None:
    """Raise ValueError unless the notes in a journal are valid."""
    snapshot, displaced = plan.get("snapshot", ""), plan.get("displaced", [])
    if snapshot and not notes.SNAPSHOT.match(snapshot):
        raise ValueError("no snapshot")
    reader, part = plan.get("reader", False), plan.get("part", [])
    if part and (reader != PART or notes.parse_part(notes.encode_part(part).encode("ascii")) != part):
        raise ValueError("no part")
    if (not part and not isinstance(reader, bool)) or any("/" in name or name in ("", ".", "..") for name in displaced):
        raise ValueError("no memories")


def _parse_place(text: Any) -> str:
    """Return a path as a swap writes it: absolute and normalised. Raise ValueError otherwise."""
    if not isinstance(text, str) or os.path.normpath(text) != text or not text.startswith("/"):
        raise ValueError("no path")
    return text


def is_folder(place: str) -> bool:
    """Return whether a real path is a folder, not a link to one."""
    try:
        return stat.S_ISDIR(places.read_status(place).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
