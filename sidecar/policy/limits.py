"""Limits on the size of a memory, and guards against it getting worse.

Both can be set for all memories, for one layout's files (``[limits.layouts.NAME]``) and for some memories
(``[limits.memories."acme/*"]``): a narrower table overrides single keys.

In such a pattern ``*`` and ``?`` match within one part of an id, ``**`` matches any number of parts, ``{a,b}`` is either.
The first pattern that matches counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from typing import Any, TypeVar

from sidecar.format.patterns import compile_patterns
from sidecar.host.text import parse_duration
from sidecar.host.values import dataclass
from sidecar.program.notes import OTHER_MEMORY, UNKNOWN_LINEAGE

GIB = 1 << 30
REJECT, TRIM = "reject", "trim"
MODES = (REJECT, TRIM)

OF_FILES = ("bytes", "file_bytes", "files", "depth")
"""Limits that can also be set for one layout's files."""
OF_MEMORIES = (*OF_FILES, "packed_bytes", "memory_bytes", "store_bytes")
CODES = {key: f"limit-{key.replace('_', '-')}" for key in OF_MEMORIES} | {"packed_bytes": "limit-packed"}

EMPTY, MISSING, GONE, SHRUNK = "empty", "required-missing", "root-missing", "shrunk"
DOWNGRADE, DAMAGED, CREDENTIALS = "schema-downgrade", "database-damaged", "credentials"
PARTIAL = "partial"
"""No guard that could be allowed: a part of a memory that stands alone never replaces all of it."""
REASONS = (EMPTY, MISSING, GONE, SHRUNK, DOWNGRADE, DAMAGED, CREDENTIALS, UNKNOWN_LINEAGE, OTHER_MEMORY)
"""Reasons for which a guard objects; each can be allowed by itself."""
REPEATABLE = (MISSING, GONE, SHRUNK)
"""Reasons that are accepted if they are repeated often enough. All others stay until a person decides."""
MOST_CONVERSATIONS = 20
"""The largest value of ``accept_after_conversations``."""

Tables = Mapping[str, Mapping[str, Any]]
T = TypeVar("T")


def find_table(memory: str, tables: Mapping[str, T], otherwise: T) -> T:
    """Return the table of the first pattern that matches a memory's id."""
    return next((table for pattern, table in tables.items() if compile_patterns([pattern]).match(memory)), otherwise)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a memory may be. What an export brings is checked inside the sandbox before bytes travel, and on arrival."""

    bytes: int = 8 * GIB
    """Of all files together, unpacked. Sizes may be written as texts: "500 MB", "2 GiB"."""
    file_bytes: int = 8 * GIB
    """Of one file."""
    files: int = 200_000
    """How many files, folders and links."""
    depth: int = 64
    """How many parts a path may have below its root."""
    packed_bytes: int = 8 * GIB
    """Of one pack as it travels, with its index."""
    memory_bytes: int = 0
    """Of all that a memory has in the store, every snapshot together; 0: no limit."""
    store_bytes: int = 0
    """Of all memories in the store; 0: no limit. What other services wrote in the last five minutes may be missing."""
    over: str = REJECT
    """What happens to an export over a limit: "reject", or "trim": rebuildable, then cold, then warm files are left out."""
    bytes_over: str = ""
    """The same for this limit alone; "": as ``over`` says."""
    file_bytes_over: str = ""
    """The same for this limit alone."""
    files_over: str = ""
    """The same for this limit alone."""
    depth_over: str = ""
    """The same for this limit alone."""
    packed_bytes_over: str = ""
    """The same for this limit alone."""
    memory_bytes_over: str = ""
    """The same for this limit alone; "trim" forgets the oldest snapshots, never one that a person pinned, and rejects if
    that is too little."""
    store_bytes_over: str = ""
    """The same for this limit alone; "trim" forgets the oldest snapshots of the memory, as for ``memory_bytes``."""
    warn_at: float = 0.8
    """A receipt warns from this share of a limit on."""
    layouts: Tables = field(default_factory=dict)
    """Of one layout's files alone: ``bytes``, ``file_bytes``, ``files``, ``depth`` and what happens over each."""
    memories: Tables = field(default_factory=dict)
    """Of the memories a pattern fits (``*`` within a part of an id, ``**`` across parts): any of the keys above."""

    def of(self, memory: str) -> Limits:
        """Return the limits of one memory."""
        return replace(self, **find_table(memory, self.memories, {}), memories={})

    def narrow_to_layout(self, layout: str) -> Limits:
        """Return the limits of one layout's files: ``bytes`` and ``files`` then count only these."""
        return replace(self, **self.layouts.get(layout, {}), layouts={})

    def trims(self, key: str) -> bool:
        """Return whether files are left out, rather than the export rejected, over this limit."""
        return (getattr(self, f"{key}_over") or self.over) == TRIM

    def list_trimming(self, keys: Iterable[str] = OF_MEMORIES) -> list[str]:
        """Return the limits over which files are left out."""
        return [key for key in keys if self.trims(key)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guards:
    """When an export is kept but does not become the head. A limit is no guard: nothing but the config moves it."""

    shrink_to: float = 0.5
    """Fewer bytes or files than this share of the head's."""
    shrink_from_bytes: int = 64 * 1024
    """Bytes are compared from this size on."""
    shrink_from_files: int = 10
    """File counts are compared from this number on."""
    allow: list[str] = field(default_factory=list)
    """Reasons never to object for: "empty", "required-missing", "root-missing", "shrunk", "schema-downgrade",
    "database-damaged", "credentials", "unknown-lineage", "other-memory"."""
    accept_after_conversations: int = 3
    """"required-missing", "root-missing" and "shrunk" are accepted when they come again in so many different conversations,
    this one included; 0: never."""
    accept_after: str = "24h"
    """The same when they come again over so long a time, by the store's clock, and at least twice before; "": never."""
    layouts: Tables = field(default_factory=dict)
    """For one layout's files alone: the ``shrink_`` keys, and ``required``, the paths it cannot do without."""
    memories: Tables = field(default_factory=dict)
    """For the memories a pattern fits: any of the keys above."""

    def of(self, memory: str) -> Guards:
        """Return the guards of one memory."""
        return replace(self, **find_table(memory, self.memories, {}), memories={})

    @property
    def accept_after_seconds(self) -> float:
        """The time in seconds; 0 means never."""
        return parse_duration(self.accept_after).total_seconds() if self.accept_after not in ("", "0") else 0.0

    def narrow_to_layout(self, layout: str) -> Guards:
        """Return the guards of one layout's files."""
        table = {key: value for key, value in self.layouts.get(layout, {}).items() if key != "required"}
        return replace(self, **table, layouts={})
