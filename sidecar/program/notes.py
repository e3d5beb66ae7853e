"""The notes a sandbox keeps about each memory: which store and memory its files belong to, and where they are.

They are a small JSON file, ``notes``, in the memory's folder of the cache (``scratch.py``). A complete restore and every
export write them; the sidecar says what they hold (``request["notes"]``), except for the folders, which are known only here.
An export answers with the notes as they were before it, so that the sidecar can tell whether it is about to continue
another store's memory, or a memory under another's id. The same rules decide here whether the notes may be replaced:
an export that is refused for one of them leaves them as they are, so that it is refused the next time as well.

Whoever works in the sandbox can write to the file, so nothing in it is believed unless it has the form it should have.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence

from sidecar.format.refusal import Refusal
from sidecar.program import places

NAME = "notes"
LONGEST = 1 << 18
LONGEST_TEXT = 1000
LONGEST_PATH = 4096
MOST_ROOTS = 1000
MOST_MEMORIES = 200
"""So many folders of other memories are looked at."""
MOST_TOLD = 5
"""An export's answer has at most so many notes of other memories."""
UNKNOWN_LINEAGE, OTHER_MEMORY = "unknown-lineage", "other-memory"
_STORE = re.compile(r"[0-9a-f]{32}\Z")


class Notes(NamedTuple):
    """What is noted of one memory. ``store`` and ``sandbox`` are empty where the sidecar did not know them."""

    memory: str
    roots: Dict[str, str]
    """The real folder of each root that had something in it."""
    store: str = ""
    """The id of the store (its object ``store-id``)."""
    sandbox: str = ""
    """The reference under which the sidecar knew this sandbox, e.g. ``e2b:abc``. A copy has another."""
    machine: str = ""
    """The name of the machine that a folder on it (``local:``) is a sandbox of: an image may be copied to many."""
    reader: bool = False
    """The memory was restored only to be read: it is never to become the head from here."""
    conversation: str = ""
    current: bool = True
    """Whether what is in these folders is this memory: not when another was restored over it since."""
    withheld: Sequence[str] = ()
    """Roots of it that are not here, for their projects were not when it was restored."""

    def as_dict(self) -> Dict[str, Any]:
        return dict(self._asdict())


def parse(text: bytes) -> Optional[Notes]:
    """The notes in a file's contents; ``None`` unless they are such as ``write`` leaves."""
    try:
        value = json.loads(text.decode("utf-8")) if len(text) <= LONGEST else None
    except (ValueError, RecursionError):
        return None
    return parse_value(value)


def parse_value(value: Any) -> Optional[Notes]:
    """Notes from a JSON value of unknown origin; ``None`` when it is not one. Fields of later versions are left out."""
    if not isinstance(value, dict):
        return None
    value = {field: value[field] for field in Notes._fields if field in value}
    texts = [value.get(field, "") for field in ("memory", "store", "sandbox", "machine", "conversation")]
    roots = value.get("roots", {})
    if not all(isinstance(text, str) and len(text) <= LONGEST_TEXT for text in texts) or not texts[0]:
        return None
    flags = [value.get("reader", False), value.get("current", True)]
    if not all(isinstance(flag, bool) for flag in flags) or (texts[1] and not _STORE.match(texts[1])):
        return None
    if not isinstance(roots, dict) or len(roots) > MOST_ROOTS or not all(map(_is_root, roots.items())):
        return None
    withheld = value.get("withheld", [])
    if not isinstance(withheld, (list, tuple)) or len(withheld) > MOST_ROOTS or not all(map(_is_name, withheld)):
        return None
    return Notes(**dict(value, roots=roots, withheld=tuple(withheld)))


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and len(name) <= LONGEST_TEXT


def _is_root(root: Any) -> bool:
    name, folder = root
    if not isinstance(folder, str) or len(name) > LONGEST_TEXT or len(folder) > LONGEST_PATH or "\0" in folder:
        return False
    return folder.startswith("/") and os.path.normpath(folder) == folder


def read(folder: str) -> Optional[Notes]:
    """The notes of the memory with this folder in the cache; ``None`` when there are none that can be believed."""
    try:
        return parse(places.read_file(os.path.join(folder, NAME), LONGEST))
    except (OSError, Refusal):
        return None


