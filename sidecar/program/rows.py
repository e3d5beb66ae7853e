"""The rows of the cache as bytes, fast to write and read: nearly all rows of a large memory are plain files.

Plain files are stored in columns: names, digests, and nine numbers of each. Folders have a name and a mode. Everything
else (databases, links, files of several blocks) is a JSON list per line, with the block sums in a section of their own.

The sandbox's agent can write this file. So every value is checked for its type and range, and what is built from the
file is bounded by its size: a row's name cannot come without its numbers.
"""

from __future__ import annotations

import json
import re
from array import array
from itertools import repeat
from typing import Any, Iterator, List, Mapping, Optional, Tuple

from sidecar.format.index import DIR, FILE, LINK

Row = Tuple[Tuple[Any, ...], List[Any], str]
"""An entry as a plain tuple, its stat signature, and the digest of a database's first page without counters."""

SECTIONS = 8
COLUMNS = "qqqqQQqqq"
"""Mode, size, mtime and block of an entry; device, inode, size, mtime and ctime of its stat signature."""
DIGEST_BYTES = 32
LONGEST_LINE = 1 << 16
LONGEST_NUMBER = 40
MOST_MODE = 0o7777
_OTHER = [str, str, int, int, int, str, int, int, str, bool, list, str]
_DIGEST = re.compile(r"(?:[0-9a-f]{%d})?\Z" % (2 * DIGEST_BYTES))
_LEAST, _MOST, _MOST_UNSIGNED = -(1 << 63), (1 << 63) - 1, (1 << 64) - 1


def dump(rows: Mapping[str, Optional[Row]]) -> tuple[list[int], bytes]:
    """Return the sizes of the sections, and the sections joined. ``None`` as a row marks a removed path."""
    files: list[Row] = []
    folders: list[tuple[Any, ...]] = []
    lines: list[bytes] = []
    sums: list[bytes] = []
    gone: list[bytes] = []
    for path, row in rows.items():
        if row is None:
            gone.append(json.dumps(path).encode("ascii"))
        elif _is_plain(path, row):
            files.append(row)
        elif _is_folder(path, row):
            folders.append(row[0])
        else:
            (name, kind, mode, size, mtime, digest, block, own, target, database), signature, first = row
            line = [name, kind, mode, size, mtime, digest, block, len(own), target, database, signature, first]
            lines.append(json.dumps(line, separators=(",", ":")).encode("ascii"))
            sums.append(own)
    entries = list(zip(*[entry for entry, _, _ in files])) or [()] * 10
    signatures = list(zip(*[signature for _, signature, _ in files])) or [()] * 5
    numbers = (entries[2], entries[3], entries[4], entries[6], *signatures)
    sections = [
        _join_paths(list(entries[0])),
        bytes.fromhex("".join(entries[5])),
        b"".join(array(code, column).tobytes() for code, column in zip(COLUMNS, numbers)),
        _join_paths([entry[0] for entry in folders]),
        array("q", [entry[2] for entry in folders]).tobytes(),
        b"\n".join(lines),
        b"".join(sums),
        b"\n".join(gone),
    ]
    return [len(section) for section in sections], b"".join(sections)


def load(sizes: Any, body: memoryview) -> tuple[dict[str, Row], list[str]]:
    """Return the rows and the removed paths that ``dump`` wrote. Raise ValueError for anything else."""
    if type(sizes) is not list or [type(size) for size in sizes] != [int] * SECTIONS or min(sizes) < 0:
        raise ValueError("no sections")
    if sum(sizes) != len(body):
        raise ValueError("sections of another size")
    sections, at = [], 0
    for size in sizes:
        sections.append(body[at : at + size])
        at += size
    names, digests, numbers, folders, modes, others, sums, gone = sections
    rows: dict[str, Row] = dict(_iterate_files(names, digests, numbers))
    rows.update(_iterate_folders(folders, modes))
    rows.update(_iterate_others(others, sums))
    return rows, [_parse_text(line) for line in _split_lines(gone)]


def _is_plain(path: str, row: Row) -> bool:
    """Return whether a row fits into the columns: a file of one block, with numbers in range."""
    entry, signature, first = row
    _, kind, mode, size, mtime, digest, block, sums, target, database = entry
    return (
        kind == FILE
        and not (sums or target or database or first)
        and len(signature) == 5
        and type(signature[0]) is int
        and 0 <= mode <= MOST_MODE
        and 0 <= size <= _MOST
        and 0 <= block <= _MOST
        and _LEAST <= mtime <= _MOST
        and 0 <= min(signature[:3])
        and max(signature[:2]) <= _MOST_UNSIGNED
        and _LEAST <= min(signature[3:])
        and max(signature[2:]) <= _MOST
        and len(digest) == 2 * DIGEST_BYTES
        and "\0" not in path
    )


