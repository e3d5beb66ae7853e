"""A SQLite database as pages: find text in it without asking for every row, and clear what is not in use.

A value that does not fit into a page goes on in a chain of others, so a text may be cut at a page's end; here it is put
together again. With the numbers of the pages that changed, only those and the chains they begin are read.
"""

from __future__ import annotations

import mmap
import os
from typing import Callable, Iterable, Iterator, List, NamedTuple, Set, Tuple

BTREE = {2, 5, 10, 13}
INDEX_INTERIOR, TABLE_INTERIOR, INDEX_LEAF, TABLE_LEAF = 2, 5, 10, 13
BATCH = 1 << 20
MOST_PAGES = (1 << 25) - 1
"""With more of them, a page that begins with another's number may look like one of a tree."""
SMALLEST = 512
PENDING_BYTE = 1 << 30
WIDE = {2: "utf-16-le", 3: "utf-16-be"}

Look = Callable[[bytes], bool]


class UnexpectedPage(Exception):
    """These pages are not what they should be: better ask SQLite itself."""


class Cell(NamedTuple):
    start: int
    local: int
    size: int
    overflow: int
    """The first page of the chain it goes on in; 0 when there is none."""


class Pages:
    """An open copy of a database that nobody else has open."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        size = int.from_bytes(data[16:18], "big")
        self.size = 65536 if size == 1 else size
        if self.size < SMALLEST:
            raise UnexpectedPage
        self.usable = self.size - data[20]
        self.count = len(data) // self.size
        self._encoding = WIDE.get(int.from_bytes(data[56:60], "big"), "")
        if self.count > MOST_PAGES:
            raise UnexpectedPage

    def read_page(self, number: int) -> bytes:
        return self._data[(number - 1) * self.size : number * self.size]

    def may_concern(self, look: Look, changed: Iterable[int] | None) -> bool:
        """Whether ``look`` finds something on these pages (``None``: on all), or nobody can say."""
        look = self.adapt_look(look)
        numbers = range(1, self.count + 1) if changed is None else changed
        batch: List[bytes] = []
        idle, seen = self._list_unused_pages(), set()  # type: Tuple[Set[int], Set[int]]
        others: List[int] = []
        weight = 0
        for number in numbers:
            page = self.read_page(number)
            if number not in idle and page[100 if number == 1 else 0] not in BTREE:
                others.append(number)
                continue
            for piece in [page] if number in idle else self._iterate_texts(number, page, seen):
                batch.append(piece)
                weight += len(piece)
            if weight > BATCH:
                if look(b"\0".join(batch)):
                    return True
                batch, weight = [], 0
        for number in others:
            if number in seen:
                continue
            if changed is not None:
                return True  # part of a value that begins on a page that did not change
            batch.append(self.read_page(number))
        return look(b"\0".join(batch))

    def adapt_look(self, look: Look) -> Look:
        """The same look at text as it is encoded here: a wide one may begin at any byte, and blobs are not encoded."""
        code = self._encoding
        if not code:
            return look

        def wide(data: bytes) -> bool:
            return look(data) or any(look(data[at:].decode(code, "replace").encode()) for at in (0, 1))

        return wide

    def _iterate_texts(self, number: int, page: bytes, seen: Set[int]) -> Iterator[bytes]:
        yield page
        for cell in self.iterate_cells(number, page):
            if cell.overflow:
                yield b"".join(self._iterate_chain(page, cell, seen))

    def iterate_cells(self, number: int, page: bytes) -> Iterator[Cell]:
        """The cells of a page of a tree that go on elsewhere. Raise ``UnexpectedPage``."""
        head = 100 if number == 1 else 0
        kind = page[head]
        if kind == TABLE_INTERIOR:
            return
        count = int.from_bytes(page[head + 3 : head + 5], "big")
        pointers = head + (12 if kind == INDEX_INTERIOR else 8)
        usable = self.usable
        most = usable - 35 if kind == TABLE_LEAF else (usable - 12) * 64 // 255 - 23
        least = (usable - 12) * 32 // 255 - 23
        skip = 4 if kind == INDEX_INTERIOR else 0
        try:
            for place in range(pointers, pointers + 2 * count, 2):
                at = (page[place] << 8 | page[place + 1]) + skip
                size = page[at]
                at += 1
                if size >= 0x80:
                    size, at = read_varint(page, at - 1)
                if size > most:
                    if kind == TABLE_LEAF:
                        _, at = read_varint(page, at)
                    local = least + (size - least) % (usable - 4)
                    local = local if local <= most else least
                    first = int.from_bytes(page[at + local : at + local + 4], "big")
                    yield Cell(at, local, size, first)
        except IndexError:
            raise UnexpectedPage from None

    def _iterate_chain(self, page: bytes, cell: Cell, seen: Set[int]) -> Iterator[bytes]:
        yield page[cell.start : cell.start + cell.local]
        left, number = cell.size - cell.local, cell.overflow
        room = self.usable - 4
        while left > 0:
            if not 0 < number <= self.count or number in seen:
                raise UnexpectedPage
            seen.add(number)
            at = (number - 1) * self.size
            yield self._data[at + 4 : at + 4 + min(left, room)]
            left -= room
            number = int.from_bytes(self._data[at : at + 4], "big")

    def _read_free_list(self) -> Tuple[List[Tuple[int, int]], List[int]]:
        """The trunks of the list of free pages, each with how many it names, and the pages they name.

        Raise ``UnexpectedPage``.
        """
        trunks: List[Tuple[int, int]] = []
        leaves: List[int] = []
        trunk = int.from_bytes(self._data[32:36], "big")
        while trunk:
            if trunk > self.count or len(trunks) > self.count:
                raise UnexpectedPage
            at = (trunk - 1) * self.size
            count = int.from_bytes(self._data[at + 4 : at + 8], "big")
            if count * 4 + 8 > self.size:
                raise UnexpectedPage
            names = self._data[at + 8 : at + 8 + 4 * count]
            trunks.append((trunk, count))
            leaves += [int.from_bytes(names[place : place + 4], "big") for place in range(0, len(names), 4)]
            trunk = int.from_bytes(self._data[at : at + 4], "big")
        return trunks, leaves

    def _list_unused_pages(self) -> Set[int]:
        """Pages that hold no value: free ones, SQLite's maps of where pages belong, and the one it never uses."""
        trunks, leaves = self._read_free_list()
        unused = PENDING_BYTE // self.size + 1
        idle = {number for number, _ in trunks} | set(leaves) | {unused}
        if int.from_bytes(self._data[52:56], "big"):
            maps = range(2, self.count + 1, self.usable // 5 + 1)
            idle.update(number + (number == unused) for number in maps)
        return idle

    def iterate_slack(self) -> Iterator[Tuple[int, int]]:
        """Every part of the file that holds nothing, but may hold what was there before. Raise ``UnexpectedPage``."""
        trunks, leaves = self._read_free_list()
        idle = self._list_unused_pages()
        for number, count in trunks:
            yield (number - 1) * self.size + 8 + 4 * count, number * self.size
        for number in leaves:
            if 0 < number <= self.count:
                yield (number - 1) * self.size, number * self.size
        seen: Set[int] = set()
        for number in range(1, self.count + 1):
            page = self.read_page(number)
            if number in idle or number in seen or page[100 if number == 1 else 0] not in BTREE:
                continue
            base = (number - 1) * self.size
            for start, end in _iterate_gaps(page, 100 if number == 1 else 0, self.usable):
                yield base + start, base + end
            for cell in self.iterate_cells(number, page):
                last, left = self._find_chain_end(cell, seen)
                yield (last - 1) * self.size + 4 + left, last * self.size

    def _find_chain_end(self, cell: Cell, seen: Set[int]) -> Tuple[int, int]:
        """The last page of a chain, and how much of it is used."""
        left, number, room = cell.size - cell.local, cell.overflow, self.usable - 4
        while True:
            if not 0 < number <= self.count or number in seen:
                raise UnexpectedPage
            seen.add(number)
            if left <= room:
                return number, left
            left -= room
            at = (number - 1) * self.size
            number = int.from_bytes(self._data[at : at + 4], "big")


def read_varint(page: bytes, at: int) -> Tuple[int, int]:
    """A number as SQLite writes it, and where it ends. Raise IndexError."""
    value = 0
    for count in range(9):
        byte = page[at]
        at += 1
        if count == 8:
            return value << 8 | byte, at
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            break
    return value, at


def _iterate_gaps(page: bytes, head: int, usable: int) -> Iterator[Tuple[int, int]]:
    """What lies between a page's list of cells and the first of them, and in the holes between those."""
    kind, count = page[head], int.from_bytes(page[head + 3 : head + 5], "big")
    begin = head + (12 if kind in (INDEX_INTERIOR, TABLE_INTERIOR) else 8) + 2 * count
    first = int.from_bytes(page[head + 5 : head + 7], "big") or 65536
    if not begin <= first <= usable:
        raise UnexpectedPage
    yield begin, first
    hole = int.from_bytes(page[head + 1 : head + 3], "big")
    while hole:
        following, size = int.from_bytes(page[hole : hole + 2], "big"), int.from_bytes(page[hole + 2 : hole + 4], "big")
        if size < 4 or hole + size > usable or (following and following <= hole):
            raise UnexpectedPage
        yield hole + 4, hole + size
        hole = following


def may_concern(place: str, look: Look, changed: Iterable[int] | None) -> bool:
    """Whether ``look`` finds something on these pages of a database (``None``: on all), or nobody can say."""
    if os.path.getsize(place) < SMALLEST:
        return False
    with open(place, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return Pages(data).may_concern(look, changed)
        except UnexpectedPage:
            return True


def has_remains(place: str, look: Look) -> bool:
    """Whether ``look`` finds something in what is not in use. Raise ``UnexpectedPage``."""
    with open(place, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        database = Pages(data)
        return any(map(database.adapt_look(look), _iterate_batches(data, database.iterate_slack())))


def clear_unused(place: str) -> None:
    """Overwrite with zeros what is not in use. Raise Strange; then nothing was done."""
    with open(place, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for start, end in list(Pages(data).iterate_slack()):
            if data[start:end].count(0) != end - start:
                data[start:end] = bytes(end - start)


def sort_free_list(place: str) -> None:
    """Have SQLite use the free pages in the order they are in the file, so that what is built anew lies where it lay before.

    Each becomes a part of their list of its own, which is the order they are taken in. Nothing is done where that is not
    sure to be right.
    """
    with open(place, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        try:
            database = Pages(data)
            trunks, leaves = database._read_free_list()
        except UnexpectedPage:
            return
        free = sorted([number for number, _ in trunks] + leaves)
        if int.from_bytes(data[52:56], "big") or not free or len(free) != int.from_bytes(data[36:40], "big"):
            return
        for number, following in zip(free, free[1:] + [0]):
            at = (number - 1) * database.size
            data[at : at + database.size] = following.to_bytes(4, "big") + bytes(database.size - 4)
        data[32:36] = free[0].to_bytes(4, "big")


def _iterate_batches(data: mmap.mmap, parts: Iterable[Tuple[int, int]]) -> Iterator[bytes]:
    batch, weight = [], 0
    for start, end in parts:
        batch.append(data[start:end])
        weight += end - start
        if weight > BATCH:
            yield b"\0".join(batch)
            batch, weight = [], 0
    yield b"\0".join(batch)
