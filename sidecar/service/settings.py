"""What a service can be told."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field, replace

from sidecar.errors import BadConfig
from sidecar.local_policy import LocalPolicy
from sidecar.sections import check_least

FORMS = ("auto", "json", "console")
LEAST = {"concurrency": 1, "body_bytes": 1, "lease": 1, "checkpoint_every": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    bind: str = "127.0.0.1:8077"
    """Where to listen. Without a token only a loopback address is allowed."""
    token_file: str = ""
    """A file with bearer tokens, one a line; beside those in MEMORY_SIDECAR_TOKEN."""
    local_roots: list[str] = field(default_factory=list)
    """Folders of this machine that may be sandboxes (`local:`), with all they hold. Empty: on a loopback address any, on
    others none."""
    concurrency: int = 4
    """How many exports and restores run at once."""
    queue: int = 500
    """How many may wait; more are refused with 429."""
    body_bytes: int = 1 << 20
    """The largest request, tarballs to be adopted aside."""
    grace: float = 25.0
    """Seconds to finish what runs and to save what is looked after, when told to stop."""
    log: str = "auto"
    """"json", "console", or "auto": words when a person watches."""
    lease: float = 30.0
    """A service that was not heard of for so long has lost its attachments to another one on the same store."""
    checkpoint_every: float = 300.0
    """Seconds between two exports of a sandbox that is looked after, unless its restore or attachment says otherwise."""
    drill_every: float = 86400.0
    """Seconds between two drills: a random snapshot is restored into a scratch sandbox. 0: never."""
    drill_bytes: int = 1 << 30
    """Larger snapshots are not drilled; so much must fit into the temporary folder."""
    lead: float = 60.0
    """So many seconds before a provider ends a sandbox it is exported."""


def check_service(settings: Service) -> Service:
    """Raise ``BadConfig`` for what a service could not work with."""
    check_least(settings, "service", LEAST)
    if settings.log not in FORMS:
        may_be = " or ".join(f'"{form}"' for form in FORMS)
        raise BadConfig(f"[service] log must be {may_be}, not {settings.log!r}.", at=("service", "log"))
    address(settings.bind)
    return settings


def local_policy(policy: LocalPolicy, settings: Service) -> LocalPolicy:
    """Which folders of this machine callers may name."""
    return replace(policy, confined=bool(settings.local_roots) or not is_loopback(address(settings.bind)[0]))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def address(bind: str) -> tuple[str, int]:
    """The host and port to listen on. Raise ``BadConfig`` when it is none."""
    host, colon, port = bind.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535 or not host:
        hint = "Write host:port, such as 127.0.0.1:8077."
        raise BadConfig(f"{bind!r} is no address to listen on.", hint=hint, at=("service", "bind"))
    return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """Where to send which events."""

    url: str
    """Called with a POST for each event."""
    events: list[str] = field(default_factory=lambda: ["*"])
    """Patterns such as "sandbox.*" or "export.rejected"."""
    secret_env: str = ""
    """The environment variable that holds the secret which signs each call."""
