"""The settings of the audit."""

from __future__ import annotations

from sidecar.errors import BadConfig
from sidecar.host.text import parse_duration
from sidecar.host.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    store: bool = False
    """Keep the audit in the store: a line for every call that reads or changes a memory, by services and by commands."""
    file: str = ""
    """A file on this machine to which each line is added, too."""
    keep: str = ""
    """How long lines stay in the store: "90d", "1y". Empty: for good."""

    @property
    def kept(self) -> bool:
        """Whether lines are kept anywhere beside the log of a service."""
        return self.store or bool(self.file)

    @property
    def keep_seconds(self) -> float:
        """How many seconds lines stay in the store; 0: for good."""
        return parse_duration(self.keep).total_seconds() if self.keep else 0.0


def check_audit(settings: Audit) -> Audit:
    """Return the settings. Raise ``BadConfig`` for a time that makes no sense."""
    try:
        seconds = settings.keep_seconds
    except ValueError as problem:
        raise BadConfig(f"[audit] keep is not valid: {problem}.", at=("audit", "keep")) from None
    if settings.keep and seconds < 86400:
        raise BadConfig("[audit] keep must be at least a day.", hint='Write keep = "90d".', at=("audit", "keep"))
    return settings
