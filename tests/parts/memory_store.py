"""A store in a dictionary, with a clock that a test can turn: for thousands of small states."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

from sidecar.errors import ObjectMissing, SwapLost
from sidecar.ports import Glance, Link, ObjectInfo, StoredObject


class MemoryStore:
    url = "memory:"
    seal = ""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.objects: dict[str, tuple[bytes, float, str]] = {}
        """Each key with its bytes, when they were written, and their version."""
        self._versions = map(str, itertools.count())

    def room(self, size: int) -> int:
        return size

    async def prepare(self) -> None: ...

    async def get(self, key: str) -> StoredObject | None:
        found = self.objects.get(key)
        return StoredObject(found[0], found[2]) if found else None

    async def put(self, key: str, source: bytes | Path) -> int:
        data = source if isinstance(source, bytes) else source.read_bytes()
        self.objects[key] = data, self.now, next(self._versions)
        return len(data)

    async def swap(self, key: str, data: bytes, *, expected: str | None) -> str:
        found = self.objects.get(key)
        if (found[2] if found else None) != expected:
            raise SwapLost(f"{key} was changed by someone else.")
        await self.put(key, data)
        return self.objects[key][2]

    async def stream(self, key: str) -> AsyncIterator[bytes]:
        if key not in self.objects:
            raise ObjectMissing(f"There is no {key}.")
        yield self.objects[key][0]

    async def link_to_get(self, key: str, *, seconds: int) -> Link | None:
        return None

    async def link_to_put(self, key: str, *, size: int, sha256: str, seconds: int) -> Link | None:
        return None

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        for key in sorted(key for key in self.objects if key.startswith(prefix)):
            data, modified, _ = self.objects[key]
            yield ObjectInfo(key, len(data), modified)

    async def glance(self, prefix: str, *, after: str = "", level: bool = False) -> Glance:
        infos = [info async for info in self.list(prefix) if info.key > after]
        if not level:
            return Glance(infos[:1000], complete=len(infos) <= 1000)
        return Glance(
            [info for info in infos if "/" not in info.key[len(prefix) :]], await self.folders(prefix, most=1000)
        )

    async def folders(self, prefix: str, *, most: int) -> Sequence[str]:
        below = (key[len(prefix) :].split("/") for key in self.objects if key.startswith(prefix))
        return sorted({parts[0] for parts in below if len(parts) > 1})[:most]

    async def copy(self, source: str, target: str) -> None:
        if source not in self.objects:
            raise ObjectMissing(f"There is no {source}.")
        await self.put(target, self.objects[source][0])

    async def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    async def sweep(self, prefix: str, *, older_than: float) -> int:
        return 0

    async def purge(self, prefix: str) -> int:
        gone = [key for key in self.objects if key.startswith(prefix)]
        await self.delete(gone)
        return len(gone)

    async def warnings(self) -> Sequence[str]:
        return []

    async def safety(self) -> str:
        return "honours conditional writes"

    async def close(self) -> None: ...
