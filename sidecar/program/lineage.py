"""The snapshots that this sandbox was restored from or exported to, of one memory, oldest first.

A sandbox that was restored only to be read has them in a file of another name: a version that knows no readers finds none,
so what it exports from here is stored beside the head.
"""

from __future__ import annotations

import os
import re
from typing import List

from sidecar.format.refusal import Refusal
from sidecar.program import places

NAME, OF_READER = "lineage", "read-lineage"
LONGEST = 100
LONGEST_FILE = 1 << 20
SNAPSHOT = re.compile(r"[0-9A-Za-z-]{1,64}\Z")


def read(folder: str) -> List[str]:
    """The snapshots noted in a memory's folder of the cache. Whoever works in the sandbox can write there: what cannot
    be a snapshot's id is left out."""
    try:
        text = places.read_file(_locate_file(folder, is_reader(folder)), LONGEST_FILE)
        return [line for line in text.decode("ascii", "replace").split() if SNAPSHOT.match(line)]
    except (OSError, Refusal):
        return []


def is_reader(folder: str) -> bool:
    """Whether the memory was restored here only to be read. Where a run was cut short both files can be there."""
    return places.exists(_locate_file(folder, True))


def write(folder: str, snapshots: List[str], reader: bool) -> None:
    text = "".join(snapshot + "\n" for snapshot in snapshots[-LONGEST:])
    places.write_file(_locate_file(folder, reader), text.encode("ascii"))
    places.remove(_locate_file(folder, not reader))


def forget(folder: str) -> None:
    """The memory is not in this sandbox any more."""
    for reader in (False, True):
        places.remove(_locate_file(folder, reader))


def _locate_file(folder: str, reader: bool) -> str:
    return os.path.join(folder, OF_READER if reader else NAME)
