"""Decompress packs with whichever zstd implementation this machine has."""

from __future__ import annotations

import contextlib
import gzip
import shutil
import subprocess
import threading
from typing import BinaryIO, Iterator

from sidecar.format.refusal import Refusal


@contextlib.contextmanager
def decompress(stream: BinaryIO, codec: str) -> Iterator[BinaryIO]:
    """Yield the decompressed bytes of a "gz" or "zst" stream. Raise Refusal (``no-zstd``) if this machine cannot read
    zstd."""
    if codec == "gz":
        with gzip.GzipFile(fileobj=stream, mode="rb") as plain:
            yield plain  # type: ignore[misc]
        return
    try:
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]

        with zstd.ZstdFile(stream) as plain:
            yield plain
        return
    except ImportError:
        pass
    try:
        import zstandard

        with zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True, closefd=False) as reader:
            yield reader
        return
    except ImportError:
        pass
    if not shutil.which("zstd"):
        raise Refusal("no-zstd", "This sandbox has neither the zstd program nor Python 3.14.")
    process = subprocess.Popen(["zstd", "-q", "-d", "-c"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    feeder = threading.Thread(target=_copy_to_pipe, args=(stream, process.stdin), daemon=True)
    feeder.start()
    try:
        yield process.stdout  # type: ignore[misc]
    finally:
        process.stdout.close()
        process.wait()
        feeder.join()


def _copy_to_pipe(source: BinaryIO, target: BinaryIO) -> None:
    """Feed a decompressor's input. A broken pipe is ignored: the reader stopped early."""
    with contextlib.suppress(BrokenPipeError), target:
        shutil.copyfileobj(source, target, 1 << 20)
