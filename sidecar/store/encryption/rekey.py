"""Re-encrypt and re-sign everything for the keys that are set now: after a key was changed, or when keys are first
used.

Packs never change, so each is written again under a fresh id; then the manifests that named the old pack are swapped,
one by one, for manifests that name the new one. Every snapshot can be restored at any time, and what is done is not
repeated. Old packs are collected like all packs that are not needed any more. Exports may run at the same time.
"""

from __future__ import annotations

import contextlib
from dataclasses import field, replace

from sidecar.errors import (
    BaseCollected,
    ObjectRefused,
    SnapshotDamaged,
    SnapshotNotFound,
    SwapLost,
    UsageError,
)
from sidecar.host.files import open_spool
from sidecar.host.values import dataclass
from sidecar.host.work import Progress
from sidecar.ids import (
    ATTACHMENTS,
    AUDIT,
    CONVERSATIONS,
    INSTANCES,
    LISTINGS,
    NOTICED,
    ROOT,
    STARTS,
    STORE_ID,
    WANTED,
    WRITERS,
    MemoryKeys,
    build_memory_key,
    make_pack_id,
)
from sidecar.ports import Store
from sidecar.store.encryption.encrypted_store import EncryptedStore
from sidecar.store.encryption.opening import StoreEncryption
from sidecar.store.encryption.passphrase import (
    COPY,
    IDENTITY,
    check_identities,
    generate_identity,
    read_identities,
    write_identities,
)
from sidecar.store.encryption.signed_store import SignedStore
from sidecar.store.fetch import fetch_pack
from sidecar.store.manifest import Manifest, Pack
from sidecar.store.marks import hold_packs
from sidecar.store.repository import Repository

OUTBOX = "outbox/"
MOST_PASSES = 5
"""Exports that run at the same time may build on old packs again: at most this many passes check whether one did."""

TWIN = (
    "{name} was written without keys, and this store has another of that name, which is hidden and stays the one that counts."
    " If it is yours, bring it out with docs/read_snapshot.py; then remove it."
)


@dataclass(slots=True, kw_only=True)
class Rekeyed:
    """What was done to one memory."""

    memory: str
    packs: int = 0
    """Packs that were re-encrypted."""
    bytes: int = 0
    snapshots: int = 0
    objects: int = 0
    problems: list[str] = field(default_factory=list)
    """What could not be done, and stays as it was."""


@dataclass(slots=True, kw_only=True)
class RekeyReport:
    """What was done to a store."""

    memories: list[Rekeyed] = field(default_factory=list)
    objects: int = 0
    """Objects of the service, beside the memories."""
    problems: list[str] = field(default_factory=list)
    readable_names: list[str] = field(default_factory=list)
    """Names of memories that can be read in the store, from before it was encrypted."""
    finished: bool = False
    """Nothing in the store needs an older key any more, except packs that wait to be collected."""


async def rekey(repository: Repository, memory: str, progress: Progress) -> RekeyReport:
    """Re-encrypt one memory, or the whole store. What cannot be done is reported; running it again continues from
    there.

    Raise ``UsageError`` if no keys are set, and ``KeyNeeded`` if what is there cannot be decrypted.
    """
    signed, sealed = _find_layers(repository.store)
    report, identity = RekeyReport(), None
    if sealed is not None:
        identity = IdentityChange(sealed.opening)
        await identity.begin()
    await repository.store.prepare()
    if sealed is not None:
        readable, twins = await sealed.opening.adopt_readable()
        report.readable_names = readable.get("memories", [])
        report.problems += [TWIN.format(name=name) for name in twins]
    memories = [memory] if memory else await repository.memories()
    for one in memories:
        report.memories.append(await _rekey_memory(repository, one, progress))
    if not memory:
        report.problems += await _list_unknown(repository.store, memories)
        report.objects = await _rekey_others(repository.store, report.problems)
    if not memory:
        for row in report.memories:  # an export may have ended in the meantime that began on old packs
            await _rekey_until_settled(repository, row, progress, first=False)
    done = not report.problems and not any(row.problems for row in report.memories)
    if done and not memory:
        await signed.mark()
        if sealed is not None and identity is not None:
            await sealed.opening.settle()
            await identity.end()
    report.finished = done and not memory
    return report


