"""Memory folders under names that every server accepts.

The folder of an id that is not plain was called ``readable~hash`` by earlier versions, and not every S3 look-alike
accepts a ``~``. A new folder is called ``_readable_hash``. Only this layer knows both names: all layers above it use
``readable~hash``, and it finds the folder that a memory has.

Earlier versions look for a memory only under the old name. So that they do not create it a second time there, a
``head.json`` of format 2, which they refuse, is put in the old place: a *signpost*, the marker object that says the
memory is in the other folder. It is written by the same compare-and-swap by which they would write the first head. So
if an old and a new sidecar create a memory at the same time, one of them finds the other's object. What an earlier
version writes beside a signpost (an export that it calls diverged) is still found in the memory: both folders are read
as one. If a server does not accept ``~`` there is no signpost, and no earlier version that could write.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TypeVar

from sidecar.errors import KeyRefused, ObjectMissing, StoreError, SwapLost
from sidecar.format.checksums import encode_checksummed
from sidecar.host.values import dataclass
from sidecar.ids import ROOT, build_portable_folder, parse_portable_folder
from sidecar.ports import Glance, Link, ObjectInfo, Store, StoredObject, StoreLayer

LOG = logging.getLogger("sidecar")
HEAD = "head.json"
SIGNPOST = encode_checksummed(
    {"format": 2, "folder": "this memory is in the folder with the portable form of this name"}
)
"""The same bytes everywhere, and fewer than any head has: a listing recognises it by its size."""
TWO_HEADS = (
    "An earlier version of the sidecar had made a head of its own in %s%s/, though this memory is in %s%s/. Its snapshots"
    " stand beside the head now; update that sidecar."
)
T = TypeVar("T")
Infos = list[ObjectInfo]
Places = list[str]  # a method below hides the type's own name


class FolderForm(Enum):
    """Which of its two possible folders a memory is in."""

    OLD = "old"
    NEW = "new"

    @property
    def other(self) -> FolderForm:
        """The other form."""
        return FolderForm.NEW if self is FolderForm.OLD else FolderForm.OLD


@dataclass(frozen=True, slots=True)
class _MemoryKey:
    """An object key below a memory that has two possible folders."""

    folder: str
    rest: str

    def at(self, home: FolderForm) -> str:
        """Return the object key in one of the two folders."""
        return f"{ROOT}{self.folder if home is FolderForm.OLD else build_portable_folder(self.folder)}/{self.rest}"

    @property
    def is_head(self) -> bool:
        return self.rest == HEAD

    @property
    def head(self) -> _MemoryKey:
        """The key of the memory's head."""
        return _MemoryKey(self.folder, HEAD)


def _parse_key(key: str) -> _MemoryKey | None:
    """Return the parts of an object key that has two possible places; ``None`` for a key that has only one."""
    folder, slash, rest = key.removeprefix(ROOT).partition("/")
    return _MemoryKey(folder, rest) if slash and key.startswith(ROOT) and build_portable_folder(folder) else None


