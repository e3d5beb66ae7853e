"""Read a tarball as a stream without trusting anything it says.

``tarfile`` is not made for hostile input: its streams keep "reading" for as long as a header says, even when no more
bytes come; extension headers of any size are read into memory and copied for each member; and a damaged header is taken
for the end of the archive. So ``tarfile`` only parses single headers here. Every size that a header announces is
compared with the bytes that may still come before anything is read, and bytes that do not come are an error. The header
types are those of POSIX pax (``XHDTYPE``, ``XGLTYPE``) and GNU tar (long names).
"""

from __future__ import annotations

import tarfile
from typing import BinaryIO, Iterator

BLOCK = tarfile.BLOCKSIZE
CHUNK = 1 << 20
# Extension headers are read into memory, so each is bounded, and so are their number and the records in them.
LONGEST_HEADER = 16 << 10
HEADER_ALLOWANCE = 16 << 10
"""Bytes allowed for each member besides its contents, where the size of a pack is limited."""
MOST_HEADERS = 8
"""Extension headers allowed before one member; honest writers need two or three."""
MOST_RECORDS = 1000
LONGEST_SIZE = 20
"""Digits of a size. A number that needs more than 64 bits is not a number of bytes."""

OWN = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
LONG = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


class BadTarball(ValueError):
    """The stream is not a complete, valid tarball."""


class TooLarge(BadTarball):
    """A header announces more than is allowed."""


class SparseMember(BadTarball):
    """A sparse member says where in a file each piece belongs. The sidecar never writes any, so none is accepted."""


class MemberContents:
    """The bytes of one member. They must be read before the next member is asked for."""

    def __init__(self, tarball: Tarball, size: int) -> None:
        self._tarball = tarball
        self._left = size

    def read(self, size: int = -1) -> bytes:
        """Return ``size`` bytes, fewer only at the member's end. Raise BadTarball if the stream ends before."""
        wanted = self._left if size < 0 else min(size, self._left)
        self._left -= wanted
        return self._tarball.take(wanted)


class Tarball:
    """Iterate over the members of a tarball, each with its contents.

    ``most`` is how many bytes there may be in all, headers included. Iterating raises BadTarball, TooLarge or
    SparseMember.
    """

    def __init__(self, stream: BinaryIO, most: int, longest_header: int = LONGEST_HEADER) -> None:
        self._stream = stream
        self._left = most
        self._longest_header = longest_header
        self._common: dict[str, str] = {}

    def __iter__(self) -> Iterator[tuple[tarfile.TarInfo, MemberContents]]:
        while True:
            member = self._read_member()
            if member is None:
                return
            # The rule of tarfile: links, folders and devices have no contents, whatever their size field says.
            has = member.isreg() or member.type not in tarfile.SUPPORTED_TYPES
            size = member.size if has else 0
            self._check_size(member, size)
            contents = MemberContents(self, size)
            yield member, contents
            while contents.read(CHUNK):
                pass
            self.take(-size % BLOCK)

    def take(self, size: int) -> bytes:
        """Return exactly ``size`` bytes of the stream. Raise BadTarball if it ends before, TooLarge if the allowance is
        used up."""
        if size > self._left:
            raise TooLarge("it holds more than it may")
        data = self._stream.read(size) if size else b""
        if len(data) < size:
            pieces = [data]
            missing = size - len(data)
            while missing:
                piece = self._stream.read(missing)
                if not piece:
                    raise BadTarball("it ends before it should")
                pieces.append(piece)
                missing -= len(piece)
            data = b"".join(pieces)
        self._left -= size
        return data

    def _read_member(self) -> tarfile.TarInfo | None:
        """Return the next member with its extension headers applied; ``None`` at the end-of-archive block."""
        own: dict[str, str] = {}
        for _ in range(MOST_HEADERS + 1):
            block = self.take(BLOCK)
            if block.count(0) == BLOCK:
                if own:
                    raise BadTarball("it ends between a header and its member")
                return None
            try:
                member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            except tarfile.HeaderError as problem:
                raise BadTarball("it has a damaged header: %s" % problem) from None
            if member.type in OWN:
                own.update(_parse_records(self._read_extension(member)))
            elif member.type == tarfile.XGLTYPE:
                self._common.update(_parse_records(self._read_extension(member)))
                if sum(len(key) + len(value) for key, value in self._common.items()) > self._longest_header:
                    raise TooLarge("its headers for all members are too large")
            elif member.type in LONG:
                key = "path" if member.type == tarfile.GNUTYPE_LONGNAME else "linkpath"
                own[key] = _decode_text(self._read_extension(member).partition(b"\0")[0])
            else:
                return self._complete_member(member, own)
        raise TooLarge("it has more headers about one member than any has")

    def _read_extension(self, member: tarfile.TarInfo) -> bytes:
        """Read the contents of an extension header, padded to whole blocks. Raise TooLarge if it is over its bound."""
        if member.size > self._longest_header:
            raise TooLarge("an extension header of it is too large")
        self._check_size(member, member.size)
        return self.take(member.size + -member.size % BLOCK)[: member.size]

    def _complete_member(self, member: tarfile.TarInfo, own: dict[str, str]) -> tarfile.TarInfo:
        """Apply the extension headers to a member. Raise SparseMember for a sparse one."""
        said = {**self._common, **own} if own else self._common
        if member.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse") for key in said):
            raise SparseMember("%r is a sparse member, which is not read" % member.name[:200])
        # In pax an empty value takes back what an earlier header said, so it is ignored.
        if said.get("path"):
            member.name = said["path"]
        if said.get("linkpath"):
            member.linkname = said["linkpath"]
        if said.get("size"):
            member.size = _parse_size(said["size"])
        if said.get("mtime"):
            member.mtime = _parse_time(said["mtime"])
        if member.isdir():
            member.name = member.name.rstrip("/")
        member.pax_headers = said
        return member

    def _check_size(self, member: tarfile.TarInfo, size: int) -> None:
        """Raise BadTarball for a negative size, TooLarge if the contents exceed what may still come."""
        if member.size < 0:
            raise BadTarball("%r has a negative size" % member.name[:200])
        if size > self._left:
            raise TooLarge("%r is said to have %d bytes, more than there may be in all" % (member.name[:200], size))


def _parse_records(data: bytes) -> dict[str, str]:
    """Parse the records of a pax header: ``LENGTH KEY=VALUE`` and a newline each. The length counts the whole record."""
    records: dict[str, str] = {}
    at = count = 0
    while at < len(data):
        digits = data[at : at + LONGEST_SIZE].partition(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        key, equals, value = data[at + len(digits) + 1 : at + length].partition(b"=")
        if at + length > len(data) or not key or not equals or not value.endswith(b"\n"):
            raise BadTarball("it has a pax header that is none")
        records[_decode_text(key)] = _decode_text(value[:-1])
        at += length
        count += 1
        if count > MOST_RECORDS:
            raise TooLarge("a pax header of it has more records than any member needs")
    return records


def _decode_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _parse_size(text: str) -> int:
    # int() also accepts digits of other scripts, blanks and underscores. Another tar reader would then see another
    # size, and another start of the next header.
    if not (text.isascii() and text.isdecimal() and len(text) <= LONGEST_SIZE):
        raise BadTarball("a member of it has a size that is no number")
    return int(text)


def _parse_time(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
