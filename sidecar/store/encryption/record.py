"""The record of an encrypted store: the key that hides its names, and the recipients its objects are encrypted for.

It is one small object, encrypted for all of those recipients and kept twice, so that damage to one copy does not hide a
whole store.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Self

from sidecar.errors import KeyNeeded, NotSigned, ObjectRefused
from sidecar.format.checksums import encode_checksummed
from sidecar.host.values import dataclass
from sidecar.ports import Store
from sidecar.store.encryption.keyring import Altered, Keyring, NotDecrypted, is_encrypted
from sidecar.store.encryption.names import HiddenNames
from sidecar.store.encryption.signatures import BadSignature, Signatures, is_signed, strip_signature
from sidecar.store.manifest import decode_object

RECORD = "sealing"
COPY = "sealing.copy"
FORMAT = 2
NAME_KEY_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The contents of the record."""

    names: str
    """The key that hides names, in base64."""
    sets: list[list[str]]
    """Each set of recipients for whom objects in this store may be encrypted."""
    plain: dict[str, list[str]]
    """Names, by the first part of their key, that existed before encryption and stay readable."""

    @classmethod
    def new(cls, recipients: Iterable[str], plain: dict[str, list[str]]) -> Self:
        """Return a record with a new name key."""
        names = base64.b64encode(secrets.token_bytes(NAME_KEY_BYTES)).decode()
        return cls(names=names, sets=[list(recipients)], plain=plain)

    def build_names(self) -> HiddenNames:
        return HiddenNames(base64.b64decode(self.names), self.plain)

    def is_known_to(self, recipients: Iterable[str]) -> bool:
        """Return whether this set of recipients is recorded."""
        return list(recipients) in self.sets

    def with_recipients(self, recipients: Iterable[str]) -> Self:
        return replace(self, sets=[*self.sets, list(recipients)])

    def list_recipients(self) -> set[str]:
        """Return all recipients of all sets."""
        return {recipient for one in self.sets for recipient in one}


@dataclass(frozen=True, slots=True)
class Records:
    """Reads and writes the record of one store."""

    store: Store
    keyring: Keyring
    signatures: Signatures | None = None
    trust_unsigned: bool = False

    async def read(self) -> tuple[Record | None, str | None, str]:
        """Return the record, the version that a swap must find, and the problem with the object if its copy had to be
        used.

        Raise ``KeyNeeded`` if it is for other keys, ``ObjectRefused`` if neither is valid.
        """
        stored = await self.store.get(RECORD)
        problem: KeyNeeded | ObjectRefused | None = None
        if stored is not None:
            try:
                return self._decrypt(RECORD, stored.data), stored.version, ""
            except (KeyNeeded, ObjectRefused) as raised:
                problem = raised
        version = stored.version if stored else None
        copy = await self.store.get(COPY)
        if copy is None:
            if problem is not None:
                raise problem
            return None, None, ""
        try:
            record = self._decrypt(COPY, copy.data)
        except (KeyNeeded, ObjectRefused) as raised:
            raise problem or raised from None
        return record, version, problem.message if problem else f"{RECORD} is missing; its copy is used."

    async def check(self) -> list[str]:
        """Return problems with the record and its copy, of which one may replace the other."""
        found: dict[str, Record] = {}
        problems = []
        for key in (RECORD, COPY):
            try:
                stored = await self.store.get(key)
                if stored is None:
                    problems.append(f"{key}, one of the two that hold the key to this store's names, is missing.")
                else:
                    found[key] = self._decrypt(key, stored.data)
            except KeyNeeded:
                problems.append(f"{key} is damaged: none of the keys of this store opens it.")
            except ObjectRefused as problem:
                problems.append(problem.message)
        if len(found) == 2 and found[RECORD] != found[COPY]:
            problems.append(f"{RECORD} and {COPY} do not say the same: one of them is not the last that was written.")
        return [f"{problem} `rekey` writes both anew." for problem in problems]

    async def write(self, record: Record, expected: str | None) -> None:
        """Write the record and its copy. Raise ``SwapLost`` if another process wrote it since."""
        data = self._encrypt(record)
        if expected is None:
            # If several processes start at once one wins, and only the winner's name key may be in the copy.
            await self.store.swap(RECORD, data, expected=None)
            await self.store.put(COPY, data)
        else:
            # The copy is never older than the record: a reader that can decrypt the copy and not the record knows that
            # the record was altered.
            await self.store.put(COPY, data)
            await self.store.swap(RECORD, data, expected=expected)

    def _encrypt(self, record: Record) -> bytes:
        """Sign the record if a signing key is given, and encrypt it for all its recipients."""
        data = encode_checksummed({"format": FORMAT, **asdict(record)})
        if self.signatures is not None and self.signatures.can_sign:
            data = self.signatures.sign(RECORD, data)
        return self.keyring.seal(data, record.list_recipients())

    def _decrypt(self, key: str, data: bytes) -> Record:
        """Decrypt and validate a record. Raise ``KeyNeeded`` or ``ObjectRefused``."""
        if not is_encrypted(data):
            raise ObjectRefused(f"{key}, which holds the key to this store's names, is not what was written.")
        try:
            data = self.keyring.open(data)
        except NotDecrypted:
            raise KeyNeeded("This store is encrypted, and none of the keys given opens it.") from None
        except Altered as problem:
            raise ObjectRefused(f"{key}, which holds the key to this store's names, is damaged: {problem}.") from None
        try:
            return decode_object(self._check_signature(key, data), Record, FORMAT)
        except ValueError as wrong:
            raise ObjectRefused(f"{key} is not valid: {wrong}.") from None

    def _check_signature(self, key: str, data: bytes) -> bytes:
        """Return a record without its signature, after checking it. Raise ``NotSigned``."""
        if self.signatures is None or (self.trust_unsigned and not is_signed(data)):
            return strip_signature(data)
        try:
            return self.signatures.checked(RECORD, data)
        except BadSignature as problem:
            raise NotSigned(f"{key}, which holds the key to this store's names, {problem}.") from None
