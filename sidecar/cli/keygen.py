"""``keygen``: a new key, for a file that only its owner can read."""

from __future__ import annotations

import argparse
import io
import sys
from datetime import UTC, datetime
from pathlib import Path

from sidecar.cli.result import Result
from sidecar.cli.screen import print_error
from sidecar.errors import UsageError
from sidecar.files import restrict_to_owner, write_new

SECRETS = ("identity", "private")


def run_keygen(args: argparse.Namespace) -> Result:
    """A key for stdout, or with ``-o`` in a file of its own: then only what is public of it is shown."""
    made = _make_signing_key() if args.signing else _make_encryption_key()
    if args.output is None:
        _restrict_output()
        return made
    if args.output == "-":
        raise UsageError("A key goes to a file, or without -o to stdout.", hint="memory-sidecar keygen -o memories.key")
    target = Path(args.output)
    write_new(target, "".join(f"{line}\n" for line in made.words))
    public = {name: value for name, value in made.document.items() if name not in SECRETS}
    shown = public.get("recipient") or public.get("public")
    return Result({**public, "file": str(target)}, [f"{target}: a new key. Its public key: {shown}"])


def _restrict_output() -> None:
    """``keygen > FILE``: the shell has made the file, as a rule for everybody to read."""
    try:
        closed = restrict_to_owner(sys.stdout.fileno())
    except (io.UnsupportedOperation, ValueError, OSError):
        return
    if closed:
        print_error("other users could have read the file: its mode is 0600 now.")
    elif closed is False:
        print_error("warning: other users can read the file that the key is in.")


def _make_encryption_key() -> Result:
    import pyrage

    identity = pyrage.x25519.Identity.generate()
    public = str(identity.to_public())
    made = datetime.now(UTC).isoformat(timespec="seconds")
    words = [f"# created: {made}", f"# public key: {public}", str(identity)]
    return Result({"kind": "age", "recipient": public, "identity": str(identity)}, [*words])


def _make_signing_key() -> Result:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
    return Result({"kind": "ed25519", "public": public, "private": private}, [f"# {public}", *private.splitlines()])
