"""Reach files and folders by their real paths: no link is followed, in any part of a path.

The path of a root is resolved once and then checked (``containment.py``). Whoever works in the sandbox may put a link where
a folder was at any later moment, also while a run is under way. So whatever is opened, made, moved or removed after that is
reached folder by folder, each opened from the one before with O_NOFOLLOW, and a link on the way is refused.

Which places of a machine a run may touch.

In a sandbox of a provider that is the sandbox's own business: there is nothing else in it. A folder on this machine
(``local:``) is a sandbox among other things, and a link in it may lead to them. There the sidecar says beneath which folders
every root must lie, after all links were followed, and what no root may be in: its store, its keys, its own files.
"""

from __future__ import annotations

import errno
import os
import stat
from _thread import _local
from typing import Any, Callable, Dict, FrozenSet, List, NamedTuple, Optional, Tuple, TypeVar

from sidecar.format.refusal import Refusal

_ENTER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW
"""With O_PATH a folder on the way need not be readable, as for any path."""
READ = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
"""To list a folder it must be readable."""
_MOST_HELD = 4
T = TypeVar("T")
_held = _local()  # descriptors are kept for each thread alone, so that none closes another's


def open_folder(path: str, flags: int = _ENTER) -> int:
    """A descriptor of the folder at a real path, to be closed by the caller. Raise OSError, or Refusal for a link in it."""
    parts = [part for part in path.split("/") if part]
    descriptor = os.open("/", _ENTER if parts else flags)
    try:
        for number, part in enumerate(parts, 1):
            inner = open_subfolder(descriptor, part, path, flags if number == len(parts) else _ENTER)
            os.close(descriptor)
            descriptor = inner
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_subfolder(descriptor: int, name: str, path: str, flags: int = _ENTER) -> int:
    """Open the folder ``name`` in the one that is open; ``path`` is what the whole is called."""
    try:
        return os.open(name, flags, dir_fd=descriptor)
    except OSError as problem:
        # With O_DIRECTORY a link is "not a directory", as a file is; without O_PATH, a loop.
        if problem.errno in (errno.ENOTDIR, errno.ELOOP) and _is_link(descriptor, name):
            raise Refusal("in-the-way", "%s lies behind a link." % path) from None
        raise


def _is_link(descriptor: int, name: str) -> bool:
    try:
        os.readlink(name, dir_fd=descriptor)
        return True
    except OSError:
        return False


