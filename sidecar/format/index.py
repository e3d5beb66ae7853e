"""The index of a pack: what it changes, one JSON object a line.

    {"index":1,"kind":"full"}
    {"path":"claude-mem/claude-mem.db","type":"file","size":8192,"mode":420,"mtime":1,"digest":"…","block":4096,"sums":"…"}
    {"path":"project/memory","type":"dir","mode":493}
    {"path":"project/memory/today.md","type":"link","target":"2026-11-16.md"}
    {"gone":"project/memory/old.md"}

``mtime`` is in nanoseconds. A file with ``blocks`` ("0-3,9") is carried as those blocks alone, ``sums`` being theirs; without,
it is carried whole. ``blocks`` may be empty: only its mode or time changed. Everything else stays as the packs before said.

A snapshot is its packs' indexes, laid one over the other.
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
    """One path of a memory: what it is and what its contents are called."""

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
"""Where they are in an entry that is a plain tuple."""
ORDINARY = {"path", "type", "mode", "size", "mtime", "digest", "block"}


class Change(NamedTuple):
    """An entry as a pack carries it: whole (``blocks`` is None) or as some of its blocks (``entry.sums`` are theirs)."""

    entry: Entry
    blocks: Optional[List[int]] = None


class Index(NamedTuple):
    kind: str
    changes: List[Change]
    gone: List[str]


def compact(blocks: list[int]) -> str:
    """[0, 1, 2, 9] -> "0-2,9"."""
    runs: list[list[int]] = []
    for number in blocks:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else "%d-%d" % (first, last) for first, last in runs)


def expand(text: str, below: int, most: int) -> list[int]:
    """The inverse of ``compact``. Raise ValueError unless there are at most ``most`` numbers, rising, all ``below``."""
    blocks: list[int] = []
    for run in text.split(",") if text else []:
        first, _, last = run.partition("-")
        low, high = int(first), int(last or first)
        if low > high or high >= below or (blocks and low <= blocks[-1]) or high - low >= most - len(blocks):
            raise ValueError("block numbers out of order or range: %r" % text[:80])
        blocks.extend(range(low, high + 1))
    return blocks


def _encode_change(change: Change) -> dict[str, Any]:
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
    """The index as lines. Names that are not UTF-8 travel as escaped surrogates."""
    encode = json.JSONEncoder(separators=(",", ":")).encode
    yield (encode({"index": VERSION, "kind": index.kind}) + "\n").encode()
    for change in index.changes:
        yield (encode(_encode_change(change)) + "\n").encode()
    for path in index.gone:
        yield (encode({"gone": path}) + "\n").encode()


def _pop_typed(line: dict[str, Any], key: str, kind: type, default: Any) -> Any:
    value: Any = line.pop(key, default)
    if type(value) is not kind or (isinstance(value, int) and value < 0 and key != "mtime"):
        raise ValueError("index line has a wrong %r: %.80r" % (key, value))
    return value


def _parse_plain_file(line: dict[str, Any]) -> Change | None:
    """A file carried whole in one block, as nearly all lines of a large memory are; ``None`` when it is anything else."""
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
    # A carried block has a sum: a short text can then not stand for more numbers than there are sums.
    count = min((entry.size + entry.block - 1) // entry.block, MOST_BLOCKS)
    blocks = expand(blocks_text, count, len(entry.sums) // SUM_BYTES)
    return Change(entry, blocks)


def load(lines: Iterable[bytes]) -> Index:
    """Parse an index. Raise ValueError for anything that is not exactly the format above."""
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
    """Append an index to a file, compressed; line by line, since an index can be large."""
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    for line in dump(index):
        target.write(packer.compress(line))
    target.write(packer.flush())


def read(source: BinaryIO) -> Index:
    """Read a compressed index. Raise ValueError when it is not one."""
    import gzip
    import io

    try:
        with io.BufferedReader(gzip.GzipFile(fileobj=source, mode="rb"), 1 << 18) as lines:
            return load(lines)
    except (EOFError, OSError, zlib.error) as problem:
        raise ValueError("not a whole index: %s" % problem) from None


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
