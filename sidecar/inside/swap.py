"""Put staged files in the place of a memory's old ones: all, or none.

Every move is written to a journal first. A run that fails undoes what it moved; one that is killed is undone by the next.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil

from .refusal import Refusal


class Swap:
    """A plan of moves between folders of one file system. ``commit`` carries it out."""

    def __init__(self, journal: str, stages: list[str], owner: tuple[int, int]) -> None:
        self._journal = journal
        self._stages = stages
        self._owner = owner
        self._moves: list[tuple[str, str]] = []
        self._made: list[str] = []
        self._modes: dict[str, int] = {}
        self._away: set[str] = set()
        self._real: set[str] = set()

    def begin(self) -> None:
        """Make the staging folders; from here on a run that is killed is cleared up by the next."""
        self._write("staging")
        for stage in self._stages:
            os.makedirs(os.path.join(stage, "new"))

    def remove(self, place: str, aside: str) -> None:
        """Move an old file out of the way."""
        self._moves.append((place, aside))
        self._away.add(place)

    def folder(self, place: str, mode: int | None = None) -> None:
        """Have a folder here, with its parents; with this mode, if one is given."""
        missing = []
        folder = place
        while not os.path.isdir(folder) and folder not in self._modes:
            if os.path.lexists(folder) and folder not in self._away:
                raise Refusal("in-the-way", "%s is not a folder and not part of the memory." % folder)
            missing.append(folder)
            folder = os.path.dirname(folder)
        for path in reversed(missing):
            self._made.append(path)
            self._modes[path] = 0o755
        if mode is not None:
            self._modes[place] = mode

    def put(self, staged: str, place: str) -> None:
        """Move a staged file here; never through a link."""
        parent = os.path.dirname(place)
        if parent not in self._real:
            if os.path.realpath(parent) != parent:
                raise Refusal("in-the-way", "%s lies behind a link." % place)
            self._real.add(parent)
        if os.path.lexists(place) and place not in self._away:
            raise Refusal("in-the-way", "%s is in the way and not part of the memory." % place)
        self._moves.append((staged, place))

    def commit(self) -> None:
        """Carry it out. Raise Refusal when it could not be; then everything is as it was."""
        self._write("swapping")
        try:
            moves = iter(self._moves)
            pending = next(moves, None)
            while pending is not None and pending[0] in self._away:
                with contextlib.suppress(FileNotFoundError):  # its owner removed it meanwhile
                    os.rename(*pending)
                pending = next(moves, None)
            for folder in self._made:
                os.mkdir(folder)
                self._give(folder)
            while pending is not None:
                os.rename(*pending)
                pending = next(moves, None)
        except OSError as problem:
            undo(self._journal)
            raise Refusal("swap-failed", "The memory could not be put in place: %s." % problem) from None
        self._write("done")
        for folder, mode in sorted(self._modes.items(), reverse=True):
            os.chmod(folder, mode)

    def end(self) -> None:
        """Clear up, whatever happened."""
        undo(self._journal)

    def _give(self, place: str) -> None:
        if os.geteuid() == 0 and self._owner[0] != 0:
            os.lchown(place, *self._owner)

    def _write(self, state: str) -> None:
        text = json.dumps({"state": state, "stages": self._stages, "made": self._made, "moves": self._moves})
        with open(self._journal + ".new", "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self._journal + ".new", self._journal)


def undo(journal: str) -> bool:
    """Bring an unfinished swap back to where it began and remove its staging folders. True when it was cut short."""
    try:
        with open(journal, encoding="ascii") as file:
            plan = json.load(file)
    except (FileNotFoundError, ValueError):
        return False
    if plan["state"] == "swapping":
        for source, target in reversed(plan["moves"]):
            if os.path.lexists(target) and not os.path.lexists(source):
                os.rename(target, source)
        for folder in reversed(plan["made"]):
            try:
                os.rmdir(folder)
            except OSError:
                continue  # never made, or someone else put something into it meanwhile
    for stage in plan["stages"]:
        shutil.rmtree(stage, ignore_errors=True)
    os.unlink(journal)
    return bool(plan["state"] != "done")
