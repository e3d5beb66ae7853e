"""Tarballs made to harm whoever reads them, and sandboxes without Python that bring such: single cases and random ones.

``python -m tests.parts.hostile_archives case NAME FOLDER`` imports one case, ``… bare NAME FOLDER`` has a sandbox without
Python bring it, and ``… seeds FIRST COUNT FOLDER`` reads a row of random ones, in a process of its own; for each it prints what
the engine said, how long it took, and the memory at its peak.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import os
import random
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zstandard

from sidecar.engine import Engine, ExportRequest, export
from sidecar.engine.archives.tarballs import adopt
from sidecar.errors import SidecarError
from sidecar.format.checksums import decode_checksummed, encode_checksummed
from sidecar.policy.limits import Limits
from tests.parts.forgery import Bundle, ForgedSandbox, header, pax, zeros
from tests.parts.homes import engine_at
from tests.parts.memory_use import peak_kib

MEMORY = "hostile"
GOOD_NAME = ".claude-mem/modes/code.json"
NAME = ".claude-mem/modes/x.json"
ELSEWHERE = "photos/cat.jpg"
"""A member that is no part of any memory."""
BEYOND = 999_999_999_999_999_999
GIB = 1 << 30
ESCAPED = "escaped-from-a-tarball"
"""In every name that must never appear on the disk."""
END = bytes(1024)


def file(name: str, contents: bytes = b"{}") -> bytes:
    """A member as an honest writer makes it."""
    return header(name, len(contents)) + contents + bytes(-len(contents) % 512)


def folder(name: str) -> bytes:
    return header(name, 0, tarfile.DIRTYPE)


def link(name: str, target: str) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    return info.tobuf(tarfile.GNU_FORMAT)


def record(key: bytes, value: bytes) -> bytes:
    """A pax record with its right length."""
    length = len(key) + len(value) + 3
    while len(str(length)) + len(key) + len(value) + 3 != length:
        length = len(str(length)) + len(key) + len(value) + 3
    return b"%d %s=%s\n" % (length, key, value)


def long_name(name: bytes) -> bytes:
    return header("././@LongLink", len(name) + 1, tarfile.GNUTYPE_LONGNAME) + name + bytes(512 - len(name) % 512)


GOOD = file(GOOD_NAME)


def _gz(*parts: bytes) -> bytes:
    return gzip.compress(b"".join(parts), 1)


def _pax_size(name: str, size: bytes) -> bytes:
    return pax(record(b"size", size)) + header(name, 0)


def _overlapping() -> bytes:
    """Headers of 16 kB in which each second byte begins another record that reaches to the end."""
    return b"".join(pax(b"2 " * 7_000 + b"%d=\n" % number, tarfile.XGLTYPE) for number in range(40))


def _many_globals() -> bytes:
    """Headers for all members, of ever other keywords: a careless reader copies them all for each member."""
    return b"".join(
        pax(b"".join(record(b"k%d" % (number * 800 + n), b"v") for n in range(800)), tarfile.XGLTYPE)
        for number in range(1000)
    )


def _million_members() -> bytes:
    packed = zstandard.ZstdCompressor()
    some = packed.compress(header("photos/cat.jpg", 0) * 10_000)
    return packed.compress(GOOD) + some * 100 + packed.compress(END)


def _long_names() -> bytes:
    """Members each with as long a name as there is, and a wide character in it, which makes all of them wide."""
    packed = zstandard.ZstdCompressor()
    pieces = [packed.compress(GOOD)]
    part = "/".join(["n" * 250] * 15) + "/\N{BRAIN}"
    for start in range(0, 10_000, 1000):
        names = (f".claude-mem/modes/{n}/{part}".encode() for n in range(start, start + 1000))
        pieces.append(packed.compress(b"".join(pax(record(b"path", name)) + header("x", 0) for name in names)))
    return b"".join(pieces) + packed.compress(END)


def _many_comments() -> bytes:
    """Thousands of notes in as large headers as are read."""

    def note(number: int) -> bytes:
        text = json.dumps({"keyed": {f"claude-mem/{number}/{n}": "~/" + "p" * 60 for n in range(150)}})
        return pax(record(b"comment", b"memory-sidecar: " + text.encode())) + file(f".claude-mem/modes/{number}.json")

    return _gz(GOOD, *(note(number) for number in range(4_900)), END)


def _projects(projects: list[str]) -> bytes:
    text = b"memory-sidecar: " + json.dumps({"projects": projects}).encode()
    return _gz(pax(record(b"comment", text), tarfile.XGLTYPE), GOOD, END)


def _bomb(kind: bytes, size: int, name: str = "././@PaxHeader") -> bytes:
    return _gz(GOOD, header(name, size, kind)) + zeros(size) + _gz(END)


def _sparse_1_0() -> bytes:
    """A sparse map of gigabytes, in the contents of its member, which a careless reader makes a list of."""
    records = record(b"GNU.sparse.major", b"1") + record(b"GNU.sparse.minor", b"0")
    size = 2 * GIB
    piece = gzip.compress(b"0\n" * (8 << 20), 9)
    return _gz(GOOD, pax(records), header(NAME, size), b"%d\n" % BEYOND) + piece * (size // (16 << 20)) + _gz(END)


def _links_out() -> bytes:
    """A link that leads out by way of another, and one more below it, for which folders would be made there."""
    top = ".claude-mem/corpora"
    deep = f"{top}/a/b/c/d/e/f/g/h"
    return _gz(
        GOOD,
        link(f"{deep}/hop", "../" * 8 + "flat"),
        link(f"{deep}/hop/out", "../" * 10 + "x"),
        folder(f"{top}/flat"),
        link(f"{top}/flat/out/{ESCAPED}/y", "x"),
        END,
    )


def _window(log: int) -> bytes:
    """A zstd frame that says it needs a window of 2 to the ``log`` bytes."""
    frame_header = bytes([0, (log - 10) << 3])
    raw_block = (3 << 3 | 1).to_bytes(3, "little") + b"abc"
    return b"\x28\xb5\x2f\xfd" + frame_header + raw_block


Make = Callable[[], bytes]
ARCHIVES: dict[str, tuple[str, Make]] = {
    # sizes that are not there
    "size-by-pax": ("pack-bomb", lambda: _gz(GOOD, _pax_size(NAME, b"%d" % BEYOND))),
    "size-by-pax-left-out": ("pack-bomb", lambda: _gz(GOOD, _pax_size(ELSEWHERE, b"%d" % BEYOND), END)),
    "size-by-pax-of-a-device": (
        "pack-bomb",
        lambda: _gz(GOOD, pax(record(b"size", b"%d" % BEYOND)), header(NAME, 0, b"Z"), END),
    ),
    "size-by-global-pax": (
        "pack-bomb",
        lambda: _gz(pax(record(b"size", b"%d" % BEYOND), tarfile.XGLTYPE), GOOD, file(NAME), END),
    ),
    "size-base-256": ("pack-bomb", lambda: _gz(GOOD, header(NAME, 1 << 62))),
    "size-within-the-limit": ("not-an-archive", lambda: _gz(GOOD, header(NAME, 4 * GIB))),
    "size-within-the-limit-left-out": ("not-an-archive", lambda: _gz(GOOD, header(ELSEWHERE, 4 * GIB))),
    "size-negative": ("not-an-archive", lambda: _gz(GOOD, header(NAME, -512), END)),
    "size-negative-by-one": ("not-an-archive", lambda: _gz(GOOD, header(NAME, -1), END)),
    "size-negative-by-pax": ("not-an-archive", lambda: _gz(GOOD, _pax_size(NAME, b"-1"), END)),
    "size-no-number": ("not-an-archive", lambda: _gz(GOOD, _pax_size(NAME, b"many"), END)),
    "size-of-6000-digits": ("not-an-archive", lambda: _gz(GOOD, _pax_size(NAME, b"9" * 6000), END)),
    "size-in-another-script": ("not-an-archive", lambda: _gz(GOOD, _pax_size(NAME, "٣".encode()), END)),
    # headers that fill the memory
    "header-of-gigabytes": ("pack-bomb", lambda: _bomb(tarfile.XHDTYPE, 6 * GIB)),
    "header-of-gigabytes-for-all": ("pack-bomb", lambda: _bomb(tarfile.XGLTYPE, 6 * GIB)),
    "long-name-of-gigabytes": ("pack-bomb", lambda: _bomb(tarfile.GNUTYPE_LONGNAME, 6 * GIB)),
    "long-link-of-gigabytes": ("pack-bomb", lambda: _bomb(tarfile.GNUTYPE_LONGLINK, 6 * GIB)),
    "header-said-to-be-of-gigabytes": ("pack-bomb", lambda: _gz(GOOD, header("x", BEYOND, tarfile.XHDTYPE))),
    "header-negative": ("not-an-archive", lambda: _gz(GOOD, header("x", -512, tarfile.XHDTYPE), file(NAME), END)),
    "million-keywords": (
        "pack-bomb",
        lambda: _gz(pax(b"".join(record(b"k%d" % n, b"") for n in range(1_000_000))), GOOD, END),
    ),
    "thousands-of-keywords": (
        "pack-bomb",
        lambda: _gz(pax(b"".join(record(b"%x" % n, b"") for n in range(2_000))), GOOD, END),
    ),
    "overlapping-records": ("not-an-archive", lambda: _gz(_overlapping(), GOOD, *[file(NAME)] * 100, END)),
    "many-headers-for-all": ("pack-bomb", lambda: _gz(_many_globals(), GOOD, *[file(NAME)] * 2000, END)),
    "nested-headers": ("pack-bomb", lambda: _gz(pax(record(b"comment", b"")) * 4000, GOOD, END)),
    "record-of-length-0": ("not-an-archive", lambda: _gz(pax(b"0 a=b\n"), GOOD, END)),
    "record-longer-than-its-header": ("not-an-archive", lambda: _gz(pax(b"99 a=b\n"), GOOD, END)),
    "record-of-digits": ("not-an-archive", lambda: _gz(pax(b"1" * 15_000), GOOD, END)),
    "many-comments": ("pack-bomb", _many_comments),
    # more than there may be
    "million-members": ("limit-files", _million_members),
    "long-names": ("pack-bomb", _long_names),
    "zeros-in-a-member": ("limit-file-bytes", lambda: _bomb(tarfile.REGTYPE, 10 * GIB, NAME)),
    "zeros-left-out": ("pack-bomb", lambda: _bomb(tarfile.REGTYPE, 12 * GIB, ELSEWHERE)),
    "zeros-behind-the-end": ("pack-bomb", lambda: _gz(GOOD, END) + zeros(12 * GIB)),
    "nothing-but-zeros": ("pack-bomb", lambda: zeros(12 * GIB)),
    "zstd-zeros": (
        "pack-bomb",
        lambda: zstandard.compress(GOOD + header(ELSEWHERE, 12 * GIB)) + zstandard.compress(bytes(16 << 20)) * 768,
    ),
    "zstd-window": ("not-an-archive", lambda: _window(31)),
    "empty-gzip-members": ("not-an-archive", lambda: gzip.compress(b"") * 200_000),
    "empty-zstd-frames": ("not-an-archive", lambda: zstandard.compress(b"") * 500_000),
    # sparse members
    "sparse-by-type": ("unsafe-member", lambda: _gz(GOOD, header(NAME, 512, tarfile.GNUTYPE_SPARSE), bytes(512), END)),
    "sparse-0.0": (
        "unsafe-member",
        lambda: _gz(GOOD, pax(record(b"GNU.sparse.size", b"%d" % BEYOND)), file(NAME), END),
    ),
    "sparse-0.1": ("unsafe-member", lambda: _gz(GOOD, pax(record(b"GNU.sparse.map", b"0,1")), file(NAME), END)),
    "sparse-1.0": ("unsafe-member", _sparse_1_0),
    "sparse-for-all": (
        "unsafe-member",
        lambda: _gz(pax(record(b"GNU.sparse.map", b"0,1"), tarfile.XGLTYPE), GOOD, END),
    ),
    # what would be taken for less than it is
    "no-end": ("not-an-archive", lambda: _gz(GOOD, file(NAME))),
    "no-end-zstd": ("not-an-archive", lambda: zstandard.compress(GOOD + file(NAME, b"x" * 9000) + END)[:-9]),
    "damage-in-the-middle": ("not-an-archive", lambda: _gz(GOOD, b"\xff" * 512, file(NAME), END)),
    "checksum-of-gzip": ("not-an-archive", lambda: _gz(GOOD, END)[:-8] + bytes(8)),
    # ways out, and places that cannot be
    "links-out": ("unsafe-path", _links_out),
    "link-below-a-file": ("unsafe-path", lambda: _gz(GOOD, link(f"{GOOD_NAME}/x", "y"), END)),
    "folder-where-a-file-is": ("unsafe-path", lambda: _gz(GOOD, folder(GOOD_NAME), END)),
    "folder-below-a-file": ("unsafe-path", lambda: _gz(GOOD, folder(f"{GOOD_NAME}/x"), END)),
    "file-where-a-folder-is": ("unsafe-path", lambda: _gz(folder(GOOD_NAME), GOOD, END)),
    "projects-at-one-place": ("unsafe-path", lambda: _projects(["/" * n + "a" for n in range(1, 500)])),
    "projects-deep": ("limit-depth", lambda: _projects(["~/" + "d/" * 300 + str(n) for n in range(20)])),
    "projects-out": ("unsafe-path", lambda: _projects([f"~/../../../{ESCAPED}"])),
}
"""What may be said of each, by its name: the error's code."""


