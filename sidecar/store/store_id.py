"""A store's id: the object ``store-id``, 32 hex digits that are made up once and go where the store goes.

It is written before the first memory of a store is, and every head carries it, so that who has read a head need not ask for
it. A store that was moved away and begun again in the same place has another.
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
    """The store's id, or "" when it has none yet.

    Raise ``SnapshotDamaged`` when there is something else in its place.
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
    """The store's id, made up now if it has none. Of several that do so at once, one wins, and all return that one.

    Raise ``SnapshotDamaged`` as above, or a ``StoreError`` when the store cannot be written.
    """
    for _ in range(ATTEMPTS):
        if found := await read_store_id(store):
            return found
        await store.prepare()
        with suppress(SwapLost):
            await store.swap(STORE_ID, secrets.token_hex(16).encode(), expected=None)
    raise StoreError(f"{store.url} does not keep its id: what is written there does not stay.")
