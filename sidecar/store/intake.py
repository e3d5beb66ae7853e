"""Check what arrives from a sandbox or a tarball as untrusted input.

First what a snapshot claims to contain: every path, link, size and digest (``check_entries``). Then that its packs have
exactly that (``check_pack``), which writes nothing and keeps at most one block in memory.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import os
import posixpath
import queue
import re
import tarfile
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
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
from sidecar.format import digests
from sidecar.format.compression import decompress
from sidecar.format.digests import Readable
from sidecar.format.index import DIR, FILE, LINK, Change, Entry, Index, load
from sidecar.format.packs import BLOCKS_PREFIX, CHUNK, describe_member
from sidecar.format.tarballs import HEADER_ALLOWANCE, LONGEST_HEADER, MemberContents, SparseMember, Tarball, TooLarge
from sidecar.host.work import Deadline, NoProgress, Progress
from sidecar.policy.limits import Limits

LONGEST_PATH, LONGEST_NAME = 4096, 255
LARGEST_BLOCK = 1 << 20
FARTHEST_TIME = 1 << 62
NOTHING: Mapping[str, Entry] = MappingProxyType({})
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
LONGEST_ROW, LONGEST_INDEX = 16 << 20, 512 << 20
LARGE = 1 << 20
"""A larger pack is decompressed in a thread, while what came of it is hashed."""
AHEAD = 3
"""How many chunks that thread may be ahead."""


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


def check_hint(what: str, hint: str) -> None:
    """Raise ``UnsafePath`` unless a folder can have been at this hint: in the home (``~`` or ``~/…``) or absolute."""
    try:
        long = len(hint.encode("utf-8", "surrogateescape")) > LONGEST_PATH
    except UnicodeEncodeError:
        long = True
    if long or not (hint == "~" or hint.startswith(("~/", "/"))) or ".." in hint.split("/") or "\0" in hint:
        raise UnsafePath(f"{what} is said to be at {hint[:200]!r}.")


def check_link(path: str, target: str) -> None:
    """Raise ``UnsafeLink`` unless the link stays inside the root that contains it."""
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
    """Check all entries of a snapshot: every path, link, size and digest, and that no path leads through a link or a
    file.

    Entries that are in ``base``, a snapshot already in the store, were checked when that was made. Raise a typed error.
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
            _check_link_path(path, entry.target, entries)
    _check_folders(entries)
    if total > limits.bytes:
        raise LimitExceeded(
            f"This memory has {total:,} bytes; limits.bytes allows {limits.bytes:,}.", code="limit-bytes"
        )


def _check_entry(entry: Entry, roots: Collection[str], limits: Limits) -> None:
    """Check one entry. Raise UnsafePath, UnsafeLink, BadAnswer, LimitExceeded or DigestMismatch."""
    path = entry.path
    check_path(path, roots, limits.depth)
    if entry.mode > 0o777 or abs(entry.mtime) > FARTHEST_TIME:
        raise BadAnswer(f"{path!r} has an impossible mode or time.")
    if entry.type == FILE:
        _check_file(entry, limits)
    # Size, mtime, digest, block and sums: only files have them.
    elif entry[3:8] != (0, 0, "", 0, b"") or entry.database:
        raise BadAnswer(f"{path!r} is a {entry.type} with the properties of a file.")
    elif entry.type == LINK:
        check_link(path, entry.target)


def _check_folders(entries: dict[str, Entry]) -> None:
    """Raise ``UnsafePath`` if something is below an entry that is not a folder."""
    folders = {path.rpartition("/")[0] for path in entries}
    while folders:
        for folder in folders:
            if folder in entries and entries[folder].type != DIR:
                raise UnsafePath(f"Something lies below {folder!r}, which is not a folder.")
        folders = {folder.rpartition("/")[0] for folder in folders} - {""}


def _check_link_path(path: str, target: str, entries: dict[str, Entry]) -> None:
    """Raise ``UnsafeLink`` if a link goes up again after it passed another link: its text then does not tell where it
    leads."""
    here, through = posixpath.dirname(path), False
    for part in target.split("/"):
        if part == ".." and through:
            raise UnsafeLink(f"The link {path!r} leads through another link and back up.")
        here = posixpath.normpath(posixpath.join(here, part))
        through = through or (here in entries and entries[here].type == LINK)