def write(folder: str, notes: Notes) -> None:
    """Replace the notes of the memory with this folder in the cache. Raise OSError or Refusal."""
    places.write_file(os.path.join(folder, NAME), json.dumps(notes.as_dict()).encode("ascii"))


def write_or_warn(folder: str, notes: Notes) -> List[str]:
    """The same at the end of a run, which has done its work whether or not it can be noted. Return what to say."""
    try:
        write(folder, notes)
        return []
    except (OSError, Refusal) as problem:
        return ["This sandbox cannot note which memory it holds: %s." % problem]


def read_others(base: str, folder: str) -> Dict[str, Notes]:
    """The notes of the other memories that are known in this sandbox, by their folders in the cache."""
    found: Dict[str, Notes] = {}
    own = os.path.basename(folder)
    names = sorted(name for name in os.listdir(base) if name != own)  # what is no memory's folder has no notes
    for name in names[:MOST_MEMORIES]:
        other = os.path.join(base, name)
        notes = read(other)
        if notes is not None:
            found[other] = notes
    return found


def overlaps(one: Dict[str, str], other: Dict[str, str]) -> bool:
    """Whether two memories have the same folders, or one has all of the other's and more.

    Two that share some folders, and each have others besides (two projects under one ``~/.claude``), live side by side.
    """
    ours, theirs = set(one.values()), set(other.values())
    return bool(ours & theirs) and (ours <= theirs or theirs <= ours)


def list_others_here(told: Dict[str, Any], others: Iterable[Notes]) -> List[Notes]:
    """Those of other memories in this sandbox. Notes from another one came with a copy, and say nothing of this."""
    place = told["sandbox"], told.get("machine", "")
    here = [notes for notes in others if notes.current and (notes.sandbox, notes.machine) == place]
    return [notes for notes in here if notes.memory != told["memory"]]


def find_owners(told: Dict[str, Any], others: Iterable[Notes], roots: Dict[str, str]) -> List[Notes]:
    """The other memories whose folders these are."""
    return [notes for notes in list_others_here(told, others) if overlaps(notes.roots, roots)]


def find_objection(
    told: Dict[str, Any],
    own: Optional[Notes],
    others: Iterable[Notes],
    roots: Dict[str, str],
    lineage: Iterable[str],
) -> str:
    """Why an export from these folders would mix up memories: the code of a guard, or "".

    ``told`` is what the sidecar says (``request["notes"]``), ``own`` are the notes of the memory before the export. Where the
    memory here grew out of a snapshot that was its head in this store, neither can be: a version that kept no notes has
    restored or exported it here, or a person has made an export the head that was refused before.
    """
    if not set(told["heads"]).isdisjoint(lineage):
        return ""
    if own is None or own.sandbox != told["sandbox"] or not own.current:
        return OTHER_MEMORY if find_owners(told, others, roots) else ""
    return UNKNOWN_LINEAGE if own.store and told["store"] and own.store != told["store"] else ""


def build_after_export(told: Dict[str, Any], own: Optional[Notes], roots: Dict[str, str]) -> Notes:
    """What to write down after an export that was not refused as a mix-up."""
    before = own.roots if own is not None and own.sandbox == told["sandbox"] else {}
    still = {name: folder for name, folder in before.items() if os.path.exists(folder)}
    return Notes(
        memory=told["memory"],
        store=told["store"] or (own.store if own is not None else ""),
        sandbox=told["sandbox"],
        machine=told.get("machine", ""),
        roots=dict(still, **roots),
        reader=own.reader if own is not None else False,
        conversation=told.get("conversation", ""),
        withheld=own.withheld if own is not None else (),
    )


def build_after_restore(told: Dict[str, Any], roots: Dict[str, str], withheld: Sequence[str] = ()) -> Notes:
    """What to write down after a complete restore."""
    return Notes(
        memory=told["memory"],
        store=told["store"],
        sandbox=told["sandbox"],
        machine=told.get("machine", ""),
        roots=roots,
        reader=told["reader"],
        conversation=told.get("conversation", ""),
        withheld=tuple(withheld),
    )
