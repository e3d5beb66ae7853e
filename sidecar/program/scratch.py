"""The program's own folder in a sandbox: the only place an export writes to.

~/.cache/memory-sidecar/<memory>/lineage             the snapshots restored or exported here, oldest first
~/.cache/memory-sidecar/<memory>/read-lineage        the same, for a read-only copy (notes.py)
~/.cache/memory-sidecar/<memory>/part-lineage        the same, for a part of it, below the patterns of that part
~/.cache/memory-sidecar/<memory>/index-<snapshot>    what this sandbox last restored or exported (a cache)
~/.cache/memory-sidecar/<memory>/rows-<hash>         digests of a database's rows, to count what changes (sketches.py)
~/.cache/memory-sidecar/<memory>/notes               which store and memory that is, and in which folders (notes.py)
~/.cache/memory-sidecar/<memory>/journal             a restore's swap under way
~/.cache/memory-sidecar/<memory>/answer              the last restore's answer, in case it was lost on the way
~/.cache/memory-sidecar/<memory>/brief               where the brief of the last restore was put (brief.py)
~/.cache/memory-sidecar/ready.json                   says that the memory is in place (ready.py)
~/.cache/memory-sidecar/.turn                        locked by the run that works in this sandbox, with what it does
~/.cache/memory-sidecar/.program-<hash>.zip          this program, and the rules it works by, so that they need not be
~/.cache/memory-sidecar/.rules-<hash>.json           sent again (kept_files.py)
~/.cache/memory-sidecar/set-aside/<time>-<snapshot>/ what a restore replaced and no snapshot has (set_aside.py)
~/.cache/memory-sidecar/work-<random>/               one run's files, locked while it runs, removed by any later run

Only the sandbox's user can read it. That user's agent can replace any of it, so links in place of these folders are not
followed, and every module that reads one of the files validates its contents.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from typing import Iterator, List, Optional

from sidecar.format.protocol import AllowedPaths
from sidecar.format.refusal import Refusal
from sidecar.program import leftovers, notes, places
from sidecar.program.places import contain

STALE_SECONDS = 900
JUST_BEGUN_SECONDS = 60
LONGEST_NOTE = 1000
TURN = ".turn"
"""Begins with a dot, which no memory's folder does."""
WORK = re.compile(r"work-(sh-)?[0-9a-f]{16}\Z")
"""A memory may be called "work-items": only a name of the exact form that runs use is taken for a run's folder."""


