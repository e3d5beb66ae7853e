"""Folders that are named after the path of a project, and so have another name where the project is at another path.

In the store such a folder keeps the name it had where it was first exported. A restore gives it the name that belongs
to the project's path in this sandbox and records both names, so that the next export finds the stored names again. A
folder keeps its name everywhere if its project was not named, appears in no transcript and is not near the home.
"""

from __future__ import annotations

import json
import os
import re
from fnmatch import fnmatch
from typing import Any, NamedTuple

from sidecar.program import places

NOTES = "keys"
MOST_NOTES = 64 << 20
MOST_TRANSCRIPTS, ENOUGH = 8, 1 << 16
MOST_NEAR = 500


class FolderName(NamedTuple):
    """The local name of a stored folder, and the project path that gave it that name."""

    local: str
    path: str


class FolderNames:
    """The local and the stored name of each such folder of one root."""

    def __init__(self, folder: str = "", known: dict[str, FolderName] | None = None) -> None:
        self.known = known or {}
        self._prefix = folder + "/"
        self._stored = {key.local: name for name, key in self.known.items()}

    def may_rename_in(self, folder: str) -> bool:
        """Return whether entries directly in this folder may have another name in the store."""
        return folder + "/" == self._prefix

    def stored(self, relative: str) -> str:
        """Return the stored path of a local path."""
        return self._rename_folder(relative, self.name_of) if relative.startswith(self._prefix) else relative

    def local(self, relative: str) -> str:
        """Return the local path of a stored path."""
        if not relative.startswith(self._prefix):
            return relative
        return self._rename_folder(relative, lambda name: self.known[name].local if name in self.known else name)

    def name_of(self, local: str) -> str:
        """Return the stored name of a local folder: the one recorded at its restore, else its own, with "~" if that is
        taken."""
        name = self._stored.get(local)
        if name is None:
            name = local
            while name in self.known:
                name += "~"
        return name

    def _rename_folder(self, relative: str, rename: Any) -> str:
        folder, slash, rest = relative[len(self._prefix) :].partition("/")
        return str(self._prefix + rename(folder) + slash + rest)


class FileName(FolderNames):
    """The local and the stored name of a root that is one file: a variable chooses the local name, the stored name is
    fixed."""

    def __init__(self, local: str, stored: str) -> None:
        super().__init__()
        self.here, self._stored_name = local, stored

    def may_rename_in(self, folder: str) -> bool:
        return not folder

    def stored(self, relative: str) -> str:
        return self._stored_name if relative == self.here else relative

    def local(self, relative: str) -> str:
        return self.here if relative == self._stored_name else relative


def make_slug(path: str, longest: int) -> str:
    """Return the folder name for a project's path, as Claude Code makes it: every UTF-16 unit that is not an ASCII
    letter or digit becomes "-"; a longer name is cut and a hash of the whole path is appended."""
    import unicodedata

    path = unicodedata.normalize("NFC", path)
    units = path.encode("utf-16-le", "surrogatepass")
    codes = [units[at] | units[at + 1] << 8 for at in range(0, len(units), 2)]
    name = "".join(chr(code) if code < 128 and chr(code).isalnum() else "-" for code in codes)
    if len(name) <= longest:
        return name
    # The hash is a 32-bit one (31 * h + code), its absolute value in base 36, as in the JavaScript original.
    number = 0
    for code in codes:
        number = (number * 31 + code) & 0xFFFFFFFF
    number = abs(number - (1 << 32) if number >> 31 else number)
    digits = ""
    while number or not digits:
        number, digit = divmod(number, 36)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[digit] + digits
    return name[:longest] + "-" + digits


def read_folder_names(memory: str, root: str, layout: dict[str, Any], own: FolderNames) -> FolderNames:
    """Return the folder names that a restore recorded for a root; ``own`` if the layout has no such folders."""
    keyed = layout.get("keyed")
    if not keyed:
        return own
    try:
        notes = json.loads(places.read_file(os.path.join(memory, NOTES), MOST_NOTES))
    except (OSError, ValueError, RecursionError):
        return FolderNames(keyed["folder"])
    rows = notes.get(root) if isinstance(notes, dict) else None
    if not isinstance(rows, dict) or not all(_is_name(name) and _is_row(row) for name, row in rows.items()):
        return FolderNames(keyed["folder"])
    return FolderNames(keyed["folder"], {name: FolderName(*row) for name, row in rows.items()})


