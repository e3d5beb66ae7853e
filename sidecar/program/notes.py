"""The notes a sandbox keeps about each memory: which store and memory its files belong to, and where they are.

They are a small JSON file, ``notes``, in the memory's cache folder (``scratch.py``). A complete restore and every
export write them. The sidecar provides the contents (``Identity``, here ``told``) except for the folders, which are
known only in the sandbox. An export returns the notes as they were before it, so that the sidecar can tell whether
it is about to continue another store's memory, or a memory under another's id. The same rules decide here whether the
notes may be replaced: an export that is refused by one of them leaves the notes unchanged, so that it is refused the
next time too.

Beside them is the lineage: the snapshots that the memory was restored from or exported to, oldest first. A read-only
copy keeps its lineage in a file of another name. A version of the program that does not know read-only copies then finds
no lineage, so what it exports from here is stored beside the head. The same goes for a part of a memory: that file begins
with the patterns of the part. If there is another file beside it, a version that does not know parts wrote that, and it
counts.

The sandbox's agent can write to the files, so nothing in them is trusted unless it has the expected form.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence

from sidecar.format.protocol import Identity, SandboxNotes
from sidecar.format.refusal import Refusal
from sidecar.program import places

NAME = "notes"
LONGEST = 1 << 18
LONGEST_TEXT = 1000
LONGEST_PATH = 4096
MOST_ROOTS = 1000
MOST_MEMORIES = 200
"""At most this many folders of other memories are read."""
MOST_TOLD = 5
"""At most this many notes of other memories are in an export's answer."""
UNKNOWN_LINEAGE, OTHER_MEMORY = "unknown-lineage", "other-memory"
_STORE = re.compile(r"[0-9a-f]{32}\Z")
LINEAGE, LINEAGE_OF_READER, LINEAGE_OF_PART = "lineage", "read-lineage", "part-lineage"
MOST_PATTERNS = 5000
"""How many patterns a part has at most."""
LONGEST_LINEAGE = 100
LONGEST_LINEAGE_FILE = 1 << 20
SNAPSHOT = re.compile(r"[0-9A-Za-z-]{1,64}\Z")


class Notes(NamedTuple):
    """The notes about one memory. ``store`` and ``sandbox`` are empty if the sidecar did not know them."""

    memory: str
    roots: Dict[str, str]
    """The real folder of each root that contained something."""
    store: str = ""
    """The id of the store (its object ``store-id``)."""
    sandbox: str = ""
    """The reference by which the sidecar knew this sandbox, e.g. ``e2b:abc``. A copy of the sandbox has another one."""
    machine: str = ""
    """The name of the machine, for a folder on it (``local:``): an image may be copied to many machines."""
    reader: bool = False
    """The memory is a read-only copy: an export from here never becomes the head."""
    conversation: str = ""
    current: bool = True
    """Whether the files in these folders are this memory; false once another was restored over it."""
    withheld: Sequence[str] = ()
    """Roots that were not restored because their projects were not in the sandbox."""
    label: str = ""
    """Of a read-only copy: the label of what is exported from here."""

    def as_dict(self) -> Dict[str, Any]:
        return dict(self._asdict())

    def tell(self) -> SandboxNotes:
        """Return the notes as an answer has them."""
        return SandboxNotes(**dict(self._asdict(), withheld=list(self.withheld)))


def parse(text: bytes) -> Optional[Notes]:
    """Return the notes in a file's contents; ``None`` unless they have the form that ``write`` produces."""
    try:
        value = json.loads(text.decode("utf-8")) if len(text) <= LONGEST else None
    except (ValueError, RecursionError):
        return None
    return parse_value(value)


