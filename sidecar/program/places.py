"""Reach files and folders by their real paths: no link is followed, in any part of a path.

The path of a root is resolved once and then checked (``Containment`` below). The sandbox's agent can replace a folder
by a link at any later time, also while a run is under way. So everything that is opened, made, moved or removed after
that is reached folder by folder, each opened relative to its parent with O_NOFOLLOW, and a link on the way is refused.

``Containment`` says which paths of a machine a run may touch. A provider's sandbox contains nothing else, so nothing is
restricted there. A folder on this machine (``local:``) is a sandbox among other things, and a link in it may lead to
them. For that the sidecar names the folders below which every root must be after all links were followed, and the
folders in which no root may be: its store, its encryption keys, its own files.
"""

from __future__ import annotations

import errno
import os
import stat
from _thread import _local
from typing import Callable, Dict, FrozenSet, List, NamedTuple, Optional, Tuple, TypeVar

from sidecar.format.protocol import AllowedPaths
from sidecar.format.refusal import Refusal

_ENTER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW
"""With O_PATH a folder on the way need not be readable, as with any path."""
READ = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
"""To list a folder it must be readable."""
_MOST_HELD = 4
UNFINISHED = ".new"
"""The ending of a file that is being written."""
T = TypeVar("T")
_held = _local()  # descriptors are kept per thread, so that no thread closes another's


def open_folder(path: str, flags: int = _ENTER) -> int:
    """Return a descriptor of the folder at a real path; the caller closes it. Raise OSError, or Refusal if a part of it
    is a link."""
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
    """Open the folder ``name`` relative to an open parent. ``path`` is the whole path, for messages."""
    try:
        return os.open(name, flags, dir_fd=descriptor)
    except OSError as problem:
        # With O_DIRECTORY a link fails as ENOTDIR, like a file does; without O_PATH it fails as ELOOP.
        if problem.errno in (errno.ENOTDIR, errno.ELOOP) and _is_link(descriptor, name):
            raise Refusal("in-the-way", "%s lies behind a link." % path) from None
        raise


def _is_link(descriptor: int, name: str) -> bool:
    """Return whether a name in an open folder is a symbolic link."""
    try:
        os.readlink(name, dir_fd=descriptor)
        return True
    except OSError:
        return False


