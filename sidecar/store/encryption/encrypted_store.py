"""A store that encrypts: everything written through it is encrypted, and ids and host names in object keys are hidden.

Each object is an ordinary age file. What is read may also be plain, from before encryption was turned on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from sidecar.errors import KeyNeeded, ObjectMissing, ObjectRefused
from sidecar.ports import Glance, Link, ObjectInfo, Store, StoredObject, StoreLayer
from sidecar.store.encryption.keyring import MAGIC, Altered, NotDecrypted, is_encrypted
from sidecar.store.encryption.names import ROOTS
from sidecar.store.encryption.opening import ENCRYPTED, EncryptionKeys, EncryptionState, StoreEncryption
from sidecar.store.encryption.streams import decrypt_stream

LOG = logging.getLogger("sidecar")
NOT_OURS = (
    "{name} is not a name of this store, and nothing there was written with its keys. `rekey` takes up what a sidecar without"
    " keys wrote; remove anything else."
)


class EncryptedStore(StoreLayer):
    """Wraps a store. Without encryption keys it passes everything through, unless the store is encrypted: then it
    raises ``KeyNeeded``."""

    def __init__(self, inner: Store, keys: EncryptionKeys | None) -> None:
        super().__init__(inner)
        self._keys = keys
        self.opening = StoreEncryption(inner, keys)
        self._told: set[str] = set()

    @property
    def encrypts(self) -> bool:
        return self._keys is not None

    @property
    def seal(self) -> str:
        return self.opening.state.keyring.seal_name if self.opening.state else ""

    def room(self, size: int) -> int:
        if self.opening.state is not None:
            size = self.opening.state.keyring.room(size)
        return self._inner.room(size)

    async def prepare(self) -> None:
        await self._inner.prepare()
        await self.opening.open_to_write(fresh=True)

    async def probe(self) -> None:
        """Check whether ``prepare`` would succeed, without writing a record of the encryption keys. Raise as it does."""
        await self._inner.prepare()
        self.opening.check_recipients()
        if await self.opening.open_to_read(fresh=True) is None:
            await self.opening.check_nothing_hidden(f"{ROOTS[0]}/")

    async def get(self, key: str) -> StoredObject | None:
        """Read and decrypt an object. Raise ``ObjectRefused`` if it was altered, ``KeyNeeded`` if no key given decrypts
        it."""
        state = await self.opening.open_to_read()
        stored = await self._inner.get(hidden := _hide(state, key))
        if stored is None:
            await self.opening.check_nothing_hidden(key)
            return None
        if not is_encrypted(stored.data):
            if hidden != key:  # a writer that could name it could also have encrypted it
                raise ObjectRefused(f"{key} is damaged: it is not sealed.", version=stored.version)
            return stored
        if state is None:
            raise KeyNeeded(ENCRYPTED)
        try:
            return replace(stored, data=await asyncio.to_thread(state.keyring.open, stored.data))
        except (NotDecrypted, Altered) as problem:
            raise await self._make_refusal(key, problem, stored.version) from None

    async def put(self, key: str, source: bytes | Path) -> int:
        state = await self.opening.open_to_write()
        if state is None:
            return await self._inner.put(key, source)
        if isinstance(source, bytes):
            return await self._inner.put(_hide(state, key), await asyncio.to_thread(state.keyring.seal, source))
        # Written beside the source, which is a scratch file: the store below needs its size, and reads it twice.
        sealed = source.with_name(f"{source.name}.age")
        try:
            await asyncio.to_thread(state.keyring.encrypt_file, source, sealed)
            return await self._inner.put(_hide(state, key), sealed)
        finally:
            sealed.unlink(missing_ok=True)

    async def swap(self, key: str, data: bytes, *, expected: str | None) -> str:
        state = await self.opening.open_to_write()
        if state is None:
            return await self._inner.swap(key, data, expected=expected)
        sealed = await asyncio.to_thread(state.keyring.seal, data)
        return await self._inner.swap(_hide(state, key), sealed, expected=expected)

    async def stream(self, key: str) -> AsyncIterator[bytes]:
        """Decrypt an object as a stream; a plain one from before encryption is passed through."""
        state = await self.opening.open_to_read()
        async with contextlib.aclosing(_gather_first_line(self._inner.stream(_hide(state, key)))) as chunks:
            try:
                first = await anext(chunks, b"")
            except ObjectMissing:
                await self.opening.check_nothing_hidden(key)
                raise ObjectMissing(f"{self.url} holds no {key}.") from None
            if not is_encrypted(first):
                if first:
                    yield first
                async for chunk in chunks:
                    yield chunk
                return
            if state is None:
                raise KeyNeeded(ENCRYPTED)
            try:
                async with contextlib.aclosing(decrypt_stream(_prepend(first, chunks), state.keyring)) as plain:
                    async for chunk in plain:
                        yield chunk
            except (NotDecrypted, Altered) as problem:
                raise await self._make_refusal(key, problem, None) from None

    async def _make_refusal(self, key: str, problem: Exception, version: str | None) -> ObjectRefused | KeyNeeded:
        """Return the error for an object that cannot be decrypted: altered, or encrypted for a key that was not given.
        Raise ``KeyNeeded`` if no key fits any more."""
        if isinstance(problem, NotDecrypted):
            # According to the current record: another process may have changed the keys since it was read.
            state = await self.opening.open_to_read(fresh=True)
            if state is None or not state.complete:
                return KeyNeeded(f"{key} is sealed for a key that was not given.")
        why = str(problem) or "none of the keys of this store opens it"
        return ObjectRefused(f"{key} is damaged: {why}.", version=version)

    async def link_to_get(self, key: str, *, seconds: int) -> Link | None:
        return None if self._keys else await self._inner.link_to_get(key, seconds=seconds)

    async def link_to_put(self, key: str, *, size: int, sha256: str, seconds: int) -> Link | None:
        return None if self._keys else await self._inner.link_to_put(key, size=size, sha256=sha256, seconds=seconds)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """List objects under their plain names; foreign names are logged once and left out."""
        state, empty = await self.opening.open_to_read(), True
        if state is None:
            async for info in self._inner.list(prefix):
                empty = False
                yield info
            if empty:
                await self.opening.check_nothing_hidden(prefix)
            return
        found = [info async for info in self._inner.list(_hide(state, prefix))]
        for stranger in find_strangers(state, (info.key for info in found)) - self._told:
            self._told.add(stranger)
            LOG.warning("Ignored: %s", NOT_OURS.format(name=stranger))
        shown = [replace(info, key=state.names.shown(info.key)) for info in found if state.names.is_ours(info.key)]
        for info in sorted(shown, key=lambda info: info.key):
            yield info

    async def glance(self, prefix: str, *, after: str = "", level: bool = False) -> Glance:
        """Glance at objects under their plain names. Their order is not that of the names in the store, so ``after``
        needs them all."""
        state = await self.opening.open_to_read()
        if after and state is not None:
            return Glance([info async for info in self.list(prefix) if info.key > after])
        hidden = _hide(state, prefix)
        found = await self._inner.glance(hidden, after=after, level=level)
        if state is None:
            if not found.objects and not found.folders:
                await self.opening.check_nothing_hidden(prefix)
            return found
        shown = [
            replace(info, key=state.names.shown(info.key)) for info in found.objects if state.names.is_ours(info.key)
        ]
        folders = [f"{hidden}{name}/" for name in found.folders]
        names = sorted(state.names.shown(key).split("/")[-2] for key in folders if state.names.is_ours(key))
        return Glance(shown, names, found.complete)

    async def folders(self, prefix: str, *, most: int) -> Sequence[str]:
        state = await self.opening.open_to_read()
        hidden = _hide(state, prefix)
        found = await self._inner.folders(hidden, most=most)
        if state is None:
            if not found:
                await self.opening.check_nothing_hidden(prefix)
            return found
        keys = [f"{hidden}{name}/" for name in found]
        return sorted(state.names.shown(key).split("/")[-2] for key in keys if state.names.is_ours(key))

    async def copy(self, source: str, target: str) -> None:
        state = await self.opening.open_to_write()
        try:
            await self._inner.copy(_hide(state, source), _hide(state, target))
        except ObjectMissing:
            raise ObjectMissing(f"{self.url} holds no {source}.") from None

    async def delete(self, keys: Iterable[str]) -> None:
        state = await self.opening.open_to_read()
        await self._inner.delete([_hide(state, key) for key in keys])

    async def sweep(self, prefix: str, *, older_than: float) -> int:
        return await self._inner.sweep(_hide(await self.opening.open_to_read(), prefix), older_than=older_than)

    async def purge(self, prefix: str) -> int:
        return await self._inner.purge(_hide(await self.opening.open_to_read(), prefix))


def find_encryption(store: Store) -> EncryptedStore | None:
    """Return the layer of a store that encrypts; ``None`` if no encryption keys were given."""
    layer: object = store
    while not isinstance(layer, EncryptedStore):
        if not isinstance(layer, StoreLayer):
            return None
        layer = layer.inner
    return layer if layer.encrypts else None


def find_strangers(state: EncryptionState, keys: Iterable[str]) -> set[str]:
    """Return the folders, or objects beside them, whose names were not made with this store's name key."""
    foreign = [key.split("/") for key in keys if not state.names.is_ours(key)]
    return {"/".join(parts[:4] if state.names.is_ours("/".join(parts[:3])) else parts[:2]) for parts in foreign}


def _hide(state: EncryptionState | None, key: str) -> str:
    """Return the object key as it is stored."""
    return state.names.hide(key) if state is not None else key


async def _gather_first_line(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """Yield the same chunks; the first contains all of age's first line, however small a store's chunks are."""
    first = b""
    async for chunk in chunks:
        first += chunk
        if len(first) >= len(MAGIC):
            break
    if first:
        yield first
    async for chunk in chunks:
        yield chunk


async def _prepend(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for chunk in rest:
        yield chunk