def _find_layers(store: Store) -> tuple[SignedStore, EncryptedStore | None]:
    """Return the signing and the encrypting layer of a store. Raise ``UsageError`` if no keys are set."""
    if not isinstance(store, SignedStore) or not isinstance(store.inner, EncryptedStore):
        raise UsageError("This store is opened without keys.")
    if not store.signs and not store.inner.encrypts:
        raise UsageError("No keys are set, so there is nothing to seal or sign with.", hint="See docs/security.md.")
    return store, store.inner if store.inner.encrypts else None


async def _list_unknown(store: Store, memories: list[str]) -> list[str]:
    """Return problems with folders of memories whose ids are not known, because no object in them is valid."""
    known = {build_memory_key(memory) for memory in memories}
    folders = {info.key[len(ROOT) :].partition("/")[0] async for info in store.list(ROOT)}
    return [f"Nothing in {ROOT}{folder}/ is believed." for folder in sorted(folders - known)]


async def _rekey_memory(repository: Repository, memory: str, progress: Progress) -> Rekeyed:
    """Re-encrypt a memory's packs, manifests and small objects."""
    done = Rekeyed(memory=memory)
    progress.step(f"sealing {memory} anew")
    await _rekey_until_settled(repository, done, progress, first=True)
    keys = MemoryKeys.of(memory)
    skipped = (keys.packs, keys.snapshots, keys.clock)
    others = [info.key async for info in repository.store.list(keys.prefix) if not info.key.startswith(skipped)]
    for key in others:
        done.objects += await _rewrite(repository.store, key, done.problems)
    return done


async def _rekey_until_settled(repository: Repository, done: Rekeyed, progress: Progress, *, first: bool) -> None:
    """Go through the manifests until none names an old pack."""
    for number in range(MOST_PASSES):
        if not await _rekey_manifests(repository, done, progress, again=number > 0 or not first):
            return
    done.problems.append("Exports went on building on old packs: run it again.")


async def _rekey_manifests(repository: Repository, done: Rekeyed, progress: Progress, *, again: bool) -> bool:
    """Swap each manifest for one whose packs are encrypted for today's keys. Return whether there was anything to do."""
    store, keys, wanted = repository.store, MemoryKeys.of(done.memory), repository.store.seal
    found: dict[str, tuple[Manifest, str]] = {}
    damaged: list[str] = []
    for snapshot in await repository.list_snapshot_ids(done.memory):
        try:
            found[snapshot] = await _read_manifest(store, keys, done.memory, snapshot)
        except SnapshotDamaged as damage:
            damaged.append(damage.message)
        except SnapshotNotFound:
            continue  # forgotten in the meantime
    done.problems += [] if again else damaged
    ready = {
        _identify_contents(pack): pack
        for manifest, _ in found.values()
        for pack in manifest.packs
        if pack.sealed == wanted
    }
    stale = False
    for snapshot, (manifest, version) in found.items():
        new = manifest
        if any(pack.sealed != wanted for pack in manifest.packs):
            try:
                packs = [await _rekey_pack(store, done, pack, ready, progress) for pack in manifest.packs]
            except SnapshotDamaged as damage:
                done.problems += [] if again else [f"Snapshot {snapshot}: {damage.message}"]
                continue
            new, stale = replace(manifest, packs=packs), True
        elif again:
            continue
        done.snapshots += await _swap_manifest(store, keys.snapshot(snapshot), manifest, new, version)
    return stale


async def _read_manifest(store: Store, keys: MemoryKeys, memory: str, snapshot: str) -> tuple[Manifest, str]:
    stored = await store.get(keys.snapshot(snapshot))
    if stored is None:
        raise SnapshotNotFound(f"{memory} has no snapshot {snapshot}.")
    return Manifest.decode(stored.data, memory, snapshot), stored.version


