"""Remove a pack from the sandbox once it has been fetched, without being told.

A process of its own outlives the command and watches the file: to be told would cost another round trip.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import struct
import time

GRACE_SECONDS = 2.0
"""A reader may look at a file before it opens it for good."""
LONGEST_SECONDS = 900.0

IN_CLOSE_WRITE, IN_CLOSE_NOWRITE, IN_OPEN, IN_DELETE_SELF = 0x8, 0x10, 0x20, 0x400
_EVENT = struct.Struct("iIII")


def reap(folder: str, bundle: str) -> None:
    """Have ``folder`` removed after ``bundle`` in it was read by somebody, or after a quarter of an hour."""
    events = _open_watch(bundle)  # before anybody is told of it, or a quick reader might be missed
    if os.fork():
        return
    try:
        os.setsid()
        # Locks and the command's output would stay open as long as this process has them.
        os.closerange(0, events)
        os.closerange(events + 1, 1024)
        for _ in range(3):
            os.open(os.devnull, os.O_RDWR)
        _wait_for_readers(events, bundle, time.monotonic() + LONGEST_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os._exit(0)


def _wait_for_readers(events: int, bundle: str, deadline: float) -> None:
    """Return when whoever opened the file has closed it again, when it is gone, or at the deadline.

    By the last event, not by their number: alike ones that follow each other arrive as one.
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
    """An inotify descriptor that tells of readers; -1 where there is no inotify."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        events = libc.inotify_init1(os.O_CLOEXEC)
        wanted = IN_OPEN | IN_CLOSE_NOWRITE | IN_CLOSE_WRITE | IN_DELETE_SELF
        watched = libc.inotify_add_watch(events, os.fsencode(path), wanted)
    except (OSError, AttributeError):
        return -1
    return int(events) if events >= 0 and watched >= 0 else -1


def _parse_masks(data: bytes) -> list[int]:
    masks, at = [], 0
    while at < len(data):
        _, mask, _, length = _EVENT.unpack_from(data, at)
        masks.append(mask)
        at += _EVENT.size + length
    return masks