def tarball_of(*members: bytes) -> bytes:
    """What a sandbox without Python brings when it is honest."""
    return _gz(*(members or (file("./project/MEMORY.md", b"# Long term\n"),)), END)


ASKED = ("three-tier",)
HONEST_ROOT = {"name": "project", "layout": "three-tier", "hint": "/home/user"}


def _root(**said: Any) -> dict[str, Any]:
    return {"roots": [{**HONEST_ROOT, **said}]}


ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "root-out": ("bad-answer", _root(name=f"../../../../{ESCAPED}")),
    "root-out-beside-an-honest-one": (
        "bad-answer",
        {"roots": [HONEST_ROOT, {"name": f"../../../../{ESCAPED}", "layout": "nothing", "hint": "~"}]},
    ),
    "root-absolute": ("bad-answer", _root(name=f"/tmp/{ESCAPED}")),
    "root-of-nothing-known": ("bad-answer", _root(name="elsewhere")),
    "root-of-an-unknown-layout": ("bad-answer", _root(layout="elsewhere")),
    "root-of-a-layout-not-asked-for": ("bad-answer", _root(name="claude-mem", layout="claude-mem")),
    "root-under-another-layout": ("bad-answer", _root(layout="claude-mem")),
    "root-twice": ("bad-answer", {"roots": [HONEST_ROOT, HONEST_ROOT]}),
    "root-3": ("bad-answer", _root(name="project-3")),
    "root-3000": ("bad-answer", _root(name="project-3000")),
    "root-0": ("bad-answer", _root(name="project-0")),
    "root-1": ("bad-answer", _root(name="project-1")),
    "root-02": ("bad-answer", _root(name="project-02")),
    "root-superscript": ("bad-answer", _root(name="project-²")),
    "root-in-another-script": ("bad-answer", _root(name="project-٢")),
    "root-of-6000-digits": ("bad-answer", _root(name="project-" + "9" * 6000)),
    "root-nul": ("bad-answer", _root(name="project\0")),
    "root-empty": ("bad-answer", _root(name="")),
    "root-lone-surrogate": ("bad-answer", _root(name="project\ud800")),
    "hint-up": ("unsafe-path", _root(hint="/home/user/../../etc")),
    "hint-nul": ("unsafe-path", _root(hint="/home/\0")),
    "hint-control": ("unsafe-path", _root(hint="/home/\x1b[2J")),
    "hint-newline": ("unsafe-path", _root(hint="/home/user\nroot")),
    "hint-long": ("unsafe-path", _root(hint="/" + "x" * 5000)),
    "hint-lone-surrogate": ("unsafe-path", _root(hint="/home/\ud800")),
    "hint-relative": ("unsafe-path", _root(hint="home/user")),
    "hint-empty": ("unsafe-path", _root(hint="")),
    "home-lone-surrogate": ("unsafe-path", {"home": "/home/\ud800"}),
    "no-roots": ("bad-answer", {"roots": []}),
}
"""What may be said of an answer that is honest but for this."""


