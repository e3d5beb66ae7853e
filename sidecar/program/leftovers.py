"""Files that killed runs leave outside the sidecar's own folder: uploads, and folders with a command's output.

/tmp/memory-sidecar-<random>.bundle     what a restore brings, or a request, written by the sandbox's daemon
/tmp/memory-sidecar-<random>.command    a command that was too long to be sent as one
/tmp/memory-sidecar-<random>.run/       what a command prints; in the home, with a leading dot, if /tmp is full

Only the run that made a name knows it, so every later run removes what no run uses. A run locks its uploads while it
works. Before it has the lock, and while the sidecar saves something between two commands, the modification time
decides.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from typing import Iterable, Optional

OURS = re.compile(r"\.?memory-sidecar-[0-9a-f]{16}\.(bundle|command|run)\Z")
JUST_WRITTEN_SECONDS = 15
"""Allowed between the last byte of an upload and the command that needs it. An upload that is removed too early is sent
again."""
SPARED_SECONDS = 1800
STALE_SECONDS = 900
"""After this time the sidecar does not ask for a command's output any more."""


def lock_upload(path: str) -> Optional[int]:
    """Lock an upload for as long as the returned descriptor is open; ``None`` if it cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def keep_uploads(paths: Iterable[str]) -> None:
    """Keep uploads that a later command will use again, by setting their times into the future."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.utime(path, (time.time(), time.time() + SPARED_SECONDS))


def remove(path: str) -> bool:
    """Remove a file or folder. Return whether nothing is at that path any more."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            import shutil

            shutil.rmtree(path)
        else:
            os.unlink(path)
    return not os.path.lexists(path)


def tidy(home: str) -> None:
    """Remove what earlier runs of this user left in /tmp and in the home, unless a run still uses it."""
    for folder in ("/tmp", home):
        names = []
        with contextlib.suppress(OSError):
            names = os.listdir(folder)
        for name in names:
            if OURS.match(name):
                with contextlib.suppress(OSError):
                    path = os.path.join(folder, name)
                    if _is_leftover(path, os.lstat(path)):
                        remove(path)


def _is_leftover(path: str, status: os.stat_result) -> bool:
    """Return whether no run uses this any more. Files of other users are judged by their age alone."""
    age = time.time() - status.st_mtime
    if status.st_uid != os.geteuid():
        return age > STALE_SECONDS
    if stat.S_ISDIR(status.st_mode):
        return age > JUST_WRITTEN_SECONDS and not _is_running(path, age)
    return (
        age > JUST_WRITTEN_SECONDS
        and stat.S_ISREG(status.st_mode)
        and not is_locked(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
    )


def _is_running(folder: str, age: float) -> bool:
    """Return whether the command with this output is still running, or has ended recently enough to be asked for."""
    if os.path.exists(os.path.join(folder, "done")):
        return age < STALE_SECONDS
    try:
        with open(os.path.join(folder, "pid")) as file:
            os.kill(int(file.read(20)), 0)
        return True
    except PermissionError:
        return True
    except (OSError, ValueError, OverflowError):
        return False


def is_locked(descriptor: int) -> bool:
    """Return whether a running command has locked this open file, and close it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)
