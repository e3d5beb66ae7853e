"""Read JSON lists, JSON lines, and files that are one record as a whole."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO

from sidecar.layouts.sources import RecordSpec
from sidecar.records.columns import build_row_record, identify
from sidecar.records.files import MemoryFile, Unreadable
from sidecar.records.record import TEXT_BYTES, Item, Record, clean_record, digest_contents

LARGEST_LIST = 32 << 20
LARGEST_DOCUMENT = 8 << 20
"""A document with a list somewhere in it is held in memory as a whole."""
LONGEST_LINE = 4 << 20

_BLANKS = re.compile(r"[ \t\r\n]*")
_TITLE = re.compile(r"""(?mi)^\s*(?:title|name)\s*:\s*["']?(.+?)["']?\s*$|^#{1,6}[ \t]+(.+?)[ \t#]*$""")


def read_list(file: MemoryFile, spec: RecordSpec) -> Iterator[Item]:
    """Yield the items of a JSON list. Raise ``Unreadable``, possibly after some items."""
    for value in _iterate_values(file, spec):
        yield _make_item(spec, file, value)


def read_rest(file: MemoryFile, spec: RecordSpec) -> bytes:
    """Return a digest of what a JSON document holds beside its list; empty if it is a list. Raise ``Unreadable``."""
    text = _read_text(file)
    if text[_skip_blanks(text, 0) :][:1] == "[":
        return b""
    document = _parse_document(text)
    return digest_contents(
        _encode({key: value for key, value in document.items() if key != _find_list(document, spec)})
    )


def read_lines(file: MemoryFile, spec: RecordSpec, tail: int = 0) -> Iterator[Item]:
    """Yield each line of JSON lines; with ``tail``, only those that begin in so many bytes at the end. One that is not
    JSON, or too long, is known by its bytes alone."""
    with file.open() as stream:
        start = stream.seek(0, os.SEEK_END) - tail if tail else 0
        stream.seek(max(0, start - 1))
        if start > 0:
            while (skipped := stream.readline(LONGEST_LINE)) and not skipped.endswith(b"\n"):  # it began before
                pass
        for line in _iterate_lines(stream):
            yield _make_item(spec, file, _parse_line(line), line)


def count_lines(stream: BinaryIO) -> int:
    """Return how many items ``read_lines`` would yield of what is left of a stream."""
    return sum(1 for _ in _iterate_lines(stream))


def _iterate_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines that are not empty. Of one that is too long only the beginning counts."""
    while line := stream.readline(LONGEST_LINE):
        whole = line.endswith(b"\n") or len(line) < LONGEST_LINE
        while not whole:
            more = stream.readline(LONGEST_LINE)
            whole = more.endswith(b"\n") or len(more) < LONGEST_LINE
        line = line.strip()
        if line:
            yield line


def read_whole(file: MemoryFile, spec: RecordSpec) -> Iterator[Item]:
    """Yield the file as one record, identified by its path."""
    with file.open() as stream:
        data = stream.read(LARGEST_LIST)
    yield Item(spec.kind, ".", digest_contents(data), partial(_build_whole, spec, file, data), data)


def _build_whole(spec: RecordSpec, file: MemoryFile, data: bytes, key: str) -> Record:
    text = data[:TEXT_BYTES].decode("utf-8", "replace").removeprefix("\ufeff")
    found = _TITLE.search(text[:20_000])
    title = (found[1] or found[2]) if found else file.name
    return _make_record(spec, file, key, title, text)


def _iterate_values(file: MemoryFile, spec: RecordSpec) -> Iterator[Any]:
    """Yield the values of a list: one at a time if the document is that list."""
    text = _read_text(file)
    start = _skip_blanks(text, 0)
    if text[start : start + 1] != "[":
        document = _parse_document(text)
        name = _find_list(document, spec)
        yield from document[name] if name is not None else ()
        return
    decode, position = json.JSONDecoder().raw_decode, _skip_blanks(text, start + 1)
    try:
        while text[position : position + 1] != "]":
            value, position = decode(text, position)
            yield value
            position = _skip_blanks(text, position)
            if text[position : position + 1] == ",":
                position = _skip_blanks(text, position + 1)
            elif text[position : position + 1] != "]":
                raise ValueError("the list does not go on")
    except (ValueError, RecursionError) as problem:
        raise Unreadable(f"it is not JSON: {problem}") from None


def _read_text(file: MemoryFile) -> str:
    with file.open() as stream:
        data = stream.read(LARGEST_LIST + 1)
    if len(data) > LARGEST_LIST:
        raise Unreadable(f"it is larger than {LARGEST_LIST >> 20} MB")
    return data.decode("utf-8-sig", "replace")


def _parse_document(text: str) -> dict[str, Any]:
    if len(text) > LARGEST_DOCUMENT:
        raise Unreadable(f"it is larger than {LARGEST_DOCUMENT >> 20} MB")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise Unreadable(f"it is not JSON: {problem}") from None
    if not isinstance(document, dict):
        raise Unreadable("it is not a list")
    return document


def _find_list(document: dict[str, Any], spec: RecordSpec) -> str | None:
    return next((key for key in spec.list if isinstance(document.get(key), list)), None)


def _skip_blanks(text: str, position: int) -> int:
    found = _BLANKS.match(text, position)
    return found.end() if found else position


def _parse_line(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return line.decode("utf-8", "replace")


def _encode(value: Any) -> bytes:
    """Return the canonical JSON of a value: the same however it was written."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as problem:
        raise Unreadable(f"it is nested too deeply: {problem}") from None


def _make_item(spec: RecordSpec, file: MemoryFile, value: Any, line: bytes = b"") -> Item:
    source = line or _encode(value)
    pick = partial(_pick, value)
    identity = identify(spec, pick) if isinstance(value, dict) else ""
    return Item(spec.kind, identity, digest_contents(source), partial(_build_item, spec, file, value), source)


def _build_item(spec: RecordSpec, file: MemoryFile, value: Any, key: str) -> Record:
    if isinstance(value, dict):
        return build_row_record(spec, file, partial(_pick, value), key)
    return _make_record(spec, file, key, "", _to_text(value))


def _make_record(spec: RecordSpec, file: MemoryFile, key: str, title: str, text: str) -> Record:
    written = Record(kind=spec.kind, key=key, title=title, text=text, project=file.project, at=file.at, path=file.path)
    return clean_record(written)


def _pick(value: dict[str, Any], column: str) -> str:
    """Return the text under the first of several keys that is set; ``outer.inner`` reaches into an object."""
    for way in column.split("|"):
        found: Any = value
        for key in way.split("."):
            found = found.get(key) if isinstance(found, dict) else None
        if found not in (None, "", [], {}):
            return _to_text(found)
    return ""


def _to_text(value: Any, depth: int = 0) -> str:
    """Return a value as people would read it: a list by lines, an object by its text, if it has one."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and depth < 3:
        return "\n".join(filter(None, (_to_text(one, depth + 1) for one in value)))
    if isinstance(value, dict) and depth < 3:
        for key in ("text", "content", "message"):
            if value.get(key):
                return _to_text(value[key], depth + 1)
    try:
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return ""
