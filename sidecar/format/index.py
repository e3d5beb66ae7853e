"""The index of a pack: what the pack changes, one JSON object per line.

    {"index":1,"kind":"full"}
    {"path":"claude-mem/claude-mem.db","type":"file","size":8192,"mode":420,"mtime":1,"digest":"…","block":4096,"sums":"…"}
    {"path":"project/memory","type":"dir","mode":493}
    {"path":"project/memory/today.md","type":"link","target":"2026-11-16.md"}
    {"gone":"project/memory/old.md"}

``mtime`` is in nanoseconds. A file with ``blocks`` ("0-3,9") is carried as those blocks only, and ``sums`` are the sums
of those blocks; without ``blocks`` the whole file is carried. Empty ``blocks`` mean that only its mode or time changed.
Paths that an index does not mention stay as the earlier packs left them.

The entries of a snapshot are the indexes of its packs, applied in order.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any, BinaryIO, Dict, Iterable, Iterator, List, NamedTuple, Optional

from sidecar.format.digests import MOST_BLOCKS, SUM_BYTES, count_blocks

VERSION = 1
FILE, DIR, LINK = "file", "dir", "link"


class Entry(NamedTuple):
    """One path of a memory: its type, its metadata, and the digest and block sums of its contents."""

    path: str
    type: str
    mode: int = 0
    size: int = 0
    mtime: int = 0
    digest: str = ""
    block: int = 0
    sums: bytes = b""
    target: str = ""
    database: bool = False


TYPE, SIZE = 1, 3
"""Positions in an entry that is a plain tuple (``program/cache.py`` keeps entries as tuples)."""
ORDINARY = {"path", "type", "mode", "size", "mtime", "digest", "block"}


class Change(NamedTuple):
    """An entry as a pack carries it: whole (``blocks`` is None), or only some blocks (``entry.sums`` are the sums of
    those)."""

    entry: Entry
    blocks: Optional[List[int]] = None


class Index(NamedTuple):
    """A parsed index: its kind ("full" or "delta"), the changed entries, and the removed paths."""

    kind: str
    changes: List[Change]
    gone: List[str]


def compact(blocks: list[int]) -> str:
    """Write block numbers as runs: [0, 1, 2, 9] becomes "0-2,9"."""
    runs: list[list[int]] = []
    for number in blocks:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else "%d-%d" % (first, last) for first, last in runs)


def expand(text: str, below: int, most: int) -> list[int]:
    """Parse what ``compact`` wrote. Raise ValueError unless the numbers rise, are all below ``below``, and are at most
    ``most``."""
    blocks: list[int] = []
    for run in text.split(",") if text else []:
        first, _, last = run.partition("-")
        low, high = int(first), int(last or first)
        if low > high or high >= below or (blocks and low <= blocks[-1]) or high - low >= most - len(blocks):
            raise ValueError("block numbers out of order or range: %r" % text[:80])
        blocks.extend(range(low, high + 1))
    return blocks


def _encode_change(change: Change) -> dict[str, Any]:
    """Return the JSON object of a changed entry, with only the fields that its type has."""
    entry, blocks = change
    line: Dict[str, Any] = {"path": entry.path, "type": entry.type}
    if entry.type == LINK:
        line["target"] = entry.target
        return line
    line["mode"] = entry.mode
    if entry.type == DIR:
        return line
    line.update(size=entry.size, mtime=entry.mtime, digest=entry.digest, block=entry.block)
    if entry.database:
        line["database"] = True
    if blocks is not None:
        line["blocks"] = compact(blocks)
    if entry.sums:
        line["sums"] = base64.b64encode(entry.sums).decode()
    return line


def dump(index: Index) -> Iterator[bytes]:
    """Yield the lines of an index. Names that are not UTF-8 are written as escaped surrogates."""
    encode = json.JSONEncoder(separators=(",", ":")).encode
    yield (encode({"index": VERSION, "kind": index.kind}) + "\n").encode()
    for change in index.changes:
        yield (encode(_encode_change(change)) + "\n").encode()
    for path in index.gone:
        yield (encode({"gone": path}) + "\n").encode()


def _pop_typed(line: dict[str, Any], key: str, kind: type, default: Any) -> Any:
    """Remove a field from a line and return it. Raise ValueError if it has another type or is negative (``mtime`` may be)."""
    value: Any = line.pop(key, default)
    if type(value) is not kind or (isinstance(value, int) and value < 0 and key != "mtime"):
        raise ValueError("index line has a wrong %r: %.80r" % (key, value))
    return value


def _parse_plain_file(line: dict[str, Any]) -> Change | None:
    """Parse a file carried whole in one block, the fast path for nearly all lines of a large memory; ``None`` if it is
    not one."""
    if line.keys() != ORDINARY or line["type"] != FILE:
        return None
    path, mode, size, mtime = line["path"], line["mode"], line["size"], line["mtime"]
    digest, block = line["digest"], line["block"]
    if (
        type(path) is type(digest) is str
        and type(mode) is type(size) is type(mtime) is type(block) is int
        and not (mode < 0 or size < 0 or block < 0)
    ):
        return Change(Entry(path, FILE, mode, size, mtime, digest, block))
    return None


def _parse_change(line: dict[str, Any]) -> Change:
    """Parse any other line about a path. Raise ValueError if a field is wrong or unknown."""
    kind = _pop_typed(line, "type", str, "")
    if kind not in (FILE, DIR, LINK):
        raise ValueError("index line has an unknown type: %.80r" % kind)
    blocks_text = line.pop("blocks", None)
    entry = Entry(
        path=_pop_typed(line, "path", str, ""),
        type=kind,
        mode=_pop_typed(line, "mode", int, 0),
        size=_pop_typed(line, "size", int, 0),
        mtime=_pop_typed(line, "mtime", int, 0),
        digest=_pop_typed(line, "digest", str, ""),
        block=_pop_typed(line, "block", int, 0),
        sums=base64.b64decode(_pop_typed(line, "sums", str, ""), validate=True),
        target=_pop_typed(line, "target", str, ""),
        database=_pop_typed(line, "database", bool, False),
    )
    if line:
        raise ValueError("index line has unknown keys: %.80r" % sorted(line))
    if blocks_text is None:
        return Change(entry)
    if type(blocks_text) is not str or kind != FILE or entry.block < 1:
        raise ValueError("index line has wrong blocks: %.80r" % (blocks_text,))
    # Each carried block has a sum, so the number of sums bounds the numbers that a short text such as "0-262143"
    # expands to: a hostile index cannot make this allocate more than its own size justifies.
    count = min((entry.size + entry.block - 1) // entry.block, MOST_BLOCKS)
    blocks = expand(blocks_text, count, len(entry.sums) // SUM_BYTES)
    return Change(entry, blocks)


def load(lines: Iterable[bytes]) -> Index:
    """Parse an index. Raise ValueError for anything that is not exactly the format described above."""
    rows, decode = iter(lines), json.JSONDecoder().decode
    head = json.loads(next(rows, b"null"))
    if type(head) is not dict or head.get("index") != VERSION or head.get("kind") not in ("full", "delta"):
        raise ValueError("not an index of version %d: %.80r" % (VERSION, head))
    changes: list[Change] = []
    gone: list[str] = []
    for row in rows:
        line = decode(row.decode("utf-8"))
        if type(line) is not dict:
            raise ValueError("index line is not an object: %.80r" % (line,))
        if "gone" in line:
            gone.append(_pop_typed(line, "gone", str, ""))
        else:
            changes.append(_parse_plain_file(line) or _parse_change(line))
    return Index(head["kind"], changes, gone)


def write(target: BinaryIO, index: Index) -> None:
    """Append a compressed index to a file. It is written line by line, because an index can be large."""
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    for line in dump(index):
        target.write(packer.compress(line))
    target.write(packer.flush())


def read(source: BinaryIO) -> Index:
    """Read a compressed index. Raise ValueError if it is not valid or not complete."""
    import gzip
    import io

    try:
        with io.BufferedReader(gzip.GzipFile(fileobj=source, mode="rb"), 1 << 18) as lines:
            return load(lines)
    except (EOFError, OSError, zlib.error) as problem:
        raise ValueError("not a whole index: %s" % problem) from None


def merge_indexes(indexes: Iterable[Index]) -> dict[str, Entry]:
    """Return the entries of a snapshot, sums included. Raise ValueError if a pack changes something that the packs
    before it do not have."""
    entries: dict[str, Entry] = {}
    for number, index in enumerate(indexes):
        if (index.kind == "full") != (number == 0):
            raise ValueError("the first pack, and only the first, must be full")
        apply_index(entries, index)
    return entries


def apply_index(entries: dict[str, Entry], index: Index) -> None:
    """Apply one index to the entries of the packs before it, in place. Raise ValueError if it does not fit them."""
    for path in index.gone:
        if entries.pop(path, None) is None:
            raise ValueError("an index removes %r, which was not there" % path)
    for change in index.changes:
        entry, blocks = change
        entries[entry.path] = entry if blocks is None else _patch_entry(entries.get(entry.path), change)


def _patch_entry(old: Entry | None, change: Change) -> Entry:
    """Apply changed blocks to an entry: take the carried sums, keep the others. Raise ValueError if they do not fit."""
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
    # The file may have grown or shrunk: cut the old sums, or extend them with zeros that carried sums must then
    # replace.
    sums = bytearray(old.sums[: count * SUM_BYTES])
    sums.extend(bytes(count * SUM_BYTES - len(sums)))
    for number, block in enumerate(blocks):
        sums[block * SUM_BYTES : (block + 1) * SUM_BYTES] = entry.sums[number * SUM_BYTES : (number + 1) * SUM_BYTES]
    return entry._replace(sums=bytes(sums))


def count_files(entries: dict[str, Entry]) -> tuple[int, int]:
    """Return the number of files and of the bytes in them."""
    files = [entry for entry in entries.values() if entry.type == FILE]
    return len(files), sum(entry.size for entry in files)


def list_folders(entries: dict[str, Entry]) -> list[Entry]:
    """Return the entries that are folders."""
    return [entry for entry in entries.values() if entry.type == DIR]
