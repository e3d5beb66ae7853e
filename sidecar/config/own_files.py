"""The sidecar's own files on this machine, which no sandbox may reach."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sidecar.config.settings import Config
from sidecar.host.files import SPOOL_PREFIX
from sidecar.host.local_token import TokenNotKept, find_token_path
from sidecar.policy.local_folders import LocalPolicy


def build_local_policy(config: Config, config_file: str, store: Path | None) -> LocalPolicy:
    """Return the policy for commands that a person types: any folder may be a sandbox, except the sidecar's own files.

    ``store`` is the folder of the store, if it is on this machine.
    """
    files = [
        *config.encryption.identity_files,
        *(os.environ.get(f"MEMORY_SIDECAR_{name}", "") for name in ("IDENTITY_FILE", "PASSPHRASE_FILE")),
        *(os.environ.get(f"MEMORY_SIDECAR_{name}", "") for name in ("SIGNING_KEY_FILE", "PREVIOUS_PASSPHRASE_FILE")),
        *(config.encryption.passphrase_file, config.encryption.previous_passphrase_file, config.signing.key_file),
        *(
            config.service.token_file,
            config.service.tokens,
            config.service.tls_cert,
            config.service.tls_key,
            config_file,
        ),
    ]
    own = [*([str(store)] if store else []), *filter(None, files)]
    with contextlib.suppress(TokenNotKept):
        own.append(str(find_token_path().parent))
    spools = os.path.join(os.path.realpath(tempfile.gettempdir()), f"{SPOOL_PREFIX}*")
    return LocalPolicy(roots=_resolve_paths(config.service.local_roots), apart=(*_resolve_paths(own), spools))


def _resolve_paths(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(os.path.realpath(os.path.expanduser(path)) for path in paths)