class BareForgery(ForgedSandbox):
    """A sandbox without Python: this tarball, and an answer that is honest but for ``said``."""

    def __init__(self, tarball: bytes, said: dict[str, Any]) -> None:
        answer = {"status": "tarball", "home": "/home/user", "roots": [HONEST_ROOT], "kind": "", "codec": "", **said}
        super().__init__(lambda request: Bundle(tarball, b"", answer, inline=False))


def plant(store: Path, pack: bytes) -> None:
    """Put another pack in the place of the only one in a store, with a manifest that says it is the right one."""
    (place,) = store.glob("memories/*/packs/[!.]*.tar.gz")
    (listed,) = store.glob("memories/*/snapshots/[!.]*.json")
    place.write_bytes(pack)
    manifest = decode_checksummed(listed.read_bytes())
    manifest["packs"][0].update(bytes=len(pack), sha256=hashlib.sha256(pack).hexdigest())
    listed.write_bytes(encode_checksummed(manifest))


PLANTED: dict[str, Make] = {
    "size-by-pax": lambda: _gz(_pax_size("project/MEMORY.md", b"%d" % BEYOND)),
    "size-of-another": lambda: _gz(_pax_size("elsewhere", b"%d" % BEYOND), END),
    "size-base-256": lambda: _gz(header("project/MEMORY.md", 1 << 62)),
    "larger": lambda: _gz(file("project/MEMORY.md", b"x" * 5_000_000), END),
    "header-of-gigabytes": lambda: _gz(header("x", 2 * GIB, tarfile.XHDTYPE)) + zeros(2 * GIB),
    "no-end": lambda: _gz(file("project/MEMORY.md", b"# Long term\n")),
    "nothing": lambda: _gz(END),
    "no-tarball": lambda: _gz(b"no tarball" * 300),
}
"""Packs for a snapshot of one file, ``project/MEMORY.md``, that somebody who can write to the store has put there."""


