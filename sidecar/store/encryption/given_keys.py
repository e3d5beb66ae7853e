"""Read the configured encryption and signing keys as texts: from files, and from the environment, which takes precedence."""

from __future__ import annotations

import os
import stat
from dataclasses import field
from pathlib import Path

from sidecar.errors import BadConfig
from sidecar.host.sections import PREFIX
from sidecar.host.values import dataclass
from sidecar.store.encryption.settings import Encryption, Signing
from sidecar.store.encryption.signatures import parse_key

LONGEST_FILE = 1 << 16
VARIABLES = (
    *("RECIPIENTS", "IDENTITY", "IDENTITY_FILE", "PASSPHRASE", "PASSPHRASE_FILE"),
    "SIGNING_KEY",
)
"""Variable names after the prefix, besides the options of the config sections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenKeys:
    """All keys that were given."""

    recipients: tuple[str, ...] = ()
    identities: tuple[str, ...] = field(default=(), repr=False)
    """Each is the text of an identity file."""
    passphrase: str = field(default="", repr=False)
    previous_passphrase: str = field(default="", repr=False)
    signing_key: str = field(default="", repr=False)
    trusted: tuple[str, ...] = field(default=(), repr=False)
    """Texts too: one of them may be a shared secret."""
    warnings: tuple[str, ...] = ()

    @property
    def encrypts(self) -> bool:
        return bool(self.recipients or self.identities or self.passphrase)

    @property
    def signs(self) -> bool:
        return bool(self.signing_key or self.trusted)


def read_given_keys(encryption: Encryption, signing: Signing) -> GivenKeys:
    """Read every key that is set. Raise ``BadConfig`` naming the file or variable, never its contents."""
    open_to_others: list[str] = []

    def read(path: str, at: tuple[str, str]) -> str:
        text = _read_key_file(path, at)
        open_to_others.extend(_warn_if_weak(path))
        return text

    files = [*encryption.identity_files, *filter(None, [_read_variable("IDENTITY_FILE")])]
    identities = [read(path, ("encryption", "identity_files")) for path in dict.fromkeys(files)]
    recipients = _read_variable("RECIPIENTS")
    passphrase = _read_variable("PASSPHRASE")
    if not passphrase and (path := _read_variable("PASSPHRASE_FILE") or encryption.passphrase_file):
        passphrase = read(path, ("encryption", "passphrase_file"))
    _check_public(signing.trusted)
    before = encryption.previous_passphrase_file
    key = _read_variable("SIGNING_KEY")
    if not key and signing.key_file:
        key = read(signing.key_file, ("signing", "key_file"))
    return GivenKeys(
        recipients=tuple(_split_list(recipients) if recipients else encryption.recipients),
        identities=tuple(filter(None, [_read_variable("IDENTITY"), *identities])),
        passphrase=passphrase,
        previous_passphrase=read(before, ("encryption", "previous_passphrase_file")) if before else "",
        signing_key=key,
        trusted=(
            *signing.trusted,
            *(_read_key_file(path, ("signing", "trusted_files")) for path in signing.trusted_files),
        ),
        warnings=tuple(open_to_others),
    )


def _check_public(texts: list[str]) -> None:
    """Raise ``BadConfig`` if the config contains a secret: the config is shown to people."""
    for text in texts:
        if parse_key(text).sign is not None:
            raise BadConfig(
                "[signing] trusted holds a key that is not public.",
                hint="Put it into a file, and that into trusted_files.",
                at=("signing", "trusted"),
            )


def _read_variable(name: str) -> str:
    return os.environ.get(PREFIX + name, "").strip()


def _split_list(text: str) -> list[str]:
    return [one.strip() for one in text.replace("\n", ",").split(",") if one.strip()]


def _read_key_file(path: str, at: tuple[str, str]) -> str:
    """Read a key file. Raise ``BadConfig`` if it cannot be read or is empty."""
    try:
        with Path(path).expanduser().open(encoding="utf-8") as file:
            text = file.read(LONGEST_FILE).strip()
    except (OSError, RuntimeError) as problem:
        words = getattr(problem, "strerror", None) or str(problem)
        raise BadConfig(f"The key file {path} cannot be read: {words}.", at=at) from None
    except UnicodeDecodeError:
        raise BadConfig(f"The key file {path} holds no text, so no key.", at=at) from None
    if not text:
        raise BadConfig(f"The key file {path} is empty.", at=at)
    return text


def _warn_if_weak(path: str) -> list[str]:
    """Return a warning if other users can read the file."""
    mode = stat.S_IMODE(Path(path).expanduser().stat().st_mode)
    if not mode & 0o077:
        return []
    return [f"Others on this machine may read the key file {path} (mode {mode:o}): `chmod 600 {path}`."]
