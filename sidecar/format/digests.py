"""Block sums of a file's contents, and one digest over them.

A file of at most one block has the SHA-256 of its bytes as its digest. A longer file has the SHA-256 of its block sums,
where a block sum is the first 16 bytes of the block's SHA-256. With the sums and a changed block the new digest can be
checked without reading the other blocks; that is what makes delta packs verifiable.
"""

from __future__ import annotations

import hashlib
from typing import Callable, Protocol

SUM_BYTES = 16
PLAIN_BLOCK = 64 * 1024
# Bounds the size of a file's sums: 2^18 blocks of 16 bytes are 4 MiB in the index.
MOST_BLOCKS = 1 << 18


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


Sink = Callable[[int, bytes, bytes], None]
"""A callback that receives some blocks: the number of the first, the bytes of all, and their sums."""

# Blocks are read this many bytes at a time, for a database's pages are small. Never more than one block of another file.
AT_ONCE = 256 * 1024


def choose_block_size(size: int, page: int = 0) -> int:
    """Return the block size for a file: a database's page size, else 64 KiB, doubled until the file has at most 2^18
    blocks."""
    block = page or PLAIN_BLOCK
    while size > block * MOST_BLOCKS:
        block *= 2
    return block


def count_blocks(size: int, block: int) -> int:
    """Return how many blocks a file of this size has; the last one may be short."""
    return (size + block - 1) // block


def hash_block(data: bytes) -> bytes:
    """Return a block's sum: the first 16 bytes of its SHA-256."""
    return hashlib.sha256(data).digest()[:SUM_BYTES]


def digest_sums(sums: bytes) -> str:
    """Return the digest of a file that has more than one block, from its block sums."""
    return hashlib.sha256(sums).hexdigest()


def digest_bytes(data: bytes, block: int) -> tuple[str, bytes]:
    """Return the digest and the block sums of bytes in memory; no sums for a single block."""
    if len(data) <= block:
        return hashlib.sha256(data).hexdigest(), b""
    sums = hash_blocks(data, block)
    return digest_sums(sums), sums


def hash_blocks(data: bytes, block: int) -> bytes:
    """Return the sums of the blocks of some bytes, joined."""
    view, sha256 = memoryview(data), hashlib.sha256
    return b"".join([sha256(view[at : at + block]).digest()[:SUM_BYTES] for at in range(0, len(data), block)])


def digest_stream(stream: Readable, size: int, block: int, sink: Sink | None = None) -> tuple[str, bytes, int]:
    """Read up to ``size`` bytes and pass the blocks to ``sink``. Return the digest, the sums and the number of bytes read."""
    block = max(block, 1)
    if size <= block:
        data = stream.read(size)
        if sink is not None and data:
            sink(0, data, b"")
        return hashlib.sha256(data).hexdigest(), b"", len(data)
    sums = bytearray()
    got, most = 0, max(block, AT_ONCE // block * block)
    while got < size:
        data = stream.read(min(most, size - got))
        if not data:
            break
        own = hash_blocks(data, block)
        if sink is not None:
            sink(got // block, data, own)
        sums += own
        got += len(data)
    return digest_sums(bytes(sums)), bytes(sums), got