def locate_own_folder(home: str) -> str:
    """Return where the program usually keeps its files in a sandbox."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"), "memory-sidecar")


def locate_spare_folder() -> str:
    """Return where it keeps them if the home cannot be written."""
    import tempfile

    return os.path.join(tempfile.gettempdir(), "memory-sidecar-%d" % os.geteuid())


class Scratch:
    """One run's access to the folder: opens it, locks the sandbox and removes leftovers. ``work`` is the run's own part.

    ``about`` says what the run does, for the message of runs that wait for it.
    """

    def __init__(
        self,
        home: str,
        memory_key: str,
        wait: float,
        snapshot: str,
        allowed: Optional[AllowedPaths] = None,
        about: str = "",
    ) -> None:
        self.snapshot = snapshot
        self.warnings: List[str] = []
        self.owner = os.stat(home).st_uid, os.stat(home).st_gid
        self._about = about
        self.base = os.path.realpath(self._open_base(home, allowed))
        self.contained = contain(allowed, self.base)
        self.memory = self._open_own(os.path.join(self.base, re.sub(r"[^\w.~-]", "_", memory_key)))
        self.journal = os.path.join(self.memory, "journal")
        self._deadline = time.monotonic() + wait
        self._turns = self._take_turns()
        self._tidy()
        leftovers.tidy(home)
        self.work = os.path.join(self.base, "work-" + os.urandom(8).hex())
        places.make_folder(self.work, 0o700)
        self._lock = self._open_lock_file(os.path.join(self.work, "lock"))
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _open_base(self, home: str, allowed: Optional[AllowedPaths]) -> str:
        """Return the program's folder, or one in the temporary folder (with a warning) if the home cannot be written."""
        own = locate_own_folder(home)
        contain(allowed).check("The folder of the sidecar", os.path.realpath(own))
        try:
            self._ensure_folder(os.path.dirname(own), 0o755)
            return self._ensure_folder(own)
        except OSError as problem:
            base = self._open_own(locate_spare_folder())
            if os.lstat(base).st_uid != os.geteuid():
                raise
            self.warnings.append(
                "What was exported is noted in %s, not in the home (%s): when that is gone, all of the memory is sent again,"
                " and the sidecar's program with it." % (base, problem.strerror or "it cannot be written")
            )
            return base

    def _open_own(self, path: str) -> str:
        """Make and return one of the sidecar's folders. It must not be a link: what is written, removed or given to
        another owner in it must not be somewhere else. Raise Refusal."""
        self._ensure_folder(path)
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise Refusal("in-the-way", "%s is a link; it has to be a folder." % path)
        return path

    def _ensure_folder(self, path: str, mode: int = 0o700) -> str:
        """Make a folder unless it exists. Raise PermissionError if it cannot be written."""
        if not os.path.isdir(path):
            os.makedirs(path, mode, exist_ok=True)
            self.give_to_user(os.path.realpath(path))
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(path)
        return path

    def give_to_user(self, path: str) -> None:
        """Give a path to the owner of the home, if this runs as root in another user's home."""
        if os.geteuid() == 0 and self.owner[0] != 0:
            places.change_owner(path, self.owner)

    def _take_turns(self) -> List[int]:
        """Take the sandbox's lock: one run at a time, because memories share folders and a half-done swap of one would
        be read by another run.

        Earlier versions know only a lock per memory, so that one is taken too, in the same order by every version.
        """
        turns = [self._take_turn(os.path.join(self.base, TURN))]
        try:
            os.ftruncate(turns[0], 0)
            os.write(turns[0], self._about.encode("utf-8", "replace"))
            turns.append(self._take_turn(os.path.join(self.memory, "turn")))
        except BaseException:
            os.close(turns[0])
            raise
        return turns

    def _take_turn(self, place: str) -> int:
        """Lock a file, waiting until the deadline. Raise Refusal (``sandbox-busy``) with what is running."""
        turn = self._open_lock_file(place)
        while True:
            try:
                fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return turn
            except OSError:
                if time.monotonic() > self._deadline:
                    running = os.pread(turn, LONGEST_NOTE, 0).decode("utf-8", "replace") or "Another export or restore"
                    os.close(turn)
                    raise Refusal("sandbox-busy", "%s is running in this sandbox." % running, True) from None
                time.sleep(0.05)

    def _open_lock_file(self, path: str) -> int:
        """Open a lock file, creating it if it is missing."""
        if places.exists(path):
            return places.open_file(path, os.O_RDWR)
        try:
            made = places.open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError:  # made by another run just now
            return places.open_file(path, os.O_RDWR)
        self.give_to_user(path)
        return made

    def iterate_journals(self) -> Iterator[str]:
        """Yield the journals of restores that were cut short, this memory's first. While another memory's journal is in
        use its lock is held too, because an earlier version takes only that lock."""
        if places.exists(self.journal):
            yield self.journal
        for name in sorted(os.listdir(self.base)):
            folder = os.path.join(self.base, name)
            journal = os.path.join(folder, "journal")
            if folder == self.memory or not os.path.exists(journal) or os.path.islink(folder):
                continue
            turn = self._take_turn(os.path.join(folder, "turn"))
            try:
                if places.exists(journal):
                    yield journal
            finally:
                os.close(turn)

    def _tidy(self) -> None:
        """Remove what killed runs left, and packs that the sidecar did not fetch or will not fetch any more: a run that
        asks again for the same snapshot never got the earlier answer."""
        for name in os.listdir(self.base):
            folder = os.path.join(self.base, name)
            if WORK.match(name) and not self._is_memory(folder) and not self._is_in_use(folder):
                _remove_work(folder)

    def _is_memory(self, folder: str) -> bool:
        """Return whether a folder is a memory's after all: a memory's name may have the form of a run's folder."""
        return any(
            places.exists(os.path.join(folder, name)) for name in ("turn", notes.LINEAGE, notes.LINEAGE_OF_READER)
        )

    def _is_in_use(self, folder: str) -> bool:
        """Return whether a run works in this folder, or its pack may still be fetched."""
        try:
            keep = os.path.join(folder, "keep")
            if places.exists(keep):
                kept = places.read_file(keep, LONGEST_NOTE).decode("utf-8", "replace")
                return kept != self.snapshot and time.time() - os.stat(folder).st_mtime < STALE_SECONDS
            lock = places.open_file(os.path.join(folder, "lock"), os.O_RDWR)
        except OSError:
            try:  # a run that has just begun has no lock yet
                return time.time() - os.lstat(folder).st_mtime < JUST_BEGUN_SECONDS
            except FileNotFoundError:  # and one that has just ended has removed it
                return True
        return leftovers.is_locked(lock)

    def leave(self, keep: bool = False) -> None:
        """End the run: remove the work folder, or keep it for a while so that the sidecar can fetch the pack in it."""
        if keep:
            places.write_file(os.path.join(self.work, "keep"), self.snapshot.encode())
        else:
            _remove_work(self.work)
        os.close(self._lock)
        for turn in reversed(self._turns):
            os.close(turn)


def _remove_work(folder: str) -> None:
    """Remove a run's folder, as far as that is possible."""
    try:
        places.remove_tree(folder)
    except (OSError, Refusal):
        pass  # the agent has put something else there