def engine_for(folder: Path, **limits: Any) -> Engine:
    return engine_at(folder / "store", **({"limits": Limits(**limits)} if limits else {}))


async def read_archive(engine: Engine, archive: Path, memory: str = MEMORY) -> str:
    """Import a tarball: the error's code, why it was rejected, or else the outcome."""
    return await _code(adopt(engine, archive, ExportRequest(memory=memory)))


async def read_answer(engine: Engine, tarball: bytes, said: dict[str, Any], memory: str = MEMORY) -> str:
    """Export from a sandbox without Python: the error's code, why it was rejected, or else the outcome."""
    return await _code(export(engine, BareForgery(tarball, said), ExportRequest(memory=memory, layouts=ASKED)))


async def _code(work: Any) -> str:
    try:
        receipt = await work
    except SidecarError as problem:
        return problem.code
    return receipt.reason.code if receipt.reason else str(receipt.outcome)


class Chance:
    """Random tarballs and answers: mostly lawful, with a few things wrong in each, so that they get far."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def often(self, share: float) -> bool:
        return self.random.random() < share

    def name(self) -> str:
        lawful = [
            *(
                NAME,
                GOOD_NAME,
                ".claude-mem/corpora/a/b.json",
                ".claude-mem/settings.json",
                ".claude-mem/claude-mem.db",
            ),
            *("MEMORY.md", "memory/2026-11-16.md", "./project/MEMORY.md", "project/memory/x.md", "app/MEMORY.md"),
            *(".claude/projects/-home-user-app/a.jsonl", ELSEWHERE, ".cm/CONTINUITY.md", "project-2/MEMORY.md"),
        ]
        odd = [
            *(
                f"../{ESCAPED}",
                f".claude-mem/../../{ESCAPED}",
                f"/tmp/{ESCAPED}",
                f"project/../../../{ESCAPED}",
                "..",
                ".",
            ),
            *("", "/", "./", "././MEMORY.md", "a//b", "memory/\x1b[2J.md", "memory/line\nbreak.md", "memory/\\..\\x"),
            *(
                "project/" + "n" * 300,
                "memory/" + "d/" * 120 + "x",
                "memory/\N{BRAIN}.md",
                ".claude-mem",
                "project",
                "memory",
            ),
            *(f"{GOOD_NAME}/below", f"{NAME}/x/{ESCAPED}", ".claude-mem/corpora/hop/x", "project-²/MEMORY.md"),
        ]
        return self.random.choice(odd if self.often(0.25) else lawful)

    def size(self) -> int:
        numbers = [-(1 << 70), -512, -1, 0, 1, 511, 513, 1 << 20, 1 << 33, BEYOND, 1 << 62, (1 << 88) - 1]
        return self.random.choice(numbers)

    def contents(self) -> bytes:
        kind = self.random.randrange(4)
        if kind == 0:
            return bytes(self.random.choice([0, 1, 512, 70_000, 1 << 20]))
        if kind == 1:
            return b"SQLite format 3\0" + self.random.randbytes(4080)
        return self.random.randbytes(self.random.choice([0, 1, 511, 512, 513, 5000]))

    def records(self) -> bytes:
        """The records of a pax header, not all of them as they should be."""
        keys = [
            b"path",
            b"size",
            b"linkpath",
            b"mtime",
            b"uid",
            b"comment",
            b"hdrcharset",
            b"GNU.sparse.map",
            b"charset",
        ]
        values = [
            *(b"", b"0", b"1", b"-1", b"1e400", b"nan", b"9" * 5000, b"\xff\xfe", b"BINARY", b"0,1,2", "٣".encode()),
            *(str(BEYOND).encode(), self.name().encode(errors="surrogateescape"), b"a\0b", b"x" * 3000),
            b"memory-sidecar: " + self.note(),
        ]
        text = b"".join(
            record(self.random.choice(keys), self.random.choice(values)) for _ in range(self.random.randint(0, 4))
        )
        if self.often(0.15):
            text = self.random.choice(
                [b"0 a=b\n", b"5 a=b", b"1 ", b"99999 a=b\n", b"2 2 2 =\n", b"\n", b"=", text[:-1]]
            )
        return text

    def note(self) -> bytes:
        projects = [
            *("~", "~/app", "/work", "~/app/", "", "/", "~x", f"~/../{ESCAPED}", f"/../../{ESCAPED}", "~/" + "p" * 300),
            *("~/app\0", "~/\ud800", "//app", "~/" + "d/" * 90, "~/.claude-mem", "~/memory/x"),
        ]
        note: dict[str, Any] = {"projects": [self.random.choice(projects) for _ in range(self.random.randint(0, 5))]}
        if self.often(0.3):
            keys = ["claude-code/projects/x", "../x", "claude-mem/x", f"claude-code/projects/../../{ESCAPED}", ""]
            note["keyed"] = {self.random.choice(keys): self.random.choice(projects)}
        if self.often(0.2):
            note["versions"] = {"claude-mem": "9" * self.random.choice([1, 300])}
        if self.often(0.2):
            note = {"projects": self.random.choice([None, 7, "x", {}, [1], [[]]])}
        return json.dumps(note).encode()

    def member(self) -> bytes:
        """One member, or what should have been one."""
        kind = self.random.choices(range(3, 12), [6, 1, 2, 1, 3, 1, 1, 2, 0.5])[0]
        if kind == 3:
            return self._named(lambda name: file(name, self.contents()))
        if kind == 4:
            return self._named(folder)
        if kind == 5:
            targets = [
                "x",
                "../x",
                "../../../" + ESCAPED,
                "/etc/passwd",
                "",
                ".",
                "..",
                "hop/../..",
                "a" * 5000,
                "\x1b",
            ]
            return self._named(lambda name: link(name, self.random.choice(targets)))
        if kind == 6:
            types = [
                bytes([self.random.randrange(256)]),
                *(t for t in (b"1", b"3", b"4", b"6", b"7", b"S", b"D", b"V")),
            ]
            return self._named(lambda name: header(name, self.random.choice([0, 512]), self.random.choice(types)))
        if kind == 7:
            types = [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE]
            return pax(self.records(), self.random.choice(types)) * self.random.choice([1, 1, 1, 2, 20])
        if kind == 8:
            return self._named(lambda name: header(name, self.size()))
        if kind == 9:
            kinds = [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE]
            return header("././@LongLink", self.size(), self.random.choice(kinds)) + self.random.randbytes(512)
        if kind == 10:
            return long_name(self.name().encode(errors="surrogateescape") * self.random.choice([1, 1, 50]))
        return self.random.choice([self.random.randbytes(512), bytes(512), b"\xff" * 512])

    def _named(self, make: Callable[[str], bytes]) -> bytes:
        name = self.name()
        if len(os.fsencode(name)) < 100:
            return make(name)
        return pax(record(b"path", os.fsencode(name))) + make("x")

    def tar(self, *lawful: bytes) -> bytes:
        pieces = [*lawful] if self.often(0.85) else []
        for _ in range(self.random.choice([1, 1, 2, 3, 8])):
            pieces.insert(self.random.randint(0, len(pieces)), self.member())
        if self.often(0.05):
            pieces += [header(f"memory/{number}", 0) for number in range(700)]
        text = b"".join(pieces) + self.random.choice([*[END] * 12, bytes(512), b"", bytes(10_240), END + b"x" * 700])
        if self.often(0.06):
            bent = bytearray(text)
            for _ in range(self.random.randint(1, 8)):
                bent[self.random.randrange(len(bent))] ^= 1 << self.random.randrange(8)
            text = bytes(bent)
        return bytes(text[: self.random.randrange(len(text))] if self.often(0.03) and text else text)

    def packed(self, tar: bytes) -> bytes:
        """Compressed in one way or another, whole or not."""
        half = self.random.randrange(len(tar) + 1)
        many = zstandard.ZstdCompressor()
        ways: list[Make] = [
            lambda: tar,
            lambda: _gz(tar),
            lambda: _gz(tar[:half]) + _gz(tar[half:]),
            lambda: zstandard.compress(tar),
            lambda: many.compress(tar[:half]) + many.compress(tar[half:]),
            lambda: _gz(b"") * 50 + _gz(tar) + bytes(3000),
            lambda: _gz(_gz(tar)),
            lambda: _gz(tar) + zeros(48 << 20),
            lambda: _window(self.random.choice([10, 20, 27, 31])) + zstandard.compress(tar),
            lambda: _gz(tar)[:-9],
            lambda: zstandard.compress(tar)[:-5],
            lambda: b"\x50\x2a\x4d\x18\xff\xff\xff\xff" + zstandard.compress(tar),
        ]
        return self.random.choice(ways[:5] if self.often(0.8) else ways)()

    def archive(self) -> bytes:
        return self.packed(self.tar(GOOD, file("MEMORY.md", b"# Long term\n")))

    def answer(self) -> tuple[bytes, dict[str, Any]]:
        """What a sandbox without Python brings, and what it says of it."""
        tar = self.packed(self.tar(folder("./project"), file("./project/MEMORY.md", b"# Long term\n")))
        if self.often(0.3):
            tar = tarball_of()
        said: dict[str, Any] = {}
        if self.often(0.6):
            roots = [dict(row["roots"][0]) for _, row in ANSWERS.values() if row.get("roots")]
            said["roots"] = [HONEST_ROOT, *self.random.sample(roots, self.random.randint(0, 2))][
                self.random.randrange(2) :
            ]
        for key, values in (
            ("home", ["", "/", "relative", "/home/\0", "x" * 5000, "/home/\ud800"]),
            ("lineage", [[], ["x"], ["../../x"] * 50]),
            ("skipped", [[{"path": "\x1b[2J\ud800", "reason": "x" * 5000}] * 3, [{"path": "", "reason": ""}]]),
            ("skipped_more", [0, 1 << 70, 10**400]),
            ("databases", [[{"path": f"project/{ESCAPED}", "method": "copied", "check": ""}]]),
            ("warnings", [["\x1b[2J"]]),
            ("keyed", [{"../x": "~"}, {"": ""}]),
            ("versions", [{"x": "9" * 500}]),
            ("projects", [["../x"]]),
            ("files", [1 << 80]),
            ("codec", ["gz", "zst", "lzma"]),
            ("kind", ["full", "delta"]),
            ("base", ["x", "../../x"]),
            ("pack_bytes", [0, 1 << 60]),
        ):
            if self.often(0.08):
                said[key] = self.random.choice(values)
        return tar, said


LIMITS = {"bytes": 8 << 20, "file_bytes": 4 << 20, "files": 500, "packed_bytes": 64 << 20}
"""Small ones, so that what is beyond them is cheap to make."""
KINDS = ("archive", "answer")


def read_seed(seed: int, folder: Path) -> tuple[str, str]:
    """Read one random thing: its kind, and what the engine said. Whatever else is raised is the test's to see."""
    chance, kind = Chance(seed), KINDS[seed % 2]
    engine = engine_for(folder, **LIMITS)
    if kind == "archive":
        archive = folder / "archive"
        archive.write_bytes(chance.archive())
        return kind, asyncio.run(read_archive(engine, archive, f"seed-{seed}"))
    tar, said = chance.answer()
    return kind, asyncio.run(read_answer(engine, tar, said, f"seed-{seed}"))