def parse_value(value: Any) -> Optional[Notes]:
    """Return notes from an untrusted JSON value; ``None`` if it is not valid. Fields of later versions are ignored."""
    if not isinstance(value, dict):
        return None
    value = {field: value[field] for field in Notes._fields if field in value}
    texts = [value.get(field, "") for field in ("memory", "store", "sandbox", "machine", "conversation", "label")]
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
    """Return whether a pair is a root's name and an absolute, normalised path."""
    name, folder = root
    if not isinstance(folder, str) or len(name) > LONGEST_TEXT or len(folder) > LONGEST_PATH or "\0" in folder:
        return False
    return folder.startswith("/") and os.path.normpath(folder) == folder


def read(folder: str) -> Optional[Notes]:
    """Return the notes in a memory's cache folder; ``None`` if there are none, or they are not valid."""
    try:
        return parse(places.read_file(os.path.join(folder, NAME), LONGEST))
    except (OSError, Refusal):
        return None


def write(folder: str, notes: Notes) -> None:
    """Replace the notes in a memory's cache folder. Raise OSError or Refusal."""
    places.write_file(os.path.join(folder, NAME), json.dumps(notes.as_dict()).encode("ascii"))


def write_or_warn(folder: str, notes: Notes) -> List[str]:
    """Write the notes at the end of a run. Return warnings instead of raising: the run's work is done in any case."""
    try:
        write(folder, notes)
        return []
    except (OSError, Refusal) as problem:
        return ["This sandbox cannot note which memory it holds: %s." % problem]


def read_others(base: str, folder: str) -> Dict[str, Notes]:
    """Return the notes of the other memories in this sandbox, by their cache folders."""
    found: Dict[str, Notes] = {}
    own = os.path.basename(folder)
    names = sorted(name for name in os.listdir(base) if name != own)  # folders that are not a memory's have no notes
    for name in names[:MOST_MEMORIES]:
        other = os.path.join(base, name)
        notes = read(other)
        if notes is not None:
            found[other] = notes
    return found


def overlaps(one: Dict[str, str], other: Dict[str, str]) -> bool:
    """Return whether two memories have the same folders, or one has all of the other's and more.

    Two memories that share some folders and each have others as well (two projects under one ``~/.claude``) do not
    conflict.
    """
    ours, theirs = set(one.values()), set(other.values())
    return bool(ours & theirs) and (ours <= theirs or theirs <= ours)


def list_others_here(told: Identity, others: Iterable[Notes]) -> List[Notes]:
    """Return the notes of other memories that are in this sandbox. Notes of another sandbox came with a copy of it and
    do not count."""
    place = told.sandbox, told.machine
    here = [notes for notes in others if notes.current and (notes.sandbox, notes.machine) == place]
    return [notes for notes in here if notes.memory != told.memory]


def find_owners(told: Identity, others: Iterable[Notes], roots: Dict[str, str]) -> List[Notes]:
    """Return the notes of the other memories that own these folders."""
    return [notes for notes in list_others_here(told, others) if overlaps(notes.roots, roots)]


def find_objection(
    told: Identity,
    own: Optional[Notes],
    others: Iterable[Notes],
    roots: Dict[str, str],
    lineage: Iterable[str],
) -> str:
    """Return why an export from these folders would mix up memories: the code of a guard, or "".

    ``told`` is what the sidecar sent, ``own`` are the memory's notes before the export. There is no objection if the
    memory in this sandbox grew out of a snapshot that was its head in this store: then either a version without notes
    restored or exported it here, or a person made a refused export the head.
    """
    if not set(told.heads).isdisjoint(lineage):
        return ""
    if own is None or own.sandbox != told.sandbox or not own.current:
        return OTHER_MEMORY if find_owners(told, others, roots) else ""
    return UNKNOWN_LINEAGE if own.store and told.store and own.store != told.store else ""


def build_after_export(told: Identity, own: Optional[Notes], roots: Dict[str, str]) -> Notes:
    """Return the notes to write after an export that was not refused as a mix-up."""
    before = own.roots if own is not None and own.sandbox == told.sandbox else {}
    still = {name: folder for name, folder in before.items() if os.path.exists(folder)}
    return Notes(
        memory=told.memory,
        store=told.store or (own.store if own is not None else ""),
        sandbox=told.sandbox,
        machine=told.machine,
        roots=dict(still, **roots),
        reader=own.reader if own is not None else False,
        conversation=told.conversation,
        withheld=own.withheld if own is not None else (),
        label=own.label if own is not None else "",
    )


