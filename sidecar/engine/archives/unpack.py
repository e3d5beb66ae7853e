"""Tar members for entries, and safe unpacking of tarballs from other sources into a folder of the sidecar's own."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import posixpath
import sys
import tarfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from sidecar.engine.limits import Bounds
from sidecar.errors import BadAnswer, PackBomb, SidecarError, UnsafeLink, UnsafeMember, UnsafePath
from sidecar.format.digests import Readable
from sidecar.format.index import DIR, LINK, Entry
from sidecar.format.packs import CHUNK
from sidecar.format.tarballs import HEADER_ALLOWANCE, MemberContents
from sidecar.host.files import build_full_error
from sidecar.host.values import dataclass
from sidecar.host.work import Deadline
from sidecar.store.intake import (
    FARTHEST_TIME,
    LONGEST_PATH,
    UNREADABLE,
    check_path,
    decompress_file,
    iterate_tar_members,
)

LONGEST_HEADER = 256 << 10
"""The longest pax header accepted. The sidecar's own comment about projects is in one."""
LONGEST_TAIL = 16 << 20
"""How many bytes may follow the end-of-archive mark: tar pads archives to whole records."""
NAME_ALLOWANCE, LEAST_NAMES = 256, 1 << 20
"""How many bytes of memory the name of a member may take here, on average over the most members allowed."""
MOST_LEFT_OUT = 50


class NotAnArchive(SidecarError):
    """The file is not a whole tarball, or holds no memory."""

    code = "not-an-archive"
    default_hint = "Give a .tar, .tar.gz or .tar.zst of a home that holds a memory, such as .claude-mem/."


def build_member(entry: Entry, name: str) -> tarfile.TarInfo:
    """Return a tar member for an entry, under ``name``."""
    member = tarfile.TarInfo(name)
    member.mode, member.mtime = entry.mode, entry.mtime / 1e9
    if entry.type == DIR:
        member.type, member.mtime = tarfile.DIRTYPE, 0
    elif entry.type == LINK:
        member.type, member.linkname, member.mode, member.mtime = tarfile.SYMTYPE, entry.target, 0o777, 0
    else:
        member.size = entry.size
    return member


def read_members(
    archive: Path, within: Bounds, deadline: Deadline, what: str = ""
) -> Iterator[tuple[str, tarfile.TarInfo, Readable]]:
    """Yield the members of a tarball of any codec: the plain name, the header and the contents of each.

    Members are counted as they are read. Raise ``NotAnArchive`` if it is not a complete tarball, and other errors if
    anything in it is unsafe or beyond the limits on arrival.
    """
    what = what or archive.name
    # The most that may be decompressed, headers included, so that a decompression bomb ends early.
    most = within.most.bytes + HEADER_ALLOWANCE * (within.most.files + 8)
    longest = max(NAME_ALLOWANCE * within.most.files, LEAST_NAMES)
    files = names = 0
    with _report_unreadable(what), decompress_file(archive, _detect_codec(archive), most, deadline=deadline) as plain:
        for member, contents in iterate_tar_members(plain, most, LONGEST_HEADER):
            files, names = files + 1, names + sys.getsizeof(member.name) + sys.getsizeof(member.linkname)
            within.check("files", files, f"The tarball holds {files:,} files, folders and links or more")
            if names > longest:
                raise PackBomb("The names in the tarball are longer than those of any memory.")
            yield check_name(member), member, _Contents(contents, what)
        tail = 0
        while data := plain.read(CHUNK):
            tail += len(data)
            if tail > LONGEST_TAIL:
                raise PackBomb("The tarball goes on for long after its end.")


def _detect_codec(archive: Path) -> str:
    with archive.open("rb") as file:
        return {b"\x1f\x8b": "gz", b"\x28\xb5": "zst", b"\x50\x2a": "zst"}.get(file.read(2), "")


@contextlib.contextmanager
def _report_unreadable(what: str) -> Iterator[None]:
    try:
        yield
    except UNREADABLE as problem:
        raise NotAnArchive(f"{what} cannot be read as a tarball: {problem}.") from None


class _Contents:
    """The contents of a member, read while files are written: read errors become ``NotAnArchive``, so that they are not
    taken for write errors."""

    def __init__(self, contents: MemberContents, what: str) -> None:
        self._contents, self._what = contents, what

    def read(self, size: int, /) -> bytes:
        with _report_unreadable(self._what):
            return self._contents.read(size)


def check_name(member: tarfile.TarInfo) -> str:
    """Return a member's name without a leading ``./``. Raise if the name is unsafe, or the member is not a file, folder
    or link."""
    name = member.name.removeprefix("./")
    if name in ("", "."):
        return ""
    check_path(name)
    if not (member.isreg() or member.isdir() or member.issym()):
        raise UnsafeMember(f"{name!r} is neither a file, a folder nor a symbolic link.")
    return name


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the members of a tarball go."""

    home: Path
    place: Callable[[str], str | None]
    """Gets a member's name and returns its path below ``home``; ``None``: it is left out."""
    aim: Callable[[str, str], str | None] | None = None
    """Gets a link's name and target and returns the target to use; ``None``: no link."""


