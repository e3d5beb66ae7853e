"""The bytes that arrive from a sandbox or a tarball are hostile until shown otherwise.

``check_pack`` compares them with what is claimed (``sidecar.store.claims``). It writes nothing, and holds no more than one
block in memory.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import zstandard

from sidecar.errors import (
    BadAnswer,
    DigestMismatch,
    LimitExceeded,
    PackBomb,
    SizeMismatch,
    UnsafeMember,
)
from sidecar.format import digests
from sidecar.format.compression import decompress
from sidecar.format.index import DIR, FILE, LINK, Change, Index, load
from sidecar.format.packs import BLOCKS_PREFIX, CHUNK, describe_member
from sidecar.format.tarballs import HEADER_ALLOWANCE, LONGEST_HEADER, MemberContents, SparseMember, Tarball, TooLarge
from sidecar.host.progress import NoProgress, Progress
from sidecar.host.threads import Deadline
from sidecar.policy.limits import Limits
from sidecar.store.claims import check_path

LONGEST_ROW, LONGEST_INDEX = 16 << 20, 512 << 20


class _Watched(io.RawIOBase):
    """Bytes that pass: counted, and only for so long."""

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


@contextlib.contextmanager
def decompress_file(
    pack: Path, codec: str, most: int, progress: Progress | None = None, deadline: Deadline | None = None
) -> Iterator[BinaryIO]:
    """The plain bytes of a file, which must end after ``most``. Raise ``PackBomb`` or ``UnpackTimeout`` from its reads."""
    with pack.open("rb", buffering=0) as file, contextlib.ExitStack() as stack:
        # Also where it is compressed: what comes out of it may be nothing for a long time.
        packed = io.BufferedReader(_Watched(file, None, NoProgress(), deadline), CHUNK)
        plain = stack.enter_context(decompress(packed, codec)) if codec else packed
        yield io.BufferedReader(_Watched(plain, most, progress or NoProgress(), deadline), CHUNK)


def iterate_tar_members(
    plain: BinaryIO, most: int, longest_header: int = LONGEST_HEADER
) -> Iterator[tuple[tarfile.TarInfo, MemberContents]]:
    """The members of a tarball of at most so many bytes, each with its contents.

    Raise ``PackBomb`` when it says that it holds more, ``UnsafeMember`` for sparse members.
    """
    try:
        yield from Tarball(plain, most, longest_header)
    except TooLarge as problem:
        raise PackBomb(f"The tarball is refused: {problem}.") from None
    except SparseMember as problem:
        raise UnsafeMember(f"The tarball is refused: {problem}.") from None


def read_index(file: Path, start: int, limits: Limits, removable: int) -> Index:
    """An index as it arrived, from ``start`` on, over a base of so many entries.

    Raise when it is not one, or longer than the limits could make it.
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


def check_pack(
    pack: Path, codec: str, index: Index, progress: Progress | None = None, deadline: Deadline | None = None
) -> None:
    """Compare a pack with its index: the same members, sizes and contents, and nothing else."""
    expected = _list_expected(index)
    allowance = sum(length for _, length in expected.values()) + HEADER_ALLOWANCE * (len(expected) + 8)
    try:
        with decompress_file(pack, codec, allowance, progress, deadline) as plain:
            for member, contents in iterate_tar_members(plain, allowance):
                change, length = _find_claimed(member, expected)
                if member.size != length:
                    raise SizeMismatch(f"{member.name!r} has {member.size} bytes in the pack, {length} in its index.")
                if change.entry.type == FILE:
                    _check_contents(change, contents)
            while plain.read(CHUNK):  # what hides behind the end mark is counted too
                pass
    except UNREADABLE as problem:
        raise BadAnswer(f"The pack cannot be read: {problem}.") from None
    if expected:
        raise BadAnswer(f"The pack lacks {len(expected)} of its members, {next(iter(expected))!r} among them.")


def _list_expected(index: Index) -> dict[str, tuple[Change, int]]:
    """The members a pack must have, by name, with their lengths."""
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


def _check_contents(change: Change, contents: MemberContents) -> None:
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
