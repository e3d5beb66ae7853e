"""The files of one snapshot of a memory after another, on this machine, with every pack fetched at most once.

Going from a snapshot to a later one that grew out of it needs only the packs in between: they are applied to what is
there. A fold covers at least what the packs did that it replaces, so it can be applied to their result as well.
"""

from __future__ import annotations

import asyncio
import io
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import zstandard

from sidecar.errors import ObjectMissing, SnapshotDamaged
from sidecar.format import index
from sidecar.format.digests import digest_stream
from sidecar.format.index import FILE, Entry, Index, merge_indexes
from sidecar.format.refusal import Refusal
from sidecar.host.files import Spool, SpoolFull
from sidecar.host.work import run_in_thread
from sidecar.ids import MemoryKeys
from sidecar.ports import Store
from sidecar.program.restore.staging import Unpacker
from sidecar.records.files import MemoryFile, make_files
from sidecar.store.fetch import fetch_packs
from sidecar.store.fold import PackFile
from sidecar.store.manifest import Manifest, Pack
from sidecar.store.recall import Recalled

Holds = Callable[[str], bool]


class Workspace:
    """Holds the files of one snapshot of a memory, those that ``wanted`` asks for.

    Packs are fetched only if they carry something of those, and always compared with their hashes; with ``check``, so are
    the files that come of them.
    """

    def __init__(
        self,
        store: Store,
        memory: str,
        scratch: Spool,
        wanted: Holds,
        *,
        check: bool = True,
        recalled: Recalled | None = None,
    ) -> None:
        self._recalled = recalled
        self._store, self._memory, self._scratch, self._wanted = store, memory, scratch, wanted
        self._indexes: dict[str, Index] = {}
        self._places: dict[str, str] = {}
        self._manifest: Manifest | None = None
        self.entries: dict[str, Entry] = {}
        """All entries of the snapshot that it holds."""
        self.packs_read = 0
        self._kept: list[str] = []
        self._check = check

    async def read_entries(self, manifest: Manifest) -> dict[str, Entry]:
        """Return the entries of a snapshot. Each index is fetched once. Raise ``SnapshotDamaged``."""
        missing = [pack for pack in manifest.packs if pack.id not in self._indexes]
        try:
            read = await asyncio.gather(*(self._fetch_index(pack) for pack in missing))
            self._indexes.update({pack.id: found for pack, found in zip(missing, read, strict=True)})
            return merge_indexes(self._indexes[pack.id] for pack in manifest.packs)
        except ValueError as problem:
            raise SnapshotDamaged(f"An index of snapshot {manifest.snapshot} is damaged: {problem}.") from None

    def add_indexes(self, manifest: Manifest, indexes: list[Index]) -> None:
        """Use indexes that were read before."""
        self._indexes.update({pack.id: found for pack, found in zip(manifest.packs, indexes, strict=True)})

    async def _fetch_index(self, pack: Pack) -> Index:
        key = MemoryKeys.of(self._memory).index(pack.id)
        try:
            got = await self._scratch.take(self._store.stream(key), most=pack.index_bytes)
        except ObjectMissing:
            raise SnapshotDamaged(f"{key} is missing from the store.") from None
        if (got.size, got.sha256) != (pack.index_bytes, pack.index_sha256):
            raise SnapshotDamaged(f"{key} is damaged: its size or hash is not what the manifest says.")
        data = await asyncio.to_thread(got.path.read_bytes)
        await asyncio.to_thread(_remove_files, [str(got.path)])
        return await asyncio.to_thread(index.read, io.BytesIO(data))

    async def advance(self, manifest: Manifest, *, keep: bool = False) -> dict[str, MemoryFile]:
        """Make the files those of a snapshot and return them. With ``keep``, those returned before stay as they are.

        Raise ``SnapshotDamaged`` or ``SpoolFull``.
        """
        entries = await self.read_entries(manifest)
        old = self._manifest
        extends = old is not None and [pack.id for pack in old.packs] == [
            pack.id for pack in manifest.packs[: len(old.packs)]
        ]
        grew = old is not None and old.packs[0].id == manifest.packs[0].id and manifest.parent == old.snapshot
        try:
            if old is not None and (extends or grew):
                done = {pack.id for pack in old.packs}
                await self._apply(
                    manifest, entries, [pack for pack in manifest.packs if pack.id not in done], keep=keep
                )
                if not extends and not await run_in_thread(self._is_intact, entries):
                    await self._start_over(manifest, entries, keep=keep)
            else:
                await self._start_over(manifest, entries, keep=keep)
        except SnapshotDamaged as damage:
            raise SnapshotDamaged(f"Snapshot {manifest.snapshot} cannot be read: {damage.message}") from None
        except OSError as problem:
            raise SpoolFull(
                f"Snapshot {manifest.snapshot} could not be unpacked in {self._scratch.folder}: {problem}."
            ) from None
        self._manifest, self.entries = manifest, entries
        return self.files

    async def apply_pack(self, manifest: Manifest, entries: dict[str, Entry], pack: PackFile) -> dict[str, MemoryFile]:
        """Apply a checked pack that is on this machine and return the files as they are then. Those before it stay."""
        wanted = self._list_wanted(entries)
        await run_in_thread(self._unpack, [pack], wanted, True)
        self._manifest, self.entries = manifest, entries
        return self.files

    @property
    def files(self) -> dict[str, MemoryFile]:
        """The files of the snapshot that it holds, as the readers of records get them."""
        assert self._manifest is not None
        hints = {root.name: root.hint for root in self._manifest.roots}
        return make_files(self._places, self.entries, hints)

    def choose_packs(self, packs: Sequence[Pack], entries: Mapping[str, Entry]) -> list[Pack]:
        """Return those of these packs that are needed for the wanted files: none that carries nothing of them, nor one
        from before they were carried whole."""
        missing = set(self._list_wanted(entries))
        chosen: list[Pack] = []
        for pack in reversed(packs):
            changes = [change for change in self._indexes[pack.id].changes if change.entry.path in missing]
            if any(change.blocks != [] for change in changes):
                chosen.append(pack)
                missing -= {change.entry.path for change in changes if change.blocks is None}
        return chosen[::-1]

    def _list_wanted(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        return {path: entry for path, entry in entries.items() if entry.type == FILE and self._wanted(path)}

    async def _start_over(self, manifest: Manifest, entries: dict[str, Entry], *, keep: bool) -> None:
        self._drop(list(self._places.values()), keep)
        self._places = {}
        await self._apply(manifest, entries, manifest.packs, keep=keep)
        if self._check and not await run_in_thread(self._is_intact, entries):
            raise SnapshotDamaged("some of its files are missing or differ.")

    async def _apply(self, manifest: Manifest, entries: dict[str, Entry], packs: list[Pack], *, keep: bool) -> None:
        """Fetch packs and apply them. Files that the snapshot does not have are dropped."""
        wanted = self._list_wanted(entries)
        packs = self.choose_packs(packs, entries)
        files = await fetch_packs(self._store, manifest.memory, packs, self._scratch, self._recalled)
        self.packs_read += len(files)
        fetched = [
            PackFile(file.path, pack.codec, self._indexes[pack.id]) for file, pack in zip(files, packs, strict=True)
        ]
        await run_in_thread(self._unpack, fetched, wanted, keep)
        await asyncio.to_thread(_remove_files, [str(file.path) for file in files])

    def _unpack(self, packs: list[PackFile], wanted: dict[str, Entry], keep: bool) -> None:
        touched = {
            change.entry.path: wanted[change.entry.path]
            for pack in packs
            for change in pack.index.changes
            if change.entry.path in wanted and change.blocks != []
        }
        folder = os.path.realpath(self._scratch.new())
        stages = dict.fromkeys({path.split("/")[0] for path in touched}, folder)
        unpacker = Unpacker(touched, stages, partial=True)
        for path in touched:
            if (old := self._places.get(path)) is not None:
                (shutil.copyfile if keep else os.replace)(old, unpacker.place(path))
                self._kept += [old] if keep else []
        try:
            for pack in packs:
                with pack.path.open("rb") as stream:
                    unpacker.apply(stream, pack.codec, pack.index)
        except Refusal as refused:
            raise SnapshotDamaged(refused.message) from None
        except zstandard.ZstdError as problem:
            raise SnapshotDamaged(f"A pack could not be unpacked: {problem}.") from None
        self._drop([self._places.pop(path) for path in list(self._places) if path not in wanted], keep)
        self._places.update({path: unpacker.place(path) for path in touched})

    def _drop(self, places: list[str], keep: bool) -> None:
        if keep:
            self._kept += places
        else:
            _remove_files(places)

    def _is_intact(self, entries: dict[str, Entry]) -> bool:
        """Return whether every file has the contents that its entry says."""
        for path, entry in self._list_wanted(entries).items():
            place = self._places.get(path)
            if place is None or not os.path.exists(place) or os.path.getsize(place) != entry.size:
                return False
            with open(place, "rb") as file:
                digest, _, _ = digest_stream(file, entry.size, entry.block)
            if digest != entry.digest:
                return False
        return True


def _remove_files(places: list[str]) -> None:
    for place in places:
        Path(place).unlink(missing_ok=True)
