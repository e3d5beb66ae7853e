"""Read one file's contents and keep what changed since the base.

The bytes that are hashed are the bytes that are kept, so a file that changes while it is read cannot get the digest of
other contents.
"""

from __future__ import annotations

import io
import os
import time
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Sequence

from sidecar.format import digests
from sidecar.program import places
from sidecar.program.cache import KnownEntry
from sidecar.program.capture.walk import MAGIC

if TYPE_CHECKING:
    from sidecar.program.privacy.scrub import Watch
    from sidecar.program.sqlite.follower import Follower

IN_MEMORY = 4 << 20
TRIES = 3


class UnnamedDatabase(Exception):
    """A file turned out to be a database, which its layout does not say."""


class Contents(NamedTuple):
    """A file as it was read: its digest and sums, and the bytes to carry (all of them if ``blocks`` is None)."""

    size: int
    block: int
    digest: str
    sums: bytes
    blocks: list[int] | None
    carried: BinaryIO
    length: int
    steady: bool = True

    def select_carried_sums(self) -> bytes:
        """Return the sums of the carried blocks."""
        if self.blocks is None:
            return self.sums
        width = digests.SUM_BYTES
        return b"".join(self.sums[number * width : (number + 1) * width] for number in self.blocks)

    def list_changed_pages(self, page: int) -> list[int] | None:
        """Return the numbers of the pages that changed, for the copy of a database; ``None`` if all may have."""
        if self.blocks is None or not page:
            return None
        each, count = self.block // page, self.size // page
        numbers = (number for block in self.blocks for number in range(block * each + 1, (block + 1) * each + 1))
        return [number for number in numbers if number <= count]


class _Collector:
    """Keeps the blocks whose sum differs from the base's: in memory for small files, else on disk with holes for zeros."""

    def __init__(self, base_sums: bytes, block: int, size: int, folder: str, watch: Watch | None = None) -> None:
        self._base = base_sums
        self._watch = watch
        self._block = block
        self._on_disk = size > IN_MEMORY
        self.blocks: list[int] = []
        self.file: BinaryIO = _open_temporary(folder) if self._on_disk else io.BytesIO()
        self.length = 0

    def __call__(self, number: int, data: bytes, sums: bytes) -> None:
        """Take blocks, the first of which has this number."""
        width = digests.SUM_BYTES
        old = self._base[number * width : number * width + len(sums)]
        same = bool(sums) and old == sums
        if self._watch is not None:
            self._watch.inspect(data, same)
        if same:
            return
        if not old:
            self._keep(range(number, number + (len(sums) // width or 1)), data)
            return
        for at in range(0, len(sums), width):
            if old[at : at + width] != sums[at : at + width]:
                start = at // width * self._block
                self._keep([number + at // width], data[start : start + self._block])

    def _keep(self, numbers: Sequence[int], data: bytes) -> None:
        self.blocks += numbers
        if self._on_disk and data.count(0) == len(data):
            self.file.seek(len(data), os.SEEK_CUR)
        else:
            self.file.write(data)
        self.length += len(data)

    def done(self) -> BinaryIO:
        """Return the kept blocks as a file, from its beginning."""
        self.file.truncate(self.length)
        self.file.seek(0)
        return self.file


def choose_base(known: KnownEntry | None, size: int, page: int = 0) -> tuple[int, bytes]:
    """Return the block size for a file, and the base's sums if their blocks can be compared."""
    block = digests.choose_block_size(size, page)
    if known is None or known.entry.block != block or not known.entry.sums or size <= block:
        return block, b""
    return block, known.entry.sums


def read_stream(
    stream: BinaryIO,
    size: int,
    known: KnownEntry | None,
    folder: str,
    page: int = 0,
    follower: Follower | None = None,
) -> Contents:
    """Read an open file that no process changes (a database copy). What ``follower`` has read of it is not read again,
    but for what changed."""
    block, base_sums = choose_base(known, size, page)
    if not base_sums:
        digest, sums, got = digests.digest_stream(stream, size, block)
        stream.seek(0)
        return Contents(got, block, digest, sums, None, stream, got)
    collector = _Collector(base_sums, block, size, folder)
    if follower is not None and follower.block == block:
        digest, sums, got = _digest_followed(stream, size, base_sums, follower, collector)
    else:
        digest, sums, got = digests.digest_stream(stream, size, block, collector)
    return Contents(got, block, digest, sums, collector.blocks, collector.done(), collector.length)


def _digest_followed(
    stream: BinaryIO, size: int, base_sums: bytes, follower: Follower, collector: _Collector
) -> tuple[str, bytes, int]:
    """Do what ``digest_stream`` does, with the sums that are known of a file of several blocks."""
    sums, got, block, width = bytearray(), 0, follower.block, digests.SUM_BYTES
    while got < size:
        own, at = follower.find_sums(got), got // block * width
        length = len(own) // width * block
        if own and own == base_sums[at : at + len(own)]:
            stream.seek(got + length)
        else:
            data = stream.read(length or min(max(block, digests.AT_ONCE // block * block), size - got))
            if not data:
                break
            own, length = own or digests.hash_blocks(data, block), len(data)
            collector(got // block, data, own)
        sums += own
        got += length
    return digests.digest_sums(bytes(sums)), bytes(sums), got


def read_changing_file(place: str, known: KnownEntry | None, folder: str, watch: Watch | None = None) -> Contents:
    """Read a file that other processes may write to. If it never stays unchanged, return the last reading with
    ``steady`` false.

    ``watch`` sees every byte that is kept. Raise ``UnnamedDatabase`` if the file begins like a SQLite database.
    """
    contents: Contents | None = None
    for attempt in range(TRIES):
        if attempt:
            time.sleep(0.02)
        descriptor = places.open_file(place)
        with open(descriptor, "rb") as stream:
            if os.pread(descriptor, len(MAGIC), 0) == MAGIC:
                raise UnnamedDatabase
            before = os.fstat(descriptor)
            block, base_sums = choose_base(known, before.st_size)
            if watch is not None:
                watch.begin()
            collector = _Collector(base_sums, block, before.st_size, folder, watch)
            digest, sums, got = digests.digest_stream(stream, before.st_size, block, collector)
            after = os.fstat(descriptor)
        blocks = collector.blocks if base_sums and got > block else None
        steady = got == before.st_size and (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
        contents = Contents(got, block, digest, sums, blocks, collector.done(), collector.length, steady)
        if steady:
            break
    assert contents is not None
    return contents


def wrap_bytes(data: bytes) -> Contents:
    """Return contents that were made in memory, such as a filtered settings file; they are always carried whole."""
    block = digests.choose_block_size(len(data))
    digest, sums = digests.digest_bytes(data, block)
    return Contents(len(data), block, digest, sums, None, io.BytesIO(data), len(data))


def _open_temporary(folder: str) -> BinaryIO:
    import tempfile

    return tempfile.TemporaryFile(dir=folder)