def open_file(place: str, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Return a descriptor of the file at a real path, without waiting if it is a pipe. Raise OSError or Refusal."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK
    return _run_in_folders(lambda folder: os.open(_get_name(place), flags, mode, dir_fd=folder), place)


def read_file(place: str, most: int) -> bytes:
    """Return the contents of a small file. Raise OSError, also if it is not a regular file or has more than ``most``
    bytes."""
    descriptor = open_file(place)
    with open(descriptor, "rb") as file:
        data = file.read(most + 1) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    if data is None or len(data) > most:
        raise OSError(errno.EFBIG, "not a file of ours", place)
    return data


def write_file(place: str, data: bytes, durable: bool = False) -> None:
    """Write one of the sidecar's files, whole or not at all. Anything of that name before, also a link or a folder, is
    replaced."""
    new = place + UNFINISHED
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
    """Return a descriptor of a new file that only its user can read; whatever was at the path is removed.

    It belongs to the owner of its folder, because root also works in the homes of other users.
    """
    remove(place)
    descriptor = open_file(place, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    owner = os.fstat(_open_parent(place))
    if owner.st_uid != 0 and os.geteuid() == 0:
        os.fchown(descriptor, owner.st_uid, owner.st_gid)
    return descriptor


def read_status(place: str) -> os.stat_result:
    """Return what ``lstat`` says of a real path."""
    return _run_in_folders(lambda folder: os.stat(_get_name(place), dir_fd=folder, follow_symlinks=False), place)


def exists(place: str) -> bool:
    """Return whether anything is at a real path, also a dangling link."""
    try:
        read_status(place)
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False


def rename(source: str, target: str) -> None:
    """Move a file or folder."""
    _run_in_folders(
        lambda here, there: os.rename(_get_name(source), _get_name(target), src_dir_fd=here, dst_dir_fd=there),
        source,
        target,
    )


def read_link(place: str) -> str:
    """Return the target of a link."""
    return _run_in_folders(lambda folder: os.readlink(_get_name(place), dir_fd=folder), place)


def change_owner(place: str, owner: Tuple[int, int]) -> None:
    """Change the owner of a file, a folder or a link."""
    _run_in_folders(lambda folder: os.chown(_get_name(place), *owner, dir_fd=folder, follow_symlinks=False), place)


def make_folder(place: str, mode: int = 0o777) -> None:
    """Make one folder; its parent must exist."""
    _run_in_folders(lambda folder: os.mkdir(_get_name(place), mode, dir_fd=folder), place)


def make_link(target: str, place: str) -> None:
    """Make a link."""
    _run_in_folders(lambda folder: os.symlink(target, _get_name(place), dir_fd=folder), place)


def remove(place: str) -> None:
    """Remove whatever is at a path of the sidecar's, also a folder with its contents; nothing happens if nothing is there."""
    try:
        _run_in_folders(lambda folder: os.unlink(_get_name(place), dir_fd=folder), place)
    except FileNotFoundError:
        pass
    except (IsADirectoryError, PermissionError):  # unlinking a folder fails with either, depending on the system
        remove_tree(place)


def remove_folder(place: str) -> None:
    """Delete an empty folder. Raise OSError if it is not empty, or missing."""
    _run_in_folders(lambda folder: os.rmdir(_get_name(place), dir_fd=folder), place)


def make_folders(top: str, relative: str) -> None:
    """Make a folder and its parents below an existing folder; "" is the root of the file system."""
    place = top
    for part in filter(None, relative.split("/")):
        place = place + "/" + part
        try:
            make_folder(place, 0o700)
        except FileExistsError:
            continue  # if it is not a folder, the next step fails


def remove_tree(place: str) -> None:
    """Delete a folder with its contents; what cannot be deleted stays."""
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
    """Remove a name in an open folder, ignoring errors."""
    try:
        remove(name, dir_fd=folder)
    except OSError:
        pass


def close_folders() -> None:
    """Close the folders that are kept open for further work in them."""
    folders = _get_open_folders()
    while folders:
        os.close(folders.popitem()[1])


def _run_in_folders(act: Callable[..., T], *places: str) -> T:
    """Call ``act`` with descriptors of the parent folders of these paths. They stay open for a while, because most work
    comes folder by folder."""
    try:
        return act(*[_open_parent(place) for place in places])
    except OSError as problem:
        problem.filename = places[0]  # the whole path, for messages
        raise


def _open_parent(place: str) -> int:
    """Return the open parent folder of ``place``: one of those used last, or opened now."""
    path, folders = place.rpartition("/")[0], _get_open_folders()
    descriptor = folders.pop(path, None)
    if descriptor is None:
        descriptor = open_folder(path)
        while len(folders) >= _MOST_HELD:
            os.close(folders.pop(next(iter(folders))))
    folders[path] = descriptor
    return descriptor


def _get_open_folders() -> Dict[str, int]:
    """Return this thread's open folders, least recently used first."""
    folders: Dict[str, int] = _held.__dict__.setdefault("folders", {})
    return folders


def _get_name(place: str) -> str:
    return place.rpartition("/")[2]


class Containment(NamedTuple):
    """Where roots may be, as real paths: below ``beneath`` (``None``: anywhere) and never in ``apart``. An entry of
    ``apart`` that ends in ``*`` is a prefix."""

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
        """Return whether a root may be at this real path."""
        try:
            self.check("", place)
            return True
        except Refusal:
            return False

    def may_lead_to_project(self, place: str) -> bool:
        """Return whether an allowed project is in this folder, or will be once it is made. The home, the first of
        ``beneath``, always exists and is left out."""
        return self.beneath is None or any(is_in(folder, place) for folder in self.beneath[1:])

    def inner(self, folder: str) -> FrozenSet[str]:
        """Return the excluded paths in this folder."""
        return frozenset(place for place in self.apart if is_in(place, folder))


def contain(allowed: Optional[AllowedPaths], *own: str) -> Containment:
    """Return the containment that a request asks for. ``own`` is the sidecar's folder in this sandbox, where no memory
    may be."""
    beneath, apart = (allowed.beneath, allowed.apart) if allowed is not None else (None, [])
    return Containment(beneath, frozenset([*own, *apart]))


def is_apart(place: str, apart: FrozenSet[str]) -> bool:
    """Return whether this path itself is one of the excluded ones."""
    return place in apart or any(place.startswith(one[:-1]) for one in apart if one.endswith("*"))


def is_in(place: str, folder: str) -> bool:
    """Return whether a real path is that folder or in it; for one that ends in ``*``, whether the path begins like it."""
    if folder.endswith("*"):
        return place.startswith(folder[:-1])
    return place == folder or place.startswith(folder.rstrip(os.sep) + os.sep)
