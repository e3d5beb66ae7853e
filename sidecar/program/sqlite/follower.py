"""The block sums of a database's copy, computed while another process still writes it.

Nothing says in which order SQLite writes a copy's pages, how often, or when. So what is read meanwhile counts only once
the complete copy was read again: a piece that was read before it was written, or that was written once more, has another
checksum then.
"""

from __future__ import annotations

import os
import zlib
from typing import BinaryIO, List, Optional

from sidecar.format import digests

PIECE = 1 << 20
AT_ONCE = 256 << 10


class Follower:
    """The sums of the pieces of a file that were read so far. The first piece is left for the end: SQLite completes a
    database's first page last."""

    def __init__(self, place: str, block: int) -> None:
        self.block = block
        self.checksums: List[int] = []
        """Of each piece from the second on."""
        self._place = place
        self._sums = bytearray()
        self._file: Optional[BinaryIO] = None

    def advance(self) -> bool:
        """Read a piece more. Return False if there is none yet."""
        if self._file is None:
            try:
                self._file = open(self._place, "rb", buffering=0)
            except FileNotFoundError:
                return False
        at = (1 + len(self.checksums)) * PIECE
        if os.fstat(self._file.fileno()).st_size < at + PIECE:
            return False
        sums, checksum = bytearray(), 0
        for place in range(at, at + PIECE, AT_ONCE):
            data = os.pread(self._file.fileno(), AT_ONCE, place)
            if len(data) != AT_ONCE:
                return False
            sums += digests.hash_blocks(data, self.block)
            checksum = zlib.crc32(data, checksum)
        self._sums += sums
        self.checksums.append(checksum)
        return True

    def find_sums(self, at: int) -> bytes:
        """Return the sums of the piece that begins at this byte; none if it was not read."""
        width = PIECE // self.block * digests.SUM_BYTES
        start = (at // PIECE - 1) * width
        return bytes(self._sums[start : start + width]) if start >= 0 else b""

    def close(self) -> None:
        """Close the file. The sums stay."""
        if self._file is not None:
            self._file.close()
            self._file = None


def list_checksums(descriptor: int) -> List[int]:
    """Return the checksums of an open file's pieces, from the second on."""
    found: List[int] = []
    at = PIECE
    while True:
        checksum = 0
        for place in range(at, at + PIECE, AT_ONCE):
            data = os.pread(descriptor, AT_ONCE, place)
            if len(data) != AT_ONCE:
                return found
            checksum = zlib.crc32(data, checksum)
        found.append(checksum)
        at += PIECE