def _is_row(row: Any) -> bool:
    """Return whether a value is a recorded pair of local name and path."""
    return isinstance(row, list) and len(row) == 2 and _is_name(row[0]) and isinstance(row[1], str)


def _is_name(name: Any) -> bool:
    """Return whether it is a valid folder name that does not lead elsewhere."""
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\0" not in name


def write_folder_names(memory: str, keys: dict[str, FolderNames]) -> None:
    """Record the folder names of all roots for the next export."""
    notes = json.dumps({root: known.known for root, known in keys.items()})
    places.write_file(os.path.join(memory, NOTES), notes.encode("ascii"))


def find_project_paths(folder: str, keys: FolderNames, keyed: dict[str, Any], known: list[str]) -> dict[str, str]:
    """Return the project path of each such folder of a root, by its stored name, if it is known. Others are searched
    near the ``known`` paths."""
    slugs = {make_slug(path, keyed["longest"]): path for path in known}
    slugs.update((key.local, key.path) for key in keys.known.values())
    top = os.path.join(folder, keyed["folder"])
    names = sorted(os.listdir(top)) if os.path.isdir(top) else []
    paths = {name: slugs.get(name) or _find_transcript_path(os.path.join(top, name), name, keyed) for name in names}
    if not all(paths.values()):
        near: dict[str, str] = {}
        for path in _list_nearby_folders(known):
            near.setdefault(make_slug(path, keyed["longest"]), path)
        paths = {name: path or near.get(name, "") for name, path in paths.items()}
    return {keys.name_of(name): path for name, path in paths.items() if path}


def _list_nearby_folders(places: list[str]) -> list[str]:
    """Return the folders in these places and the folders in those, up to a bound."""
    found: list[str] = []
    layer = list(dict.fromkeys(places))
    for _ in range(2):
        inner = []
        for place in layer:
            try:
                with os.scandir(place) as scan:
                    entries = [entry for entry in scan if not entry.name.startswith(".")]
                inner += sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
            except OSError:
                continue  # missing, or not readable for this user
            if len(found) + len(inner) >= MOST_NEAR:
                break
        found += inner
        layer = found[:]
    return found[:MOST_NEAR]


def _find_transcript_path(folder: str, name: str, keyed: dict[str, Any]) -> str:
    """Return the path in a folder's transcripts that gives the folder its name; "" if none does."""
    key = re.compile(rb'"%s"\s*:\s*("(?:[^"\\]|\\.)*")' % re.escape(keyed["path_key"]).encode())
    try:
        transcripts = [file for file in os.listdir(folder) if fnmatch(file, keyed["transcripts"])]
        for file in sorted(transcripts)[:MOST_TRANSCRIPTS]:
            for text in set(key.findall(_read_both_ends(os.path.join(folder, file)))):
                path = json.loads(text)
                if make_slug(path, keyed["longest"]) == name:
                    return str(path)
    except (OSError, ValueError):
        pass
    return ""


def _read_both_ends(place: str) -> bytes:
    """Return the beginning and the end of a file: where a session began, and where it last continued."""
    descriptor = places.open_file(place)
    with open(descriptor, "rb") as file:
        first = file.read(ENOUGH)
        file.seek(max(len(first), os.fstat(descriptor).st_size - ENOUGH))
        return first + file.read(ENOUGH)


def name_folders(keyed: dict[str, Any], names: list[str], paths: dict[str, str]) -> FolderNames:
    """Return what the stored folders ``names`` are called here, given the project paths that are known.

    If two would have the same name, the later one in ``paths`` gets a "~": no program reads it then, but nothing is
    lost.
    """
    known: dict[str, FolderName] = {}
    taken = {name for name in names if name not in paths}
    for name, path in paths.items():
        if name in names:
            local = make_slug(path, keyed["longest"])
            while local in taken:
                local += "~"
            taken.add(local)
            known[name] = FolderName(local, path)
    return FolderNames(keyed["folder"], known)
