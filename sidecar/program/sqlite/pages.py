"""A SQLite database as pages: find text without querying every row, and overwrite unused bytes.

A value that does not fit into a page continues in a chain of overflow pages, so a text may be cut at a page's end; the
chain is joined again here. Given the numbers of the changed pages, only those and the chains that begin there are read.

The rules come from https://www.sqlite.org/fileformat2.html, cited below by section: 1.3 The Database Header, 1.4 The
Lock-Byte Page, 1.5 The Freelist, 1.6 B-tree Pages, 1.7 Cell Payload Overflow Pages, 1.8 Pointer Map or Ptrmap Pages,
2.1 Record Format.
All integers are big-endian, and pages are numbered from 1. Anything that contradicts them raises ``UnexpectedPage``
before a byte is changed.
"""

from __future__ import annotations

import mmap
import os
import struct
from bisect import bisect_left, bisect_right
from typing import Callable, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple

# The page types of section 1.6: the first byte of a b-tree page.
BTREE = {2, 5, 10, 13}
INDEX_INTERIOR, TABLE_INTERIOR, INDEX_LEAF, TABLE_LEAF = 2, 5, 10, 13
BATCH = 1 << 20
WINDOW = 16 << 20
"""Mapped memory is given back whenever so much of the file was read, or the whole file would count as this program's."""
# The high byte of a page number must stay below 2: other pages begin with a page number (an overflow page with the next
# of its chain, section 1.7), and the first byte tells them from b-tree pages.
MOST_PAGES = (1 << 25) - 1
"""With more pages, an overflow page could look like a b-tree page."""
SMALLEST = 512
# The page that contains this byte is used for locks and never for data (section 1.4).
PENDING_BYTE = 1 << 30
# Text encodings other than UTF-8, by the number at offset 56 (section 1.3.13).
WIDE = {2: "utf-16-le", 3: "utf-16-be"}


Search = Callable[[bytes], Iterator[Tuple[int, bool]]]
"""Yields where in some bytes there are traces of what is looked for, and whether it is there. Values stand in a page without
anything between them, so it may be there in a value and seem not to be in the page; but its traces are in both."""


class UnexpectedPage(Exception):
    """The pages are not what the file format allows: use SQLite itself instead."""


class Cell(NamedTuple):
    """The payload of a cell that continues in overflow pages: where it starts, how much is on the page, and its size."""

    start: int
    local: int
    size: int
    overflow: int
    """The first overflow page; 0 if there is none."""


class _Piece(NamedTuple):
    """Bytes that are looked through: a page, or a whole record (then ``number`` is 0). ``idle``: it contains no value, or
    only a part of one."""

    data: bytes
    number: int
    idle: bool


# The sizes of values by their types, from 0 to 11 (section 2.1); 10 and 11 are not used.
_SIZES = (0, 1, 2, 3, 4, 6, 8, 8, 0, 0, 0, 0)


