"""Bearer tokens: which ones are accepted, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from sidecar.errors import BadConfig
from sidecar.host.local_token import SHORTEST
from sidecar.host.loopback import is_loopback

PLACE = ("service", "token_file")


class Tokens:
    """The accepted tokens. Without any, every caller is accepted, which is allowed on loopback only."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accept(self, authorization: str) -> bool:
        """Whether the value of an ``Authorization`` header has an accepted token."""
        scheme, _, token = authorization.partition(" ")
        given = hashlib.sha256(token.strip().encode()).digest()
        # Every token is compared, so that the time taken does not reveal which one was close.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def load_tokens(file: str) -> Tokens:
    """Return the tokens of ``MEMORY_SIDECAR_TOKEN`` (separated by commas) and of a file (one per line).

    Raise ``BadConfig`` if the file cannot be read or has no token, or if a token is too short.
    """
    given = os.environ.get("MEMORY_SIDECAR_TOKEN", "").split(",")
    if file:
        try:
            given += Path(file).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as problem:
            raise BadConfig(f"The token file {file} cannot be read: {problem}.", at=PLACE) from None
    tokens = [token.strip() for token in given if token.strip()]
    if any(len(token) < SHORTEST for token in tokens):
        raise BadConfig(f"A token has fewer than {SHORTEST} characters.", hint="Make one: openssl rand -hex 32")
    if file and not tokens:
        raise BadConfig(f"The token file {file} holds no token.", hint="Make one: openssl rand -hex 32", at=PLACE)
    return Tokens(tokens)


def check_bind(host: str, *, given: bool) -> None:
    """Raise ``BadConfig`` if the service would listen beyond loopback without any token."""
    if given or is_loopback(host):
        return
    raise BadConfig(
        f"Without a token the service listens on loopback only, not on {host}.",
        hint="Set MEMORY_SIDECAR_TOKEN (openssl rand -hex 32), make one with `memory-sidecar token`, or bind to 127.0.0.1.",
    )
