"""What a service can be told."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    bind: str = "127.0.0.1:8077"
    """Where to listen. Without a token only a loopback address is allowed."""
    token_file: str = ""
    """A file with bearer tokens, one a line; beside those in MEMORY_SIDECAR_TOKEN."""
    concurrency: int = 4
    """How many exports and restores run at once."""
    queue: int = 500
    """How many may wait; more are refused with 429."""
    body_bytes: int = 1 << 20
    """The largest request, tarballs to be adopted aside."""
    grace: float = 25.0
    """Seconds to finish what runs and to save what is attached, when told to stop."""
    log: str = "auto"
    """"json", "console", or "auto": words when a person watches."""
    lease: float = 30.0
    """A service that was not heard of for so long has lost its attachments to another one on the same store."""
    checkpoint_every: float = 300.0
    """Seconds between two exports of an attached sandbox, unless the attachment says otherwise."""
    drill_every: float = 86400.0
    """Seconds between two drills: a random snapshot is restored into a scratch sandbox. 0: never."""
    drill_bytes: int = 1 << 30
    """Larger snapshots are not drilled; so much must fit into the temporary folder."""
    lead: float = 60.0
    """So many seconds before a provider ends a sandbox it is exported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """Where to send which events."""

    url: str
    """Called with a POST for each event."""
    events: list[str] = field(default_factory=lambda: ["*"])
    """Patterns such as "sandbox.*" or "export.rejected"."""
    secret_env: str = ""
    """The environment variable that holds the secret which signs each call."""
