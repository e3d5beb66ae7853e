"""The stamp of folders on this machine: equal to an earlier one only if no file in them was changed in between.

It is made of what ``stat`` says, the times of the last change among it, which nobody can set. So it tells as much as the
signatures by which an export knows a file again (``sidecar/program/cache.py``), without starting a process.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from itertools import islice

from sidecar.program.places import is_in

MOST_ENTRIES = 5000
"""Folders with more in them have no stamp: going through them all would cost as much as an export."""
TICK_NS = 2_000_000_000
"""Two changes in one tick of a file system's clock leave the same time behind. What changed so shortly before has no
stamp; file systems whose times are whole seconds need two of them."""
OWN = ".cache/memory-sidecar"
"""The folder of a home in which the program keeps its notes. Each run writes its lock and has a folder for itself there."""
OF_A_RUN = (".turn", "turn")
WORK = "work-"


def compute_stamp(folders: Sequence[str]) -> str:
    """Return the stamp of folders, with all that is in them; "" if there is none: they have too much in them, something
    just changed or cannot be read, or a link leads to a folder elsewhere.

    The folders are real paths, the first that of the home.
    """
    settled = time.time_ns() - TICK_NS
    digest = hashlib.blake2b(digest_size=16)
    try:
        for number, (path, status) in enumerate(_walk(folders)):
            # A folder's own times do not count, here as there: an entry that comes or goes shows by itself.
            fresh = not stat.S_ISDIR(status.st_mode) and max(status.st_mtime_ns, status.st_ctime_ns) > settled
            if number >= MOST_ENTRIES or fresh:
                return ""
            name = os.fsencode(path)
            digest.update(struct.pack("<6QqqI", *_list_figures(status), len(name)) + name)
    except OSError:
        return ""
    return digest.hexdigest()


def _list_figures(status: os.stat_result) -> tuple[int, ...]:
    """Return what changes with a file. The times of a folder tell of scratch files too, and are left out."""
    whose = status.st_dev, status.st_ino, status.st_mode, status.st_uid, status.st_gid
    if stat.S_ISDIR(status.st_mode):
        return (*whose, 0, 0, 0)
    return (*whose, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _walk(folders: Sequence[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield everything in folders, by path, and what links to files lead to. Raise ``OSError``, also if a folder is too
    large, or a link leads to one elsewhere."""
    waiting, notes = list(folders), os.path.join(folders[0], OWN)
    while waiting:
        folder = waiting.pop()
        own = notes in (folder, os.path.dirname(folder))
        with os.scandir(folder) as entries:
            rows = sorted(islice(entries, MOST_ENTRIES + 1), key=lambda entry: entry.name)
        if len(rows) > MOST_ENTRIES:
            raise OSError(errno.EFBIG, "has too much in it", folder)
        for entry in rows:
            if own and (entry.name in OF_A_RUN or entry.name.startswith(WORK)):
                continue
            status = entry.stat(follow_symlinks=False)
            yield entry.path, status
            if stat.S_ISDIR(status.st_mode):
                waiting.append(entry.path)
            elif stat.S_ISLNK(status.st_mode):
                yield from _follow(entry.path, folders)


def _follow(link: str, folders: Sequence[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the file elsewhere that a link leads to. Raise ``OSError`` if it leads to a folder elsewhere, or to nothing:
    what comes there later would not be seen."""
    real = os.path.realpath(link)
    if any(is_in(real, folder) for folder in folders):
        return  # it is looked at where it is, or would be
    status = os.stat(real)
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EXDEV, "leads to a folder elsewhere", link)
    yield f"{link}/", status
