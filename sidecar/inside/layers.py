"""A snapshot is its packs' indexes, laid one over the other."""

from __future__ import annotations

from typing import Iterable

from .digests import SUM_BYTES, count_blocks
from .index import DIR, FILE, Change, Entry, Index


def merge_indexes(indexes: Iterable[Index]) -> dict[str, Entry]:
    """The entries of a snapshot, sums included. Raise ValueError when a pack changes what the ones below do not have."""
    entries: dict[str, Entry] = {}
    for number, index in enumerate(indexes):
        if (index.kind == "full") != (number == 0):
            raise ValueError("the first pack, and only the first, must be full")
        apply_index(entries, index)
    return entries


def apply_index(entries: dict[str, Entry], index: Index) -> None:
    """Lay one index over the entries below it, in place."""
    for path in index.gone:
        if entries.pop(path, None) is None:
            raise ValueError("an index removes %r, which was not there" % path)
    for change in index.changes:
        entry, blocks = change
        entries[entry.path] = entry if blocks is None else _patch_entry(entries.get(entry.path), change)


def _patch_entry(old: Entry | None, change: Change) -> Entry:
    entry, blocks = change
    assert blocks is not None
    if old is None or old.type != FILE:
        raise ValueError("an index changes blocks of %r, which was not there" % entry.path)
    if not blocks:
        if (old.digest, old.size) != (entry.digest, entry.size):
            raise ValueError("an index changes %r without its contents" % entry.path)
        return entry._replace(sums=old.sums, block=old.block)
    count = count_blocks(entry.size, entry.block)
    if old.block != entry.block or not old.sums or len(entry.sums) != len(blocks) * SUM_BYTES or count < 2:
        raise ValueError("an index changes blocks of %r in a way that does not fit" % entry.path)
    sums = bytearray(old.sums[: count * SUM_BYTES])
    sums.extend(bytes(count * SUM_BYTES - len(sums)))
    for number, block in enumerate(blocks):
        sums[block * SUM_BYTES : (block + 1) * SUM_BYTES] = entry.sums[number * SUM_BYTES : (number + 1) * SUM_BYTES]
    return entry._replace(sums=bytes(sums))


def count_files(entries: dict[str, Entry]) -> tuple[int, int]:
    """How many files, and how many bytes in them."""
    files = [entry for entry in entries.values() if entry.type == FILE]
    return len(files), sum(entry.size for entry in files)


def list_folders(entries: dict[str, Entry]) -> list[Entry]:
    return [entry for entry in entries.values() if entry.type == DIR]
