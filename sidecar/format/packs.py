"""Write a pack: a tarball, compressed according to its size.

Up to 256 KiB are kept in memory and compressed by zlib: to start a program would take longer. What is more goes through
zstd where that is, as a program or in Python (3.14), while the pack is written. Without it up to 8 MiB are kept and
compressed well, because such a pack may be returned inside a command's output; a larger one is compressed as fast as
possible, by the ``pigz`` program, else by zlib at its lowest level.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import shutil
import tarfile
import zlib
from typing import IO, TYPE_CHECKING, Any, BinaryIO

from sidecar.format import index
from sidecar.format.digests import count_blocks
from sidecar.format.refusal import Refusal

if TYPE_CHECKING:
    import subprocess

HELD_BACK, HELD_BACK_WITHOUT_ZSTD = 256 << 10, 8 << 20
QUICKLY, WELL = 2, 3
"""Levels of zstd. A full pack is large, and on two cores it would be waited for; at the next level it is 5 % smaller."""
BLOCKS_PREFIX = "@blocks/"
CHUNK = 1 << 20
F_SETPIPE_SZ = 1031
"""Linux's number for it; the module ``fcntl`` has it only since Python 3.10."""


def describe_member(change: index.Change) -> tuple[str, int]:
    """Return the name and the length of the tar member in which a pack carries a file, or the changed blocks of it."""
    entry, blocks = change
    if blocks is None:
        return entry.path, entry.size
    last = count_blocks(entry.size, entry.block) - 1
    short = (last + 1) * entry.block - entry.size if blocks and blocks[-1] == last else 0
    return BLOCKS_PREFIX + entry.path, len(blocks) * entry.block - short


class _Compressed:
    """A write-only stream that chooses its codec once it knows whether the pack is small or large."""

    def __init__(self, target: BinaryIO, allow_zstd: bool, level: int) -> None:
        self._target = target
        self._level = level
        self._held: io.BytesIO | None = io.BytesIO()
        self._most_held = HELD_BACK if allow_zstd else HELD_BACK_WITHOUT_ZSTD
        self._allow_zstd = allow_zstd
        self._process: subprocess.Popen[bytes] | None = None
        self._sink: IO[bytes] | None = None
        self.codec = "gz"

    def write(self, data: bytes) -> None:
        if self._held is not None:
            self._held.write(data)
            if self._held.tell() > self._most_held:
                self._open_bulk()
        elif self._sink is not None:
            try:
                self._sink.write(data)
            except BrokenPipeError:
                raise Refusal("compressor-failed", "The compressor stopped half way; is the disk full?", True) from None

    def _open_bulk(self) -> None:
        """Start the compressor for large packs, unless this one is not large enough for it, and pass it what was kept in
        memory so far."""
        import gzip
        import subprocess

        assert self._held is not None
        program = (
            ["zstd", "-q", "-c", "-%d" % self._level, "-T0"]
            if self._allow_zstd and shutil.which("zstd")
            else ["pigz", "-c", "-1"]
        )
        module = _find_zstd_module() if self._allow_zstd and program[0] != "zstd" else None
        if module is None and program[0] != "zstd" and self._held.tell() <= HELD_BACK_WITHOUT_ZSTD:
            self._most_held = HELD_BACK_WITHOUT_ZSTD
            return
        held, self._held = self._held.getvalue(), None
        if module is not None:
            self._sink, self.codec = module.ZstdFile(self._target, "wb", level=self._level), "zst"
        elif shutil.which(program[0]):
            self._process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=self._target)
            self._sink, self.codec = self._process.stdin, "zst" if program[0] == "zstd" else "gz"
            widen_pipe(self._process.stdin)
        else:
            self._sink = gzip.GzipFile(fileobj=self._target, mode="wb", compresslevel=1, mtime=0)  # type: ignore[assignment]
        self.write(held)

    def finish(self) -> None:
        """Compress what was kept in memory, or wait for the compressor. Raise Refusal if it failed."""
        if self._held is not None:
            packer = zlib.compressobj(6, zlib.DEFLATED, 31)
            self._target.write(packer.compress(self._held.getbuffer()) + packer.flush())
        elif self._sink is not None:
            self._sink.close()
            if self._process is not None and self._process.wait() != 0:
                raise Refusal("compressor-failed", "The compressor failed; is the disk full?", True)
        self._target.flush()

    def abandon(self) -> None:
        """Kill the compressor."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def _find_zstd_module() -> Any:
    """Return the module of Python 3.14 and newer; ``None`` if it is not there."""
    try:
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    return zstd


def widen_pipe(stream: IO[bytes] | None) -> None:
    """Let more be written to a pipe at once: else whoever writes waits for the reader every 64 KiB."""
    if stream is not None:
        with contextlib.suppress(OSError):  # only Linux has that, and an unprivileged user may not have more
            fcntl.fcntl(stream.fileno(), F_SETPIPE_SZ, CHUNK)


class Packer:
    """A pack that is being written to an open file: ``add`` entries, then call ``finish``."""

    def __init__(self, target: BinaryIO, allow_zstd: bool = True, level: int = WELL) -> None:
        self._stream = _Compressed(target, allow_zstd, level)
        self._length = 0

    def add(self, entry: index.Entry, contents: BinaryIO | None, length: int, name: str = "") -> None:
        """Add a member: ``length`` bytes of ``contents``, or a folder or link. Raise OSError if the contents are too
        short."""
        member = tarfile.TarInfo(name or entry.path)
        member.mode = entry.mode
        member.mtime = entry.mtime // 1_000_000_000
        if entry.type == index.DIR:
            member.type = tarfile.DIRTYPE
        elif entry.type == index.LINK:
            member.type, member.linkname, member.mode = tarfile.SYMTYPE, entry.target, 0o777
        member.size = length
        self._write(member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
        left = length
        while left and contents is not None:
            data = contents.read(min(left, CHUNK))
            if not data:
                raise OSError("unexpected end of data")
            self._write(data)
            left -= len(data)
        self._write(bytes(-length % tarfile.BLOCKSIZE))

    def add_blocks(self, entry: index.Entry, contents: BinaryIO, length: int) -> None:
        """Add only the changed blocks of a file, concatenated in the order of the index."""
        self.add(entry, contents, length, name=BLOCKS_PREFIX + entry.path)

    def finish(self) -> str:
        """Complete the tarball and return its codec, "gz" or "zst"."""
        end = 2 * tarfile.BLOCKSIZE
        self._write(bytes(end + -(self._length + end) % tarfile.RECORDSIZE))
        self._stream.finish()
        return self._stream.codec

    def _write(self, data: bytes) -> None:
        self._stream.write(data)
        self._length += len(data)

    def abandon(self) -> None:
        """Stop the compressor and leave the file incomplete: the pack is not needed any more."""
        self._stream.abandon()