def _check_file(entry: Entry, limits: Limits) -> None:
    """Check a file's size, digest and block sums."""
    if entry.size > limits.file_bytes:
        raise LimitExceeded(
            f"{entry.path!r} has {entry.size:,} bytes; limits.file_bytes allows {limits.file_bytes:,}.",
            code="limit-file-bytes",
        )
    if not _DIGEST.match(entry.digest) or not 512 <= entry.block <= LARGEST_BLOCK:
        raise BadAnswer(f"{entry.path!r} has no proper digest or block size.")
    count = digests.count_blocks(entry.size, entry.block)
    if count > digests.MOST_BLOCKS or len(entry.sums) != (count * digests.SUM_BYTES if count > 1 else 0):
        raise BadAnswer(f"{entry.path!r} has {len(entry.sums)} bytes of block sums for {count} blocks.")
    if entry.sums and digests.digest_sums(entry.sums) != entry.digest:
        raise DigestMismatch(f"The digest of {entry.path!r} is not that of its blocks.")


class _Watched(io.RawIOBase):
    """A stream that counts what is read, up to a limit and a deadline. Raise PackBomb or UnpackTimeout."""

    def __init__(self, stream: BinaryIO, most: int | None, progress: Progress, deadline: Deadline | None) -> None:
        self._stream, self._left, self._progress, self._deadline = stream, most, progress, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self._deadline is not None:
            self._deadline.check()
        data = self._stream.read(len(buffer))
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                raise PackBomb("A tarball unpacks to more than it should hold.")
        self._progress.advance(len(data))
        buffer[: len(data)] = data
        return len(data)


