"""Signatures: a line after an object's bytes, made with a key over the bytes and the object's name.

    signed ed25519 3f1c9d0a77e2b4c8 base64…        or        signed hmac-sha256 …

The name is part of it, so that no object can be put in the place of another.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Callable, Iterable
from dataclasses import field

from sidecar.errors import BadConfig
from sidecar.host.values import dataclass

HMAC_PREFIX = "hmac-sha256:"
SHORTEST_SECRET = 16
LONGEST_LINE = 160
"""More than a signature line ever has."""
_LINE = re.compile(rb"\nsigned (ed25519|hmac-sha256) ([0-9a-f]{16}) ([A-Za-z0-9+/]{40,90}={0,2})\n\Z")
_ABOUT = b"memory-sidecar signed object\0"


class BadSignature(Exception):
    """The message says what is wrong with the signature; it is to follow the object's name."""


@dataclass(frozen=True, slots=True)
class SigningKey:
    """One signing key; ``sign`` is set only if its private part is known."""

    kind: str
    name: str
    verify: Callable[[bytes, bytes], bool] = field(repr=False)
    sign: Callable[[bytes], bytes] | None = field(default=None, repr=False)


class Signatures:
    """The key this sidecar signs with, if any, and the keys whose signatures it trusts."""

    def __init__(self, key: str, trusted: Iterable[str]) -> None:
        self._own = parse_key(key) if key else None
        if self._own is not None and self._own.sign is None:
            raise BadConfig("The signing key is a public one.", hint="Public keys go into [signing] trusted.", at=_AT)
        believed = [*([self._own] if self._own else []), *(parse_key(text) for text in trusted)]
        self._believed = {one.name: one for one in believed}

    @property
    def can_sign(self) -> bool:
        return self._own is not None

    def sign(self, key: str, data: bytes) -> bytes:
        """Return the bytes with a signature line."""
        assert self._own is not None
        assert self._own.sign is not None
        signature = base64.b64encode(self._own.sign(_build_message(key, data))).decode()
        return data + f"\nsigned {self._own.kind} {self._own.name} {signature}\n".encode()

    def checked(self, key: str, signed: bytes) -> bytes:
        """Return the bytes without their signature, after checking it. Raise ``BadSignature``."""
        found = _LINE.search(signed, max(0, len(signed) - LONGEST_LINE))
        if found is None:
            raise BadSignature("is not signed")
        data, (kind, name, text) = signed[: found.start()], (part.decode() for part in found.groups())
        believed = self._believed.get(name)
        if believed is None or believed.kind != kind:
            raise BadSignature("is not signed by a key you trust")
        try:
            good = believed.verify(base64.b64decode(text, validate=True), _build_message(key, data))
        except binascii.Error:
            good = False
        if not good:
            raise BadSignature("is not what was signed under that name")
        return data


def strip_signature(data: bytes) -> bytes:
    """Return an object's bytes without the signature it may have, which is not checked."""
    found = _LINE.search(data, max(0, len(data) - LONGEST_LINE))
    return data[: found.start()] if found else data


def is_signed(data: bytes) -> bool:
    """Return whether data ends with a signature line."""
    return _LINE.search(data, max(0, len(data) - LONGEST_LINE)) is not None


def _build_message(key: str, data: bytes) -> bytes:
    return _ABOUT + key.encode() + b"\0" + data


_AT = ("signing", "key_file")


def parse_key(text: str) -> SigningKey:
    """Parse a signing key in any of the usual forms. Raise ``BadConfig``, which never repeats it."""
    text = "\n".join(line for line in text.strip().splitlines() if not line.startswith("#"))
    if text.startswith(HMAC_PREFIX):
        return _make_shared_key(_decode_base64(text.removeprefix(HMAC_PREFIX)))
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    data = text.encode() + b"\n"
    try:
        if "OPENSSH PRIVATE KEY-----" in text:
            key: object = serialization.load_ssh_private_key(data, None)
        elif "PRIVATE KEY-----" in text:
            key = serialization.load_pem_private_key(data, None)
        elif "PUBLIC KEY-----" in text:
            key = serialization.load_pem_public_key(data)
        elif text.startswith("ssh-"):
            key = serialization.load_ssh_public_key(" ".join(text.split()[:2]).encode())
        elif text.startswith("public:"):
            key = Ed25519PublicKey.from_public_bytes(_decode_base64(text.removeprefix("public:")))
        else:
            key = Ed25519PrivateKey.from_private_bytes(_decode_base64(text))
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise _make_no_key_error() from None
    if isinstance(key, Ed25519PrivateKey):
        return _make_ed25519_key(key.public_key(), key.sign)
    if isinstance(key, Ed25519PublicKey):
        return _make_ed25519_key(key, None)
    raise _make_no_key_error()


def _make_ed25519_key(public: object, sign: Callable[[bytes], bytes] | None) -> SigningKey:
    """Return an Ed25519 key."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    assert isinstance(public, Ed25519PublicKey)

    def verify(signature: bytes, message: bytes) -> bool:
        try:
            public.verify(signature, message)
        except InvalidSignature:
            return False
        return True

    return SigningKey("ed25519", hashlib.sha256(public.public_bytes_raw()).hexdigest()[:16], verify, sign)


def _make_shared_key(secret: bytes) -> SigningKey:
    """Return a key from a shared secret. Raise ``BadConfig`` if it is too short."""
    if len(secret) < SHORTEST_SECRET:
        raise BadConfig(f"A secret to sign with has at least {SHORTEST_SECRET} bytes.", at=_AT)

    def sign(message: bytes) -> bytes:
        return hmac.digest(secret, message, "sha256")

    name = sign(b"the name of this key").hex()[:16]
    return SigningKey(
        "hmac-sha256", name, lambda signature, message: hmac.compare_digest(signature, sign(message)), sign
    )


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        raise _make_no_key_error() from None


def _make_no_key_error() -> BadConfig:
    return BadConfig(
        "A key to sign with, or to trust, is none.",
        hint="Give an Ed25519 key (PEM, OpenSSH, base64, or for a public one public: and base64), or hmac-sha256: and a"
        " secret in base64. `memory-sidecar keygen --signing` makes one.",
        at=_AT,
    )
