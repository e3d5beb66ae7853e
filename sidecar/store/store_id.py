"""A store's id: the object ``store-id``, 32 random hex digits that are written once and stay with the store's contents.

It is written before the store's first memory, and every head contains it, so that a reader of a head need not fetch it.
A store that was moved away and started again in the same place has another id.
"""

from __future__ import annotations

import re
import secrets
from contextlib import suppress

from sidecar.errors import SnapshotDamaged, StoreError, SwapLost
from sidecar.ids import STORE_ID
from sidecar.ports import Store

ATTEMPTS = 3
_FORM = re.compile(rb"[0-9a-f]{32}\Z")


async def read_store_id(store: Store) -> str:
    """Return the store's id, or "" if it has none yet.

    Raise ``SnapshotDamaged`` if something else is in its place.
    """
    held = await store.get(STORE_ID)
    if held is None:
        return ""
    if not _FORM.match(held.data):
        raise SnapshotDamaged(
            f"{STORE_ID} of {store.url} is damaged: it should be 32 hex digits.",
            hint="Put it back from a backup, or remove it: the next export gives the store a new id.",
        )
    return held.data.decode("ascii")


async def ensure_store_id(store: Store) -> str:
    """Return the store's id, creating it if there is none. If several processes do so at once, all return the same one.

    Raise ``SnapshotDamaged`` as above, or a ``StoreError`` if the store cannot be written.
    """
    for _ in range(ATTEMPTS):
        if found := await read_store_id(store):
            return found
        await store.prepare()
        with suppress(SwapLost):
            await store.swap(STORE_ID, secrets.token_hex(16).encode(), expected=None)
    raise StoreError(f"{store.url} does not keep its id: what is written there does not stay.")