class _ReadAhead(io.RawIOBase):
    """A stream that a thread reads ahead. Reads raise what reading it raised; ``close`` ends the thread."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._chunks: queue.Queue[bytes | BaseException] = queue.Queue(AHEAD)
        self._rest = memoryview(b"")
        self._ended = False
        self._thread = threading.Thread(target=self._read, name="read-ahead", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            chunk = b"any"
            while chunk and not self._ended:
                chunk = self._stream.read(CHUNK)
                self._chunks.put(chunk)
        except BaseException as problem:
            self._chunks.put(problem)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest and not self._ended:
            got = self._chunks.get()
            self._ended = not got or isinstance(got, BaseException)
            if isinstance(got, BaseException):
                raise got
            self._rest = memoryview(got)
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count

    def close(self) -> None:
        self._ended = True
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._chunks.get(timeout=0.01)  # it may wait for room
        super().close()


@contextlib.contextmanager
def decompress_file(
    pack: Path, codec: str, most: int, progress: Progress | None = None, deadline: Deadline | None = None
) -> Iterator[BinaryIO]:
    """Yield the decompressed bytes of a file, which must end after ``most``. Reads raise ``PackBomb`` or
    ``UnpackTimeout``."""
    with pack.open("rb", buffering=0) as file, contextlib.ExitStack() as stack:
        # The compressed side is watched too: a decompressor may read for long without producing any output.
        packed = io.BufferedReader(_Watched(file, None, NoProgress(), deadline), CHUNK)
        plain = stack.enter_context(decompress(packed, codec)) if codec else packed
        if codec and os.fstat(file.fileno()).st_size > LARGE:
            plain = stack.enter_context(_ReadAhead(plain))  # type: ignore[assignment]
        yield io.BufferedReader(_Watched(plain, most, progress or NoProgress(), deadline), CHUNK)


def iterate_tar_members(
    plain: BinaryIO, most: int, longest_header: int = LONGEST_HEADER
) -> Iterator[tuple[tarfile.TarInfo, MemberContents]]:
    """Yield the members of a tarball of at most ``most`` bytes, each with its contents.

    Raise ``PackBomb`` if it announces more, ``UnsafeMember`` for sparse members.
    """
    try:
        yield from Tarball(plain, most, longest_header)
    except TooLarge as problem:
        raise PackBomb(f"The tarball is refused: {problem}.") from None
    except SparseMember as problem:
        raise UnsafeMember(f"The tarball is refused: {problem}.") from None


def read_index(file: Path, start: int, limits: Limits, removable: int) -> Index:
    """Read an index that arrived, from ``start`` on. ``removable`` is how many entries its base has.

    Raise ``BadAnswer`` if it is not valid, ``LimitExceeded`` or ``PackBomb`` if it is longer than the limits allow.
    """
    most_rows, most_bytes = 1 + limits.files + removable, LONGEST_INDEX
    try:
        with file.open("rb") as stream:
            stream.seek(start)
            with gzip.GzipFile(fileobj=stream, mode="rb") as text:
                return load(_iterate_rows(text, most_rows, most_bytes))
    except (ValueError, EOFError, OSError, zlib.error, RecursionError) as problem:
        raise BadAnswer(f"The sandbox's index cannot be read: {problem}.") from None


def _iterate_rows(text: gzip.GzipFile, most_rows: int, most_bytes: int) -> Iterator[bytes]:
    """Yield the lines of an index. Raise LimitExceeded or PackBomb if there are too many, or one is too long."""
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
"""What reading something that is not a tarball can raise."""


def check_pack(
    pack: Path,
    codec: str,
    index: Index,
    progress: Progress | None = None,
    deadline: Deadline | None = None,
    keep: Callable[[Entry], BinaryIO | None] | None = None,
) -> None:
    """Compare a pack with its index: the same members, sizes and contents, and nothing else. Raise a typed error if not.

    What ``keep`` returns for a file that is carried whole gets its contents, which are right only if nothing is raised.
    """
    expected = _list_expected(index)
    allowance = sum(length for _, length in expected.values()) + HEADER_ALLOWANCE * (len(expected) + 8)
    try:
        with decompress_file(pack, codec, allowance, progress, deadline) as plain:
            for member, contents in iterate_tar_members(plain, allowance):
                change, length = _find_claimed(member, expected)
                if member.size != length:
                    raise SizeMismatch(f"{member.name!r} has {member.size} bytes in the pack, {length} in its index.")
                if change.entry.type == FILE:
                    copy = keep(change.entry) if keep is not None and change.blocks is None else None
                    _check_contents(change, contents if copy is None else _Copied(contents, copy))
            while plain.read(CHUNK):  # bytes hidden behind the end-of-archive mark are counted too
                pass
    except UNREADABLE as problem:
        raise BadAnswer(f"The pack cannot be read: {problem}.") from None
    if expected:
        raise BadAnswer(f"The pack lacks {len(expected)} of its members, {next(iter(expected))!r} among them.")


def _list_expected(index: Index) -> dict[str, tuple[Change, int]]:
    """Return the members that a pack must have, by name, with their lengths."""
    members: dict[str, tuple[Change, int]] = {}
    for change in index.changes:
        entry, blocks = change
        if entry.type != FILE:
            if index.kind == "full":
                members[entry.path] = (change, 0)
        elif blocks is None or blocks:
            name, length = describe_member(change)
            members[name] = (change, length)
    return members


def _find_claimed(member: tarfile.TarInfo, expected: dict[str, tuple[Change, int]]) -> tuple[Change, int]:
    """Return the change that a member belongs to. Raise BadAnswer if the index has none, UnsafeMember if its type differs."""
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
    """Raise unless a member is a regular file, folder or link with a plain relative name."""
    check_path(member.name.removeprefix(BLOCKS_PREFIX))
    if not (member.isreg() or member.isdir() or member.issym()):
        raise UnsafeMember(f"{member.name!r} is neither a file, a folder nor a symbolic link.")


class _Copied:
    """Contents that are copied to a file as they are read."""

    def __init__(self, contents: MemberContents, copy: BinaryIO) -> None:
        self._contents, self._copy = contents, copy

    def read(self, size: int, /) -> bytes:
        data = self._contents.read(size)
        self._copy.write(data)
        return data


def _check_contents(change: Change, contents: Readable) -> None:
    """Compare a file's contents with its digest, or its changed blocks with their sums. Raise DigestMismatch."""
    entry, blocks = change
    if blocks is None:
        digest, sums, _ = digests.digest_stream(contents, entry.size, entry.block)
        if (digest, sums) != (entry.digest, entry.sums):
            raise DigestMismatch(f"The contents of {entry.path!r} are not what its digest says.")
        return
    for number, block in enumerate(blocks):
        data = contents.read(min(entry.block, entry.size - block * entry.block))
        if digests.hash_block(data) != entry.sums[number * digests.SUM_BYTES : (number + 1) * digests.SUM_BYTES]:
            raise DigestMismatch(f"Block {block} of {entry.path!r} is not what its sum says.")
