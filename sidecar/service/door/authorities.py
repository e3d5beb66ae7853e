"""Hosts with their ports, as they stand in the headers ``Host`` and ``Origin``.

Settings are checked with this too, so it imports no web framework: every command would wait for that.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Self

from sidecar.host.values import dataclass

ANY = "*"
DEFAULT_PORTS = {"http": 80, "https": 443}
_AUTHORITY = re.compile(
    r"(?:(?P<name>[a-z0-9_-]+(?:\.[a-z0-9_-]+)*)\.?|\[(?P<address>[0-9a-f:.]+)\])(?::(?P<port>[0-9]{0,5}))?"
)
_ORIGIN = re.compile(r"(?P<scheme>https?)://(?P<authority>[^/?#@]+)")


@dataclass(frozen=True, slots=True)
class Authority:
    """A host and its port, as in the headers ``Host`` and ``Origin``, normalised: lower case, without a trailing dot."""

    name: str
    port: int | None = None
    """``None`` if it is not given."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return ``None`` for a text that is not a host: with credentials, a path, or characters that no host has."""
        found = _AUTHORITY.fullmatch(text.strip(" \t").lower())
        if found is None:
            return None
        port = int(found["port"]) if found["port"] else None
        if found["address"] is None:
            return cls(found["name"], port)
        try:
            return cls(f"[{ipaddress.IPv6Address(found['address'])}]", port)
        except ValueError:
            return None

    def is_origin(self, origin: str) -> bool:
        """Whether a page of this origin came from this host.

        The scheme is not compared: behind a proxy that terminates TLS, the browser's scheme differs from the service's.
        A missing port is therefore the default port of the origin's scheme, as in the browser's ``Host``.
        """
        found = _ORIGIN.fullmatch(origin.strip(" \t").lower())
        other = Authority.parse(found["authority"]) if found else None
        if found is None or other is None:
            return False
        default = DEFAULT_PORTS[found["scheme"]]
        return (self.name, self.port or default) == (other.name, other.port or default)
