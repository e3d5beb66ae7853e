"""Fold packs, on the sidecar's side, so that a snapshot never needs more than a handful.

The newest deltas become one, together with older ones that are no larger, so that a byte is rewritten only as often as
its pack's size doubles. Once the deltas are larger than half the full pack, everything becomes a new full pack.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import zstandard

from sidecar.errors import SnapshotDamaged
from sidecar.format.digests import SUM_BYTES, count_blocks
from sidecar.format.index import DIR, FILE, LINK, Change, Entry, Index, apply_index, merge_indexes
from sidecar.format.packs import Packer
from sidecar.format.refusal import Refusal
from sidecar.format.roots import get_root
from sidecar.host.values import dataclass
from sidecar.program.restore.staging import Staged, Unpacker

MOST_PACKS = 8


@dataclass(frozen=True, slots=True)
class PackFile:
    """A pack on the sidecar's disk with its index."""

    path: Path
    codec: str
    index: Index
    stored: str = ""
    """Its id, if it is in the store already."""


def do_deltas_outweigh(full_bytes: int, delta_bytes: int) -> bool:
    """Return whether the deltas are so large that a new full pack is the better fold."""
    return delta_bytes * 2 > full_bytes


def find_first_to_fold(sizes: list[int]) -> int:
    """Return the first delta to fold, given the sizes of all, oldest first: at least the last two are folded."""
    first = len(sizes) - 2
    total = sum(sizes[first:])
    while first > 0 and sizes[first - 1] <= total:
        first -= 1
        total += sizes[first]
    return first


def unpack_files(packs: list[PackFile], entries: dict[str, Entry], folder: Path) -> dict[str, Staged]:
    """Unpack a snapshot's files into a folder and check them all. Raise ``SnapshotDamaged``."""
    unpacker = _make_unpacker(entries, entries, folder)
    with _translate_refusals():
        for pack in packs:
            with pack.path.open("rb") as stream:
                unpacker.apply(stream, pack.codec, pack.index)
        return unpacker.checked()


@contextmanager
def _translate_refusals() -> Iterator[None]:
    """Translate the refusals of the in-sandbox program's unpacker: here they mean that the snapshot is damaged."""
    try:
        yield
    except Refusal as refused:
        raise SnapshotDamaged(refused.message) from None
    except zstandard.ZstdError as problem:
        raise SnapshotDamaged(f"A pack could not be unpacked: {problem}.") from None


def _make_unpacker(
    wanted: dict[str, Entry], entries: Iterable[str], folder: Path, *, partial: bool = False
) -> Unpacker:
    """Return an unpacker that stages all roots in one folder of the sidecar's."""
    stages = dict.fromkeys(set(map(get_root, entries)), os.path.realpath(folder))
    return Unpacker(wanted, stages, partial=partial)


def fold_to_full(packs: list[PackFile], folder: Path, target: Path, wanted: dict[str, Entry] | None = None) -> PackFile:
    """Fold packs, from the full one on, into one full pack with the same result, or with only some of its entries. Raise
    ``SnapshotDamaged``."""
    entries = merge_indexes(pack.index for pack in packs) if wanted is None else wanted
    staged = unpack_files(packs, entries, folder)
    with target.open("wb", buffering=0) as file:
        packer = Packer(file, allow_zstd=any(pack.codec == "zst" for pack in packs))
        for path in sorted(entries):
            if entries[path].type == FILE:
                with open(staged[path].place, "rb") as contents:
                    packer.add(entries[path], contents, entries[path].size)
            else:
                packer.add(entries[path], None, 0)
        codec = packer.finish()
    return PackFile(target, codec, Index("full", [Change(entries[path]) for path in sorted(entries)], []))


def fold_deltas(below: list[Index], deltas: list[PackFile], folder: Path, target: Path) -> PackFile:
    """Fold consecutive deltas into one delta over the packs ``below``, which are not read. Raise ``SnapshotDamaged``."""
    before = merge_indexes(below)
    entries = dict(before)
    for delta in deltas:
        apply_index(entries, delta.index)
    touched = _list_touched(deltas)
    touched_entries = {path: entries[path] for path in touched if path in entries}
    unpacker = _make_unpacker(touched_entries, entries, folder, partial=True)
    with _translate_refusals():
        for delta in deltas:
            with delta.path.open("rb") as stream:
                unpacker.apply(stream, delta.codec, delta.index)
    changes: list[Change] = []
    with target.open("wb", buffering=0) as file:
        packer = Packer(file, allow_zstd=any(delta.codec == "zst" for delta in deltas))
        for path, entry in touched_entries.items():
            blocks = touched[path]
            if entry.type in (DIR, LINK) or blocks is None:
                changes.append(Change(entry))
                if entry.type == FILE:
                    with open(unpacker.place(path), "rb") as contents:
                        packer.add(entry, contents, entry.size)
                continue
            numbers = sorted(number for number in blocks if number < count_blocks(entry.size, entry.block))
            sums = b"".join(entry.sums[number * SUM_BYTES : (number + 1) * SUM_BYTES] for number in numbers)
            changes.append(Change(entry._replace(sums=sums), numbers))
            if numbers:
                _add_blocks(packer, entry, numbers, unpacker.place(path), folder / "blocks")
        codec = packer.finish()
    return PackFile(target, codec, Index("delta", changes, sorted(set(before) - set(entries))))


def _list_touched(deltas: list[PackFile]) -> dict[str, set[int] | None]:
    """Return the paths that the deltas touch, with the blocks of each; ``None`` for the whole file."""
    touched: dict[str, set[int] | None] = {}
    for delta in deltas:
        for path in delta.index.gone:
            touched.pop(path, None)
        for change in delta.index.changes:
            path = change.entry.path
            if change.blocks is None:
                touched[path] = None
                continue
            blocks = touched.setdefault(path, set())
            if blocks is not None:
                blocks.update(change.blocks)
    return touched


def _add_blocks(packer: Packer, entry: Entry, numbers: list[int], place: str, gathered: Path) -> None:
    """Gather the blocks of a file and add them to the pack."""
    length = 0
    with open(place, "rb") as source, gathered.open("w+b") as blocks:
        for number in numbers:
            source.seek(number * entry.block)
            length += blocks.write(source.read(min(entry.block, entry.size - number * entry.block)))
        blocks.seek(0)
        packer.add_blocks(entry, blocks, length)
