"""Folders of memories under names that every server takes.

The folder of an id that is not plain was called ``readable~hash`` by earlier versions, and not every S3 look-alike takes a
``~``. A new one is called ``_readable_hash``. This layer is the only one that knows: all above it write ``readable~hash``,
and it finds the folder that a memory has.

Earlier versions look for a memory under the old name alone. So that they do not begin it a second time there, a ``head.json``
of format 2 stands in the old place, which they refuse: a *signpost*. It is set by the same compare-and-swap by which they
would write the first head, so of an old and a new sidecar that begin a memory at the same moment one finds the other. What an
earlier version writes beside a signpost (an export that it calls diverged) is found in the memory all the same: both folders
are read as one. Where a server takes no ``~`` there is no signpost, and no earlier version that could write.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TypeVar

from sidecar.errors import HeadMoved, KeyRefused, ObjectMissing
from sidecar.ids import ROOT, folder_from_portable, portable_folder
from sidecar.ports import Link, ObjectInfo, Store, Stored
from sidecar.snapshots.sealed import seal

LOG = logging.getLogger("sidecar")
HEAD = "head.json"
SIGNPOST = seal({"format": 2, "folder": "this memory is in the folder with the portable form of this name"})
"""The same bytes everywhere, and fewer than any head has: a listing tells it by its size."""
TWO_HEADS = (
    "An earlier version of the sidecar had made a head of its own in %s%s/, though this memory is in %s%s/. Its snapshots"
    " stand beside the head now; update that sidecar."
)
T = TypeVar("T")
Infos = list[ObjectInfo]
Places = list[str]  # a method below hides the type's own name


class Home(Enum):
    """Which of its two possible folders a memory is in."""

    OLD = "old"
    NEW = "new"

    @property
    def other(self) -> Home:
        return Home.NEW if self is Home.OLD else Home.OLD


@dataclass(frozen=True, slots=True)
class _Key:
    """A key below a memory that has two possible folders."""

    folder: str
    rest: str

    def at(self, home: Home) -> str:
        return f"{ROOT}{self.folder if home is Home.OLD else portable_folder(self.folder)}/{self.rest}"

    @property
    def is_head(self) -> bool:
        return self.rest == HEAD

    @property
    def head(self) -> _Key:
        return _Key(self.folder, HEAD)


def _double(key: str) -> _Key | None:
    """The same as a key that has two possible places; ``None`` for one that has a single one."""
    folder, slash, rest = key.removeprefix(ROOT).partition("/")
    return _Key(folder, rest) if slash and key.startswith(ROOT) and portable_folder(folder) else None


class PortableStore:
    """Around any store: finds each memory in the folder it has, and gives a new one a name that every server takes."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.url = inner.url
        self._homes: dict[str, Home] = {}
        """Where memories were found. Others may delete one and begin it anew: who reads or swaps its head learns of it."""
        self._mixed: set[str] = set()
        """Folders of which something was seen in both places."""
        self._takes_old = True
        """Whether the server takes a ``~``, as far as is known."""

    @property
    def seal(self) -> str:
        return self._inner.seal

    def room(self, size: int) -> int:
        return self._inner.room(size)

    async def prepare(self) -> None:
        await self._inner.prepare()

    async def get(self, key: str) -> Stored | None:
        double = _double(key)
        if double is None:
            return await (self._old(lambda: self._inner.get(key), None) if "~" in key else self._inner.get(key))
        home = self._homes.get(double.folder)
        if home is not None and (found := await self._get(double, home)) is not None:
            return found
        if home is not None and not double.is_head:
            return await self._get(double, home.other)
        new, old = await asyncio.gather(self._get(double, Home.NEW), self._get(double, Home.OLD))
        if double.is_head:
            self._learn(double.folder, new is not None, old is not None)
        return new if new is not None else old

    async def put(self, key: str, source: bytes | Path) -> int:
        return await self._inner.put(await self._to_write(key), source)

    async def swap(self, key: str, data: bytes, *, expected: str | None) -> str:
        double = _double(key)
        if double is None:
            return await self._inner.swap(key, data, expected=expected)
        if not double.is_head:
            place = await self._to_write(key)
            if expected is not None and double.folder in self._mixed:
                place = await self._to_read(key)  # it is swapped where it is
            return await self._inner.swap(place, data, expected=expected)
        # Not by heart, unless it is in the old folder, where the swap itself says whether it still is.
        if self._homes.get(double.folder) is not Home.OLD:
            self._homes[double.folder] = await self._claim(double)
        try:
            return await self._inner.swap(double.at(self._homes[double.folder]), data, expected=expected)
        except HeadMoved:
            self._homes.pop(double.folder, None)
            raise

    async def stream(self, key: str) -> AsyncIterator[bytes]:
        begun = False
        for place in await self._places(key):
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
        return await self._inner.link_to_get(await self._to_read(key), seconds=seconds)

    async def link_to_put(self, key: str, *, size: int, sha256: str, seconds: int) -> Link | None:
        return await self._inner.link_to_put(await self._to_write(key), size=size, sha256=sha256, seconds=seconds)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        double = _double(prefix)
        if double is None and prefix != ROOT:
            async for info in self._inner.list(prefix):
                yield info
            return
        for info in await self._listed(double):
            yield info

    async def _listed(self, below: _Key | None) -> Infos:
        """What is in both folders as if it were in one, in the order of what we call it; ``None``: of all memories."""
        if below is None:
            there = await _collect(self._inner.list(ROOT))
        else:
            old, new = await asyncio.gather(
                self._old(lambda: _collect(self._inner.list(below.at(Home.OLD))), Infos()),
                _collect(self._inner.list(below.at(Home.NEW))),
            )
            there = [*old, *new]
        in_old: dict[str, ObjectInfo] = {}
        in_new: dict[str, ObjectInfo] = {}
        for info in there:
            name = info.key[len(ROOT) :].partition("/")[0]
            folder = folder_from_portable(name)
            if folder != name:
                key = f"{ROOT}{folder}{info.key[len(ROOT) + len(name) :]}"
                in_new[key] = replace(info, key=key)
            elif not _is_signpost(info):
                in_old[info.key] = info
        if below is not None and in_old and in_new:
            self._mixed.add(below.folder)
        in_old_home = below is not None and self._homes.get(below.folder) is Home.OLD
        both = in_new | in_old if in_old_home else in_old | in_new
        return sorted(both.values(), key=lambda info: info.key)

    async def folders(self, prefix: str, *, most: int) -> Sequence[str]:
        double = _double(prefix)
        if double is None:
            found = await self._inner.folders(prefix, most=most)
            return sorted({folder_from_portable(name) for name in found}) if prefix == ROOT else found
        none: Sequence[str] = ()
        new, old = await asyncio.gather(
            self._inner.folders(double.at(Home.NEW), most=most),
            self._old(lambda: self._inner.folders(double.at(Home.OLD), most=most), none),
        )
        return sorted({*new, *old})[:most]

    async def copy(self, source: str, target: str) -> None:
        written = await self._to_write(target)
        for place in await self._places(source):
            with contextlib.suppress(ObjectMissing):
                return await self._inner.copy(place, written)
        raise ObjectMissing(f"{self.url} holds no {source}.")

    async def delete(self, keys: Iterable[str]) -> None:
        places, old = Places(), Places()
        for key in keys:
            double = _double(key)
            if double is None:
                (old if "~" in key else places).append(key)
            elif double.is_head:
                await self.get(key)  # to know where it is: the signpost stays until all of the memory is gone
                places.append(double.at(self._homes.pop(double.folder, Home.NEW)))
            else:
                places.append(double.at(Home.NEW))
                old.append(double.at(Home.OLD))
        if places:
            await self._inner.delete(places)
        if old:
            await self._old(lambda: self._inner.delete(old), None)

    async def sweep(self, prefix: str, *, older_than: float) -> int:
        double = _double(prefix)
        if double is None:
            return await self._inner.sweep(prefix, older_than=older_than)
        swept = await self._inner.sweep(double.at(Home.NEW), older_than=older_than)
        return swept + await self._old(lambda: self._inner.sweep(double.at(Home.OLD), older_than=older_than), 0)

    async def purge(self, prefix: str) -> int:
        double = _double(prefix)
        if double is None:
            return await self._inner.purge(prefix)
        signposts = 0
        if not double.rest:
            head = await self._old(lambda: self._inner.get(double.head.at(Home.OLD)), None)
            signposts = int(head is not None and head.data == SIGNPOST)
        purged = await self._inner.purge(double.at(Home.NEW))
        purged += await self._old(lambda: self._inner.purge(double.at(Home.OLD)), 0)
        self._homes.pop(double.folder, None)
        return purged - signposts

    async def warnings(self) -> Sequence[str]:
        return await self._inner.warnings()

    async def safety(self) -> str:
        return await self._inner.safety()

    async def close(self) -> None:
        await self._inner.close()

    async def _get(self, key: _Key, home: Home) -> Stored | None:
        """What is in one of the two places; a signpost is nothing."""
        if home is Home.NEW:
            return await self._inner.get(key.at(home))
        found = await self._old(lambda: self._inner.get(key.at(home)), None)
        return None if found is not None and key.is_head and found.data == SIGNPOST else found

    async def _to_write(self, key: str) -> str:
        """Where a key is written: in the folder that the memory has, or that it is now given."""
        double = _double(key)
        if double is None:
            return key
        if double.folder not in self._homes:
            self._homes[double.folder] = await self._claim(double)
        return double.at(self._homes[double.folder])

    async def _to_read(self, key: str) -> str:
        """Where an object is that somebody else will read, or swap."""
        place, *others = await self._places(key)
        double = _double(key)
        if double is None or double.folder not in self._mixed or not others:
            return place
        return place if await _collect(self._inner.list(place)) else others[0]

    async def _places(self, key: str) -> Places:
        """Where an object may be, the likelier place first."""
        double = _double(key)
        if double is None:
            return [key]
        if double.folder not in self._homes:
            await self.get(double.head.at(Home.OLD))
        home = self._homes.get(double.folder, Home.NEW)
        return [double.at(one) for one in (home, home.other) if one is Home.NEW or self._takes_old]

    async def _claim(self, key: _Key) -> Home:
        """Where a memory is that is about to be written: where it was, else in the new folder, with a signpost in the old one.

        Raise what the store raises.
        """
        while True:
            old = await self._old(lambda: self._inner.get(key.head.at(Home.OLD)), None)
            if not self._takes_old or (old is not None and old.data == SIGNPOST):
                return Home.NEW
            new = await self._inner.get(key.head.at(Home.NEW))
            if new is None and (old is not None or await self._is_in_old(key)):
                return Home.OLD
            try:
                await self._inner.swap(key.head.at(Home.OLD), SIGNPOST, expected=old.version if old else None)
            except HeadMoved:
                continue  # somebody was faster: see who
            except KeyRefused:
                self._takes_old = False
            if old is not None:
                self._mixed.add(key.folder)
                LOG.warning(TWO_HEADS, ROOT, key.folder, ROOT, portable_folder(key.folder))
            return Home.NEW

    async def _is_in_old(self, key: _Key) -> bool:
        """Whether the old folder has anything of a memory, though no head. A signpost, just set, is nothing."""
        there = await _collect(self._inner.list(_Key(key.folder, "").at(Home.OLD)))
        return any(not _is_signpost(info) for info in there)

    async def _old(self, asked: Callable[[], Awaitable[T]], nothing: T) -> T:
        """What is found under a name that the server may not take: under such a one there is nothing."""
        if not self._takes_old:
            return nothing
        try:
            return await asked()
        except KeyRefused:
            self._takes_old = False
            return nothing

    def _learn(self, folder: str, new: bool, old: bool) -> None:
        if new and old:
            self._mixed.add(folder)
        if new or old:
            self._homes[folder] = Home.NEW if new else Home.OLD
        else:
            self._homes.pop(folder, None)


def _is_signpost(info: ObjectInfo) -> bool:
    double = _double(info.key)
    return double is not None and double.is_head and info.size == len(SIGNPOST)


async def _collect(infos: AsyncIterator[ObjectInfo]) -> Infos:
    return [info async for info in infos]
