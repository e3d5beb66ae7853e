"""Check what a snapshot claims to contain as untrusted input: every path, link, size and digest."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType

from sidecar.errors import BadAnswer, DigestMismatch, LimitExceeded, UnsafeLink, UnsafePath
from sidecar.format import digests
from sidecar.format.index import DIR, FILE, LINK, Entry
from sidecar.policy.limits import Limits

LONGEST_PATH, LONGEST_NAME = 4096, 255
LARGEST_BLOCK = 1 << 20
FARTHEST_TIME = 1 << 62
NOTHING: Mapping[str, Entry] = MappingProxyType({})
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


def check_path(path: str, roots: Collection[str] | None = None, depth: int = 256) -> None:
    """Raise ``UnsafePath`` unless this is a relative path below a known root that cannot lead anywhere else."""
    parts = path.split("/")
    shown = path if len(path) < 200 else path[:200] + "…"
    if path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise UnsafePath(f"{shown!r} is not a plain relative path.")
    if roots is not None and (parts[0] not in roots or len(parts) < 2):
        raise UnsafePath(f"{shown!r} is not below a root of this memory.")
    try:
        encoded = [len(part.encode("utf-8", "surrogateescape")) for part in parts]
    except UnicodeEncodeError:
        raise UnsafePath(f"{shown!r} is not a name a file system has.") from None
    if sum(encoded) + len(parts) > LONGEST_PATH or max(encoded) > LONGEST_NAME:
        raise UnsafePath(f"{shown!r} is longer than a file system takes.")
    if len(parts) > depth + 1:
        raise LimitExceeded(
            f"{shown!r} is {len(parts) - 1:,} parts deep; limits.depth allows {depth:,}.", code="limit-depth"
        )


def check_hint(what: str, hint: str) -> None:
    """Raise ``UnsafePath`` unless a folder can have been at this hint: in the home (``~`` or ``~/…``) or absolute."""
    try:
        long = len(hint.encode("utf-8", "surrogateescape")) > LONGEST_PATH
    except UnicodeEncodeError:
        long = True
    if long or not (hint == "~" or hint.startswith(("~/", "/"))) or ".." in hint.split("/") or "\0" in hint:
        raise UnsafePath(f"{what} is said to be at {hint[:200]!r}.")


def check_link(path: str, target: str) -> None:
    """Raise ``UnsafeLink`` unless the link stays inside the root that contains it."""
    inside = posixpath.normpath(posixpath.join(posixpath.dirname(path.split("/", 1)[1]), target))
    try:
        target.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise UnsafeLink(f"The link {path!r} has a target no file system has.") from None
    if not target or target.startswith("/") or "\0" in target or inside == ".." or inside.startswith("../"):
        raise UnsafeLink(f"The link {path!r} leads out of the memory.")


def check_entries(
    entries: dict[str, Entry], roots: Collection[str], limits: Limits, base: Mapping[str, Entry] = NOTHING
) -> None:
    """Check all entries of a snapshot: every path, link, size and digest, and that no path leads through a link or a
    file.

    Entries that are in ``base``, a snapshot already in the store, were checked when that was made. Raise a typed error.
    """
    if len(entries) > limits.files:
        raise LimitExceeded(
            f"This memory has {len(entries):,} files, folders and links; limits.files allows {limits.files:,}.",
            code="limit-files",
        )
    total = sum(entry.size for entry in entries.values() if entry.type == FILE)
    for path, entry in entries.items():
        if base.get(path) is not entry or entry.size > limits.file_bytes or path.count("/") > limits.depth:
            _check_entry(entry, roots, limits)
        if entry.type == LINK:
            _check_link_path(path, entry.target, entries)
    _check_folders(entries)
    if total > limits.bytes:
        raise LimitExceeded(
            f"This memory has {total:,} bytes; limits.bytes allows {limits.bytes:,}.", code="limit-bytes"
        )


def _check_entry(entry: Entry, roots: Collection[str], limits: Limits) -> None:
    """Check one entry. Raise UnsafePath, UnsafeLink, BadAnswer, LimitExceeded or DigestMismatch."""
    path = entry.path
    check_path(path, roots, limits.depth)
    if entry.mode > 0o777 or abs(entry.mtime) > FARTHEST_TIME:
        raise BadAnswer(f"{path!r} has an impossible mode or time.")
    if entry.type == FILE:
        _check_file(entry, limits)
    # Size, mtime, digest, block and sums: only files have them.
    elif entry[3:8] != (0, 0, "", 0, b"") or entry.database:
        raise BadAnswer(f"{path!r} is a {entry.type} with the properties of a file.")
    elif entry.type == LINK:
        check_link(path, entry.target)


def _check_folders(entries: dict[str, Entry]) -> None:
    """Raise ``UnsafePath`` if something is below an entry that is not a folder."""
    folders = {path.rpartition("/")[0] for path in entries}
    while folders:
        for folder in folders:
            if folder in entries and entries[folder].type != DIR:
                raise UnsafePath(f"Something lies below {folder!r}, which is not a folder.")
        folders = {folder.rpartition("/")[0] for folder in folders} - {""}


def _check_link_path(path: str, target: str, entries: dict[str, Entry]) -> None:
    """Raise ``UnsafeLink`` if a link goes up again after it passed another link: its text then does not tell where it
    leads."""
    here, through = posixpath.dirname(path), False
    for part in target.split("/"):
        if part == ".." and through:
            raise UnsafeLink(f"The link {path!r} leads through another link and back up.")
        here = posixpath.normpath(posixpath.join(here, part))
        through = through or (here in entries and entries[here].type == LINK)


def _check_file(entry: Entry, limits: Limits) -> None:
    """Check a file's size, digest and block sums."""
    if entry.size > limits.file_bytes:
        raise LimitExceeded(
            f"{entry.path!r} has {entry.size:,} bytes; limits.file_bytes allows {limits.file_bytes:,}.",
            code="limit-file-bytes",
        )
    if not _DIGEST.match(entry.digest) or not 512 <= entry.block <= LARGEST_BLOCK:
        raise BadAnswer(f"{entry.path!r} has no proper digest or block size.")
    count = digests.count_blocks(entry.size, entry.block)
    if count > digests.MOST_BLOCKS or len(entry.sums) != (count * digests.SUM_BYTES if count > 1 else 0):
        raise BadAnswer(f"{entry.path!r} has {len(entry.sums)} bytes of block sums for {count} blocks.")
    if entry.sums and digests.digest_sums(entry.sums) != entry.digest:
        raise DigestMismatch(f"The digest of {entry.path!r} is not that of its blocks.")
