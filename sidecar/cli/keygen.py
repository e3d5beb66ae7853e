"""``keygen``: a new key, for a file that only its owner can read."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

from sidecar.cli.result import Result


def run_keygen(args: argparse.Namespace) -> Result:
    """Nothing is written anywhere: ``memory-sidecar keygen > memories.key`` keeps it."""
    return _to_sign() if args.signing else _to_encrypt()


def _to_encrypt() -> Result:
    import pyrage

    identity = pyrage.x25519.Identity.generate()
    public = str(identity.to_public())
    made = datetime.now(UTC).isoformat(timespec="seconds")
    words = [f"# created: {made}", f"# public key: {public}", str(identity)]
    return Result({"kind": "age", "recipient": public, "identity": str(identity)}, [*words])


def _to_sign() -> Result:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
    return Result({"kind": "ed25519", "public": public, "private": private}, [f"# {public}", private.rstrip()])
