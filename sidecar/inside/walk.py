"""Find a root's memory: one walk, no file opened.

What is left out is said: names a layout never exports, secrets, links that lead out, devices and sockets.
"""

from __future__ import annotations

import os
import stat
from typing import Iterator, NamedTuple

from .refusal import Refusal
from .roots import Root

SQLITE_TAILS = ("-wal", "-shm", "-journal")
MOST_SKIPPED = 200
ENDLESS = 1 << 62
SLACK = 10_000
"""Links that lead out are found but do not count: only what is far beyond a limit ends the walk."""


class Found(NamedTuple):
    """One path of a root that is memory: its travelling name, where it is, and what ``lstat`` said."""

    path: str
    place: str
    relative: str
    status: os.stat_result
    root: Root


class Skipped:
    """What was left out and why; long lists are counted, not kept."""

    def __init__(self) -> None:
        self.rows: list[dict[str, str]] = []
        self.more = 0
        self.reasons: dict[str, int] = {}

    def add(self, path: str, reason: str) -> None:
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if len(self.rows) < MOST_SKIPPED:
            self.rows.append({"path": path, "reason": reason})
        else:
            self.more += 1


def is_database_tail(name: str, siblings: set[str]) -> bool:
    """Whether a name is the -wal, -shm or -journal of a file beside it: part of that database, never a file of its own."""
    return any(name.endswith(tail) and name[: -len(tail)] in siblings for tail in SQLITE_TAILS)


def walk(root: Root, skipped: Skipped, most: int = ENDLESS) -> Iterator[Found]:
    """Yield folders before what they hold, in name order. Raise Refusal when there are far more than ``most``."""
    count = 0
    pending = [""]
    while pending:
        folder = pending.pop()
        held: list[str] = []
        for found in _folder(root, folder, skipped, held):
            count += 1
            if count > most + SLACK:
                raise Refusal("limit-files", "This memory has more than %d files; limits.files allows fewer." % count)
            yield found
        pending.extend(reversed(held))


def _folder(root: Root, folder: str, skipped: Skipped, held: list[str]) -> Iterator[Found]:
    """One folder's memory; the folders to enter next are appended to ``held``."""
    rules, prefix = root.rules, folder + "/" if folder else ""
    try:
        with os.scandir(os.path.join(root.folder, folder)) as scan:
            names = sorted(scan, key=lambda entry: entry.name)
    except PermissionError:
        raise Refusal("unreadable", "Folder %s/%s may not be read by this user." % (root.name, folder)) from None
    except FileNotFoundError:
        return
    siblings = {entry.name for entry in names}
    for entry in names:
        relative = prefix + entry.name
        path = root.path(relative)
        if rules.never(relative):
            _say(root, skipped, path, entry, "never exported")
        elif rules.secret(relative):
            skipped.add(path, "secret")
        elif entry.is_dir(follow_symlinks=False):
            if rules.may_hold(relative):
                held.append(relative)
                if rules.keep(relative + "/x"):
                    yield Found(path, entry.path, relative, entry.stat(follow_symlinks=False), root)
            else:
                _say(root, skipped, path, entry, "not part of the layout")
        elif is_database_tail(entry.name, siblings):
            continue
        elif entry.is_symlink() and rules.may_hold(relative) and not rules.keep(relative):
            skipped.add(path, "a link, not a folder")
        elif not rules.keep(relative):
            _say(root, skipped, path, entry, "not part of the layout")
        else:
            yield from _file(root, path, relative, entry, skipped)


def _file(root: Root, path: str, relative: str, entry: os.DirEntry[str], skipped: Skipped) -> Iterator[Found]:
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return
    if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
        yield Found(path, entry.path, relative, status, root)
    else:
        skipped.add(path, "not a file, folder or link")


def _say(root: Root, skipped: Skipped, path: str, entry: os.DirEntry[str], reason: str) -> None:
    if root.whole or root.rules.keep(path.split("/", 1)[1]):
        skipped.add(path + ("/" if entry.is_dir(follow_symlinks=False) else ""), reason)


def link_target(place: str, root: Root, relative: str) -> str | None:
    """A link's target, relative and inside its root; ``None`` when it leads out of it."""
    target = os.readlink(place)
    if os.path.isabs(target):
        target = os.path.relpath(target, os.path.dirname(place))
    inside = os.path.normpath(os.path.join(os.path.dirname(relative), target))
    if inside == ".." or inside.startswith("../") or os.path.isabs(inside) or _turns_back(place, target):
        return None
    return target


def _turns_back(place: str, target: str) -> bool:
    """Whether a target goes up again after it went through another link: nobody can tell by its text where it leads."""
    here, through = os.path.dirname(place), False
    for part in target.split("/"):
        if part == ".." and through:
            return True
        here = os.path.normpath(os.path.join(here, part))
        through = through or os.path.islink(here)
    return False
