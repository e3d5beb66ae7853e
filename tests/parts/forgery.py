"""A sandbox that lies: answers in the program's own frame and format, with whatever a test wants in them.

``python -m tests.parts.forgery CASE STORE`` runs one case in a process of its own and prints what the engine said and how
much memory it took.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import io
import json
import os
import pickle
import resource
import sys
import tarfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

from sidecar.engine import Engine, ExportRequest, export
from sidecar.errors import SidecarError
from sidecar.format import digests
from sidecar.ports import CommandResult, SandboxStatus
from tests.parts.homes import engine_at
from tests.parts.sent import request_in

Line = dict[str, Any]
Member = tuple[tarfile.TarInfo, bytes]
MEMORY = "forged"
ROOTS = [{"name": "project", "layout": "three-tier", "hint": "~"}]
GIB = 1 << 30
TEN_GB = 10 * GIB


@dataclass
class Bundle:
    """What an export sends: a compressed pack with its compressed index behind it, and the answer about both."""

    pack: bytes = b""
    index: bytes = b""
    answer: dict[str, Any] = field(default_factory=dict)
    inline: bool = True


Forge = Callable[[dict[str, Any]], "Bundle | bytes"]


class ForgedSandbox:
    """Answers every command by ``forge(request)``: a bundle to be framed, or raw output."""

    ref = "forged:sandbox"
    path = "/home/user/.cache/memory-sidecar/work-1/bundle"

    def __init__(self, forge: Forge) -> None:
        self.forge = forge
        self.control_trips = 0
        self.tidied: list[str] = []
        self.fetched: list[str] = []
        self.uploaded = 0
        self.asked: list[dict[str, Any]] = []
        self.downloads: Sequence[bytes] | None = None
        self._bundle = b""

    def ground(self, projects: Sequence[str] | None) -> None:
        return None

    def holds(self, path: str) -> bool:
        return False

    async def stamp(self, projects: Sequence[str] | None) -> str:
        return ""

    async def run(self, command: str, **how: Any) -> CommandResult:
        request = request_in(command, how.get("environment"))
        if request["do"] == "tidy":
            self.tidied.append(command)
            return CommandResult(0, b"")
        self.asked.append(request)
        forged = self.forge(request)
        if isinstance(forged, bytes):
            return CommandResult(0, forged)
        self._bundle = forged.pack + forged.index
        answer = {
            "status": "changed",
            "memory": request["memory"],
            "snapshot": request["snapshot"],
            "kind": "full",
            "codec": "gz",
            "roots": ROOTS,
            "pack_bytes": len(forged.pack),
            **forged.answer,
        }
        claim = {
            "path": self.path,
            "bytes": len(self._bundle),
            "sha256": hashlib.sha256(self._bundle).hexdigest(),
            "inline": forged.inline,
        }
        answer["bundle"] = {**claim, **forged.answer.get("bundle", {})}
        return CommandResult(0, framed(request["nonce"], answer, self._bundle if forged.inline else b""))

    async def upload(self, path: str, chunks: AsyncIterator[bytes]) -> None:
        async for chunk in chunks:
            self.uploaded += len(chunk)

    async def download(self, path: str) -> AsyncGenerator[bytes]:
        self.fetched.append(path)
        if self.downloads is not None:
            for chunk in self.downloads:
                yield chunk
            return
        for at in range(0, len(self._bundle), 1 << 20):
            yield self._bundle[at : at + (1 << 20)]

    async def connect(self) -> SandboxStatus:
        return SandboxStatus()

    async def prolong(self, seconds: float) -> SandboxStatus:
        return SandboxStatus()

    async def remove(self, path: str) -> None:
        return None

    async def close(self) -> None:
        return None


def framed(nonce: str, answer: object, inline: bytes = b"") -> bytes:
    text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    body = base64.b64encode(inline) + b"\n" if inline else b""
    return b"\nmemory-sidecar %s begin\n%s\n%smemory-sidecar %s end\n" % (nonce.encode(), text, body, nonce.encode())


def entry(path: str, contents: bytes = b"x", **more: Any) -> Line:
    """The index line of a file as the honest program writes it; ``more`` says otherwise."""
    digest, sums = digests.digest_bytes(contents, digests.PLAIN_BLOCK)
    line: Line = {"path": path, "type": "file", "mode": 0o644, "size": len(contents), "mtime": 1, "digest": digest}
    line["block"] = digests.PLAIN_BLOCK
    if sums:
        line["sums"] = base64.b64encode(sums).decode()
    return {**line, **more}


def folder(path: str, **more: Any) -> Line:
    return {"path": path, "type": "dir", "mode": 0o755, **more}


def link(path: str, target: str, **more: Any) -> Line:
    return {"path": path, "type": "link", "target": target, **more}


def member(path: str, contents: bytes = b"x", kind: bytes = tarfile.REGTYPE, target: str = "") -> Member:
    info = tarfile.TarInfo(path)
    info.type, info.linkname, info.size, info.mtime = kind, target, len(contents), 1
    return info, contents


def members_of(lines: Iterable[Line], contents: bytes = b"x") -> list[Member]:
    """The members that belong to honest lines of a full pack."""
    kinds = {"file": tarfile.REGTYPE, "dir": tarfile.DIRTYPE, "link": tarfile.SYMTYPE}
    return [
        member(line["path"], contents if line["type"] == "file" else b"", kinds[line["type"]], line.get("target", ""))
        for line in lines
    ]


def tarball(members: Iterable[Member]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
        for info, contents in members:
            tar.addfile(info, io.BytesIO(contents))
    return out.getvalue()


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A lone tar header, whatever size it claims."""
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def pax(records: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    """A pax extension header with these bytes for records."""
    return header("././@PaxHeader", len(records), kind) + records + bytes(-len(records) % 512)


def zeros(size: int) -> bytes:
    """So many zero bytes as gzip members, made without ever holding them."""
    piece = 16 << 20
    return gzip.compress(bytes(piece), 9) * (size // piece) + gzip.compress(bytes(size % piece))


def index(lines: Iterable[Line], kind: str = "full") -> bytes:
    rows = [{"index": 1, "kind": kind}, *lines]
    return gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())


def honest(lines: list[Line] | None = None, contents: bytes = b"x", **answer: Any) -> Bundle:
    """A full bundle that keeps every promise."""
    lines = [entry("project/MEMORY.md", contents)] if lines is None else lines
    return Bundle(gzip.compress(tarball(members_of(lines, contents))), index(lines), answer)


def delta(lines: list[Line], members: list[Member], base: str, **answer: Any) -> Bundle:
    said = {"kind": "delta", "base": base, "lineage": [base], **answer}
    return Bundle(gzip.compress(tarball(members)), index(lines, "delta"), said)


def _lines(*lines: Line) -> Forge:
    """A bundle whose pack fits its index: only what the index says is wrong."""
    return lambda request: honest(list(lines))


def _members(*members: Member) -> Forge:
    """A bundle with an innocent index and other members in its pack."""
    return lambda request: Bundle(gzip.compress(tarball(members)), index([entry("project/MEMORY.md")]))


def _tar(tar: bytes, *lines: Line) -> Forge:
    """A bundle with this very tarball."""
    return lambda request: Bundle(gzip.compress(tar), index(lines or [entry("project/MEMORY.md")]))


def _answer(**said: Any) -> Forge:
    return lambda request: honest(**said)


GOOD = entry("project/MEMORY.md")
BIG = digests.PLAIN_BLOCK * 3
BIG_BEFORE, BIG_AFTER = b"a" * BIG, b"a" * digests.PLAIN_BLOCK + b"b" * digests.PLAIN_BLOCK + b"a" * digests.PLAIN_BLOCK


def big_base(request: dict[str, Any]) -> Bundle:
    """A full export with one file of three blocks, for deltas to be laid over."""
    lines = [entry("project/MEMORY.md", BIG_BEFORE)]
    return honest(lines, BIG_BEFORE)


def _delta_of(line: Line, contents: bytes, kind: str = "@blocks/") -> Forge:
    def forge(request: dict[str, Any]) -> Bundle:
        return delta([line], [member(kind + line["path"], contents)], request["known"][0])

    return forge


def _patch(**more: Any) -> Line:
    """Block 1 of the big file changes."""
    digest, sums = digests.digest_bytes(BIG_AFTER, digests.PLAIN_BLOCK)
    carried = base64.b64encode(sums[digests.SUM_BYTES : 2 * digests.SUM_BYTES]).decode()
    return {**entry("project/MEMORY.md", BIG_AFTER), "digest": digest, "blocks": "1", "sums": carried, **more}


CHANGED_BLOCK = b"b" * digests.PLAIN_BLOCK
good_delta = _delta_of(_patch(), CHANGED_BLOCK)


def _large(size: int) -> Line:
    """The line of a file of so many bytes, with digest and sums that fit each other."""
    sums = bytes(digests.SUM_BYTES * digests.count_blocks(size, digests.PLAIN_BLOCK))
    said = base64.b64encode(sums).decode()
    return entry("project/MEMORY.md", size=size, digest=digests.digest_sums(sums), sums=said)


def _bomb_claiming(size: int) -> Forge:
    """10 GB of zeros in a member whose index line says ``size``."""

    def forge(request: dict[str, Any]) -> Bundle:
        pack = gzip.compress(header("project/MEMORY.md", TEN_GB)) + zeros(TEN_GB) + gzip.compress(bytes(1024))
        return Bundle(pack, index([_large(size) if size > 1 else GOOD]), inline=False)

    return forge


def _bomb_behind(request: dict[str, Any]) -> Bundle:
    """A pack that is all it should be, and goes on for 10 GB after its end."""
    good = honest([entry(f"project/memory/{number}") for number in range(300)])
    return Bundle(good.pack + zeros(TEN_GB), good.index, inline=False)


def _zstd_bomb(request: dict[str, Any]) -> Bundle:
    frames = zstandard.ZstdCompressor().compress(bytes(16 << 20)) * (TEN_GB // (16 << 20))
    first = zstandard.ZstdCompressor().compress(tarball([member("project/MEMORY.md")]))
    return Bundle(first + frames, index([GOOD]), {"codec": "zst"}, inline=False)


def _row_bomb(request: dict[str, Any]) -> Bundle:
    """An index whose one line never ends."""
    return Bundle(honest().pack, gzip.compress(b'{"index":1,"kind":"full"}\n') + zeros(2 * GIB), inline=False)


def _rows_bomb(request: dict[str, Any]) -> Bundle:
    """An index of ever the same line, a gigabyte of it."""
    row = (json.dumps(entry("project/" + "n" * 200)) + " " * 8000 + "\n").encode()
    some = gzip.compress(row * 2000) * 70
    return Bundle(honest().pack, gzip.compress(b'{"index":1,"kind":"full"}\n') + some, inline=False)


def _blocks_bomb(request: dict[str, Any]) -> Bundle:
    """One short line that says a billion block numbers."""
    line = entry("project/MEMORY.md", size=1 << 50, block=512, blocks="0-1000000000")
    return delta([line], [], request["known"][0])


def _many_blocks_bomb(request: dict[str, Any]) -> Bundle:
    """Short lines that each say as many block numbers as one file may have."""
    lines = [entry(f"project/memory/{n}", size=(1 << 18) * 512, block=512, blocks="0-262143") for n in range(2000)]
    return delta(lines, [], request["known"][0])


def _huge_block(request: dict[str, Any]) -> Bundle:
    """A gigabyte in one block: whoever checks blocks one by one would hold it all."""
    digest = hashlib.sha256()
    for _ in range(1024):
        digest.update(bytes(1 << 20))
    line = entry("project/MEMORY.md", size=GIB, block=GIB, digest=digest.hexdigest())
    pack = gzip.compress(header("project/MEMORY.md", GIB)) + zeros(GIB) + gzip.compress(bytes(1024))
    return Bundle(pack, index([line]), inline=False)


def _header_bomb(kind: bytes) -> Forge:
    """An extension header of gigabytes, in a pack whose files are said to be as large."""
    size = 6 * GIB

    def forge(request: dict[str, Any]) -> Bundle:
        pack = gzip.compress(header("././@PaxHeader", size, kind)) + zeros(size)
        return Bundle(pack, index([_large(size)]), inline=False)

    return forge


def _nested_headers(request: dict[str, Any]) -> Bundle:
    """Thousands of extension headers, each about the next."""
    lines = [entry(f"project/memory/{n}") for n in range(300)]
    return Bundle(gzip.compress(pax(b"11 comment=\n") * 4000 + tarball(members_of(lines))), index(lines))


def _slow_header(request: dict[str, Any]) -> Bundle:
    """A header of nothing but digits, on which a careless pattern works for hours."""
    return Bundle(gzip.compress(pax(b"1" * 120_000) + tarball([member("project/MEMORY.md")])), index([GOOD]))


def _empty_files(count: int) -> Forge:
    """An index of so many empty files, and a pack with none of them."""

    def forge(request: dict[str, Any]) -> Bundle:
        row = json.dumps(entry("project/memory/@", b"")).replace("@", "%d") + "\n"
        text = '{"index":1,"kind":"full"}\n' + "".join(row % number for number in range(count))
        return Bundle(gzip.compress(tarball([])), gzip.compress(text.encode(), 1), inline=False)

    return forge


def _gnu_sparse() -> bytes:
    return header("project/MEMORY.md", 512, tarfile.GNUTYPE_SPARSE) + bytes(512 + 1024)


def _pax_sparse() -> bytes:
    info, contents = member("project/MEMORY.md", b"x")
    info.pax_headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": str(1 << 40)}
    return tarball([(info, contents)])


UP = "project/../../../evil"
CASES: dict[str, tuple[str, Forge]] = {
    # names in the index
    "entry-dotdot": ("unsafe-path", _lines(entry("project/../../evil"))),
    "entry-dotdot-alone": ("unsafe-path", _lines(entry(".."))),
    "entry-absolute": ("unsafe-path", _lines(entry("/etc/evil"))),
    "entry-of-another-root": ("unsafe-path", _lines(entry("claude-mem/claude-mem.db"))),
    "entry-that-is-a-root": ("unsafe-path", _lines(entry("project"))),
    "entry-empty-name": ("unsafe-path", _lines(folder(""))),
    "entry-empty-part": ("unsafe-path", lambda r: Bundle(honest().pack, index([entry("project//x")]))),
    "entry-nul": ("unsafe-path", lambda r: Bundle(honest().pack, index([entry("project/a\0b")]))),
    "entry-too-long": ("unsafe-path", _lines(entry("project/" + "n" * 300))),
    "entry-too-deep": ("limit-depth", _lines(entry("project/" + "d/" * 100 + "x"))),
    "entry-lone-surrogate": (
        "unsafe-path",
        lambda r: delta([folder("project/memory/\ud800")], [], r["known"][0]),
    ),
    # links
    "link-up": ("unsafe-link", _lines(link("project/memory/x", "../../../etc/passwd"))),
    "link-absolute": ("unsafe-link", _lines(link("project/x", "/etc/passwd"))),
    "link-empty": ("unsafe-link", lambda r: Bundle(honest().pack, index([link("project/x", "")]))),
    "link-through-a-link": (
        "unsafe-link",
        _lines(
            folder("project/memory"),
            link("project/memory/top", ".."),
            link("project/memory/out", "top/../../etc"),
        ),
    ),
    "link-lone-surrogate": (
        "unsafe-link",
        lambda r: delta([link("project/memory/x", "\ud800")], [], r["known"][0]),
    ),
    "link-as-parent": ("unsafe-path", _lines(link("project/memory", "tasks"), entry("project/memory/x"))),
    "link-as-later-parent": ("unsafe-path", _lines(entry("project/memory/x"), link("project/memory", "tasks"))),
    "file-as-parent": ("unsafe-path", _lines(entry("project/memory"), entry("project/memory/x"))),
    # members of the pack
    "member-dotdot": ("unsafe-path", _members(member(UP))),
    "member-absolute": ("unsafe-path", _members(member("/tmp/evil"))),
    "member-blocks-dotdot": ("unsafe-path", _members(member("@blocks/../../evil"))),
    "member-device": ("unsafe-member", _members(member("project/MEMORY.md", b"", tarfile.CHRTYPE))),
    "member-block-device": ("unsafe-member", _members(member("project/MEMORY.md", b"", tarfile.BLKTYPE))),
    "member-fifo": ("unsafe-member", _members(member("project/MEMORY.md", b"", tarfile.FIFOTYPE))),
    "member-hardlink": ("unsafe-member", _members(member("project/MEMORY.md", b"", tarfile.LNKTYPE, "/etc/passwd"))),
    "member-link-for-a-file": (
        "unsafe-member",
        lambda r: Bundle(
            gzip.compress(tarball([member("project/MEMORY.md", b"", tarfile.SYMTYPE, "/etc/passwd")])),
            index([entry("project/MEMORY.md", b"")]),
        ),
    ),
    "member-other-link": (
        "unsafe-member",
        lambda r: Bundle(
            gzip.compress(tarball([member("project/x", b"", tarfile.SYMTYPE, "/etc/passwd")])),
            index([link("project/x", "MEMORY.md")]),
        ),
    ),
    "member-gnu-sparse": ("unsafe-member", _tar(_gnu_sparse())),
    "member-pax-sparse": ("unsafe-member", _tar(_pax_sparse())),
    "member-not-in-index": ("bad-answer", _members(member("project/MEMORY.md"), member("project/tasks/todo.md"))),
    "member-twice": ("bad-answer", _members(member("project/MEMORY.md"), member("project/MEMORY.md"))),
    "member-missing": ("bad-answer", _members()),
    "member-longer": ("size-mismatch", _members(member("project/MEMORY.md", b"xy"))),
    "not-a-tarball": ("bad-answer", lambda r: Bundle(gzip.compress(b"no tarball" * 300), index([GOOD]))),
    "not-gzip": ("bad-answer", lambda r: Bundle(b"no gzip at all", index([GOOD]))),
    "zstd-said-gzip-sent": ("bad-answer", _answer(codec="zst")),
    "pack-cut-short": ("bad-answer", lambda r: Bundle(honest().pack[:-30], index([GOOD]))),
    # bombs
    "bomb-truthful": ("limit-file-bytes", _bomb_claiming(TEN_GB)),
    "bomb-small-in-index": ("pack-bomb", _bomb_claiming(1)),
    "bomb-behind-the-end": ("pack-bomb", _bomb_behind),
    "bomb-zstd": ("pack-bomb", _zstd_bomb),
    "bomb-index-row": ("pack-bomb", _row_bomb),
    "bomb-index-rows": ("pack-bomb", _rows_bomb),
    "bomb-block-numbers": ("bad-answer", _blocks_bomb),
    "bomb-many-block-numbers": ("bad-answer", _many_blocks_bomb),
    "bomb-block": ("bad-answer", _huge_block),
    "bomb-pax-header": ("pack-bomb", _header_bomb(tarfile.XHDTYPE)),
    "bomb-pax-global-header": ("pack-bomb", _header_bomb(tarfile.XGLTYPE)),
    "bomb-solaris-header": ("pack-bomb", _header_bomb(tarfile.SOLARIS_XHDTYPE)),
    "bomb-long-name": ("pack-bomb", _header_bomb(tarfile.GNUTYPE_LONGNAME)),
    "bomb-nested-headers": ("bad-answer", _nested_headers),
    "bomb-slow-header": ("pack-bomb", _slow_header),
    "million-files": ("limit-files", _empty_files(1_000_000)),
    "one-file-too-many": ("limit-files", _empty_files(200_001)),
    # numbers and digests
    "digest-wrong": ("digest-mismatch", _lines(entry("project/MEMORY.md", digest="0" * 64))),
    "digest-no-digest": ("bad-answer", _lines(entry("project/MEMORY.md", digest="../../x"))),
    "sums-wrong": (
        "digest-mismatch",
        lambda r: honest(
            [entry("project/MEMORY.md", BIG_BEFORE, sums=base64.b64encode(bytes(48)).decode())], BIG_BEFORE
        ),
    ),
    "sums-missing": ("bad-answer", lambda r: honest([entry("project/MEMORY.md", BIG_BEFORE, sums="")], BIG_BEFORE)),
    "size-negative": ("bad-answer", _lines(entry("project/MEMORY.md", size=-1))),
    "size-a-fraction": ("bad-answer", _lines(entry("project/MEMORY.md", size=1.0))),
    "size-true": ("bad-answer", _lines(entry("project/MEMORY.md", size=True))),
    "size-beyond": ("limit-file-bytes", _lines(entry("project/MEMORY.md", size=1 << 62))),
    "block-zero": ("bad-answer", _lines(entry("project/MEMORY.md", block=0))),
    "mode-setuid": ("bad-answer", _lines(entry("project/MEMORY.md", mode=0o4755))),
    "mode-of-folder": ("bad-answer", _lines(folder("project/memory", mode=0o1777))),
    "time-beyond": ("bad-answer", _lines(entry("project/MEMORY.md", mtime=10**30))),
    "type-unknown": ("bad-answer", lambda r: Bundle(honest().pack, index([folder("project/x", type="socket")]))),
    "key-unknown": ("bad-answer", _lines(entry("project/MEMORY.md", owner="root"))),
    "link-as-database": ("bad-answer", _lines(GOOD, link("project/x", "MEMORY.md", database=True))),
    "folder-as-database": ("bad-answer", _lines(folder("project/memory", database=True))),
    "path-twice": ("bad-answer", lambda r: Bundle(honest().pack, index([GOOD, GOOD]))),
    "index-not-json": ("bad-answer", lambda r: Bundle(honest().pack, gzip.compress(b"{\n"))),
    "index-deep": (
        "bad-answer",
        lambda r: Bundle(honest().pack, gzip.compress(b'{"index":1,"kind":"full"}\n' + b"[" * 100_000 + b"\n")),
    ),
    "index-empty": ("bad-answer", lambda r: Bundle(honest().pack, gzip.compress(b""))),
    "index-of-another-version": (
        "bad-answer",
        lambda r: Bundle(honest().pack, gzip.compress(b'{"index":99,"kind":"full"}\n')),
    ),
    # deltas
    "delta-wrong-block": ("digest-mismatch", _delta_of(_patch(), b"c" * digests.PLAIN_BLOCK)),
    "delta-wrong-sum": (
        "digest-mismatch",
        _delta_of(_patch(sums=base64.b64encode(bytes(16)).decode()), CHANGED_BLOCK),
    ),
    "delta-of-a-file-not-there": ("bad-answer", _delta_of(_patch(path="project/tasks/todo.md"), CHANGED_BLOCK)),
    "delta-block-out-of-range": ("bad-answer", _delta_of(_patch(blocks="3"), CHANGED_BLOCK)),
    "delta-blocks-backwards": ("bad-answer", _delta_of(_patch(blocks="1,0"), CHANGED_BLOCK * 2)),
    "delta-without-contents": (
        "bad-answer",
        lambda r: delta([_patch(blocks="", sums="")], [], r["known"][0]),
    ),
    "delta-removes-what-is-not-there": (
        "bad-answer",
        lambda r: delta([{"gone": "project/tasks/todo.md"}], [], r["known"][0]),
    ),
    "delta-removes-outside": ("bad-answer", lambda r: delta([{"gone": "../../evil"}], [], r["known"][0])),
    "delta-over-nothing": ("bad-answer", lambda r: delta([_patch()], [member("@blocks/project/MEMORY.md")], "")),
    "full-with-a-base": ("bad-answer", lambda r: honest(base=r["known"][0])),
    "base-not-in-the-store": (
        "bad-answer",
        lambda r: delta([_patch()], [member("@blocks/project/MEMORY.md")], "20200101T000000000Z-00000000"),
    ),
    "base-outside": (
        "bad-answer",
        lambda r: delta([_patch()], [member("@blocks/project/MEMORY.md")], "../../../../etc/passwd"),
    ),
    # the answer itself
    "another-memory": ("memory-mismatch", _answer(memory="somebody-else")),
    "another-snapshot": ("memory-mismatch", _answer(snapshot="20200101T000000000Z-00000000")),
    "no-end-mark": ("bad-answer", lambda r: framed(r["nonce"], {"status": "changed"}).rsplit(b"memory-sidecar", 1)[0]),
    "another-nonce": ("bad-answer", lambda r: framed("0" * 16, {"status": "changed"})),
    "nothing-said": ("bad-answer", lambda r: b""),
    "deep-json": ("bad-answer", lambda r: framed(r["nonce"], b"[" * 100_000)),
    "deep-object": ("bad-answer", lambda r: framed(r["nonce"], b'{"a":' * 100_000)),
    "a-list": ("bad-answer", lambda r: framed(r["nonce"], [])),
    "wrong-types": ("bad-answer", _answer(files="many")),
    "no-bundle": (
        "bad-answer",
        lambda r: framed(r["nonce"], {"status": "changed", "memory": r["memory"], "snapshot": r["snapshot"]}),
    ),
    "nameless-status": ("bad-answer", _answer(status="fine")),
    "unchanged-since-nothing": ("bad-answer", _answer(status="unchanged")),
    "unchanged-since-elsewhere": ("bad-answer", _answer(status="unchanged", base="../../../../etc/passwd")),
    "codec-unknown": ("bad-answer", _answer(codec="lzma")),
    "pack-longer-than-bundle": ("bad-answer", _answer(pack_bytes=1 << 40)),
    "pack-negative": ("bad-answer", _answer(pack_bytes=-1)),
    "bundle-larger-than-allowed": ("limit-packed", _answer(bundle={"bytes": 1 << 50})),
    "bundle-size-differs": ("size-mismatch", _answer(bundle={"bytes": 5000})),
    "bundle-hash-differs": ("digest-mismatch", _answer(bundle={"sha256": "0" * 64})),
    # where it says its roots are
    "root-of-unknown-layout": ("bad-answer", _answer(roots=[{"name": "project", "layout": "evil", "hint": "~"}])),
    "root-of-another-layout": ("bad-answer", _answer(roots=[{"name": "project", "layout": "claude-mem", "hint": "~"}])),
    "root-twice": ("bad-answer", _answer(roots=ROOTS * 2)),
    "root-above-the-home": (
        "unsafe-path",
        _answer(roots=[{"name": "project", "layout": "three-tier", "hint": "~/../../etc/cron.d"}]),
    ),
    "root-of-another-user": (
        "unsafe-path",
        _answer(roots=[{"name": "project", "layout": "three-tier", "hint": "~x/y"}]),
    ),
    "root-that-is-the-home": (
        "unsafe-path",
        _answer(roots=[*ROOTS, {"name": "cm", "layout": "codymaster", "hint": "~"}]),
    ),
    "root-that-is-another-folder": (
        "unsafe-path",
        _answer(roots=[*ROOTS, {"name": "cm-2", "layout": "codymaster", "hint": "~/.ssh"}]),
    ),
    "not-taken-of-no-root": ("bad-answer", _answer(not_taken={"x\x1b[31m": 1})),
    "not-taken-of-many-roots": ("bad-answer", _answer(not_taken={f"project-{n}": 1 for n in range(2, 100_000)})),
    "part-of-many-patterns": ("bad-answer", _answer(part=[f"project/{n}" for n in range(10_000)])),
    "part-that-is-none": ("bad-answer", _answer(part=[1])),
    "database-of-no-root": ("bad-answer", _answer(databases_not_taken=["x/y.db"])),
}
BOMBS = [name for name in CASES if name.startswith("bomb-") or name == "million-files"]
"""The cases that must also be cheap to refuse."""


async def export_forged(engine: Engine, forge: Forge) -> tuple[str, ForgedSandbox]:
    """Export from a lying sandbox: the error's code, the code of why it was rejected, or else the outcome."""
    sandbox = ForgedSandbox(forge)
    try:
        receipt = await export(engine, sandbox, ExportRequest(memory=MEMORY, layouts=("three-tier",)))
    except SidecarError as problem:
        return problem.code, sandbox
    return receipt.reason.code if receipt.reason else str(receipt.outcome), sandbox


def _elsewhere(forge: Forge, request: dict[str, Any]) -> Bundle | bytes:
    """Forge in a process of its own, so that the memory it takes is not counted."""
    receiving, sending = os.pipe()
    if os.fork() == 0:
        with os.fdopen(sending, "wb") as target:
            pickle.dump(forge(request), target)
        os._exit(0)
    os.close(sending)
    with os.fdopen(receiving, "rb") as source:
        forged: Bundle | bytes = pickle.load(source)
    os.wait()
    return forged


def _main(case: str, store: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (3 * GIB, 3 * GIB))
    _, forge = CASES[case]
    sizes: list[int] = []
    started = time.monotonic()

    def prepared(request: dict[str, Any]) -> Bundle | bytes:
        nonlocal started
        forged = _elsewhere(forge, request)
        sizes.append(len(forged.pack) + len(forged.index) if isinstance(forged, Bundle) else len(forged))
        started = time.monotonic()
        return forged

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code, _ = asyncio.run(export_forged(engine_at(Path(store)), prepared))
    grew = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    seconds = time.monotonic() - started
    print(json.dumps({"code": code, "grew_kib": grew, "sent": sizes[-1], "seconds": round(seconds, 2)}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