def _elsewhere(make: Make, target: Path) -> None:
    """Write what is made by a process of its own, so that the memory it takes is not counted."""
    if os.fork() == 0:
        target.write_bytes(make())
        os._exit(0)
    assert os.wait()[1] == 0


def _told(work: Callable[[], tuple[str, str]]) -> None:
    """Print a line of JSON about it."""
    started, broke = time.monotonic(), ""
    try:
        kind, code = work()
    except BaseException:
        kind, code, broke = "", "", traceback.format_exc()
    took = round(time.monotonic() - started, 2)
    print(json.dumps({"kind": kind, "code": code, "broke": broke, "seconds": took, "peak_kib": peak_kib()}), flush=True)


def _main(what: str, *words: str) -> None:
    folder = Path(words[-1])
    tempfile.tempdir = str(folder / "spool")
    if what == "case":
        _elsewhere(ARCHIVES[words[0]][1], folder / "archive")
        _told(lambda: ("archive", asyncio.run(read_archive(engine_for(folder), folder / "archive"))))
        return
    if what == "bare":
        _elsewhere(ARCHIVES[words[0]][1], folder / "archive")
        tarball = (folder / "archive").read_bytes()
        _told(lambda: ("answer", asyncio.run(read_answer(engine_for(folder), tarball, {}))))
        return
    first, count = int(words[0]), int(words[1])
    for seed in range(first, first + count):
        _told(lambda seed=seed: read_seed(seed, folder))  # type: ignore[misc]


if __name__ == "__main__":
    _main(*sys.argv[1:])