async def _rekey_pack(
    store: Store, done: Rekeyed, pack: Pack, ready: dict[tuple[str, str], Pack], progress: Progress
) -> Pack:
    """Return the same pack encrypted for today's keys, under a new id. Raise ``SnapshotDamaged``."""
    if pack.sealed == store.seal:
        return pack
    if _identify_contents(pack) not in ready:
        keys, name = MemoryKeys.of(done.memory), make_pack_id()
        async with open_spool() as scratch:
            file, index = await fetch_pack(store, done.memory, pack, scratch)
            size = await store.put(keys.pack(name, pack.codec), file.path)
            index_size = await store.put(keys.index(name), index.path.read_bytes())
        progress.advance(pack.bytes)
        done.packs, done.bytes = done.packs + 1, done.bytes + size + index_size
        ready[_identify_contents(pack)] = replace(
            pack, id=name, stored_bytes=size, stored_index_bytes=index_size, sealed=store.seal
        )
    return ready[_identify_contents(pack)]


def _identify_contents(pack: Pack) -> tuple[str, str]:
    """Return what identifies a pack's contents, whatever its id."""
    return pack.sha256, pack.index_sha256


async def _swap_manifest(store: Store, key: str, old: Manifest, new: Manifest, version: str) -> bool:
    """Replace a manifest, unless it was changed or deleted since, or a pack of the new one was collected. Return
    whether it was replaced."""
    try:
        written = await store.swap(key, new.encode(), expected=version)
    except SwapLost:
        return False
    try:
        await hold_packs(store, new)
    except BaseCollected:
        with contextlib.suppress(SwapLost):
            await store.swap(key, old.encode(), expected=written)
        return False
    return True


async def _rekey_others(store: Store, problems: list[str]) -> int:
    """Rewrite the store's id and what services keep beside the memories. A service that died is taken for alive a
    little longer."""
    prefixes = (ATTACHMENTS, CONVERSATIONS, INSTANCES, OUTBOX, AUDIT, STARTS, WANTED, NOTICED, WRITERS, LISTINGS)
    keys = [info.key for prefix in prefixes async for info in store.list(prefix)]
    return sum([await _rewrite(store, key, problems) for key in (STORE_ID, *keys)])


async def _rewrite(store: Store, key: str, problems: list[str]) -> bool:
    """Rewrite a small object as it is, unless another process just did. Return whether it was rewritten."""
    try:
        stored = await store.get(key)
        if stored is not None:
            await store.swap(key, stored.data, expected=stored.version)
            return True
    except SwapLost:
        pass
    except ObjectRefused as refused:
        problems.append(refused.message)
    return False


class IdentityChange:
    """A change of the identity behind a passphrase: the new one is kept beside the old until everything is re-encrypted,
    then alone."""

    def __init__(self, opening: StoreEncryption) -> None:
        self._opening = opening
        self._store = opening.store

    async def begin(self) -> None:
        """If the passphrase was changed, add a new identity, encrypted with the new passphrase, which decrypts nothing
        yet.

        Raise ``KeyNeeded`` if no passphrase given decrypts the old one.
        """
        passphrase, previous = self._opening.passphrases
        if not passphrase or not previous:
            return
        found, version, opened_by = await read_identities(self._store, [passphrase, previous])
        if found and opened_by != passphrase:
            await write_identities(self._store, [generate_identity(), *found], passphrase, version)
            self._opening.reset()

    async def end(self) -> None:
        """Remove older identities, because nothing is encrypted for them any more. If one of the two objects is
        missing, write both."""
        passphrase, previous = self._opening.passphrases
        if not passphrase:
            if previous:
                await self._store.delete([IDENTITY, COPY])
            return
        found, version, _ = await read_identities(self._store, [passphrase])
        if len(found) > 1 or await check_identities(self._store, [passphrase]):
            await write_identities(self._store, found[:1], passphrase, version)
