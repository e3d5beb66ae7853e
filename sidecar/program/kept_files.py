"""What a sandbox keeps so that it need not be sent again: the program, and the rules.

~/.cache/memory-sidecar/.program-<sha256>.zip     the package that this program is in
~/.cache/memory-sidecar/.rules-<sha256>.json      the layouts of the sidecar

Each is named by its hash. The sandbox's agent can write there, so a file is opened once, without following a link, and
what was read counts only if it has that hash. The bootstrap (``delivery.py`` of the sidecar) does the same for the
program.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import List, Optional

from sidecar.format.refusal import Refusal
from sidecar.program import places
from sidecar.program.scratch import Scratch, locate_own_folder, locate_spare_folder

PROGRAM, RULES = ".program-%s.zip", ".rules-%s.json"
"""Names that begin with a dot, which no memory's folder does."""
MOST_KEPT = {PROGRAM: 2, RULES: 4}
"""Two versions of the sidecar may work in one sandbox, each with a program of its own."""
LONGEST = 64 << 20
NOT_KEPT = "%s could not be kept in this sandbox (%s): every command has to bring it, and costs another request."
WORDS = {PROGRAM: "The sidecar's program", RULES: "The layouts"}


def find(kind: str, sha256: str, home: str) -> Optional[bytes]:
    """Return the file with this hash that the sandbox keeps; ``None`` if it has none."""
    for spare in (False, True):
        folder = locate_spare_folder() if spare else locate_own_folder(home)
        try:
            data = places.read_file(os.path.join(os.path.realpath(folder), kind % sha256), LONGEST)
        except (OSError, Refusal):
            continue
        if hashlib.sha256(data).hexdigest() == sha256:
            return data
    return None


def keep(kind: str, data: bytes, scratch: Scratch) -> List[str]:
    """Keep a file, and remove the oldest ones of its kind. Return warnings: the run goes on if that fails."""
    name = kind % hashlib.sha256(data).hexdigest()
    place = os.path.join(scratch.base, name)
    try:
        for other in _list_older(kind, name, scratch.base)[MOST_KEPT[kind] - 1 :]:
            places.remove(os.path.join(scratch.base, other))
        places.write_file(place, data)
        return []
    except (OSError, Refusal) as problem:
        _remove_unfinished(place + places.UNFINISHED)
        return [NOT_KEPT % (WORDS[kind], getattr(problem, "strerror", None) or problem)]


def _remove_unfinished(place: str) -> None:
    """Remove what was written before the disk was full: others need the room."""
    try:
        places.remove(place)
    except (OSError, Refusal):
        pass


def _list_older(kind: str, name: str, folder: str) -> List[str]:
    """Return the other files of a kind, the newest first."""
    pattern = re.compile(re.escape(kind) % "[0-9a-f]{64}" + r"\Z")
    others = [other for other in os.listdir(folder) if pattern.match(other) and other != name]
    return sorted(others, key=lambda other: places.read_status(os.path.join(folder, other)).st_mtime, reverse=True)
