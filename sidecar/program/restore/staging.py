"""Turn packs back into files in a staging folder, and check every one of them.

Where a member goes is looked up in the snapshot's entries, never taken from the tarball; staged files have numbers for
names, and links are not made here. So nothing in a tarball can lead outside.
"""

from __future__ import annotations

import io
import os
import zlib
from gzip import BadGzipFile
from typing import BinaryIO, NamedTuple

from sidecar.format import digests
from sidecar.format.compression import decompress
from sidecar.format.index import FILE, Entry, Index
from sidecar.format.packs import BLOCKS_PREFIX, CHUNK, describe_member
from sidecar.format.refusal import Refusal
from sidecar.format.roots import get_root
from sidecar.format.tarballs import HEADER_ALLOWANCE, BadTarball, MemberContents, Tarball
from sidecar.program import places


class Section(io.RawIOBase):
    """Part of an open file, readable as a stream of its own."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._left = file, length
        file.seek(start)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._file.read(min(len(buffer), self._left))
        buffer[: len(data)] = data
        self._left -= len(data)
        return len(data)


class Staged(NamedTuple):
    """An unpacked file: its path, and its block sums."""

    place: str
    sums: bytes


class Written(NamedTuple):
    """What a staged file has, known from the bytes that were written to it."""

    size: int
    block: int
    digest: str
    sums: bytes


class Unpacker:
    """Applies packs in order. ``entries`` is the snapshot as it must come out, ``stages`` a real folder for each root.

    With ``partial``, blocks of a file whose beginning is in none of the packs are kept too; the rest is a hole.
    """

    def __init__(self, entries: dict[str, Entry], stages: dict[str, str], partial: bool = False) -> None:
        self._entries = entries
        self._partial = partial
        names = (path for path, entry in entries.items() if entry.type == FILE)
        self._places = {path: os.path.join(stages[get_root(path)], str(n)) for n, path in enumerate(names)}
        self._written: dict[str, Written] = {}
        """Files whose contents are known, so that they need not be read again to be compared."""
        for stage in stages.values():
            places.make_folders("", stage)

    def apply(self, stream: BinaryIO, codec: str, index: Index) -> None:
        """Apply one pack after those before it. Raise Refusal (``pack-damaged``) if it is not a complete tarball."""
        changes = {change.entry.path: change for change in index.changes if change.entry.type == FILE}
        lengths = dict(describe_member(change) for change in index.changes if change.entry.type == FILE)
        most = sum(lengths.values()) + HEADER_ALLOWANCE * (len(index.changes) + 8)
        try:
            with decompress(stream, codec) as plain:
                for member, contents in Tarball(plain, most):
                    if not member.isreg() or member.name not in lengths:
                        continue
                    if member.size != lengths[member.name]:
                        raise BadTarball("%r is not as long as the index says" % member.name)
                    if not member.name.startswith(BLOCKS_PREFIX):
                        self._write(changes[member.name].entry, contents)
                        continue
                    patch = changes.get(member.name[len(BLOCKS_PREFIX) :])
                    if patch is not None and patch.blocks:
                        self._patch(patch.entry, patch.blocks, contents)
        except (BadGzipFile, EOFError, ValueError, zlib.error) as problem:
            raise Refusal("pack-damaged", "A pack could not be unpacked: %s." % problem, True) from None
        finally:
            places.close_folders()  # the sidecar unpacks in many folders, one after the other

    def _write(self, entry: Entry, contents: MemberContents) -> None:
        """Write a file that the pack carries whole."""
        place = self._places.get(entry.path)
        if place is None:
            return
        with open(places.open_file(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            if self._partial:
                for data in iter(lambda: contents.read(CHUNK), b""):
                    _write_sparsely(file, data)
            else:
                digest, sums, size = digests.digest_stream(
                    contents, entry.size, entry.block, lambda number, data, sums: _write_sparsely(file, data)
                )
                self._written[entry.path] = Written(size, entry.block, digest, sums)
            file.truncate()

    def _patch(self, entry: Entry, blocks: list[int], contents: MemberContents) -> None:
        """Write the changed blocks of a file; skipped if the file is not there, unless ``partial``."""
        place = self._places.get(entry.path)
        if place is None:
            return
        if not self._partial and not places.exists(place):
            return
        written, own = self._written.pop(entry.path, None), []
        with open(places.open_file(place, os.O_RDWR | os.O_CREAT), "r+b") as file:
            for number in blocks:
                data = contents.read(min(entry.block, entry.size - number * entry.block))
                file.seek(number * entry.block)
                file.write(data)
                own.append(digests.hash_block(data) if written is not None else b"")
            file.truncate(entry.size)
        patched = _apply_patch(written, entry, blocks, own) if written is not None else None
        if patched is not None:
            self._written[entry.path] = patched

    def place(self, path: str) -> str:
        """Return where a file was staged."""
        return self._places[path]

    def checked(self) -> dict[str, Staged]:
        """Return every file of the snapshot with its contents compared. Raise Refusal (``incomplete``) if one differs
        or is missing."""
        staged: dict[str, Staged] = {}
        wrong: list[str] = []
        for path, place in self._places.items():
            entry, written = self._entries[path], self._written.get(path)
            if written is not None and written.block == entry.block:
                if (written.size, written.digest) == (entry.size, entry.digest):
                    staged[path] = Staged(place, written.sums)
                else:
                    wrong.append(path)
                continue
            try:
                with open(places.open_file(place), "rb") as file:
                    digest, sums, got = digests.digest_stream(file, entry.size, entry.block)
                    intact = got == entry.size and digest == entry.digest and not file.read(1)
            except FileNotFoundError:
                intact = False
            if intact:
                staged[path] = Staged(place, sums)
            else:
                wrong.append(path)
        places.close_folders()
        if wrong:
            first = ", ".join(repr(path) for path in wrong[:3])
            raise Refusal(
                "incomplete", "%d of %d files are missing or differ: %s" % (len(wrong), len(self._places), first)
            )
        return staged


def _apply_patch(written: Written, entry: Entry, blocks: list[int], own: list[bytes]) -> Written | None:
    """Return what a file has after some blocks of it were written, whose sums are ``own``. ``None`` if that is not certain:
    a block that ends elsewhere now, or is new, was not among them."""
    if written.block != entry.block or not written.sums:
        return None
    width, before = digests.SUM_BYTES, digests.count_blocks(written.size, entry.block)
    count = digests.count_blocks(entry.size, entry.block)
    expected = set(range(before, count))
    shorter = min(written.size, entry.size)
    if written.size != entry.size and shorter % entry.block:
        expected.add(shorter // entry.block)
    if count < 2 or not expected.issubset(blocks) or any(number >= count for number in blocks):
        return None
    sums = bytearray(written.sums[: count * width].ljust(count * width, b"\0"))
    for number, one in zip(blocks, own):
        sums[number * width : (number + 1) * width] = one
    return Written(entry.size, entry.block, digests.digest_sums(bytes(sums)), bytes(sums))


def _write_sparsely(file: BinaryIO, data: bytes) -> None:
    """Write, leaving holes where a whole chunk is zeros, so that a sparse file stays sparse."""
    if data.count(0) == len(data) and len(data) >= digests.PLAIN_BLOCK:
        file.seek(len(data), os.SEEK_CUR)
    else:
        file.write(data)
