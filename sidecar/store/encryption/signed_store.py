"""A store that signs: every small object is signed, and one that is not is refused.

Packs and their indexes are not signed: the manifests, which are, name them by size and hash.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from sidecar.errors import KeyNeeded, NotSigned, ObjectMissing, ObjectRefused
from sidecar.ports import Glance, Link, ObjectInfo, Store, StoredObject, StoreLayer
from sidecar.store.encryption.encrypted_store import EncryptedStore
from sidecar.store.encryption.signatures import LONGEST_LINE, BadSignature, Signatures, is_signed, strip_signature

CHUNK = 1 << 20
AT_ONCE = 8
BELIEVED_SECONDS = 60.0
"""For this long it is assumed that a store is still not signed."""
LOG = logging.getLogger("sidecar")
MARK = "signed"
"""An object that says that a store is signed, so that nothing is added to it without a key."""
ABOUT_IT = b"What is in this store is signed.\n"
OBEYED_UNREAD = ("pins", "damaged")
"""Objects below a memory that take effect by being listed: each is checked before it does."""
NO_KEY = "This store is signed, and no key to sign with was given."
NO_KEY_HINT = "Set [signing] key_file (MEMORY_SIDECAR_SIGNING_KEY_FILE). Nothing was changed."


class SignedStore(StoreLayer):
    """Signs with, and trusts, the keys given. Without any it reads signed objects unchecked, and adds nothing to a
    signed store."""

    def __init__(self, inner: Store, signatures: Signatures | None, *, trust_unsigned: bool = False) -> None:
        super().__init__(inner)
        self._signatures = signatures
        self._trust_unsigned = trust_unsigned
        self._seen_signed = False
        self._unsigned_until = 0.0
        self._looked_at: dict[ObjectInfo, bool] = {}

    @property
    def signs(self) -> bool:
        return self._signatures is not None

    def room(self, size: int) -> int:
        return self._inner.room(size + (LONGEST_LINE if self._signatures else 0))

    async def prepare(self) -> None:
        """Prepare the store to be written, and mark it as signed. Raise ``KeyNeeded`` if a signing key is missing."""
        await self._inner.prepare()
        if self._signatures is None:
            await self._check_unsigned()
        elif not self._signatures.can_sign:
            raise KeyNeeded(NO_KEY, hint=NO_KEY_HINT)
        elif not await self._is_marked():
            await self.mark()

    async def probe(self) -> None:
        """Check whether ``prepare`` would succeed, without leaving anything in the store. Raise as it does."""
        if isinstance(self._inner, EncryptedStore):
            await self._inner.probe()
        else:
            await self._inner.prepare()
        if self._signatures is None:
            await self._check_unsigned()
        elif not self._signatures.can_sign:
            raise KeyNeeded(NO_KEY, hint=NO_KEY_HINT)

    async def _check_unsigned(self) -> None:
        """Raise ``KeyNeeded`` if another sidecar has begun to sign this store."""
        if not self._seen_signed and time.monotonic() >= self._unsigned_until:
            self._seen_signed = await self._inner.get(MARK) is not None
            self._unsigned_until = time.monotonic() + BELIEVED_SECONDS
        if self._seen_signed:
            raise KeyNeeded(NO_KEY, hint=NO_KEY_HINT)

    async def _is_marked(self) -> bool:
        """Return whether the store has a valid object that says that it is signed."""
        try:
            return await self.get(MARK) is not None
        except ObjectRefused as problem:
            LOG.warning("Written again: %s", problem.message)
            return False

    async def mark(self) -> None:
        """Write the object that says that this store is signed, if it is."""
        if self._signatures is not None:
            await self._inner.put(MARK, self._sign(MARK, ABOUT_IT))

    async def get(self, key: str) -> StoredObject | None:
        """Read an object without its signature. Raise ``NotSigned`` if the signature is missing or not trusted."""
        stored = await self._inner.get(key)
        if stored is None or _is_pack(key):
            return stored
        if self._signatures is None:
            self._seen_signed = self._seen_signed or is_signed(stored.data)
            return replace(stored, data=strip_signature(stored.data))
        try:
            return replace(stored, data=self._signatures.checked(key, stored.data))
        except BadSignature as problem:
            if self._trust_unsigned and not is_signed(stored.data):
                return stored
            raise NotSigned(f"{_name_object(key)} {problem}.", version=stored.version) from None

    async def put(self, key: str, source: bytes | Path) -> int:
        if not _is_pack(key):
            source = self._sign(key, source if isinstance(source, bytes) else source.read_bytes())
        return await self._inner.put(key, source)

    async def swap(self, key: str, data: bytes, *, expected: str | None) -> str:
        return await self._inner.swap(key, self._sign(key, data), expected=expected)

    def _sign(self, key: str, data: bytes) -> bytes:
        """Return data with a signature, or unchanged in an unsigned store. Raise ``KeyNeeded`` if a key is missing."""
        if self._signatures is None:
            if self._seen_signed:
                raise KeyNeeded(NO_KEY, hint=NO_KEY_HINT)
            return data
        if not self._signatures.can_sign:
            raise KeyNeeded(NO_KEY, hint=NO_KEY_HINT)
        return self._signatures.sign(key, data)

    async def stream(self, key: str) -> AsyncIterator[bytes]:
        if _is_pack(key):
            async for chunk in self._inner.stream(key):
                yield chunk
            return
        stored = await self.get(key)
        if stored is None:
            raise ObjectMissing(f"{self.url} holds no {key}.")
        for start in range(0, len(stored.data), CHUNK):
            yield stored.data[start : start + CHUNK]

    async def link_to_get(self, key: str, *, seconds: int) -> Link | None:
        return await self._inner.link_to_get(key, seconds=seconds) if _is_pack(key) else None

    async def link_to_put(self, key: str, *, size: int, sha256: str, seconds: int) -> Link | None:
        if not _is_pack(key):
            return None
        return await self._inner.link_to_put(key, size=size, sha256=sha256, seconds=seconds)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """List objects, without those that take effect by being listed and are not validly signed."""
        for info in await self._leave_out_unsigned([info async for info in self._inner.list(prefix)]):
            yield info

    async def glance(self, prefix: str, *, after: str = "", level: bool = False) -> Glance:
        found = await self._inner.glance(prefix, after=after, level=level)
        return replace(found, objects=await self._leave_out_unsigned(found.objects))

    async def _leave_out_unsigned(self, found: Sequence[ObjectInfo]) -> Sequence[ObjectInfo]:
        """Return listed objects without those that take effect by being listed and are not validly signed."""
        if self._signatures is None or not (doubted := [info for info in found if _is_obeyed_unread(info.key)]):
            return found
        good: dict[ObjectInfo, bool] = {}
        for start in range(0, len(doubted), AT_ONCE):
            some = doubted[start : start + AT_ONCE]
            good |= zip(some, await asyncio.gather(*map(self._is_ours, some)), strict=True)
        return [info for info in found if good.get(info, True)]

    async def _is_ours(self, info: ObjectInfo) -> bool:
        """Return whether a listed object is validly signed; one that is not is logged and ignored."""
        if info not in self._looked_at:
            try:
                self._looked_at[info] = await self.get(info.key) is not None
            except ObjectRefused as problem:
                LOG.warning("Ignored: %s", problem.message)
                self._looked_at[info] = False
        return self._looked_at[info]

    async def folders(self, prefix: str, *, most: int) -> Sequence[str]:
        return await self._inner.folders(prefix, most=most)

    async def copy(self, source: str, target: str) -> None:
        if _is_pack(source) and _is_pack(target):
            await self._inner.copy(source, target)
            return
        stored = await self.get(source)
        if stored is None:
            raise ObjectMissing(f"{self.url} holds no {source}.")
        await self.put(target, stored.data)

    async def delete(self, keys: Iterable[str]) -> None:
        await self._inner.delete(keys)

    async def sweep(self, prefix: str, *, older_than: float) -> int:
        return await self._inner.sweep(prefix, older_than=older_than)

    async def purge(self, prefix: str) -> int:
        return await self._inner.purge(prefix)


def _is_pack(key: str) -> bool:
    """Return whether a key is that of a pack or a pack's index."""
    parts = key.split("/")
    return len(parts) == 4 and parts[0] == "memories" and parts[2] == "packs"


def _is_obeyed_unread(key: str) -> bool:
    """Return whether an object takes effect by being listed alone."""
    parts = key.split("/")
    return len(parts) == 4 and parts[0] == "memories" and parts[2] in OBEYED_UNREAD


def _name_object(key: str) -> str:
    """Return an object's name as people know it."""
    parts = key.split("/")
    if len(parts) == 4 and parts[2] == "snapshots":
        return f"Snapshot {parts[3].removesuffix('.json')} ({key})"
    return key
