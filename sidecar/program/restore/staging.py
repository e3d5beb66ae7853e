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


class Unpacker:
    """Applies packs in order. ``entries`` is the snapshot as it must come out, ``stages`` a real folder for each root.

    With ``partial``, blocks of a file whose beginning is in none of the packs are kept too; the rest is a hole.
    """

    def __init__(self, entries: dict[str, Entry], stages: dict[str, str], partial: bool = False) -> None:
        self._entries = entries
        self._partial = partial
        names = (path for path, entry in entries.items() if entry.type == FILE)
        self._places = {path: os.path.join(stages[get_root(path)], str(n)) for n, path in enumerate(names)}
        for stage in stages.values():
            os.makedirs(stage, exist_ok=True)

    def apply(self, stream: BinaryIO, codec: str, index: Index) -> None:
        """Apply one pack after those before it. Raise Refusal (``pack-damaged``) if it is not a complete tarball."""
        patches = {change.entry.path: change for change in index.changes if change.blocks}
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
                        self._write(member.name, contents)
                        continue
                    patch = patches.get(member.name[len(BLOCKS_PREFIX) :])
                    if patch is not None and patch.blocks is not None:
                        self._patch(patch.entry, patch.blocks, contents)
        except (BadGzipFile, EOFError, ValueError, zlib.error) as problem:
            raise Refusal("pack-damaged", "A pack could not be unpacked: %s." % problem, True) from None
        finally:
            places.close_folders()  # the sidecar unpacks in many folders, one after the other

    def _write(self, path: str, contents: MemberContents) -> None:
        """Write a file that the pack carries whole."""
        place = self._places.get(path)
        if place is None:
            return
        with open(places.open_file(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            while True:
                data = contents.read(CHUNK)
                if not data:
                    break
                _write_sparsely(file, data)
            file.truncate()

    def _patch(self, entry: Entry, blocks: list[int], contents: MemberContents) -> None:
        """Write the changed blocks of a file; skipped if the file is not there, unless ``partial``."""
        place = self._places.get(entry.path)
        if place is None:
            return
        if not self._partial and not places.exists(place):
            return
        with open(places.open_file(place, os.O_RDWR | os.O_CREAT), "r+b") as file:
            for number in blocks:
                file.seek(number * entry.block)
                file.write(contents.read(min(entry.block, entry.size - number * entry.block)))
            file.truncate(entry.size)

    def place(self, path: str) -> str:
        """Return where a file was staged."""
        return self._places[path]

    def checked(self) -> dict[str, Staged]:
        """Return every file of the snapshot with its contents compared. Raise Refusal (``incomplete``) if one differs
        or is missing."""
        staged: dict[str, Staged] = {}
        wrong: list[str] = []
        for path, place in self._places.items():
            entry = self._entries[path]
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


def _write_sparsely(file: BinaryIO, data: bytes) -> None:
    """Write, leaving holes where a whole chunk is zeros, so that a sparse file stays sparse."""
    if data.count(0) == len(data) and len(data) >= digests.PLAIN_BLOCK:
        file.seek(len(data), os.SEEK_CUR)
    else:
        file.write(data)
