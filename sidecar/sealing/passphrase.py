"""A passphrase instead of keys: it opens one object of the store, which holds the identity that all others are sealed for.

A passphrase is made slow to try, a second each time; so it seals that one object and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from sidecar.errors import KeyNeeded, SwapLost
from sidecar.ports import Store
from sidecar.sealing import slowly

IDENTITY = "identity.age"
COPY = "identity.copy.age"


async def read_identities(store: Store, passphrases: Iterable[str]) -> tuple[list[str], str | None, str]:
    """The identities of a store, the present one first; none when it has none yet. With them, the version that a swap must
    find, and the passphrase that opened it.

    Raise ``KeyNeeded`` when no passphrase given opens it.
    """
    stored = await store.get(IDENTITY)
    version = stored.version if stored else None
    copies = [one.data for one in (stored, await store.get(COPY) if stored is None else None) if one]
    if stored is not None:
        copies += [one.data for one in [await store.get(COPY)] if one and one.data != stored.data]
    for data in copies:
        for passphrase in passphrases:
            text = await asyncio.to_thread(_decrypt, data, passphrase)
            if text:
                return text.split(), version, passphrase
    if copies:
        raise KeyNeeded("This store is encrypted with a passphrase, and none that was given opens it.")
    return [], None, ""


async def check_identities(store: Store, passphrases: Iterable[str]) -> list[str]:
    """What is wrong with the identity's object, or with the copy of it: the two are the same."""
    objects = {key: await store.get(key) for key in (IDENTITY, COPY)}
    there = {key: stored.data for key, stored in objects.items() if stored}
    if not there or len(set(there.values())) == 1 < len(there):
        return []
    wrong, given = [f"{key} is missing" for key in objects if key not in there], [*filter(None, passphrases)]
    for key, data in there.items() if given else ():
        if not any([await asyncio.to_thread(_decrypt, data, passphrase) for passphrase in given]):
            wrong.append(f"{key} is damaged, or for another passphrase")
    wrong = wrong or [f"{IDENTITY} and {COPY} are not the same"]
    return [f"{what}. `rekey` with the passphrase writes both anew." for what in wrong]


async def write_identities(store: Store, identities: Iterable[str], passphrase: str, expected: str | None) -> None:
    """Raise ``HeadMoved`` when somebody else wrote them since."""
    data = await asyncio.to_thread(_encrypt, "\n".join(identities) + "\n", passphrase)
    await store.swap(IDENTITY, data, expected=expected)
    await store.put(COPY, data)


async def make_identity(store: Store, passphrase: str) -> list[str]:
    """A new identity, or the one that somebody else made meanwhile."""
    made = [generate_identity()]
    try:
        await write_identities(store, made, passphrase, None)
    except SwapLost:
        made, _, _ = await read_identities(store, [passphrase])
    return made


def generate_identity() -> str:
    import pyrage

    return str(pyrage.x25519.Identity.generate())


def _encrypt(text: str, passphrase: str) -> bytes:
    import pyrage

    return pyrage.passphrase.encrypt(text.encode(), passphrase)


def _decrypt(data: bytes, passphrase: str) -> str:
    """Empty when it is another passphrase, or the object is damaged: age cannot tell the two apart."""
    import pyrage

    try:
        try:
            return pyrage.passphrase.decrypt(data, passphrase).decode()
        except pyrage.DecryptError as problem:
            if str(problem).startswith(slowly.REFUSED):
                return slowly.decrypt_with_passphrase(data, passphrase).decode()
            return ""
    except ValueError:
        return ""
