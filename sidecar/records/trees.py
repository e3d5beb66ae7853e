"""Where the rows of a table stand in its database file: from the pages that changed, it tells the rows that may have.

A table is a tree of pages, and a row is a cell on one of its leaves, continued in a chain of overflow pages if it is long.
If a row differs between two versions of a file, then a page on the way to it differs: its leaf, its chain, or a page above,
which then has other children. So the rows to look at are those on leaves that changed or whose chain did, and those below
children that came or went.

The rules are those of https://www.sqlite.org/fileformat2.html. Files come from a sandbox: what contradicts the rules raises
``UnexpectedPage``, and nothing that is built here is larger than the file justifies.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple, Self

from sidecar.format.digests import SUM_BYTES
from sidecar.format.index import Entry
from sidecar.program.sqlite.pages import SMALLEST, TABLE_INTERIOR, TABLE_LEAF, UnexpectedPage, read_varint

MOST_ROWS = 300_000
"""A table with more rows is not followed."""
HEADER_BYTES = 100


class PageReader:
    """Reads single pages of a database file. Raise ``UnexpectedPage`` if it does not begin like one."""

    def __init__(self, place: str) -> None:
        self._file = os.open(place, os.O_RDONLY)
        header = os.pread(self._file, HEADER_BYTES, 0)
        size = int.from_bytes(header[16:18], "big")
        self.size = 65536 if size == 1 else size
        if len(header) < HEADER_BYTES or self.size < SMALLEST or self.size & (self.size - 1):
            self.close()
            raise UnexpectedPage
        self.usable = self.size - header[20]
        self.count = os.fstat(self._file).st_size // self.size
        self.form = header[16:18] + header[20:21] + header[56:60]
        """What has to be the same in two versions of a file: page size, reserved bytes and encoding."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._file)

    def read(self, number: int, length: int = 0) -> bytes:
        """Return a page, or the beginning of it. Raise ``UnexpectedPage`` if there is none."""
        if not 0 < number <= self.count:
            raise UnexpectedPage
        return os.pread(self._file, length or self.size, (number - 1) * self.size)


class _Leaf(NamedTuple):
    rowids: tuple[int, ...]
    chain: tuple[int, ...]
    """The overflow pages of its rows."""


class TableTree:
    """The pages of one table. Once it raised ``UnexpectedPage`` it is of no use any more."""

    def __init__(self, root: int, pages: PageReader) -> None:
        self._root, self._form = root, pages.form
        self._leaves: dict[int, _Leaf] = {}
        self._inner: dict[int, tuple[int, ...]] = {}
        self._owners: dict[int, int] = {}
        self._rows = 0
        for _ in self._add(pages, [root]):
            pass

    def follow(self, pages: PageReader, changed: Iterable[int]) -> set[int]:
        """Take in the pages that changed, and return the rowids of the rows that may have come, gone or changed. Raise
        ``UnexpectedPage``."""
        if pages.form != self._form:
            raise UnexpectedPage
        known = {self._owners.get(number, number) for number in changed}
        touched: set[int] = set()
        came: list[int] = []
        for number in self._list_inner():
            if number not in known or number not in self._inner:  # dropped meanwhile, with the page above it
                continue
            old, new = set(self._inner[number]), self._list_children(number, pages)
            touched.update(self._drop(old - set(new or ())))
            came += [child for child in new or () if child not in old]
            if new is None:
                del self._inner[number]
                came.append(number)
            else:
                self._inner[number] = new
        for number in known & self._leaves.keys():
            touched.update(self._drop([number]))
            came.append(number)
        touched.update(self._add(pages, came))
        return touched

    def _list_inner(self) -> list[int]:
        """Return the interior pages, each after the one above it."""
        found = [self._root] if self._root in self._inner else []
        for number in found:
            found += [child for child in self._inner[number] if child in self._inner]
        return found

    def _drop(self, numbers: Iterable[int]) -> Iterator[int]:
        """Forget these pages and all below them; yield the rowids that were there."""
        waiting = list(numbers)
        while waiting:
            number = waiting.pop()
            waiting += self._inner.pop(number, ())
            leaf = self._leaves.pop(number, None)
            if leaf is not None:
                for one in leaf.chain:
                    self._owners.pop(one, None)
                self._rows -= len(leaf.rowids)
                yield from leaf.rowids

    def _add(self, pages: PageReader, numbers: Iterable[int]) -> Iterator[int]:
        """Take in these pages and all below them; yield the rowids that are there."""
        waiting = list(numbers)
        while waiting:
            number = waiting.pop()
            if number in self._inner or number in self._leaves:
                raise UnexpectedPage  # it hangs in the tree twice
            children = self._list_children(number, pages)
            if children is not None:
                self._inner[number] = children
                waiting += children
                continue
            leaf = self._leaves[number] = _read_leaf(number, pages, self._owners)
            self._owners.update(dict.fromkeys(leaf.chain, number))
            self._rows += len(leaf.rowids)
            if self._rows > MOST_ROWS:
                raise UnexpectedPage
            yield from leaf.rowids

    def _list_children(self, number: int, pages: PageReader) -> tuple[int, ...] | None:
        """Return the pages below an interior page; ``None`` if it is a leaf."""
        page = pages.read(number)
        head = HEADER_BYTES if number == 1 else 0
        if page[head] == TABLE_LEAF:
            return None
        if page[head] != TABLE_INTERIOR:
            raise UnexpectedPage
        found = [int.from_bytes(page[at : at + 4], "big") for at in _list_cells(page, head, 12)]
        found.append(int.from_bytes(page[head + 8 : head + 12], "big"))
        if len(set(found)) != len(found):
            raise UnexpectedPage
        return tuple(found)


