"""How much a memory may be, and how much worse it may get."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an export may bring: checked inside the sandbox before bytes travel, and again on arrival."""

    bytes: int = 8 * GIB
    """Of all files together, unpacked."""
    file_bytes: int = 8 * GIB
    """Of one file."""
    files: int = 200_000
    """How many files and folders."""
    depth: int = 64
    """How deep folders may lie in folders."""
    packed_bytes: int = 8 * GIB
    """Of one pack as it travels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guards:
    """When an export is kept but does not become the head."""

    shrink_to: float = 0.5
    """Fewer bytes or files than this share of the head's."""
    shrink_from_bytes: int = 64 * 1024
    """Bytes are compared from this size on."""
    shrink_from_files: int = 10
    """File counts are compared from this number on."""