class PortableStore(StoreLayer):
    """Wraps a store: finds each memory in the folder it has, and gives a new one a name that every server accepts."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._homes: dict[str, FolderForm] = {}
        """The folder form of memories seen so far. Another process may delete a memory and create it again; reading or
        swapping its head then updates this."""
        self._mixed: set[str] = set()
        """Folders for which something was seen in both places."""
        self._takes_old = True
        """Whether the server accepts a ``~``; true until a request shows otherwise."""

    async def get(self, key: str) -> StoredObject | None:
        """Read an object from the memory's folder, else from the other one. Reading a head also finds out which folder
        it is."""
        double = _parse_key(key)
        if double is None:
            return await (self._try_old(lambda: self._inner.get(key), None) if "~" in key else self._inner.get(key))
        home = self._homes.get(double.folder)
        if home is not None and (found := await self._get(double, home)) is not None:
            return found
        if home is not None and not double.is_head:
            return await self._get(double, home.other)
        new, old = await asyncio.gather(self._get(double, FolderForm.NEW), self._get(double, FolderForm.OLD))
        if double.is_head:
            self._remember_form(double.folder, new is not None, old is not None)
        return new if new is not None else old

    async def put(self, key: str, source: bytes | Path) -> int:
        return await self._inner.put(await self._locate_to_write(key), source)

    async def swap(self, key: str, data: bytes, *, expected: str | None) -> str:
        """Swap an object. A head is swapped in the folder that the memory has or now claims."""
        double = _parse_key(key)
        if double is None:
            return await self._inner.swap(key, data, expected=expected)
        if not double.is_head:
            place = await self._locate_to_write(key)
            if expected is not None and double.folder in self._mixed:
                place = await self._locate_to_read(key)  # it is swapped in the folder it is in
            return await self._inner.swap(place, data, expected=expected)
        # The remembered form is relied on only where there is a head to replace: the swap itself fails if the memory is
        # not there any more. That earlier versions find the signpost is seen to meanwhile.
        home, looking = self._homes.get(double.folder), None
        if home is None or (home is FolderForm.NEW and expected is None):
            home = self._homes[double.folder] = await self._claim_folder(double)
        elif home is FolderForm.NEW:
            looking = asyncio.create_task(self._keep_signpost(double))
        try:
            return await self._inner.swap(double.at(home), data, expected=expected)
        except SwapLost:
            self._homes.pop(double.folder, None)
            raise
        finally:
            if looking is not None:
                await looking

    async def _keep_signpost(self, key: _MemoryKey) -> None:
        """Make sure that the signpost to a memory in the new folder is there. An error is only logged: the next write
        looks again."""
        try:
            await self._claim_folder(key)
        except StoreError as problem:
            LOG.warning("The signpost to %s could not be looked at: %s", key.at(FolderForm.NEW), problem.message)

    async def stream(self, key: str) -> AsyncIterator[bytes]:
        begun = False
        for place in await self._list_places(key):
            try:
                async for chunk in self._inner.stream(place):
                    begun = True
                    yield chunk
                return
            except (ObjectMissing, KeyRefused):
                if begun:
                    raise
        raise ObjectMissing(f"{self.url} holds no {key}.")

    async def link_to_get(self, key: str, *, seconds: int) -> Link | None:
        return await self._inner.link_to_get(await self._locate_to_read(key), seconds=seconds)

    async def link_to_put(self, key: str, *, size: int, sha256: str, seconds: int) -> Link | None:
        return await self._inner.link_to_put(
            await self._locate_to_write(key), size=size, sha256=sha256, seconds=seconds
        )

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        double = _parse_key(prefix)
        if double is None and prefix != ROOT:
            async for info in self._inner.list(prefix):
                yield info
            return
        for info in await self._list_both(double):
            yield info

    async def _list_both(self, below: _MemoryKey | None) -> Infos:
        """Return what is in both folders as if it were one, sorted by the names used above this layer; ``None``: for
        all memories."""
        if below is None:
            there = await _gather_infos(self._inner.list(ROOT))
        else:
            old, new = await asyncio.gather(
                self._try_old(lambda: _gather_infos(self._inner.list(below.at(FolderForm.OLD))), Infos()),
                _gather_infos(self._inner.list(below.at(FolderForm.NEW))),
            )
            there = [*old, *new]
        return self._merge(below, there)

    def _merge(self, below: _MemoryKey | None, there: Iterable[ObjectInfo]) -> Infos:
        """Return what was listed in both folders as if it were one."""
        in_old: dict[str, ObjectInfo] = {}
        in_new: dict[str, ObjectInfo] = {}
        for info in there:
            name = info.key[len(ROOT) :].partition("/")[0]
            folder = parse_portable_folder(name)
            if folder != name:
                key = f"{ROOT}{folder}{info.key[len(ROOT) + len(name) :]}"
                if key == f"{ROOT}{folder}/{HEAD}":
                    self._homes.setdefault(folder, FolderForm.NEW)
                in_new[key] = replace(info, key=key)
            elif not _is_signpost(info):
                in_old[info.key] = info
        if below is None:
            for key in in_old.keys() - in_new.keys():
                if (double := _parse_key(key)) is not None and double.is_head:
                    self._homes.setdefault(double.folder, FolderForm.OLD)
        if below is not None and in_old and in_new:
            self._mixed.add(below.folder)
        in_old_home = below is not None and self._homes.get(below.folder) is FolderForm.OLD
        both = in_new | in_old if in_old_home else in_old | in_new
        return sorted(both.values(), key=lambda info: info.key)

    async def glance(self, prefix: str, *, after: str = "", level: bool = False) -> Glance:
        below = _parse_key(prefix)
        if below is None:
            return await self._inner.glance(prefix, after=after, level=level)
        start = _parse_key(after)

        def look(form: FolderForm) -> Awaitable[Glance]:
            return self._inner.glance(below.at(form), after=start.at(form) if start else after, level=level)

        new, old = await asyncio.gather(look(FolderForm.NEW), self._try_old(lambda: look(FolderForm.OLD), Glance([])))
        return Glance(
            self._merge(below, [*old.objects, *new.objects]),
            sorted({*old.folders, *new.folders}),
            old.complete and new.complete,
        )

    async def folders(self, prefix: str, *, most: int) -> Sequence[str]:
        double = _parse_key(prefix)
        if double is None:
            found = await self._inner.folders(prefix, most=most)
            return sorted({parse_portable_folder(name) for name in found}) if prefix == ROOT else found
        none: Sequence[str] = ()
        new, old = await asyncio.gather(
            self._inner.folders(double.at(FolderForm.NEW), most=most),
            self._try_old(lambda: self._inner.folders(double.at(FolderForm.OLD), most=most), none),
        )
        return sorted({*new, *old})[:most]

    async def copy(self, source: str, target: str) -> None:
        written = await self._locate_to_write(target)
        for place in await self._list_places(source):
            with contextlib.suppress(ObjectMissing):
                return await self._inner.copy(place, written)
        raise ObjectMissing(f"{self.url} holds no {source}.")

    async def delete(self, keys: Iterable[str]) -> None:
        """Delete objects in both folders; of a head only the head itself, never the signpost."""
        places, old = Places(), Places()
        for key in keys:
            double = _parse_key(key)
            if double is None:
                (old if "~" in key else places).append(key)
            elif double.is_head:
                await self.get(key)  # to find out where it is: the signpost stays until all of the memory is deleted
                places.append(double.at(self._homes.pop(double.folder, FolderForm.NEW)))
            else:
                places.append(double.at(FolderForm.NEW))
                old.append(double.at(FolderForm.OLD))
        if places:
            await self._inner.delete(places)
        if old:
            await self._try_old(lambda: self._inner.delete(old), None)

    async def sweep(self, prefix: str, *, older_than: float) -> int:
        double = _parse_key(prefix)
        if double is None:
            return await self._inner.sweep(prefix, older_than=older_than)
        swept = await self._inner.sweep(double.at(FolderForm.NEW), older_than=older_than)
        return swept + await self._try_old(
            lambda: self._inner.sweep(double.at(FolderForm.OLD), older_than=older_than), 0
        )

    async def purge(self, prefix: str) -> int:
        """Delete everything below a prefix in both folders; a signpost is not counted."""
        double = _parse_key(prefix)
        if double is None:
            return await self._inner.purge(prefix)
        signposts = 0
        if not double.rest:
            head = await self._try_old(lambda: self._inner.get(double.head.at(FolderForm.OLD)), None)
            signposts = int(head is not None and head.data == SIGNPOST)
        purged = await self._inner.purge(double.at(FolderForm.NEW))
        purged += await self._try_old(lambda: self._inner.purge(double.at(FolderForm.OLD)), 0)
        self._homes.pop(double.folder, None)
        return purged - signposts

    async def _get(self, key: _MemoryKey, home: FolderForm) -> StoredObject | None:
        """Return what is in one of the two places; a signpost counts as nothing."""
        if home is FolderForm.NEW:
            return await self._inner.get(key.at(home))
        found = await self._try_old(lambda: self._inner.get(key.at(home)), None)
        return None if found is not None and key.is_head and found.data == SIGNPOST else found

    async def _locate_to_write(self, key: str) -> str:
        """Return where a key is written: in the folder that the memory has, or is now given."""
        double = _parse_key(key)
        if double is None:
            return key
        if double.folder not in self._homes:
            self._homes[double.folder] = await self._claim_folder(double)
        return double.at(self._homes[double.folder])

    async def _locate_to_read(self, key: str) -> str:
        """Return where an object is that will be read by a link, or swapped."""
        place, *others = await self._list_places(key)
        double = _parse_key(key)
        if double is None or double.folder not in self._mixed or not others:
            return place
        return place if await _gather_infos(self._inner.list(place)) else others[0]

    async def _list_places(self, key: str) -> Places:
        """Return where an object may be, the likelier place first."""
        double = _parse_key(key)
        if double is None:
            return [key]
        if double.folder not in self._homes:
            await self.get(double.head.at(FolderForm.OLD))
        home = self._homes.get(double.folder, FolderForm.NEW)
        return [double.at(one) for one in (home, home.other) if one is FolderForm.NEW or self._takes_old]

    async def _claim_folder(self, key: _MemoryKey) -> FolderForm:
        """Return the folder of a memory that is about to be written: the one it has, else the new one, after putting a
        signpost in the old one.

        Raise what the store raises.
        """
        while True:
            old = await self._try_old(lambda: self._inner.get(key.head.at(FolderForm.OLD)), None)
            if not self._takes_old or (old is not None and old.data == SIGNPOST):
                return FolderForm.NEW
            new = await self._inner.get(key.head.at(FolderForm.NEW))
            if new is None and (old is not None or await self._is_in_old(key)):
                return FolderForm.OLD
            try:
                await self._inner.swap(key.head.at(FolderForm.OLD), SIGNPOST, expected=old.version if old else None)
            except SwapLost:
                continue  # another process was faster: read again
            except KeyRefused:
                self._takes_old = False
            if old is not None:
                self._mixed.add(key.folder)
                LOG.warning(TWO_HEADS, ROOT, key.folder, ROOT, build_portable_folder(key.folder))
            return FolderForm.NEW

    async def _is_in_old(self, key: _MemoryKey) -> bool:
        """Return whether the old folder has anything of a memory except a head. A signpost that was just written counts
        as nothing."""
        there = await _gather_infos(self._inner.list(_MemoryKey(key.folder, "").at(FolderForm.OLD)))
        return any(not _is_signpost(info) for info in there)

    async def _try_old(self, asked: Callable[[], Awaitable[T]], nothing: T) -> T:
        """Access a name that the server may not accept; return ``nothing`` if it does not."""
        if not self._takes_old:
            return nothing
        try:
            return await asked()
        except KeyRefused:
            self._takes_old = False
            return nothing

    def _remember_form(self, folder: str, new: bool, old: bool) -> None:
        """Remember in which folder a memory's head was found."""
        if new and old:
            self._mixed.add(folder)
        if new or old:
            self._homes[folder] = FolderForm.NEW if new else FolderForm.OLD
        else:
            self._homes.pop(folder, None)


def _is_signpost(info: ObjectInfo) -> bool:
    """Return whether a listed object is a signpost, by its name and size."""
    double = _parse_key(info.key)
    return double is not None and double.is_head and info.size == len(SIGNPOST)


async def _gather_infos(infos: AsyncIterator[ObjectInfo]) -> Infos:
    return [info async for info in infos]
