"""The lineage of a memory in this sandbox: the snapshots it was restored from or exported to, oldest first.

A read-only copy keeps its lineage in a file of another name. A version of the program that does not know read-only
copies then finds no lineage, so what it exports from here is stored beside the head.
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
    """Return the snapshots noted in a memory's cache folder. The sandbox's agent can write there, so anything that
    cannot be a snapshot's id is left out."""
    try:
        text = places.read_file(_locate_file(folder, is_reader(folder)), LONGEST_FILE)
        return [line for line in text.decode("ascii", "replace").split() if SNAPSHOT.match(line)]
    except (OSError, Refusal):
        return []


def is_reader(folder: str) -> bool:
    """Return whether the memory was restored as a read-only copy. After a run was cut short, both files may exist."""
    return places.exists(_locate_file(folder, True))


def write(folder: str, snapshots: List[str], reader: bool) -> None:
    """Replace the lineage, keeping the newest entries, and remove the file of the other kind."""
    text = "".join(snapshot + "\n" for snapshot in snapshots[-LONGEST:])
    places.write_file(_locate_file(folder, reader), text.encode("ascii"))
    places.remove(_locate_file(folder, not reader))


def forget(folder: str) -> None:
    """Remove the lineage: the memory is not in this sandbox any more."""
    for reader in (False, True):
        places.remove(_locate_file(folder, reader))


def _locate_file(folder: str, reader: bool) -> str:
    return os.path.join(folder, OF_READER if reader else NAME)
