"""The client's settings: the service's address, the token and the timeouts."""

from __future__ import annotations

import os
import ssl
from collections.abc import Generator
from typing import Any

import httpx

from sidecar import __version__
from sidecar.errors import BadConfig
from sidecar.host.local_token import read_token
from sidecar.host.loopback import is_loopback

URL, TOKEN, CA = "MEMORY_SIDECAR_URL", "MEMORY_SIDECAR_TOKEN", "MEMORY_SIDECAR_CA"
HERE = "http://127.0.0.1:8077"
"""The default address of a service."""
CONNECT_SECONDS = 10.0
WRITE_SECONDS = 60.0
IDLE_SECONDS = 3.0
"""A connection that was idle for longer is not reused: the service or a proxy may be about to close it."""


def build_client_settings(url: str | None, token: str | None, read_timeout: float) -> dict[str, Any]:
    """Return the arguments for ``httpx.Client`` and ``httpx.AsyncClient``. Raise ``BadConfig``, whose message never
    contains a token."""
    address = _parse_address(url if url is not None else os.environ.get(URL) or HERE)
    is_here = is_loopback(address.host)
    secret = _check_token(token if token is not None else os.environ.get(TOKEN, "").split(",")[0])
    return {
        "base_url": address,
        "headers": {
            "User-Agent": f"memory-sidecar/{__version__}",
            **({"Authorization": f"Bearer {secret}"} if secret else {}),
        },
        "timeout": httpx.Timeout(read_timeout, connect=CONNECT_SECONDS, write=WRITE_SECONDS),
        "limits": httpx.Limits(keepalive_expiry=IDLE_SECONDS),
        # A service on this machine is not reached through a proxy of the network.
        "trust_env": not is_here,
        "verify": _load_authorities(),
        # The token that a service keeps for its user is only sent to services on this machine.
        "auth": _KeptTokenAuth() if is_here and token is None and not secret else None,
    }


class _KeptTokenAuth(httpx.Auth):
    """Sends the token that the service keeps for its user. It is read for each call, because the service may start, and
    create it, after this client."""

    def __init__(self) -> None:
        read_token()  # raise any problem with it now, not at the first call

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        if token := read_token():
            request.headers["Authorization"] = f"Bearer {token}"
        yield request


def _load_authorities() -> ssl.SSLContext | bool:
    """Return the certificate authorities to trust: those in the file that ``MEMORY_SIDECAR_CA`` names, else the usual
    ones."""
    file = os.environ.get(CA, "")
    if not file:
        return True
    try:
        return ssl.create_default_context(cafile=file)
    except (OSError, ValueError) as problem:  # ssl.SSLError is an OSError
        why = "it holds no certificate" if isinstance(problem, ssl.SSLError) else getattr(problem, "strerror", problem)
        raise BadConfig(f"{CA}: {file} cannot be used: {why}.", hint="Name a file of certificates (PEM).") from None


def _parse_address(text: str) -> httpx.URL:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        url = httpx.URL()
    if url.userinfo:
        raise BadConfig("The service's address may not hold a name or password.", hint="Give the token apart from it.")
    if url.scheme not in ("http", "https") or not url.host:
        raise BadConfig(f"{text!r} is not a service's address.", hint="Such as http://127.0.0.1:8077.")
    return url.copy_with(query=None, fragment=None)


def _check_token(token: str) -> str:
    """Return the token if a header can carry it. Raise ``BadConfig``."""
    token = token.strip()
    if not token.isascii() or any(not character.isprintable() or character == " " for character in token):
        raise BadConfig("The token holds characters that no token has.")
    return token
