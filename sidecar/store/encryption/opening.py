"""Determine how a store is encrypted, and make sure that what is written can be found and decrypted by others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import field, replace

from sidecar.errors import KeyNeeded, StoreError, SwapLost
from sidecar.host.values import dataclass
from sidecar.ports import Store
from sidecar.store.encryption.keyring import Keyring, normalise_recipient
from sidecar.store.encryption.names import ROOTS, HiddenNames, is_opaque
from sidecar.store.encryption.passphrase import COPY as IDENTITY_COPY
from sidecar.store.encryption.passphrase import IDENTITY, make_identity, read_identities
from sidecar.store.encryption.record import COPY, RECORD, Record, Records
from sidecar.store.encryption.signatures import Signatures

BELIEVED_SECONDS = 60.0
"""For this long a writer assumes that a store is still not encrypted."""
LOG = logging.getLogger("sidecar")
ENCRYPTED = "This store is encrypted, and no key was given."


class KeysLost(StoreError):
    """The objects that hold the store's keys are gone."""

    code = "store-keys-lost"
    default_hint = (
        f"Put the object `{RECORD}` back from a copy of the store; docs/security.md says what else can be done."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EncryptionKeys:
    """The encryption keys that a sidecar was given."""

    recipients: tuple[str, ...] = ()
    identities: tuple[str, ...] = field(default=(), repr=False)
    passphrase: str = field(default="", repr=False)
    previous_passphrase: str = field(default="", repr=False)
    signatures: Signatures | None = None
    """For the store's own record."""
    trust_unsigned: bool = False


@dataclass(frozen=True, slots=True)
class EncryptionState:
    """An encrypted store whose record was read."""

    keyring: Keyring
    record: Record
    version: str | None
    names: HiddenNames
    complete: bool
    """Whether these keys decrypt everything that was ever encrypted here: then what they do not decrypt was altered."""
    by_copy: bool = False
    """The record itself was altered or is missing, and its copy was used."""


class StoreEncryption:
    """How one store is encrypted, as far as is known. Every method raises ``KeyNeeded`` if encryption keys are missing."""

    def __init__(self, store: Store, keys: EncryptionKeys | None) -> None:
        self._store = store
        self._keys = keys
        self._keyring: Keyring | None = None
        self._plain_until = 0.0
        self._turn = asyncio.Lock()
        self.state: EncryptionState | None = None

    async def open_to_read(self, *, fresh: bool = False) -> EncryptionState | None:
        """Return the state for reading; ``None`` while nothing was ever encrypted here, or no encryption keys were given."""
        if (fresh or self.state is None) and self._keys is not None:
            async with self._turn:
                if fresh or self.state is None:
                    self.state = await self._read_state(self._keys)
        return self.state

    async def open_to_write(self, *, fresh: bool = False) -> EncryptionState | None:
        """Return the state for writing, after making sure that the store's record lists our recipients; ``None``
        without encryption keys."""
        if self._keys is None:
            await self.check_nothing_hidden()
            return None
        async with self._turn:
            while fresh or self.state is None or not self.state.record.is_known_to(self.state.keyring.recipients):
                with contextlib.suppress(SwapLost):  # another process does the same: read what it wrote
                    self.state = await self._open_record(self._keys)
                    break
            return self.state

    def check_recipients(self) -> None:
        """Raise ``BadConfig`` if a recipient is not valid; without asking the store, which may contain the rest of the
        keys."""
        for text in self._keys.recipients if self._keys else ():
            normalise_recipient(text)

    async def check_nothing_hidden(self, missing: str = "") -> None:
        """Check, before an object or prefix is reported as missing, that it is not only hidden.

        Raise ``KeyNeeded`` or ``KeysLost`` if it may be.
        """
        if self.state is not None:
            return
        if self._keys is not None:
            _, hidden = await self._list_names()
            if hidden and await self._read_state(self._keys) is None:
                raise _make_lost_error()
        elif _means_empty(missing) or time.monotonic() >= self._plain_until:
            if any(await asyncio.gather(self._store.get(RECORD), self._store.get(COPY))):
                raise KeyNeeded(ENCRYPTED)
            self._plain_until = time.monotonic() + BELIEVED_SECONDS

    async def settle(self) -> None:
        """Record that everything here is encrypted for today's recipients only, signed with today's key."""
        assert self._keys is not None
        state = await self.open_to_write(fresh=True)
        assert state is not None
        record = replace(state.record, sets=[list(state.keyring.recipients)])
        await self._make_records(self._keys, state.keyring).write(record, state.version)
        await self.open_to_write(fresh=True)

    async def adopt_readable(self) -> tuple[dict[str, list[str]], list[str]]:
        """Adopt names that were written unencrypted after the record was made, so that they are found again.

        Return all readable names, and those that are not adopted because a hidden one has the same name and would not
        be found any more.
        """
        assert self._keys is not None
        state = await self.open_to_write(fresh=True)
        assert state is not None
        there, hidden = await self._list_names()
        named = {f"{root}/{name}" for root, names in there.items() for name in names}
        twins = {key for key in named if state.names.hide(key) in hidden}
        free = {root: [name for name in names if f"{root}/{name}" not in twins] for root, names in there.items()}
        plain = {root: sorted({*free.get(root, ()), *state.record.plain.get(root, ())}) for root in ROOTS}
        plain = {root: names for root, names in plain.items() if names}
        if plain != state.record.plain:
            await self._make_records(self._keys, state.keyring).write(replace(state.record, plain=plain), state.version)
            await self.open_to_write(fresh=True)
        return free, sorted(twins)

    async def check(self) -> list[str]:
        """Return problems with the store's record of its keys, or with its copy."""
        state = await self.open_to_read()
        return await self._make_records(self._keys, state.keyring).check() if self._keys and state else []

    @property
    def store(self) -> Store:
        return self._store

    @property
    def passphrases(self) -> tuple[str, str]:
        """The current passphrase, and the previous one."""
        return (self._keys.passphrase, self._keys.previous_passphrase) if self._keys else ("", "")

    def reset(self) -> None:
        """Forget the keyring, because the store's own identity was changed: it is read again."""
        self._keyring, self.state = None, None

    async def _read_state(self, keys: EncryptionKeys, *, making: bool = False) -> EncryptionState | None:
        """Read the store's record with the given keys; ``None`` if there is none yet."""
        keyring = await self._build_keyring(keys, making=making)
        if keyring is None:
            return None
        record, version, problem = await self._make_records(keys, keyring).read()
        if problem:
            LOG.warning("The store's record of its keys was altered, and its copy is used: %s", problem)
        if record is None:
            return None
        complete = all(keyring.can_decrypt(recipients) for recipients in record.sets)
        return EncryptionState(keyring, record, version, record.build_names(), complete, bool(problem))

    async def _open_record(self, keys: EncryptionKeys) -> EncryptionState:
        """Read the record; create it, repair it, or add our recipients if needed. Raise ``SwapLost`` to be called again."""
        state = await self._read_state(keys, making=True)
        assert self._keyring is not None
        records, recipients = self._make_records(keys, self._keyring), self._keyring.recipients
        if state is None:
            await self._make_record(keys, records, recipients)
        elif not state.record.is_known_to(recipients):
            await records.write(state.record.with_recipients(recipients), state.version)
        elif state.by_copy:
            await records.write(state.record, state.version)
        else:
            return state
        again = await self._read_state(keys)
        if again is None:
            raise SwapLost("The store's record of its keys is gone again.")
        return again

    async def _make_record(self, keys: EncryptionKeys, records: Records, recipients: tuple[str, ...]) -> None:
        """Write the first record, unless hidden names show that there was one: then raise ``KeysLost``."""
        there, hidden = await self._list_names()
        if hidden:
            if await self._read_state(keys) is None:
                raise _make_lost_error()
            return
        await records.write(Record.new(recipients, there), None)
        # What another process wrote unencrypted in the meantime must be found again.
        after, _ = await self._list_names()
        if after != there:
            record, version, _ = await records.read()
            assert record is not None
            await records.write(replace(record, plain=after), version)

    def _make_records(self, keys: EncryptionKeys, keyring: Keyring) -> Records:
        return Records(self._store, keyring, keys.signatures, keys.trust_unsigned)

    async def _build_keyring(self, keys: EncryptionKeys, *, making: bool) -> Keyring | None:
        """Return the keyring. A passphrase decrypts the identity in the store; ``None`` if that does not exist yet."""
        if self._keyring is not None:
            return self._keyring
        ours: list[str] = []
        others: list[str] = []
        if keys.passphrase or keys.previous_passphrase:
            given = [*filter(None, [keys.passphrase, keys.previous_passphrase])]
            found, _, opened_by = await read_identities(self._store, given)
            ours, others = (found[:1], found[1:]) if opened_by == keys.passphrase else ([], found)
            if keys.passphrase and not found:
                await self._check_no_identity_lost(keys)
                if not making:
                    # What was encrypted before there was a passphrase is read until the first write.
                    return Keyring((), keys.identities) if keys.identities else None
                ours = await make_identity(self._store, keys.passphrase)
        recipients = [*keys.recipients, *(_derive_recipient(text) for text in ours)]
        self._keyring = Keyring(recipients, [*ours, *others, *keys.identities])
        return self._keyring

    async def _check_no_identity_lost(self, keys: EncryptionKeys) -> None:
        """Raise ``KeysLost`` if this store was encrypted for an identity that is missing: no other key decrypts it."""
        sealed = any([await self._store.get(key) for key in (RECORD, COPY)]) or (await self._list_names())[1]
        if keys.identities or not sealed:
            return
        # Another process may just have created both.
        if not (await read_identities(self._store, [keys.passphrase]))[0]:
            raise KeysLost(
                f"The passphrase opens nothing: {IDENTITY} and {IDENTITY_COPY}, through which it would, are not in this store.",
                hint=f"If the store was sealed for keys, set [encryption] identity_files. If not, put the object `{IDENTITY}`"
                " back from a copy of the store. Nothing was changed.",
            )

    async def _list_names(self) -> tuple[dict[str, list[str]], set[str]]:
        """Return the readable names in the store, by the first part of their keys, and the keys that hidden names begin
        with."""
        names: dict[str, list[str]] = {}
        hidden: set[str] = set()
        for root in ROOTS:
            found = {info.key.split("/")[1] async for info in self._store.list(f"{root}/")}
            hidden |= {f"{root}/{name}" for name in found if is_opaque(name)}
            readable = sorted(name for name in found if not is_opaque(name))
            names |= {root: readable} if readable else {}
        return names, hidden


def _means_empty(missing: str) -> bool:
    """Return whether the caller will conclude that a memory, or a store, has no snapshot: that is never answered from
    memory."""
    parts = missing.split("/")
    return parts[0] == "memories" and (
        parts[-1] == "head.json" or parts[1:] == [""] or parts[2:] in ([""], ["snapshots", ""])
    )


def _make_lost_error() -> KeysLost:
    return KeysLost(f"{RECORD}, which holds the key to this store's names, is gone.")


def _derive_recipient(identity: str) -> str:
    import pyrage

    return str(pyrage.x25519.Identity.from_str(identity).to_public())