def _is_folder(path: str, row: Row) -> bool:
    """Return whether a row is a folder with nothing but a name and a mode."""
    entry, signature, first = row
    return (
        not signature and not first and "\0" not in path and entry == (path, DIR, entry[2], 0, 0, "", 0, b"", "", False)
    )


def _iterate_files(names: memoryview, digests: memoryview, numbers: memoryview) -> Iterator[tuple[str, Row]]:
    """Read the columns of plain files. Raise ValueError if they differ in length or are out of range."""
    count, rest = divmod(len(digests), DIGEST_BYTES)
    if rest or len(numbers) != 8 * len(COLUMNS) * count:
        raise ValueError("columns of several lengths")
    paths = _split_names(names, count)
    columns = []
    for number, code in enumerate(COLUMNS):
        column = array(code)
        column.frombytes(numbers[8 * count * number : 8 * count * (number + 1)])
        columns.append(column.tolist())
    mode, size, mtime, block, *signature = columns
    if count and (min(mode) < 0 or max(mode) > MOST_MODE or min(size) < 0 or min(block) < 0 or min(signature[2]) < 0):
        raise ValueError("numbers out of range")
    text = digests.hex()
    width = 2 * DIGEST_BYTES
    digest = [text[at : at + width] for at in range(0, len(text), width)]
    entries = zip(paths, repeat(FILE), mode, size, mtime, digest, block, repeat(b""), repeat(""), repeat(False))
    return zip(paths, zip(entries, map(list, zip(*signature)), repeat("")))


def _iterate_folders(names: memoryview, modes: memoryview) -> Iterator[tuple[str, Row]]:
    """Read the folders. Raise ValueError if a mode is out of range."""
    column = array("q")
    column.frombytes(modes)  # ValueError unless they are whole numbers
    if column and (min(column) < 0 or max(column) > MOST_MODE):
        raise ValueError("modes out of range")
    rest = (0, 0, "", 0, b"", "", False)
    for path, mode in zip(_split_names(names, len(column)), column):
        yield path, ((path, DIR, mode) + rest, [], "")


def _iterate_others(lines: memoryview, sums: memoryview) -> Iterator[tuple[str, Row]]:
    """Read the rows that are JSON lines. Raise ValueError if a value has a wrong type or range."""
    at = 0
    for line in _split_lines(lines):
        row = parse(line)
        if type(row) is not list or [type(value) for value in row] != _OTHER:
            raise ValueError("a row of something else")
        path, kind, mode, size, mtime, digest, block, length, target, database, signature, first = row
        if kind not in (FILE, DIR, LINK) or min(size, block, length) < 0 or not 0 <= mode <= MOST_MODE:
            raise ValueError("a row out of range")
        if not _DIGEST.match(digest):
            raise ValueError("a digest of something else")
        if at + length > len(sums) or not _is_signature(signature):
            raise ValueError("a row with other sums or signature")
        own = bytes(sums[at : at + length])
        at += length
        yield path, ((path, kind, mode, size, mtime, digest, block, own, target, database), signature, first)
    if at != len(sums):
        raise ValueError("sums of no row")


def _is_signature(signature: list[Any]) -> bool:
    """Return whether it is the stat signature of a file, of a database with its logs, or empty."""
    parts = signature if signature and type(signature[0]) is list else [signature]
    return len(parts) <= 5 and all(
        type(part) is list and len(part) in (0, 5) and all(type(number) is int for number in part) for part in parts
    )


def _join_paths(paths: list[str]) -> bytes:
    return "\0".join(paths).encode("utf-8", "surrogatepass")


def _split_names(names: memoryview, count: int) -> list[str]:
    """Split the names. They are counted first, because an empty name costs as much memory as any other. Raise
    ValueError if the number is wrong."""
    data = bytes(names)
    if count != (data.count(b"\0") + 1 if data else 0):
        raise ValueError("another number of names")
    return data.decode("utf-8", "surrogatepass").split("\0") if data else []


def _split_lines(section: memoryview) -> list[bytes]:
    return bytes(section).split(b"\n") if section else []


def _parse_text(line: bytes) -> str:
    text = parse(line)
    if type(text) is not str:
        raise ValueError("not a name")
    return text


def parse(line: bytes) -> Any:
    """Parse one JSON value. Raise ValueError, or RecursionError if it is nested too deep."""
    if len(line) > LONGEST_LINE:
        raise ValueError("a line too long")
    return json.loads(line, parse_int=_parse_number)


def _parse_number(digits: str) -> int:
    if len(digits) > LONGEST_NUMBER:  # parsing a number of thousands of digits is slow
        raise ValueError("a number too large")
    return int(digits)
