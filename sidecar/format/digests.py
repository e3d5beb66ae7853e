"""How contents are named: block sums, and one digest over them.

A file of at most one block has the SHA-256 of its bytes. A longer one has the SHA-256 of its block sums, each the first
16 bytes of a block's SHA-256. So whoever holds the sums and a changed block can check the new digest without the rest.
"""

from __future__ import annotations

import hashlib
from typing import Callable, Protocol

SUM_BYTES = 16
PLAIN_BLOCK = 64 * 1024
MOST_BLOCKS = 1 << 18


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


Sink = Callable[[int, bytes, bytes], None]
"""Takes a block's number, its bytes and its sum."""


def choose_block_size(size: int, page: int = 0) -> int:
    """The grain for a file: a database's page, else 64 KiB; doubled until the file has at most 2^18 blocks."""
    block = page or PLAIN_BLOCK
    while size > block * MOST_BLOCKS:
        block *= 2
    return block


def count_blocks(size: int, block: int) -> int:
    return (size + block - 1) // block


def hash_block(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:SUM_BYTES]


def digest_sums(sums: bytes) -> str:
    return hashlib.sha256(sums).hexdigest()


def digest_bytes(data: bytes, block: int) -> tuple[str, bytes]:
    """Digest and block sums of contents held in memory."""
    if len(data) <= block:
        return hashlib.sha256(data).hexdigest(), b""
    sums = b"".join(hash_block(data[at : at + block]) for at in range(0, len(data), block))
    return digest_sums(sums), sums


def digest_stream(stream: Readable, size: int, block: int, sink: Sink | None = None) -> tuple[str, bytes, int]:
    """Read up to ``size`` bytes; return digest, sums and how many bytes there were, handing each block to ``sink``."""
    if size <= block:
        data = stream.read(size)
        if sink is not None and data:
            sink(0, data, b"")
        return hashlib.sha256(data).hexdigest(), b"", len(data)
    sums = bytearray()
    number = got = 0
    while got < size:
        data = stream.read(min(block, size - got))
        if not data:
            break
        one = hash_block(data)
        sums += one
        if sink is not None:
            sink(number, data, one)
        number += 1
        got += len(data)
    return digest_sums(bytes(sums)), bytes(sums), got
