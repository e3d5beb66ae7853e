"""Hosts with their ports, as they stand in the headers ``Host`` and ``Origin``."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Self

ANY = "*"
DEFAULT_PORTS = {"http": 80, "https": 443}
_AUTHORITY = re.compile(
    r"(?:(?P<name>[a-z0-9_-]+(?:\.[a-z0-9_-]+)*)\.?|\[(?P<address>[0-9a-f:.]+)\])(?::(?P<port>[0-9]{0,5}))?"
)
_ORIGIN = re.compile(r"(?P<scheme>https?)://(?P<authority>[^/?#@]+)")


@dataclass(frozen=True, slots=True)
class Authority:
    """A host and its port. The same host is always written the same way: in lower case, without a dot at the end."""

    name: str
    port: int | None = None
    """None: not said."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """``None`` for what is no host: names and passwords, paths, characters that no host has."""
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

        The scheme is not compared: behind a proxy that speaks TLS the browser's differs from ours. So a port that is not
        said is the one that the origin's scheme stands for, as it is in the browser's ``Host``.
        """
        found = _ORIGIN.fullmatch(origin.strip(" \t").lower())
        other = Authority.parse(found["authority"]) if found else None
        if found is None or other is None:
            return False
        default = DEFAULT_PORTS[found["scheme"]]
        return (self.name, self.port or default) == (other.name, other.port or default)