def build_after_restore(told: Identity, reader: bool, roots: Dict[str, str], withheld: Sequence[str] = ()) -> Notes:
    """Return the notes to write after a complete restore."""
    return Notes(
        memory=told.memory,
        store=told.store,
        sandbox=told.sandbox,
        machine=told.machine,
        roots=roots,
        reader=reader,
        conversation=told.conversation,
        withheld=tuple(withheld),
        label=told.label,
    )


def read_lineage(folder: str) -> List[str]:
    """Return the snapshots noted in a memory's cache folder. The sandbox's agent can write there, so anything that
    cannot be a snapshot's id is left out."""
    try:
        text = places.read_file(locate_lineage(folder), LONGEST_LINEAGE_FILE)
        return [line for line in text.decode("ascii", "replace").split() if SNAPSHOT.match(line)]
    except (OSError, Refusal):
        return []


def is_reader(folder: str) -> bool:
    """Return whether the memory was restored as a read-only copy. After a run was cut short, both files may exist."""
    return places.exists(os.path.join(folder, LINEAGE_OF_READER)) or bool(read_part(folder))


def read_part(folder: str) -> List[str]:
    """Return the patterns of the part of the memory that was restored; empty if all of it was, or that cannot be told:
    then there is no lineage either."""
    if any(places.exists(os.path.join(folder, name)) for name in (LINEAGE, LINEAGE_OF_READER)):
        return []
    try:
        return parse_part(places.read_file(os.path.join(folder, LINEAGE_OF_PART), LONGEST_LINEAGE_FILE))
    except (OSError, Refusal):
        return []


def encode_part(patterns: Sequence[str]) -> str:
    """Return the first line of a part's lineage. No word of it can be taken for a snapshot."""
    return json.dumps({"part": list(patterns)}, separators=(",", ":")).replace(" ", "\\u0020")


def parse_part(text: bytes) -> List[str]:
    """Return the patterns in the first line of a part's lineage; empty if it is not valid."""
    try:
        patterns = json.loads(text.partition(b"\n")[0].decode("ascii"))["part"]
    except (ValueError, RecursionError, TypeError, LookupError):
        return []
    if not isinstance(patterns, list) or len(patterns) > MOST_PATTERNS:
        return []
    return patterns if all(isinstance(one, str) and 0 < len(one) <= LONGEST_PATH for one in patterns) else []


def write_lineage(folder: str, snapshots: List[str], reader: bool, part: Sequence[str] = ()) -> None:
    """Replace the lineage, keeping the newest entries, and remove the files of the other kinds."""
    text = "".join(snapshot + "\n" for snapshot in snapshots[-LONGEST_LINEAGE:])
    if part:
        # First: with another file beside it, it would not count.
        forget_lineage(folder)
        places.write_file(os.path.join(folder, LINEAGE_OF_PART), (encode_part(part) + "\n" + text).encode("ascii"))
        return
    name = LINEAGE_OF_READER if reader else LINEAGE
    places.write_file(os.path.join(folder, name), text.encode("ascii"))
    for other in (LINEAGE, LINEAGE_OF_READER, LINEAGE_OF_PART):
        if other != name:
            places.remove(os.path.join(folder, other))


def forget_lineage(folder: str) -> None:
    """Remove the lineage: the memory is not in this sandbox any more."""
    for name in (LINEAGE, LINEAGE_OF_READER, LINEAGE_OF_PART):
        places.remove(os.path.join(folder, name))


def locate_lineage(folder: str) -> str:
    """Return the path of the lineage that counts."""
    if read_part(folder):
        return os.path.join(folder, LINEAGE_OF_PART)
    return os.path.join(folder, LINEAGE_OF_READER if is_reader(folder) else LINEAGE)
