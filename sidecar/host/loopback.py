"""Which host names and addresses are this machine."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a name or address, in lower case, always means this machine: localhost, 127.0.0.0/8 or ::1."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    # Python 3.13 handles IPv4-mapped addresses (::ffff:127.0.0.1) itself, earlier versions do not.
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
