"""The bundle an export leaves with: a pack, then its index, in one file."""

from __future__ import annotations

import hashlib
import os
from typing import Any, BinaryIO, Dict

from . import index, places
from .packing import Packer
from .scratch import Scratch


class Bundle:
    """Begun with the first thing that is packed. ``carried`` is how many bytes of each path are in it."""

    def __init__(self, scratch: Scratch, zstd: bool) -> None:
        self._scratch = scratch
        self._zstd = zstd
        self._path = os.path.join(scratch.work, "bundle")
        self._packer: Packer | None = None
        self._file: BinaryIO | None = None
        self.carried: Dict[str, int] = {}

    @property
    def packer(self) -> Packer:
        if self._packer is None:
            self._file = open(places.create_file(self._path), "wb", buffering=0)
            self._packer = Packer(self._file, self._zstd)
        return self._packer

    def add(self, entry: index.Entry, blocks: list[int] | None, stream: BinaryIO, length: int) -> None:
        (self.packer.add if blocks is None else self.packer.add_blocks)(entry, stream, length)
        self.carried[entry.path] = length

    def abandon(self) -> None:
        """Give it up: what is written of it goes, and whoever still writes to it."""
        if self._packer is not None:
            self._packer.abandon()
            os.unlink(self._path)

    def finish(self, changes: index.Index) -> dict[str, Any]:
        """Close the pack, put its index behind it, and say what both are."""
        codec = self.packer.finish()
        assert self._file is not None
        self._file.close()
        pack_size = os.path.getsize(self._path)
        with open(self._path, "ab") as bundle:
            index.write(bundle, changes)
        pack_digest, index_digest = hashlib.sha256(), hashlib.sha256()
        with open(self._path, "rb") as bundle:
            for chunk in iter(lambda: bundle.read(min(1 << 20, pack_size - bundle.tell())), b""):
                pack_digest.update(chunk)
            whole = pack_digest.copy()
            for chunk in iter(lambda: bundle.read(1 << 20), b""):
                index_digest.update(chunk)
                whole.update(chunk)
        self._scratch.give_to_user(self._path)
        return {
            "kind": changes.kind,
            "codec": codec,
            "pack_bytes": pack_size,
            "pack_sha256": pack_digest.hexdigest(),
            "index_sha256": index_digest.hexdigest(),
            "bundle": {"path": self._path, "bytes": os.path.getsize(self._path), "sha256": whole.hexdigest()},
        }
