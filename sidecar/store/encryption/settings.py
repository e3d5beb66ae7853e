"""The settings about keys. The keys themselves are in files or in the environment, never in the config."""

from __future__ import annotations

from dataclasses import field

from sidecar.host.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Encryption:
    """The section ``[encryption]``."""

    recipients: list[str] = field(default_factory=list)
    """Who can open what is stored: `age1…` or `ssh-ed25519 …`. Empty: the public keys of the identities.
    Also in MEMORY_SIDECAR_RECIPIENTS."""
    identity_files: list[str] = field(default_factory=list)
    """Files with the keys that open it, the old ones too while keys are rotated. One more in MEMORY_SIDECAR_IDENTITY_FILE;
    a key itself in MEMORY_SIDECAR_IDENTITY."""
    passphrase_file: str = ""
    """A file with a passphrase, instead of keys. Also in MEMORY_SIDECAR_PASSPHRASE_FILE; the passphrase itself in
    MEMORY_SIDECAR_PASSPHRASE."""
    previous_passphrase_file: str = ""
    """A file with the passphrase that was used before, to read with until `rekey` is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signing:
    """The section ``[signing]``."""

    key_file: str = ""
    """A file with an Ed25519 private key (PEM, OpenSSH or base64), or with `hmac-sha256:` and a secret in base64. The key
    itself in MEMORY_SIDECAR_SIGNING_KEY."""
    trusted: list[str] = field(default_factory=list)
    """Public keys whose signatures count too: `ssh-ed25519 …` or base64."""
    trusted_files: list[str] = field(default_factory=list)
    """Files with such keys, one in each."""
