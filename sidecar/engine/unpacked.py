"""Tar members of entries, and safe unpacking of tarballs that others made into a folder of our own."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

from sidecar.engine.limiting import Bounds
from sidecar.errors import SidecarError, UnsafeLink, UnsafeMember, UnsafePath
from sidecar.inside.compression import opened
from sidecar.inside.index import DIR, LINK, Entry
from sidecar.inside.packing import CHUNK
from sidecar.snapshots.arrival import HEADER_ALLOWANCE, UNREADABLE, bounded, open_tar
from sidecar.snapshots.claims import FARTHEST_TIME, check_path


class NotAnArchive(SidecarError):
    code = "not-an-archive"
    default_hint = "Give a .tar, .tar.gz or .tar.zst of a home that holds a memory, such as .claude-mem/."


def entry_member(entry: Entry, name: str) -> tarfile.TarInfo:
    """An entry as a tar member under another name."""
    member = tarfile.TarInfo(name)
    member.mode, member.mtime = entry.mode, entry.mtime / 1e9
    if entry.type == DIR:
        member.type, member.mtime = tarfile.DIRTYPE, 0
    elif entry.type == LINK:
        member.type, member.linkname, member.mode, member.mtime = tarfile.SYMTYPE, entry.target, 0o777, 0
    else:
        member.size = entry.size
    return member


@contextlib.contextmanager
def members(archive: Path, bounds: Bounds) -> Iterator[tarfile.TarFile]:
    """A tarball's members, whatever its codec. Raise ``NotAnArchive`` when it is not a whole one."""
    most = bounds.most.bytes + HEADER_ALLOWANCE * (bounds.most.files + 8)
    try:
        with archive.open("rb") as file, contextlib.ExitStack() as stack:
            magic = file.read(4)
            file.seek(0)
            codec = {b"\x1f\x8b": "gz", b"\x28\xb5": "zst"}.get(magic[:2], "")
            plain = stack.enter_context(opened(file, codec)) if codec else file
            yield stack.enter_context(open_tar(bounded(plain, most)))
    except UNREADABLE as problem:
        raise NotAnArchive(f"{archive.name} cannot be read as a tarball: {problem}.") from None


def plain_name(member: tarfile.TarInfo) -> str:
    """A member's name without a leading ``./``. Raise when it, or what it is, has no place in a memory."""
    name = member.name.removeprefix("./")
    if name in ("", "."):
        return ""
    check_path(name)
    if not (member.isreg() or member.isdir() or member.issym()):
        raise UnsafeMember(f"{name!r} is neither a file, a folder nor a symbolic link.")
    return name


def unpack(archive: Path, home: Path, place: Callable[[str], str | None], bounds: Bounds) -> list[str]:
    """Unpack into ``home``, each member where ``place`` says (``None``: not at all). Return the names left out.

    Links are made last, so that no member can be written through one. Raise when anything is unsafe or beyond the bounds.
    """
    links: list[tuple[str, str]] = []
    folders: list[tuple[Path, int]] = []
    left: list[str] = []
    total = files = 0
    with members(archive, bounds) as tar:
        for member in tar:
            name = plain_name(member)
            relative = place(name) if name else None
            if relative is None:
                left += [name] if name and not member.isdir() else []
                continue
            files, total = files + 1, total + member.size
            bounds.check("files", files, f"The tarball holds {files:,} files, folders and links or more")
            bounds.check("file_bytes", member.size, f"{name!r} has {member.size:,} bytes")
            bounds.check("bytes", total, f"The tarball holds {total:,} bytes or more")
            target = home / relative
            if member.issym():
                links.append((relative, member.linkname))
            elif member.isdir():
                target.mkdir(parents=True, exist_ok=True)
                folders.append((target, member.mode & 0o777 | 0o700))
            else:
                contents = tar.extractfile(member)
                assert contents is not None
                _write(target, contents, member)
    for relative, link in links:
        inside = os.path.normpath(os.path.join(os.path.dirname(relative), link))
        if os.path.isabs(link) or inside == ".." or inside.startswith("../"):
            raise UnsafeLink(f"The link {relative!r} in {archive.name} leads out of the memory.")
        target = home / relative
        if not os.path.lexists(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(link)
    for folder, mode in folders:
        os.chmod(folder, mode)
    return left


def unpack_members(archive: Path, home: Path, places: Mapping[str, str], bounds: Bounds) -> None:
    """Unpack a tarball whose first folders are names of roots, each to its own place."""
    home.mkdir()
    for folder in places.values():
        (home / folder).mkdir(parents=True, exist_ok=True)

    def place(name: str) -> str | None:
        root, _, rest = name.partition("/")
        return f"{places[root]}/{rest}" if root in places and rest else None

    unpack(archive, home, place, bounds)


def _write(target: Path, contents: IO[bytes], member: tarfile.TarInfo) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            shutil.copyfileobj(contents, file, CHUNK)
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise UnsafePath(f"{member.name!r} is both a file and a folder in the tarball.") from None
    os.chmod(target, member.mode & 0o777 | 0o600)
    seconds = member.mtime if math.isfinite(member.mtime) else 0
    moment = max(-FARTHEST_TIME, min(FARTHEST_TIME, round(seconds * 1e9)))
    os.utime(target, ns=(moment, moment))