def open_file(place: str, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """A descriptor of the file at a real path. A pipe does not make it wait. Raise OSError or Refusal."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK
    return _run_in_folders(lambda folder: os.open(_get_name(place), flags, mode, dir_fd=folder), place)


def read_file(place: str, most: int) -> bytes:
    """A small file. Raise OSError, also when it is no plain file or has more than ``most`` bytes."""
    descriptor = open_file(place)
    with open(descriptor, "rb") as file:
        data = file.read(most + 1) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    if data is None or len(data) > most:
        raise OSError(errno.EFBIG, "not a file of ours", place)
    return data


def write_file(place: str, data: bytes, durable: bool = False) -> None:
    """Put a file of ours here, whole or not at all. Whatever was called so before, a link or a folder too, is replaced."""
    new = place + ".new"
    with open(create_file(new), "wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    try:
        rename(new, place)
    except IsADirectoryError:
        remove(place)
        rename(new, place)


def create_file(place: str) -> int:
    """A descriptor of a new file that is for its user alone; whatever was there is gone.

    It belongs to whom its folder does: root works in the homes of others, too.
    """
    remove(place)
    descriptor = open_file(place, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    owner = os.fstat(_open_parent(place))
    if owner.st_uid != 0 and os.geteuid() == 0:
        os.fchown(descriptor, owner.st_uid, owner.st_gid)
    return descriptor


def read_status(place: str) -> os.stat_result:
    """What ``lstat`` says of a real path."""
    return _run_in_folders(lambda folder: os.stat(_get_name(place), dir_fd=folder, follow_symlinks=False), place)


def exists(place: str) -> bool:
    """Whether there is anything at a real path, a link that leads nowhere too."""
    try:
        read_status(place)
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False


def rename(source: str, target: str) -> None:
    _run_in_folders(
        lambda here, there: os.rename(_get_name(source), _get_name(target), src_dir_fd=here, dst_dir_fd=there),
        source,
        target,
    )


def read_link(place: str) -> str:
    return _run_in_folders(lambda folder: os.readlink(_get_name(place), dir_fd=folder), place)


def change_owner(place: str, owner: Tuple[int, int]) -> None:
    """Change who owns a file, a folder or a link."""
    _run_in_folders(lambda folder: os.chown(_get_name(place), *owner, dir_fd=folder, follow_symlinks=False), place)


def make_folder(place: str, mode: int = 0o777) -> None:
    _run_in_folders(lambda folder: os.mkdir(_get_name(place), mode, dir_fd=folder), place)


def make_link(target: str, place: str) -> None:
    _run_in_folders(lambda folder: os.symlink(target, _get_name(place), dir_fd=folder), place)


def remove(place: str) -> None:
    """Have nothing of ours at a path, whatever was there."""
    try:
        _run_in_folders(lambda folder: os.unlink(_get_name(place), dir_fd=folder), place)
    except FileNotFoundError:
        pass
    except (IsADirectoryError, PermissionError):  # what unlinking a folder is called differs
        import shutil

        shutil.rmtree(place)


def remove_folder(place: str) -> None:
    """Delete an empty folder. Raise OSError when it is not empty, or not there."""
    _run_in_folders(lambda folder: os.rmdir(_get_name(place), dir_fd=folder), place)


def make_folders(top: str, relative: str) -> None:
    """Have a folder, and those on the way to it, below one that is there."""
    place = top
    for part in filter(None, relative.split("/")):
        place = place + "/" + part
        try:
            make_folder(place, 0o700)
        except FileExistsError:
            continue  # if it is no folder, whatever comes next says so


def remove_tree(place: str) -> None:
    """Delete a folder with all that is in it; what cannot be deleted stays."""
    try:
        folder = open_folder(place)
    except FileNotFoundError:
        return
    try:
        for _, folders, files, inner in os.fwalk(".", topdown=False, dir_fd=folder):
            for name in files:
                _try_remove(os.unlink, name, inner)
            for name in folders:
                _try_remove(os.unlink if _is_link(inner, name) else os.rmdir, name, inner)
    finally:
        os.close(folder)
    _run_in_folders(lambda above: _try_remove(os.rmdir, _get_name(place), above), place)


def _try_remove(remove: Callable[..., None], name: str, folder: int) -> None:
    try:
        remove(name, dir_fd=folder)
    except OSError:
        pass


def close_folders() -> None:
    """Close the folders that are held open for whatever comes next in them."""
    folders = _get_open_folders()
    while folders:
        os.close(folders.popitem()[1])


def _run_in_folders(act: Callable[..., T], *places: str) -> T:
    """Do something in the folders that hold these places. They stay open for a while: most work comes folder by folder."""
    try:
        return act(*[_open_parent(place) for place in places])
    except OSError as problem:
        problem.filename = places[0]  # for whoever reads of it: the whole path
        raise


def _open_parent(place: str) -> int:
    """The open folder that holds ``place``: one of those used last, or opened now."""
    path, folders = place.rpartition("/")[0], _get_open_folders()
    descriptor = folders.pop(path, None)
    if descriptor is None:
        descriptor = open_folder(path)
        while len(folders) >= _MOST_HELD:
            os.close(folders.pop(next(iter(folders))))
    folders[path] = descriptor
    return descriptor


def _get_open_folders() -> Dict[str, int]:
    folders: Dict[str, int] = _held.__dict__.setdefault("folders", {})
    return folders


def _get_name(place: str) -> str:
    return place.rpartition("/")[2]


class Containment(NamedTuple):
    """Real paths. ``beneath``: ``None`` when roots may be anywhere. ``apart``: ends in ``*`` where it is a beginning."""

    beneath: Optional[List[str]]
    apart: FrozenSet[str]

    def check(self, name: str, place: str) -> None:
        """Raise Refusal unless ``name`` may be at this real path."""
        if any(is_in(place, other) for other in self.apart):
            raise Refusal(
                "root-overlaps",
                "%s is %s here, where the sidecar keeps its own files or other memories." % (name, place),
            )
        if self.beneath is not None and not any(is_in(place, folder) for folder in self.beneath):
            raise Refusal(
                "root-outside", "%s is %s here, outside of this sandbox: beyond %s." % (name, place, self.beneath[0])
            )

    def holds(self, place: str) -> bool:
        """Whether a root may be at this real path."""
        try:
            self.check("", place)
            return True
        except Refusal:
            return False

    def may_lead_to_project(self, place: str) -> bool:
        """Whether a project lies in this folder, or will once it is made. The home, which comes first, is always there."""
        return self.beneath is None or any(is_in(folder, place) for folder in self.beneath[1:])

    def inner(self, folder: str) -> FrozenSet[str]:
        """What lies in this folder and is not for memories."""
        return frozenset(place for place in self.apart if is_in(place, folder))


def parse_containment(request: Dict[str, Any], *own: str) -> Containment:
    """What a request says of it; ``own`` is the sidecar's folder in this sandbox, where no memory is."""
    told = request.get("contained") or {"beneath": None, "apart": []}
    return Containment(told["beneath"], frozenset([*own, *told["apart"]]))


def is_apart(place: str, apart: FrozenSet[str]) -> bool:
    """Whether this very path is one of those that are not for memories."""
    return place in apart or any(place.startswith(one[:-1]) for one in apart if one.endswith("*"))


def is_in(place: str, folder: str) -> bool:
    """Whether a real path is that folder or lies in it; of one that ends in ``*``, whether it begins so."""
    if folder.endswith("*"):
        return place.startswith(folder[:-1])
    return place == folder or place.startswith(folder.rstrip(os.sep) + os.sep)
