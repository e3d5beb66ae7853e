"""Check the objects of a store that no snapshot names: those of the keys, of the service, and what is beside a memory's
snapshots.

Only encrypted or signed objects can be checked; in a plain store no problem is found.
"""

from __future__ import annotations

from collections.abc import Iterable

from sidecar.errors import KeyNeeded, SnapshotDamaged
from sidecar.host.work import gather_few
from sidecar.ids import (
    ATTACHMENTS,
    AUDIT,
    CONVERSATIONS,
    INSTANCES,
    LISTINGS,
    NOTICED,
    STARTS,
    WANTED,
    WRITERS,
    MemoryKeys,
    is_snapshot_id,
)
from sidecar.ports import Store
from sidecar.store.encryption.encrypted_store import NOT_OURS, EncryptedStore, find_strangers
from sidecar.store.encryption.names import ROOTS
from sidecar.store.encryption.passphrase import check_identities
from sidecar.store.encryption.signed_store import MARK, SignedStore
from sidecar.store.folders import list_memories
from sidecar.store.head_copies import KEPT
from sidecar.store.repository import PARALLEL_READS, Repository
from sidecar.store.store_id import read_store_id

OUTBOX = "outbox/"
LATE = 8
"""A writer that is this many heads late may still leave a copy."""


async def check_memory(repository: Repository, memory: str) -> list[str]:
    """Return problems with a memory's objects other than its head, manifests and packs."""
    keys = MemoryKeys.of(memory)
    listed = [info.key async for info in _get_unfiltered(repository.store).list(keys.prefix)]
    named = [key[len(keys.snapshots) :].removesuffix(".json") for key in listed if key.startswith(keys.snapshots)]
    others = [key for key in listed if not key.startswith((keys.packs, keys.snapshots))]
    problems = [f"{keys.snapshots}{name}.json is no snapshot's name." for name in named if not is_snapshot_id(name)]
    problems += await _list_refused(repository.store, [key for key in others if key not in (keys.head, keys.clock)])
    return problems + await _check_copies(repository, memory)


async def check_store(repository: Repository) -> list[str]:
    """Return problems with what is beside the memories, and with folders that belong to no memory."""
    store = repository.store
    prefixes = (ATTACHMENTS, CONVERSATIONS, INSTANCES, OUTBOX, AUDIT, STARTS, WANTED, NOTICED, WRITERS, LISTINGS)
    below = [info.key for prefix in prefixes async for info in store.list(prefix)]
    _, nobodys = await list_memories(store)
    return [*nobodys, *await _check_store_id(store), *await _list_refused(store, below)]


async def _check_store_id(store: Store) -> list[str]:
    """Return the problem with the store's id, if there is one."""
    try:
        await read_store_id(store)
    except (SnapshotDamaged, KeyNeeded) as problem:
        return [problem.message]
    return []


async def check_keys(repository: Repository) -> list[str]:
    """Return problems with the objects that say how a store is encrypted and signed."""
    signed = repository.store
    if not isinstance(signed, SignedStore):
        return []
    sealed, problems = signed.inner, []
    if isinstance(sealed, EncryptedStore) and (state := await sealed.opening.open_to_read()) is not None:
        inner = sealed.opening.store
        keys = [info.key for root in ROOTS async for info in inner.list(f"{root}/")]
        problems += [NOT_OURS.format(name=name) for name in sorted(find_strangers(state, keys))]
        problems += await sealed.opening.check()
        problems += await check_identities(inner, sealed.opening.passphrases)
    if signed.signs:
        problems += [f"{problem} The next export writes it anew." for problem in await _check_mark(repository, signed)]
    return problems


async def _check_mark(repository: Repository, store: Store) -> list[str]:
    """Return the problem with the object that says that the store is signed."""
    try:
        gone = await store.get(MARK) is None and await repository.memories()
    except SnapshotDamaged as problem:
        return [problem.message]
    return [f"{MARK}, which says that this store is signed, is missing."] if gone else []


async def _check_copies(repository: Repository, memory: str) -> list[str]:
    """Return problems with the copies of the last heads: those that are missing though older ones exist, and outdated
    ones."""
    if repository.witnesses is None or (head := (await repository.head(memory)).head) is None:
        return []
    keys, there = MemoryKeys.of(memory), await repository.witnesses.list_generations(memory)
    stale = [generation for generation in there if generation <= head.generation - KEPT - LATE]
    there = there[: len(there) - len(stale)]
    last = range(max(there[-1], head.generation - KEPT + 1), head.generation + 1) if there else ()
    gone = [keys.witness(generation) for generation in last if generation not in there]
    # The head may have moved just now.
    gone = [key for key in gone if await repository.store.get(key) is None]
    mended = {keys.witness(head.generation): "The next export that moves the head writes it too."}
    return [
        *(f"{key}, a copy of the head, is missing. {mended.get(key, 'Exports to come write others.')}" for key in gone),
        *(
            f"{keys.witness(one)} is a copy of a head long past: somebody put it back, or wrote it late. Exports remove it."
            for one in stale
        ),
    ]


async def _list_refused(store: Store, keys: Iterable[str]) -> list[str]:
    """Return why objects are refused, one by one."""

    async def refused(key: str) -> str:
        try:
            await store.get(key)
        except (SnapshotDamaged, KeyNeeded) as problem:
            return problem.message
        return ""

    return [*filter(None, await gather_few(refused, keys, PARALLEL_READS))]


def _get_unfiltered(store: Store) -> Store:
    """Return the store below the signatures, which also lists objects that are refused."""
    return store.inner if isinstance(store, SignedStore) else store
