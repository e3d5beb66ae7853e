"""Set aside what a restore replaces and no snapshot has, in the sidecar's own folder, outside every root.

~/.cache/memory-sidecar/set-aside/<time>-<snapshot>/<root>/<path>

On the same file system a file is moved there in the swap itself, so that it is either in its place or set aside,
whenever a run is killed. On another file system it is copied before the swap. The newest few are kept, up to a number
of bytes.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from typing import List, Tuple

from sidecar.format.protocol import FilesAside
from sidecar.format.refusal import Refusal
from sidecar.program import places
from sidecar.program.restore.swap import SET_ASIDE, is_folder
from sidecar.program.scratch import Scratch

MOST = 5
"""At most this many are kept, if their size allows."""
NAMED = re.compile(r"[0-9]{8}T[0-9]{6}(\.[0-9]{6})?Z-[\w.-]+\Z")


class SetAside:
    """What one restore sets aside. The folder is created by the first ``keep``."""

    def __init__(self, scratch: Scratch, snapshot: str, most_bytes: int) -> None:
        self.top = os.path.join(scratch.base, SET_ASIDE)
        self.folder = os.path.join(self.top, "%s-%s" % (_format_now(), snapshot))
        self.files = 0
        self.bytes = 0
        self._most_bytes = most_bytes
        self._scratch = scratch

    def keep(self, root: str, relative: str, status: os.stat_result) -> str:
        """Return where a file or link is to be set aside; its parent folders are created. Raise Refusal if it is over
        the limit."""
        if not self.files:
            self._make_folder()
        self.files += 1
        self.bytes += status.st_size
        if self.bytes > self._most_bytes:
            raise Refusal(
                "set-aside-full",
                "What is here and in no snapshot is more than the %d bytes that are set aside in a sandbox."
                % self._most_bytes,
            )
        inside = os.path.join(root, relative)
        places.make_folders(self.folder, os.path.dirname(inside))
        return os.path.join(self.folder, inside)

    def _make_folder(self) -> None:
        """Create the folder under a free name. Raise Refusal if something else is in the way."""
        if not places.exists(self.top):
            places.make_folder(self.top, 0o700)
        elif not is_folder(self.top):
            raise Refusal("in-the-way", "%s is not a folder." % self.top)
        name, number = self.folder, 1
        while places.exists(self.folder):
            number += 1
            self.folder = "%s.%d" % (name, number)
        places.make_folder(self.folder, 0o700)

    def can_move_from(self, stage: str) -> bool:
        """Return whether files can be moved here from a staging folder's file system."""
        probe, target = os.path.join(stage, "probe"), os.path.join(self.folder, "probe")
        os.close(places.open_file(probe, os.O_WRONLY | os.O_CREAT))
        try:
            places.rename(probe, target)
        except OSError:
            return False
        places.remove(target)
        return True

    def give_to_user(self) -> None:
        """Give the folders to the owner of the home, if this runs as root in another user's home."""
        for folder in (self.top, self.folder):
            self._scratch.give_to_user(folder)
        for place, folders, _ in os.walk(self.folder):
            for name in folders:
                self._scratch.give_to_user(os.path.join(place, name))

    def forget(self) -> None:
        """Remove the folder: nothing is set aside after all."""
        if self.files:
            places.remove_tree(self.folder)

    def tell(self) -> FilesAside:
        """Return the folder, files and bytes for the answer."""
        return FilesAside(self.folder, self.files, self.bytes)

    def make_room(self) -> None:
        """Remove the oldest, if there are too many or they are too large together.

        What this restore set aside stays, even if the clock was put back and others have a later time.
        """
        room = self._most_bytes - self.bytes
        others = [(size, folder) for size, folder in _list_folders(self.top) if folder != self.folder]
        for number, (size, folder) in enumerate(others, 2):
            room -= size
            if number > MOST or room < 0:
                places.remove_tree(folder)


def copy_entry(source: str, target: str, status: os.stat_result) -> None:
    """Copy a file or link, with its mode and times. Raise OSError or Refusal."""
    if stat.S_ISLNK(status.st_mode):
        places.make_link(places.read_link(source), target)
        return
    with open(places.open_file(source), "rb") as file:
        descriptor = places.open_file(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with open(descriptor, "wb") as ours:
            shutil.copyfileobj(file, ours, 1 << 20)
            ours.flush()
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
            os.utime(descriptor, ns=(status.st_atime_ns, status.st_mtime_ns))
            os.fsync(descriptor)


def _format_now() -> str:
    """Return the time to the microsecond, so that names sort in the order they were made."""
    now = time.time_ns()
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime(now // 10**9)) + ".%06dZ" % (now // 1000 % 10**6)


def _list_folders(top: str) -> List[Tuple[int, str]]:
    """Return the sizes and folders of everything set aside, newest first."""
    names = sorted((name for name in os.listdir(top) if NAMED.match(name)), reverse=True) if is_folder(top) else []
    folders = [os.path.join(top, name) for name in names]
    return [(_measure_folder(folder), folder) for folder in folders if is_folder(folder)]


def _measure_folder(folder: str) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except FileNotFoundError:
                continue
    return total