def unpack_archive(
    archive: Path, destination: Destination, within: Bounds, deadline: Deadline, what: str = ""
) -> list[str]:
    """Unpack a tarball to its destination. Return the first names left out.

    Links are made last, so that no member can be written through one. Raise if anything is unsafe or beyond the limits
    on arrival.
    """
    home, place, aim = destination.home, destination.place, destination.aim
    links: dict[str, str] = {}
    folders: list[tuple[str, int]] = []
    left: list[str] = []
    total = 0
    for name, member, contents in read_members(archive, within, deadline, what):
        relative = place(name) if name else None
        if relative is None:
            left += [name] if name and not member.isdir() and len(left) < MOST_LEFT_OUT else []
        elif member.issym():
            target = aim(name, member.linkname) if aim is not None else member.linkname
            if target is not None:
                _check_link(relative, target)
                links[relative] = target
        elif member.isdir():
            with _report_unwritable(name):
                (home / relative).mkdir(parents=True, exist_ok=True)
            folders.append((relative, member.mode & 0o777 | 0o700))
        else:
            total += member.size
            within.check("file_bytes", member.size, f"{name!r} has {member.size:,} bytes")
            within.check("bytes", total, f"The tarball holds {total:,} bytes or more")
            links.pop(relative, None)
            with _report_unwritable(name):
                _write_member(home / relative, contents, member)
    _make_links(home, links)
    for folder, mode in folders:
        os.chmod(home / folder, mode)
    return left


def _check_link(relative: str, link: str) -> None:
    inside = os.path.normpath(os.path.join(os.path.dirname(relative), link))
    if not link or os.path.isabs(link) or "\0" in link or inside == ".." or inside.startswith("../"):
        raise UnsafeLink(f"The link {relative!r} in the tarball leads out of the memory.")
    if len(os.fsencode(link)) > LONGEST_PATH:
        raise UnsafeLink(f"The link {relative!r} in the tarball leads farther than a file system takes.")


def _make_links(home: Path, links: Mapping[str, str]) -> None:
    """Make the links, each in the place of a file of the same name if there is one. Raise ``UnsafePath``."""
    # All parent folders are made before any link, so that no folder is made through a link; if a link has other members
    # below it, there is already a folder in its place.
    for relative in links:
        with _report_unwritable(relative):
            (home / relative).parent.mkdir(parents=True, exist_ok=True)
    for relative, link in links.items():
        with _report_unwritable(relative):
            if (home / relative).is_dir():
                raise IsADirectoryError
            (home / relative).unlink(missing_ok=True)
            (home / relative).symlink_to(link)


def unpack_members(
    archive: Path,
    home: Path,
    places: Mapping[str, str],
    there: Mapping[str, Collection[str]],
    within: Bounds,
    deadline: Deadline,
) -> list[str]:
    """Unpack a tarball from a sandbox, whose top folders are names of roots, each root to its own path. Return the
    links that lead out of their root, which are not made.

    ``there`` has the paths of each root in the sandbox: an absolute link with such a path leads into the root.
    """
    leaving: list[str] = []
    home.mkdir()
    for folder in places.values():
        (home / folder).mkdir(parents=True, exist_ok=True)

    def place(name: str) -> str | None:
        root, _, rest = name.partition("/")
        return f"{places[root]}/{rest}".lstrip("/") if root in places and rest else None

    def aim(name: str, target: str) -> str | None:
        root, _, rest = name.partition("/")
        for folder in there.get(root, ()):
            if target == folder or target.startswith(f"{folder}/"):
                target = posixpath.relpath(target, posixpath.dirname(f"{folder}/{rest}"))
                break
        inside = posixpath.normpath(posixpath.join(posixpath.dirname(rest), target))
        if posixpath.isabs(target) or inside == ".." or inside.startswith("../"):
            leaving.append(name)
            return None
        return target

    try:
        unpack_archive(archive, Destination(home, place, aim), within, deadline, "What the sandbox brought")
    except NotAnArchive as problem:
        raise BadAnswer(problem.message) from None
    return leaving


@contextlib.contextmanager
def _report_unwritable(name: str) -> Iterator[None]:
    """Turn errors of writing into a folder of the sidecar's own into errors about the tarball or the disk."""
    try:
        yield
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise UnsafePath(f"{name!r} is both a folder and something else in the tarball.") from None
    except OSError as problem:
        if full := build_full_error(problem):
            raise full from None
        if problem.errno in (errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ, errno.ELOOP):
            raise UnsafePath(f"{name!r} is not a name that the file system here takes.") from None
        raise


def _write_member(target: Path, contents: Readable, member: tarfile.TarInfo) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        while data := contents.read(CHUNK):
            file.write(data)
    os.chmod(target, member.mode & 0o777 | 0o600)
    seconds = member.mtime if math.isfinite(member.mtime) else 0
    moment = max(-FARTHEST_TIME, min(FARTHEST_TIME, round(seconds * 1e9)))
    os.utime(target, ns=(moment, moment))
