"""Privacy settings: what may not leave a sandbox, private passages and credentials, and what happens to them.

Like limits, they can be set for all memories, for one layout's files (``[privacy.layouts.NAME]``) and for some memories
(``[privacy.memories."acme/*"]``, the first pattern that matches): a narrower table overrides single keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from sidecar.format.protocol import PrivacyRules, PrivacyTable
from sidecar.host.values import dataclass
from sidecar.layouts import Layout
from sidecar.policy.limits import Tables, find_table

Rules = Sequence[Mapping[str, str]]

KEEP, REMOVE = "keep", "remove"
OFF, WARN, REDACT, REFUSE = "off", "warn", "redact", "refuse"
CREDENTIAL_MODES = (OFF, WARN, REDACT, REFUSE)
ALWAYS_NAMED = frozenset(["claude-code", "claude-mem", "codex", "codymaster", "opencode", "pai", "three-tier"])
"""The layouts that a policy's hash has always included, even those that filter nothing. Others are included only if
they filter something: otherwise each new layout would make every memory be read, and perhaps packed, again.
"""
MODES = {"private": (REMOVE, KEEP), "credentials": CREDENTIAL_MODES, "databases": CREDENTIAL_MODES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Privacy:
    """What is taken out of a memory before it leaves its sandbox."""

    private: str = REMOVE
    """What happens to ``<private>…</private>``, in files and databases: "remove" or "keep"."""
    credentials: str = REDACT
    """What happens to credentials in files: "off", "warn", "redact", or "refuse": such an export is rejected."""
    databases: str = ""
    """The same for credentials in databases; like ``credentials`` if it is empty."""
    layouts: Tables = field(default_factory=dict)
    """For one layout's files alone: any of the keys above."""
    memories: Tables = field(default_factory=dict)
    """For the memories a pattern fits: any of the keys above."""
    rules: Rules = ()
    """Kinds of credentials of your own: ``name``, ``pattern`` (a regular expression; of a group in it, only that is the
    secret), and ``keyword``, which is in all that it matches."""

    def of(self, memory: str) -> Privacy:
        """Return the settings for one memory."""
        return replace(self, **find_table(memory, self.memories, {}), memories={})

    def narrow_to_layout(self, layout: str) -> Privacy:
        """Return the settings for one layout's files."""
        return replace(self, **self.layouts.get(layout, {}), layouts={})

    def soften(self) -> Privacy:
        """Return the same settings, except that what would be refused is only a warning."""

        def softer(table: Any) -> dict[str, str]:
            return {key: WARN if value == REFUSE else value for key, value in table.items()}

        own: dict[str, Any] = softer({key: getattr(self, key) for key in MODES})
        return replace(self, **own, layouts={name: softer(table) for name, table in self.layouts.items()})

    def for_sandbox(self, asked: Collection[str], layouts: Mapping[str, Layout]) -> PrivacyRules:
        """Return the settings for the in-sandbox program, for the layouts that are ``asked`` for.

        ``policy`` is a hash of all of it, including what the ``layouts`` filter out of files and databases, so that any
        change shows.
        """

        from sidecar.program.privacy.credentials import VERSION  # late: most commands look for none

        def told(table: Privacy) -> dict[str, Any]:
            modes = {key: getattr(table, key) for key in MODES}
            return {**modes, "databases": table.databases or table.credentials}

        parts = {name: told(self.narrow_to_layout(name)) for name in self.layouts}
        kept_out = {
            name: [layout.filters, layout.emptied]
            for name, layout in layouts.items()
            if layout.filters or layout.emptied or name in ALWAYS_NAMED
        }
        rules = self._describe_rules()
        own = [rules] if rules else []
        text = json.dumps([VERSION, told(self), parts, kept_out, *own], sort_keys=True).encode()
        tables = {name: PrivacyTable(**table) for name, table in parts.items() if name in asked}
        policy = hashlib.sha256(text).hexdigest()[:16]
        return PrivacyRules(**told(self), layouts=tables, policy=policy, rules=rules)

    def _describe_rules(self) -> list[list[str]]:
        if not self.rules:
            return []
        from sidecar.policy.rules import describe_rules  # late, as most memories have none

        return describe_rules(self.rules)
