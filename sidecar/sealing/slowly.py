"""Open what a passphrase sealed, however slow this machine is.

The library measures how fast a machine is at the moment, and refuses work that would take it more than some sixteen seconds: a
store that was made on a fast machine could not be opened on a small or busy one. This does that work all the same.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re

REFUSED = "Excessive work"
"""How the library's complaint begins."""
MOST_WORK = 22
"""The exponent of the work; one more is twice as much. Larger ones are somebody's bad joke."""
BLOCK_BYTES = 64 << 10
_FORM = re.compile(
    rb"(age-encryption\.org/v1\n-> scrypt ([A-Za-z0-9+/]{22}) ([1-9][0-9]?)\n([A-Za-z0-9+/]{43})\n---) ([A-Za-z0-9+/]{43})\n"
)


def decrypt_with_passphrase(data: bytes, passphrase: str) -> bytes:
    """What a file of age's holds, of one block. Raise ``ValueError`` for another passphrase, or when it is damaged."""
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
    data = base64.b64decode(text + b"=" * (-len(text) % 4))
    if base64.b64encode(data).rstrip(b"=") != text:
        raise ValueError("not as it was written")
    return data


def _derive_key(key: bytes, salt: bytes, about: bytes) -> bytes:
    """HKDF with SHA-256, 32 bytes."""
    return hmac.digest(hmac.digest(salt or bytes(32), key, "sha256"), about + b"\1", "sha256")
