"""Counts of records in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sidecar.models.answers import Counts


def describe_counts(counts: Mapping[str, Counts] | None) -> str:
    """Return what changed in a few words: "+7 observations, 1 decision changed". "unknown" if it is not known."""
    if counts is None:
        return "unknown"
    parts = []
    for kind, count in counts.items():
        for sign, number, after in (("+", count.added, ""), ("", count.changed, " changed"), ("-", count.removed, "")):
            if number:
                parts.append(f"{sign}{number:,} {write_kind(kind, number)}{after}")
    return ", ".join(parts) or "nothing that it says"


def write_kind(kind: str, count: int) -> str:
    """Return the word for a kind of record, in the plural if there is more than one."""
    plurals = {"summary": "summaries", "criterion": "criteria", "entity": "entities", "work": "works"}
    return kind if count == 1 else plurals.get(kind, f"{kind}s")
