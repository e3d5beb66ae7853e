"""Where the service is, who calls, and how long to wait."""

from __future__ import annotations

import ipaddress
import os
from typing import Any

import httpx

from sidecar import __version__
from sidecar.errors import BadConfig

URL, TOKEN = "MEMORY_SIDECAR_URL", "MEMORY_SIDECAR_TOKEN"
CONNECT_SECONDS = 10.0
WRITE_SECONDS = 60.0
IDLE_SECONDS = 3.0
"""A connection idle for longer is not used again: the service or a proxy may be about to close it."""


def client_settings(url: str | None, token: str | None, read_timeout: float) -> dict[str, Any]:
    """Arguments for ``httpx.Client`` and ``httpx.AsyncClient``. Raise ``BadConfig``, which never shows a token."""
    address = _address(url if url is not None else os.environ.get(URL, ""))
    secret = _secret(token if token is not None else os.environ.get(TOKEN, "").split(",")[0])
    return {
        "base_url": address,
        "headers": {
            "User-Agent": f"memory-sidecar/{__version__}",
            **({"Authorization": f"Bearer {secret}"} if secret else {}),
        },
        "timeout": httpx.Timeout(read_timeout, connect=CONNECT_SECONDS, write=WRITE_SECONDS),
        "limits": httpx.Limits(keepalive_expiry=IDLE_SECONDS),
        # What listens on this machine is not reached through the network's proxy.
        "trust_env": not _is_here(address.host),
    }


def _address(text: str) -> httpx.URL:
    if not text:
        raise BadConfig("The service's address is not known.", hint=f"Give it, or set {URL}.")
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        url = httpx.URL()
    if url.userinfo:
        raise BadConfig("The service's address may not hold a name or password.", hint="Give the token apart from it.")
    if url.scheme not in ("http", "https") or not url.host:
        raise BadConfig(f"{text!r} is not a service's address.", hint="Such as http://127.0.0.1:8077.")
    return url.copy_with(query=None, fragment=None)


def _secret(token: str) -> str:
    """A token that a header can carry, or ''."""
    token = token.strip()
    if not token.isascii() or any(not character.isprintable() or character == " " for character in token):
        raise BadConfig("The token holds characters that no token has.")
    return token


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
