"""No secret may ever be seen: whatever a test prints, logs or fails with is searched for every credential in use."""

from __future__ import annotations

import os
from collections.abc import Iterable

VARIABLES = (
    "E2B_API_KEY",
    "DAYTONA_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "MEMORY_SIDECAR_TOKEN",
    "MEMORY_SIDECAR_POSTGRES",
)
SIGNATURE = "X-Amz-Signature="

DATABASE_PASSWORD = "hunter2-postgres-password"
"""What the tests' URLs of Postgres hold; a socket of one's own does not ask for it."""

_seen: set[str] = {DATABASE_PASSWORD}


def secrets_in_use() -> set[str]:
    """Every credential that this process has had in its environment when this was called."""
    _seen.update(value for name in VARIABLES if len(value := os.environ.get(name, "")) > 7)
    return _seen


def leaked(texts: Iterable[str]) -> bool:
    """Whether any of the texts shows a credential, or a signed link."""
    secrets = {*secrets_in_use(), SIGNATURE}
    return any(secret in text for text in texts for secret in secrets)
