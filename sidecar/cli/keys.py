"""``keygen``: make a new key, in a file that only its owner can read. ``rekey``: encrypt and sign everything for the
keys that are set now."""

from __future__ import annotations

import argparse
import io
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from sidecar.cli.result import Result, Table, format_size
from sidecar.cli.screen import print_error
from sidecar.engine import Engine
from sidecar.engine.queries import list_existing_ids
from sidecar.errors import UsageError
from sidecar.host.files import restrict_to_owner, write_new
from sidecar.host.text import format_count
from sidecar.store.encryption.rekey import RekeyReport, rekey

SECRETS = ("identity", "private")


def run_keygen(args: argparse.Namespace) -> Result:
    """Print a new key or, with ``-o``, write it to a new file and print only its public part."""
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
    """For ``keygen > FILE``: make the file, which the shell usually creates readable for everyone, private."""
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


READABLE = (
    "These folder names, from before encryption, stay readable in the store: {names}. To hide one, `fork` the memory"
)
OLD_PACKS = "Packs under the old key go once the grace period is over: `memory-sidecar forget` collects them."


async def run_rekey(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``rekey``. The exit code is 1 if something could not be done."""
    if args.memory:
        await list_existing_ids(engine.repository, args.memory)
    report = await rekey(engine.repository, args.memory or "", engine.progress)
    problems = [*report.problems, *(problem for row in report.memories for problem in row.problems)]
    return Result({"ok": not problems, **asdict(report)}, _describe_report(report, problems), 1 if problems else 0)


def _describe_report(report: RekeyReport, problems: list[str]) -> list[str | Table]:
    rows = [
        (row.memory, str(row.snapshots), str(row.packs), format_size(row.bytes), str(row.objects))
        for row in report.memories
    ]
    words: list[str | Table] = [
        Table(("MEMORY", "SNAPSHOTS", "PACKS SEALED", "SIZE", "OTHERS"), rows, "There are no memories in this store."),
        *(f"Not done: {problem}" for problem in problems),
    ]
    if report.readable_names:
        names = ", ".join(report.readable_names)
        words.append(f"{READABLE.format(names=names)} to a new id and `delete` the old one.")
    if any(row.packs for row in report.memories):
        words.append(OLD_PACKS)
    if report.finished:
        words.append("Everything that is needed is sealed and signed with the keys that are set now.")
    elif problems:
        words.append(
            f"{format_count(len(problems), 'thing')} could not be done; what was done stays. Run it again when that is mended."
        )
    return words
