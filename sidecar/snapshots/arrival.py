"""What arrives from a sandbox or a tarball is hostile until shown otherwise.

``check_entries`` looks at what is claimed, ``check_pack`` compares the claim with the bytes. Neither writes anything, and
neither holds more than one block in memory.
"""

from __future__ import annotations

import gzip
import io
import itertools
import posixpath
import re
import tarfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import zstandard

from sidecar.errors import (
    BadAnswer,
    DigestMismatch,
    LimitExceeded,
    PackBomb,
    SizeMismatch,
    UnsafeLink,
    UnsafeMember,
    UnsafePath,
)
from sidecar.inside import digests
from sidecar.inside.compression import opened
from sidecar.inside.index import DIR, FILE, LINK, Change, Entry, Index, load
from sidecar.inside.packing import BLOCKS_PREFIX, CHUNK
from sidecar.limits import Limits
from sidecar.progress import Progress, Unwatched

LONGEST_PATH, LONGEST_NAME = 4096, 255
HEADER_ALLOWANCE = 16 * 1024
LONGEST_HEADER = 16 * 1024
LARGEST_BLOCK = 1 << 20
FARTHEST_TIME = 1 << 62
LONGEST_ROW, LONGEST_INDEX = 16 << 20, 512 << 20
NOTHING: Mapping[str, Entry] = MappingProxyType({})
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


def check_path(path: str, roots: Collection[str] | None = None, depth: int = 256) -> None:
    """Raise ``UnsafePath`` unless this is a relative path below a known root that cannot lead anywhere else."""
    parts = path.split("/")
    shown = path if len(path) < 200 else path[:200] + "…"
    if path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise UnsafePath(f"{shown!r} is not a plain relative path.")
    if roots is not None and (parts[0] not in roots or len(parts) < 2):
        raise UnsafePath(f"{shown!r} is not below a root of this memory.")
    try:
        encoded = [len(part.encode("utf-8", "surrogateescape")) for part in parts]
    except UnicodeEncodeError:
        raise UnsafePath(f"{shown!r} is not a name a file system has.") from None
    if sum(encoded) + len(parts) > LONGEST_PATH or max(encoded) > LONGEST_NAME:
        raise UnsafePath(f"{shown!r} is longer than a file system takes.")
    if len(parts) > depth + 1:
        raise LimitExceeded(
            f"{shown!r} is {len(parts) - 1:,} parts deep; limits.depth allows {depth:,}.", code="limit-depth"
        )


def check_link(path: str, target: str) -> None:
    """Raise ``UnsafeLink`` unless the link stays inside the root its path is in."""
    inside = posixpath.normpath(posixpath.join(posixpath.dirname(path.split("/", 1)[1]), target))
    try:
        target.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise UnsafeLink(f"The link {path!r} has a target no file system has.") from None
    if not target or target.startswith("/") or "\0" in target or inside == ".." or inside.startswith("../"):
        raise UnsafeLink(f"The link {path!r} leads out of the memory.")


def check_entries(
    entries: dict[str, Entry], roots: Collection[str], limits: Limits, base: Mapping[str, Entry] = NOTHING
) -> None:
    """Check a whole snapshot as claimed: every path, link, size and digest, and that no path runs through a link or file.

    Those that are in ``base``, a snapshot of ours, were checked when that was made.
    """
    if len(entries) > limits.files:
        raise LimitExceeded(
            f"This memory has {len(entries):,} files, folders and links; limits.files allows {limits.files:,}.",
            code="limit-files",
        )
    total = sum(entry.size for entry in entries.values() if entry.type == FILE)
    for path, entry in entries.items():
        if base.get(path) is not entry or entry.size > limits.file_bytes or path.count("/") > limits.depth:
            _check_entry(entry, roots, limits)
        if entry.type == LINK:
            _check_way(path, entry.target, entries)
    _check_folders(entries)
    if total > limits.bytes:
        raise LimitExceeded(
            f"This memory has {total:,} bytes; limits.bytes allows {limits.bytes:,}.", code="limit-bytes"
        )


def _check_entry(entry: Entry, roots: Collection[str], limits: Limits) -> None:
    path = entry.path
    check_path(path, roots, limits.depth)
    if entry.mode > 0o777 or abs(entry.mtime) > FARTHEST_TIME:
        raise BadAnswer(f"{path!r} has an impossible mode or time.")
    if entry.type == FILE:
        _check_file(entry, limits)
    elif entry[3:8] != (0, 0, "", 0, b"") or entry.database:
        raise BadAnswer(f"{path!r} is a {entry.type} with the properties of a file.")
    elif entry.type == LINK:
        check_link(path, entry.target)


