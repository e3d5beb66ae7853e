"""The encryption keys of one sidecar: the recipients it encrypts for, and the identities it decrypts with. Encrypted
data is an ordinary age file."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sidecar.errors import BadConfig
from sidecar.host.files import SpoolFull

if TYPE_CHECKING:
    from pyrage import ssh, x25519

    Identity = x25519.Identity | ssh.Identity
    Recipient = x25519.Recipient | ssh.Recipient

MAGIC = b"age-encryption.org/v1\n"
_PER_RECIPIENT, _HEADER, _BLOCK, _TAG = 160, 640, 1 << 16, 16
_NO_MATCH = "No matching keys"
_SECRET = re.compile(r"AGE-SECRET-KEY-1[0-9A-Za-z]+")


def is_encrypted(data: bytes) -> bool:
    """Return whether data is an age file."""
    return data.startswith(MAGIC)


class NotDecrypted(Exception):
    """It is for another key, or it was altered where age cannot tell the two apart."""


class Altered(Exception):
    """It is for one of these keys, and was altered since it was encrypted."""


class Keyring:
    """Recipients and identities. Raise ``BadConfig`` if one is not valid, and if what is encrypted could not be
    decrypted again."""

    def __init__(self, recipients: Iterable[str], identities: Iterable[str]) -> None:
        opening, public = [], []
        for text in identities:
            for identity, name in _parse_identities(text):
                opening.append(identity)
                public.append(name)
        self.recipients = tuple(sorted({normalise_recipient(text) for text in recipients} or set(public)))
        self._identities = opening
        self._recipients = [_parse_recipient(text) for text in self.recipients]
        if not self.can_decrypt(self.recipients):
            raise BadConfig(
                "None of the identities given opens what would be sealed for these recipients, so it could never be read.",
                hint="Give the identity of one of them: [encryption] identity_files, or MEMORY_SIDECAR_IDENTITY_FILE.",
                at=("encryption", "recipients"),
            )

    @property
    def seal_name(self) -> str:
        """A name for the set of recipients: the same for the same recipients."""
        return hashlib.sha256("\n".join(self.recipients).encode()).hexdigest()[:16]

    def seal(self, data: bytes, also: Iterable[str] = ()) -> bytes:
        """Encrypt for the recipients, and for those in ``also``."""
        import pyrage

        more = [_parse_recipient(text) for text in sorted(set(also) - set(self.recipients))]
        return pyrage.encrypt(data, [*self._recipients, *more])

    def encrypt_file(self, source: Path, target: Path) -> None:
        """Encrypt a file. Raise ``SpoolFull`` if there is no free space for the target."""
        import pyrage

        try:
            pyrage.encrypt_file(str(source), str(target), self._recipients)
        except pyrage.EncryptError as problem:  # the library has no other error for a failed write
            raise SpoolFull(f"{source.name} could not be sealed in {target.parent}: {problem}.") from None

    def open(self, data: bytes) -> bytes:
        """Decrypt. Raise ``NotDecrypted`` or ``Altered``."""
        import pyrage

        try:
            return pyrage.decrypt(data, self._identities)
        except pyrage.DecryptError as problem:
            raise _translate_error(problem) from None

    def decrypt_stream(self, source: Any, target: Any) -> None:
        """Decrypt from an object with ``read`` to one with ``write``. Raise ``NotDecrypted`` or ``Altered``."""
        import pyrage

        try:
            pyrage.decrypt_io(source, target, self._identities)
        except (pyrage.DecryptError, OSError) as problem:  # OSError is raised once the header has been read
            raise _translate_error(problem) from None

    def can_decrypt(self, recipients: Sequence[str]) -> bool:
        """Return whether what is encrypted for these can be decrypted here. It is tried, because an SSH key does not
        tell whose it is."""
        import pyrage

        if not recipients or not self._identities:
            return False
        try:
            return self.open(pyrage.encrypt(b"", [_parse_recipient(text) for text in recipients])) == b""
        except (NotDecrypted, Altered):
            return False

    def room(self, size: int) -> int:
        """Return at most how many bytes encrypting makes of ``size``: a header of random length, and a tag for each block."""
        return size + _HEADER + _PER_RECIPIENT * len(self.recipients) + _TAG * (size // _BLOCK + 1)


def _translate_error(problem: Exception) -> Exception:
    """Translate the library's error."""
    return NotDecrypted() if _NO_MATCH in str(problem) else Altered(str(problem).partition("\n")[0])


def normalise_recipient(text: str) -> str:
    """Return a recipient without the comment that an SSH key may have. Raise ``BadConfig`` if it is not valid."""
    words = text.split()
    normal = " ".join(words[:2]) if words and words[0].startswith("ssh-") else text.strip()
    _parse_recipient(normal)
    return normal


def _parse_recipient(text: str) -> Recipient:
    """Parse a recipient. Raise ``BadConfig``, which never shows a secret key."""
    import pyrage

    try:
        if text.startswith("ssh-"):
            return pyrage.ssh.Recipient.from_str(text)
        return pyrage.x25519.Recipient.from_str(text)
    except pyrage.RecipientError:
        shown = text if not _SECRET.search(text) and len(text) < 200 else "what is given there"
        raise BadConfig(
            f"{shown!r} is no age recipient.",
            hint="Write age1… or ssh-ed25519 AAAA…; `memory-sidecar keygen` makes a key and shows its recipient.",
            at=("encryption", "recipients"),
        ) from None


def _parse_identities(text: str) -> list[tuple[Identity, str]]:
    """Return the identities in a text, each with its recipient: an OpenSSH private key, or age identities, one per line."""
    import pyrage

    if "PRIVATE KEY-----" in text:
        return [_parse_ssh_identity(text)]
    lines = [line.strip() for line in text.splitlines()]
    found: list[tuple[Identity, str]] = []
    for line in lines:
        if line and not line.startswith("#"):
            try:
                identity = pyrage.x25519.Identity.from_str(line)
            except pyrage.IdentityError:
                raise _make_no_identity_error() from None
            found.append((identity, str(identity.to_public())))
    if not found:
        raise _make_no_identity_error()
    return found


def _parse_ssh_identity(text: str) -> tuple[Identity, str]:
    """Parse an OpenSSH private key without passphrase. Raise ``BadConfig``."""
    import pyrage
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    data = text.strip().encode() + b"\n"
    try:
        public = serialization.load_ssh_private_key(data, None).public_key()
        name = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        return pyrage.ssh.Identity.from_buffer(data), name.decode()
    except (ValueError, TypeError, UnsupportedAlgorithm, pyrage.IdentityError):
        raise _make_no_identity_error() from None


def _make_no_identity_error() -> BadConfig:
    return BadConfig(
        "An identity that was given is none.",
        hint="Give a line AGE-SECRET-KEY-1…, as `memory-sidecar keygen` prints, or an OpenSSH ed25519 key without passphrase.",
        at=("encryption", "identity_files"),
    )
