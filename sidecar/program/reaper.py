"""Remove a pack from the sandbox once it has been fetched, without a second command.

A detached process outlives the command and watches the file with inotify: a command to remove it would cost another
round trip.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import struct
import time

GRACE_SECONDS = 2.0
"""A reader may open a file to look at it before it opens it to read all of it."""
LONGEST_SECONDS = 900.0

IN_CLOSE_WRITE, IN_CLOSE_NOWRITE, IN_OPEN, IN_DELETE_SELF = 0x8, 0x10, 0x20, 0x400
_EVENT = struct.Struct("iIII")


def reap(folder: str, bundle: str) -> None:
    """Have ``folder`` removed after ``bundle`` in it was read, or after a quarter of an hour."""
    events = _open_watch(bundle)  # before the path is printed, or a quick reader might be missed
    if os.fork():
        return
    try:
        os.setsid()
        # Otherwise locks and the command's output would stay open as long as this process runs.
        os.closerange(0, events)
        os.closerange(events + 1, 1024)
        for _ in range(3):
            os.open(os.devnull, os.O_RDWR)
        _wait_for_readers(events, bundle, time.monotonic() + LONGEST_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os._exit(0)


def _wait_for_readers(events: int, bundle: str, deadline: float) -> None:
    """Return when the file was opened and closed again, when it was deleted, or at the deadline.

    Only the last event counts, not their number: inotify merges equal events that follow each other.
    """
    read = False
    while time.monotonic() < deadline and os.path.exists(bundle):
        if not select.select([events] if events >= 0 else [], [], [], GRACE_SECONDS)[0]:
            if read:
                return
            continue
        for mask in _parse_masks(os.read(events, 65536)):
            read = bool(mask & (IN_CLOSE_NOWRITE | IN_CLOSE_WRITE))
            if mask & IN_DELETE_SELF:
                return


def _open_watch(path: str) -> int:
    """Return an inotify descriptor for opens and closes of a file; -1 if the system has no inotify."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        events = libc.inotify_init1(os.O_CLOEXEC)
        wanted = IN_OPEN | IN_CLOSE_NOWRITE | IN_CLOSE_WRITE | IN_DELETE_SELF
        watched = libc.inotify_add_watch(events, os.fsencode(path), wanted)
    except (OSError, AttributeError):
        return -1
    return int(events) if events >= 0 and watched >= 0 else -1


def _parse_masks(data: bytes) -> list[int]:
    """Return the masks of the events in a buffer (``struct inotify_event``: wd, mask, cookie, len, name)."""
    masks, at = [], 0
    while at < len(data):
        _, mask, _, length = _EVENT.unpack_from(data, at)
        masks.append(mask)
        at += _EVENT.size + length
    return masks
