"""Change the identity behind a passphrase: the new one is kept beside the old until everything is re-encrypted, then
alone."""

from __future__ import annotations

from sidecar.store.encryption.opening import StoreEncryption
from sidecar.store.encryption.passphrase import (
    COPY,
    IDENTITY,
    check_identities,
    generate_identity,
    read_identities,
    write_identities,
)


class IdentityChange:
    """The two steps of that change, before and after everything is re-encrypted."""

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