def _list_cells(page: bytes, head: int, skip: int) -> list[int]:
    """Return where the cells of a b-tree page begin."""
    count = int.from_bytes(page[head + 3 : head + 5], "big")
    start = head + skip
    if start + 2 * count > len(page):
        raise UnexpectedPage
    return [page[at] << 8 | page[at + 1] for at in range(start, start + 2 * count, 2)]


def _read_leaf(number: int, pages: PageReader, taken: Container[int]) -> _Leaf:
    """Return a leaf's rows. Raise ``UnexpectedPage`` if they continue in pages that others have ``taken``."""
    page, usable = pages.read(number), pages.usable
    # How much of a row stays on its leaf: section 1.6, "B-tree Pages".
    most, least = usable - 35, (usable - 12) * 32 // 255 - 23
    rowids, chain = [], []
    seen: set[int] = set()
    try:
        for place in _list_cells(page, HEADER_BYTES if number == 1 else 0, 8):
            size, at = read_varint(page, place)
            rowid, at = read_varint(page, at)
            rowids.append(rowid - (1 << 64) if rowid >> 63 else rowid)
            if size <= most:
                continue
            local = least + (size - least) % (usable - 4)
            local = local if local <= most else least
            left, after = size - local, int.from_bytes(page[at + local : at + local + 4], "big")
            while left > 0:
                if after in seen or after in taken:
                    raise UnexpectedPage
                seen.add(after)
                chain.append(after)
                left -= usable - 4
                after = int.from_bytes(pages.read(after, 4), "big")
    except IndexError:
        raise UnexpectedPage from None
    return _Leaf(tuple(rowids), tuple(chain))


def list_changed_pages(old: Entry, new: Entry, page: int) -> set[int] | None:
    """Return the numbers of the pages that differ between two versions of a file, by their sums alone; ``None`` if those
    do not tell."""
    if old.block != new.block or not old.sums or not new.sums or page < 1 or new.block % page:
        return None
    ratio = new.block // page
    count = len(new.sums) // SUM_BYTES
    found: set[int] = set()
    for block in range(count):
        at = block * SUM_BYTES
        if old.sums[at : at + SUM_BYTES] != new.sums[at : at + SUM_BYTES]:
            found.update(range(block * ratio + 1, (block + 1) * ratio + 1))
    return found