class Pages:
    """The pages of a database copy that no other process has open. Raise UnexpectedPage if the file's header is not valid."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        # Section 1.3: page size at 16 (1 stands for 65536), bytes reserved at the end of each page at 20, text encoding
        # at 56.
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
        """Return a page's bytes."""
        return self._data[(number - 1) * self.size : number * self.size]

    def give_back(self, number: int) -> None:
        """Give back mapped memory now and then, while pages are read one after the other. Nothing is lost: the file's
        bytes stay in the system's cache."""
        if number % (WINDOW // self.size) == 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._data.madvise(mmap.MADV_DONTNEED)

    def may_concern(self, search: Search, changed: Iterable[int] | None) -> bool:
        """Return whether something is found on these pages (``None``: on all), or if that cannot be determined."""
        numbers = range(1, self.count + 1) if changed is None else changed
        batch: List[_Piece] = []
        idle, seen = self._list_unused_pages(), set()  # type: Tuple[Set[int], Set[int]]
        others: List[int] = []
        weight = 0
        for number in numbers:
            self.give_back(number)
            page = self.read_page(number)
            # The first page begins with the database header of 100 bytes; its b-tree header follows.
            if number not in idle and page[100 if number == 1 else 0] not in BTREE:
                others.append(number)
                continue
            pieces = [_Piece(page, number, True)] if number in idle else self._iterate_pieces(number, page, seen)
            for piece in pieces:
                batch.append(piece)
                weight += len(piece.data)
            if weight > BATCH:
                if self._concerns(search, batch):
                    return True
                batch, weight = [], 0
        for number in others:
            if number in seen:
                continue
            if changed is not None:
                return True  # part of a value that begins on an unchanged page, so it cannot be read alone
            batch.append(_Piece(self.read_page(number), number, True))
        return self._concerns(search, batch)

    def has_remains(self, search: Search) -> bool:
        """Return whether something is found in unused bytes. Raise UnexpectedPage."""
        if any(self._find(search, data)[0] for data in _iterate_batches(self._data, self.iterate_slack())):
            return True
        for number in self._read_free_list()[1]:
            self.give_back(number)
            if 0 < number <= self.count and self._concerns(search, [_Piece(self.read_page(number), number, True)]):
                return True
        return False

    def _concerns(self, search: Search, batch: List[_Piece]) -> bool:
        """Return whether something is found in these pieces: in their bytes, gaps included, or in one of their values."""
        found, traces = self._find(search, b"\0".join([piece.data for piece in batch]))
        if found or traces == []:
            return found
        begin = 0
        for piece in batch:
            end = begin + len(piece.data)
            near = (
                None
                if traces is None
                else [at - begin for at in traces[bisect_left(traces, begin) : bisect_left(traces, end)]]
            )
            begin = end + 1
            for record in self._iterate_records(piece, near) if near != [] else ():
                if any(there for value in self._split_record(record) for _, there in search(value)):
                    return True
        return False

    def _find(self, search: Search, data: bytes) -> Tuple[bool, Optional[List[int]]]:
        """Return whether something is found in these bytes, and where there are traces; ``None``: anywhere."""
        traces: Set[int] = set()
        for at, found in search(data):
            if found:
                return True, []
            traces.add(at)
        if not self._encoding:
            return False, sorted(traces)
        # UTF-16 text may begin at any byte, and blobs are not encoded. Where a trace is in the one says nothing of the other.
        wide = [data[at:].decode(self._encoding, "replace").encode() for at in (0, 1)]
        told = [there for text in wide for _, there in search(text)]
        return any(told), None if traces or told else []

    def find_rowids(self, changed: Iterable[int]) -> Optional[Set[int]]:
        """Return the rowids on these pages, of any table, and of the values that continue on them; ``None`` if one of
        the pages is part of a value that begins on another."""
        idle = self._list_unused_pages()
        found: Set[int] = set()
        seen: Set[int] = set()
        others: List[int] = []
        for number in changed:
            if number in idle:
                continue
            page = self.read_page(number)
            head = 100 if number == 1 else 0
            if page[head] not in BTREE:
                others.append(number)
                continue
            if page[head] == TABLE_LEAF:
                found.update(_iterate_rowids(page, head))
            for cell in self.iterate_cells(number, page):
                if cell.overflow:
                    for _ in self._iterate_chain(page, cell, seen):
                        pass
        return found if seen.issuperset(others) else None

    def _iterate_pieces(self, number: int, page: bytes, seen: Set[int]) -> Iterator[_Piece]:
        """Yield a page, and the joined records that continue in overflow pages."""
        yield _Piece(page, number, False)
        for cell in self.iterate_cells(number, page):
            if cell.overflow:
                yield _Piece(b"".join(self._iterate_chain(page, cell, seen)), 0, False)

    def _iterate_records(self, piece: _Piece, near: Optional[List[int]]) -> Iterator[bytes]:
        """Yield the records in the cells of a page, or what of them is on it; of those only in which one of the places
        ``near`` may be (``None``: all). Raise UnexpectedPage."""
        if not piece.number:
            yield piece.data
            return
        page, head = piece.data, 100 if piece.number == 1 else 0
        kind = page[head]
        if kind not in (INDEX_INTERIOR, INDEX_LEAF, TABLE_LEAF):
            return
        count = int.from_bytes(page[head + 3 : head + 5], "big")
        pointers, skip = (head + 12, 4) if kind == INDEX_INTERIOR else (head + 8, 0)
        try:
            cells = sorted(struct.unpack_from(">%dH" % count, page, pointers))
            if near is not None:  # cells do not overlap: it is in the last one that begins before it, or in none
                cells = [cells[place - 1] for place in sorted({bisect_right(cells, at) for at in near}) if place]
            for cell in cells:
                size, at = read_varint(page, cell + skip)
                if kind == TABLE_LEAF:
                    _, at = read_varint(page, at)
                yield page[at : at + size]
        except (IndexError, struct.error):
            if not piece.idle:
                raise UnexpectedPage from None

    def _split_record(self, record: bytes) -> List[bytes]:
        """Return the texts and blobs of a record, texts as UTF-8.

        A record begins with the size of its header and the types of its values, all varints (section 2.1). What of it is
        in other pages is missing, or all if this is no record.
        """
        values: List[bytes] = []
        try:
            start, at = read_varint(record, 0)
            end = start
            while at < end:
                kind, at = read_varint(record, at)
                size = (kind - 12) // 2 if kind >= 12 else _SIZES[kind]
                value = record[start : start + size] if kind >= 12 else b""
                if value:
                    wide = self._encoding and kind % 2
                    values.append(value.decode(self._encoding, "replace").encode() if wide else value)
                start += size
        except IndexError:
            pass
        return values

    def iterate_cells(self, number: int, page: bytes) -> Iterator[Cell]:
        """Yield the cells of a b-tree page that continue in overflow pages. Raise UnexpectedPage."""
        # B-tree page header (section 1.6): type at 0, first freeblock at 1, number of cells at 3, start of cell
        # contents at 5. The cell pointer array follows after 8 bytes, or 12 on interior pages, which have a right-most
        # child pointer.
        head = 100 if number == 1 else 0
        kind = page[head]
        if kind == TABLE_INTERIOR:
            return
        count = int.from_bytes(page[head + 3 : head + 5], "big")
        pointers = head + (12 if kind == INDEX_INTERIOR else 8)
        usable = self.usable
        # How much of a payload stays on the page, with U the usable size: at most X = U-35 for table leaves and
        # ((U-12)*64/255)-23 for indexes. If it is larger, K = M+((P-M)%(U-4)) bytes with M = ((U-12)*32/255)-23, or M
        # if K is over X (section 1.6).
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
        """Yield the parts of a value along its overflow chain: each page has the number of the next, then data (section
        1.7). Raise UnexpectedPage if the chain leaves the file or meets another."""
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
        """Return the trunk pages of the freelist, each with the number of leaves it lists, and the leaf pages.

        Section 1.5: the header has the first trunk page at offset 32. A trunk page has the number of the next trunk,
        the number of its leaves, and their page numbers. Raise UnexpectedPage.
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
        """Return the pages that contain no value: freelist pages, pointer-map pages, and the lock-byte page."""
        trunks, leaves = self._read_free_list()
        unused = PENDING_BYTE // self.size + 1
        idle = {number for number, _ in trunks} | set(leaves) | {unused}
        # Offset 52 is not zero in auto-vacuum databases (section 1.3.12). Those have a pointer-map page as page 2 and
        # after every J = U/5 pages that it describes (section 1.8); one that would be the lock-byte page is the next
        # one.
        if int.from_bytes(self._data[52:56], "big"):
            maps = range(2, self.count + 1, self.usable // 5 + 1)
            idle.update(number + (number == unused) for number in maps)
        return idle

    def iterate_slack(self) -> Iterator[Tuple[int, int]]:
        """Yield every range of the file that is unused but may still contain old data. Raise UnexpectedPage."""
        trunks, leaves = self._read_free_list()
        idle = self._list_unused_pages()
        # Of a trunk page the part after its list of leaves is unused; leaf pages are unused as a whole (section 1.5).
        # The ranges are sure to be unused only because the lists are taken from the freelist itself, never guessed.
        for number, count in trunks:
            yield (number - 1) * self.size + 8 + 4 * count, number * self.size
        for number in leaves:
            if 0 < number <= self.count:
                yield (number - 1) * self.size, number * self.size
        seen: Set[int] = set()
        for number in range(1, self.count + 1):
            self.give_back(number)
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
        """Return the last page of an overflow chain, and how many bytes of it are used. Raise UnexpectedPage."""
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
    """Return a SQLite varint (section 1.6: 7 bits a byte, at most nine bytes, the ninth with 8 bits) and where it ends.
    Raise IndexError."""
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


def _iterate_rowids(page: bytes, head: int) -> Iterator[int]:
    """Yield the rowids of a table leaf page. A cell begins with the size of its payload and the rowid, both varints
    (section 1.6); the rowid is a signed number of 64 bits. Raise UnexpectedPage."""
    count = int.from_bytes(page[head + 3 : head + 5], "big")
    try:
        for place in range(head + 8, head + 8 + 2 * count, 2):
            _, at = read_varint(page, page[place] << 8 | page[place + 1])
            rowid = read_varint(page, at)[0]
            yield rowid - (1 << 64) if rowid >> 63 else rowid
    except IndexError:
        raise UnexpectedPage from None


def _iterate_gaps(page: bytes, head: int, usable: int) -> Iterator[Tuple[int, int]]:
    """Yield the unused ranges of a b-tree page: between the cell pointers and the first cell, and in the freeblocks.
    Raise UnexpectedPage."""
    kind, count = page[head], int.from_bytes(page[head + 3 : head + 5], "big")
    begin = head + (12 if kind in (INDEX_INTERIOR, TABLE_INTERIOR) else 8) + 2 * count
    # Start of the cell contents; 0 stands for 65536 (section 1.6).
    first = int.from_bytes(page[head + 5 : head + 7], "big") or 65536
    if not begin <= first <= usable:
        raise UnexpectedPage
    yield begin, first
    # Freeblocks form a chain in rising order: two bytes for the next one, two for the size with these four bytes. The
    # four bytes stay, so that the chain is intact (section 1.6).
    hole = int.from_bytes(page[head + 1 : head + 3], "big")
    while hole:
        following, size = int.from_bytes(page[hole : hole + 2], "big"), int.from_bytes(page[hole + 2 : hole + 4], "big")
        if size < 4 or hole + size > usable or (following and following <= hole):
            raise UnexpectedPage
        yield hole + 4, hole + size
        hole = following


def may_concern(place: str, search: Search, changed: Iterable[int] | None) -> bool:
    """Return whether something is found on these pages of a database (``None``: on all), or if that cannot be
    determined."""
    if os.path.getsize(place) < SMALLEST:
        return False
    with open(place, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return Pages(data).may_concern(search, changed)
        except UnexpectedPage:
            return True


def find_rowids(place: str, changed: Iterable[int]) -> Optional[Set[int]]:
    """Return the rowids of all rows on these pages of a database; ``None`` if that cannot be told."""
    with open(place, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return Pages(data).find_rowids(changed)
        except UnexpectedPage:
            return None


def has_remains(place: str, search: Search) -> bool:
    """Return whether something is found in the unused bytes of a database. Raise UnexpectedPage."""
    with open(place, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return Pages(data).has_remains(search)


def clear_unused(place: str) -> None:
    """Overwrite unused bytes with zeros. Raise UnexpectedPage, with nothing changed, if the pages are not as expected."""
    with open(place, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        # A list, so that every page was validated before the first write.
        for start, end in list(Pages(data).iterate_slack()):
            if data[start:end].count(0) != end - start:
                data[start:end] = bytes(end - start)


def sort_free_list(place: str) -> None:
    """Make SQLite use the free pages in file order, so that a rebuilt index ends up where it was before and few pages
    change.

    Each free page becomes a trunk page without leaves, which makes the freelist (section 1.5) a chain, and SQLite takes
    pages from its front. Nothing is done if that might be wrong: for auto-vacuum databases, whose pointer maps would
    have to follow, and if the list does not have the length that the header says.
    """
    with open(place, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        try:
            database = Pages(data)
            trunks, leaves = database._read_free_list()
        except UnexpectedPage:
            return
        free = sorted([number for number, _ in trunks] + leaves)
        # Offset 52: auto-vacuum; offset 36: the number of freelist pages.
        if int.from_bytes(data[52:56], "big") or not free or len(free) != int.from_bytes(data[36:40], "big"):
            return
        for number, following in zip(free, free[1:] + [0]):
            at = (number - 1) * database.size
            data[at : at + database.size] = following.to_bytes(4, "big") + bytes(database.size - 4)
        data[32:36] = free[0].to_bytes(4, "big")


def _iterate_batches(data: mmap.mmap, parts: Iterable[Tuple[int, int]]) -> Iterator[bytes]:
    """Join ranges of the file into batches of about 1 MiB."""
    batch, weight = [], 0
    for start, end in parts:
        batch.append(data[start:end])
        weight += end - start
        if weight > BATCH:
            yield b"\0".join(batch)
            batch, weight = [], 0
    yield b"\0".join(batch)
