"""A passphrase instead of keys: it decrypts one object of the store, which contains the identity that all others are
encrypted for.

Trying a passphrase is made slow on purpose, about a second each time, so it encrypts that one object only.

``decrypt_with_passphrase`` decrypts however slow this machine is. The library measures how fast a machine is at the
moment, and refuses work that would take it more than about sixteen seconds: a store that was created on a fast machine
could not be opened on a small or busy one. The file format is that of https://age-encryption.org/v1 with an scrypt
recipient.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import re
from collections.abc import Iterable

from sidecar.errors import KeyNeeded, SwapLost
from sidecar.ports import Store

IDENTITY = "identity.age"
COPY = "identity.copy.age"


async def read_identities(store: Store, passphrases: Iterable[str]) -> tuple[list[str], str | None, str]:
    """Return the identities of a store, the present one first; none if it has none yet. With them, the version that a
    swap must find, and the passphrase that decrypted them.

    Raise ``KeyNeeded`` if no passphrase given decrypts them.
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
    """Return problems with the identity's object or its copy: the two must be the same."""
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
    """Write the identities, encrypted, and their copy. Raise ``SwapLost`` if another process wrote them since."""
    data = await asyncio.to_thread(_encrypt, "\n".join(identities) + "\n", passphrase)
    await store.swap(IDENTITY, data, expected=expected)
    await store.put(COPY, data)


async def make_identity(store: Store, passphrase: str) -> list[str]:
    """Return a new identity, or the one that another process created in the meantime."""
    made = [generate_identity()]
    try:
        await write_identities(store, made, passphrase, None)
    except SwapLost:
        made, _, _ = await read_identities(store, [passphrase])
    return made


def generate_identity() -> str:
    """Return a new age identity."""
    import pyrage

    return str(pyrage.x25519.Identity.generate())


def _encrypt(text: str, passphrase: str) -> bytes:
    import pyrage

    return pyrage.passphrase.encrypt(text.encode(), passphrase)


def _decrypt(data: bytes, passphrase: str) -> str:
    """Decrypt; "" if it is another passphrase or the object is damaged: age cannot tell the two apart."""
    import pyrage

    try:
        try:
            return pyrage.passphrase.decrypt(data, passphrase).decode()
        except pyrage.DecryptError as problem:
            if str(problem).startswith(REFUSED):
                return decrypt_with_passphrase(data, passphrase).decode()
            return ""
    except ValueError:
        return ""


REFUSED = "Excessive work"
"""How the library's error begins."""
MOST_WORK = 22
"""The exponent of the scrypt work factor; one more is twice the work. Larger values are malicious."""
BLOCK_BYTES = 64 << 10
_FORM = re.compile(
    rb"(age-encryption\.org/v1\n-> scrypt ([A-Za-z0-9+/]{22}) ([1-9][0-9]?)\n([A-Za-z0-9+/]{43})\n---) ([A-Za-z0-9+/]{43})\n"
)


def decrypt_with_passphrase(data: bytes, passphrase: str) -> bytes:
    """Return the contents of an age file of one block. Raise ``ValueError`` for another passphrase, or if it is damaged."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    form = _FORM.match(data)
    if form is None or int(form[3]) > MOST_WORK:
        raise ValueError("not sealed by a passphrase, or with too much work")
    header, salt, work, wrapped, mac = (
        form[1],
        _decode_base64(form[2]),
        int(form[3]),
        _decode_base64(form[4]),
        _decode_base64(form[5]),
    )
    nonce, block = data[form.end() : form.end() + 16], data[form.end() + 16 :]
    if len(block) > BLOCK_BYTES + 16:
        raise ValueError("longer than a block")
    work = 1 << work
    key = hashlib.scrypt(
        passphrase.encode(),
        salt=b"age-encryption.org/v1/scrypt" + salt,
        n=work,
        r=8,
        p=1,
        maxmem=1024 * work + (1 << 20),
        dklen=32,
    )
    try:
        file_key = ChaCha20Poly1305(key).decrypt(bytes(12), wrapped, None)
        if not hmac.compare_digest(mac, hmac.digest(_derive_key(file_key, b"", b"header"), header, "sha256")):
            raise ValueError("its header was altered")
        return ChaCha20Poly1305(_derive_key(file_key, nonce, b"payload")).decrypt(bytes(11) + b"\1", block, None)
    except InvalidTag:
        raise ValueError("another passphrase, or damaged") from None


def _decode_base64(text: bytes) -> bytes:
    """Decode base64 without padding. Raise ValueError unless it is canonical."""
    data = base64.b64decode(text + b"=" * (-len(text) % 4))
    if base64.b64encode(data).rstrip(b"=") != text:
        raise ValueError("not as it was written")
    return data


def _derive_key(key: bytes, salt: bytes, about: bytes) -> bytes:
    """HKDF with SHA-256 (RFC 5869), 32 bytes."""
    return hmac.digest(hmac.digest(salt or bytes(32), key, "sha256"), about + b"\1", "sha256")