def _check_folders(entries: dict[str, Entry]) -> None:
    """Raise ``UnsafePath`` when something lies below what is not a folder."""
    folders = {path.rpartition("/")[0] for path in entries}
    while folders:
        for folder in folders:
            if folder in entries and entries[folder].type != DIR:
                raise UnsafePath(f"Something lies below {folder!r}, which is not a folder.")
        folders = {folder.rpartition("/")[0] for folder in folders} - {""}


def _check_way(path: str, target: str, entries: dict[str, Entry]) -> None:
    """Raise ``UnsafeLink`` when a link goes up again after it went through another: its text then says nothing."""
    here, through = posixpath.dirname(path), False
    for part in target.split("/"):
        if part == ".." and through:
            raise UnsafeLink(f"The link {path!r} leads through another link and back up.")
        here = posixpath.normpath(posixpath.join(here, part))
        through = through or (here in entries and entries[here].type == LINK)


def _check_file(entry: Entry, limits: Limits) -> None:
    if entry.size > limits.file_bytes:
        raise LimitExceeded(
            f"{entry.path!r} has {entry.size:,} bytes; limits.file_bytes allows {limits.file_bytes:,}.",
            code="limit-file-bytes",
        )
    if not _DIGEST.match(entry.digest) or not 512 <= entry.block <= LARGEST_BLOCK:
        raise BadAnswer(f"{entry.path!r} has no proper digest or block size.")
    count = digests.block_count(entry.size, entry.block)
    if count > digests.MOST_BLOCKS or len(entry.sums) != (count * digests.SUM_BYTES if count > 1 else 0):
        raise BadAnswer(f"{entry.path!r} has {len(entry.sums)} bytes of block sums for {count} blocks.")
    if entry.sums and digests.digest_of_sums(entry.sums) != entry.digest:
        raise DigestMismatch(f"The digest of {entry.path!r} is not that of its blocks.")


EXTENSIONS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


