"""Keys for tests, and stores opened with them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyrage
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from sidecar.engine import Engine
from sidecar.store.encryption.given_keys import GivenKeys
from sidecar.wiring import open_repository, open_sandbox


def identity() -> str:
    return str(pyrage.x25519.Identity.generate())


def recipient(of: str) -> str:
    return str(pyrage.x25519.Identity.from_str(of).to_public())


def signing_key() -> str:
    key = Ed25519PrivateKey.generate()
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return key.private_bytes(*form).decode()


def public_key(of: str) -> str:
    key = serialization.load_pem_private_key(of.encode(), None)
    return key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


ONE, OTHER = identity(), identity()
SIGNING, OTHER_SIGNING = signing_key(), signing_key()
ENCRYPTED = GivenKeys(identities=(ONE,))
SIGNED = GivenKeys(signing_key=SIGNING)
BOTH = GivenKeys(identities=(ONE,), signing_key=SIGNING)


def environment(given: GivenKeys) -> dict[str, str]:
    """The same keys for a process of its own."""
    named = {
        "MEMORY_SIDECAR_IDENTITY": "\n".join(given.identities),
        "MEMORY_SIDECAR_RECIPIENTS": ",".join(given.recipients),
        "MEMORY_SIDECAR_PASSPHRASE": given.passphrase,
        "MEMORY_SIDECAR_SIGNING_KEY": given.signing_key,
    }
    return {name: value for name, value in named.items() if value}


def engine_with(store: Path, given: GivenKeys, **settings: Any) -> Engine:
    return replace(Engine(open_sandbox=open_sandbox, repository=open_repository(f"file:{store}", given)), **settings)


def quickly_sealed(text: str, passphrase: str) -> bytes:
    """What age makes of a text and a passphrase, with the least work there is: a real one takes a second to open."""
    file_key, salt, nonce = (secrets.token_bytes(16) for _ in range(3))
    wrapping = hashlib.scrypt(passphrase.encode(), salt=b"age-encryption.org/v1/scrypt" + salt, n=2, r=8, p=1, dklen=32)
    body = ChaCha20Poly1305(wrapping).encrypt(bytes(12), file_key, None)
    header = b"age-encryption.org/v1\n-> scrypt " + _base64(salt) + b" 1\n" + _base64(body) + b"\n---"
    mac = hmac.digest(_derived(file_key, b"", b"header"), header, "sha256")
    sealed = ChaCha20Poly1305(_derived(file_key, nonce, b"payload")).encrypt(bytes(11) + b"\1", text.encode(), None)
    return header + b" " + _base64(mac) + b"\n" + nonce + sealed


def _base64(data: bytes) -> bytes:
    return base64.b64encode(data).rstrip(b"=")


def _derived(key: bytes, salt: bytes, about: bytes) -> bytes:
    return HKDF(SHA256(), 32, salt, about).derive(key)