class CarefulMember(tarfile.TarInfo):
    """A tar member whose extension headers may not fill the memory, and which must be a plain file, folder or link."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in EXTENSIONS and self.size > LONGEST_HEADER:
            raise PackBomb("A tarball's extension header is too large.")
        if self.type == tarfile.GNUTYPE_SPARSE:
            raise UnsafeMember(f"{self.name!r} is a sparse member, which is not read.")
        member: tarfile.TarInfo = super()._proc_member(tar)  # type: ignore[misc]
        if any(key.startswith("GNU.sparse") for key in getattr(member, "pax_headers", {})):
            raise UnsafeMember(f"{member.name!r} is a sparse member, which is not read.")
        return member


class _Bounded(io.RawIOBase):
    """Decompressed bytes, counted: more than expected is a bomb."""

    def __init__(self, stream: BinaryIO, most: int, progress: Progress) -> None:
        self._stream, self._left, self._progress = stream, most, progress

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._stream.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise PackBomb("A pack unpacks to more than it should hold.")
        self._progress.advance(len(data))
        buffer[: len(data)] = data
        return len(data)


def bounded(plain: BinaryIO, most: int, progress: Progress | None = None) -> BinaryIO:
    """A stream that must end after ``most`` bytes."""
    return io.BufferedReader(_Bounded(plain, most, progress or Unwatched()), CHUNK)


def open_tar(plain: BinaryIO) -> tarfile.TarFile:
    """A tarball as a stream of careful members."""
    return tarfile.open(
        fileobj=plain, mode="r|", bufsize=CHUNK, tarinfo=CarefulMember, encoding="utf-8", errors="surrogateescape"
    )


def read_index(file: Path, start: int, limits: Limits, removable: int) -> Index:
    """An index as it arrived, from ``start`` on, over a base of so many entries.

    Raise when it is not one, or longer than the limits could make it.
    """
    most_rows, most_bytes = 1 + limits.files + removable, LONGEST_INDEX
    try:
        with file.open("rb") as stream:
            stream.seek(start)
            with gzip.GzipFile(fileobj=stream, mode="rb") as text:
                return load(_rows(text, most_rows, most_bytes))
    except (ValueError, EOFError, OSError, zlib.error, RecursionError) as problem:
        raise BadAnswer(f"The sandbox's index cannot be read: {problem}.") from None


def _rows(text: gzip.GzipFile, most_rows: int, most_bytes: int) -> Iterator[bytes]:
    left = most_bytes
    for number in itertools.count(1):
        row = text.readline(LONGEST_ROW)
        if not row:
            return
        left -= len(row)
        if number > most_rows:
            raise LimitExceeded("There are more files than the limit allows.", code="limit-files")
        if left < 0 or not row.endswith(b"\n"):
            raise PackBomb("The index is larger than any memory's.")
        yield row


UNREADABLE = (tarfile.TarError, EOFError, OSError, zlib.error, zstandard.ZstdError, ValueError, RecursionError)
"""What reading a tarball that is not one can raise."""


def check_pack(pack: Path, codec: str, index: Index, progress: Progress | None = None) -> None:
    """Compare a pack with its index: the same members, sizes and contents, and nothing else."""
    expected = _expected(index)
    allowance = sum(length for _, length in expected.values()) + HEADER_ALLOWANCE * (len(expected) + 8)
    try:
        with pack.open("rb") as file, opened(file, codec) as plain:
            stream = bounded(plain, allowance, progress)
            with open_tar(stream) as tar:
                for member in tar:
                    change, length = _claimed(member, expected)
                    if member.size != length:
                        raise SizeMismatch(
                            f"{member.name!r} has {member.size} bytes in the pack, {length} in its index."
                        )
                    if change.entry.type == FILE:
                        contents = tar.extractfile(member)
                        assert contents is not None
                        _check_contents(change, contents)  # type: ignore[arg-type]
            while stream.read(CHUNK):  # what hides behind the end mark is counted too
                pass
    except UNREADABLE as problem:
        raise BadAnswer(f"The pack cannot be read: {problem}.") from None
    if expected:
        raise BadAnswer(f"The pack lacks {len(expected)} of its members, {next(iter(expected))!r} among them.")


def _expected(index: Index) -> dict[str, tuple[Change, int]]:
    """The members a pack must have, by name, with their lengths."""
    members: dict[str, tuple[Change, int]] = {}
    for change in index.changes:
        entry, blocks = change
        if entry.type != FILE:
            if index.kind == "full":
                members[entry.path] = (change, 0)
        elif blocks is None:
            members[entry.path] = (change, entry.size)
        elif blocks:
            last = digests.block_count(entry.size, entry.block) - 1
            short = (last + 1) * entry.block - entry.size if blocks[-1] == last else 0
            members[BLOCKS_PREFIX + entry.path] = (change, len(blocks) * entry.block - short)
    return members


def _claimed(member: tarfile.TarInfo, expected: dict[str, tuple[Change, int]]) -> tuple[Change, int]:
    check_member(member)
    try:
        change, length = expected.pop(member.name)
    except KeyError:
        raise BadAnswer(f"The pack holds {member.name!r}, which its index does not, or twice.") from None
    kinds = {FILE: member.isreg(), DIR: member.isdir(), LINK: member.issym() and member.linkname == change.entry.target}
    if not kinds[change.entry.type]:
        raise UnsafeMember(f"{member.name!r} is not the {change.entry.type} its index says.")
    return change, length


def check_member(member: tarfile.TarInfo) -> None:
    """Raise unless a member is a plain file, folder or link under a plain relative name."""
    check_path(member.name.removeprefix(BLOCKS_PREFIX))
    if not (member.isreg() or member.isdir() or member.issym()):
        raise UnsafeMember(f"{member.name!r} is neither a file, a folder nor a symbolic link.")


def _check_contents(change: Change, contents: BinaryIO) -> None:
    entry, blocks = change
    if blocks is None:
        digest, sums, _ = digests.digest_of_stream(contents, entry.size, entry.block)
        if (digest, sums) != (entry.digest, entry.sums):
            raise DigestMismatch(f"The contents of {entry.path!r} are not what its digest says.")
        return
    for number, block in enumerate(blocks):
        data = contents.read(min(entry.block, entry.size - block * entry.block))
        if digests.block_sum(data) != entry.sums[number * digests.SUM_BYTES : (number + 1) * digests.SUM_BYTES]:
            raise DigestMismatch(f"Block {block} of {entry.path!r} is not what its sum says.")
