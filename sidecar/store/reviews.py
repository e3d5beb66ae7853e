"""What people decided about snapshots that stand beside the head, and what waits for them: one small object per memory,
changed by compare-and-swap, so that of two who decide at once one is first and the other is told.

A snapshot that waits for a review says so in its manifest, and is listed here before its manifest is written: so one
read tells what waits. A snapshot is decided about once. What was accepted becomes the head afterwards; a process that
dies in between has changed nothing but this object, and accepting again finishes it.

Rows are short and few: the oldest lose their words, and those of snapshots that are gone are dropped; a declined one only
when there are very many.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, field, replace
from datetime import UTC, datetime, timedelta
from typing import Self

from sidecar.errors import ObjectRefused, SnapshotDamaged, SwapLost
from sidecar.format.checksums import encode_checksummed
from sidecar.host.values import dataclass
from sidecar.ids import MemoryKeys, parse_snapshot_time
from sidecar.policy.review import DECLINED, PENDING
from sidecar.ports import Store
from sidecar.store.manifest import Manifest, decode_object

LOG = logging.getLogger("sidecar")
FORMAT = 1
ACCEPTED = "accepted"
MOST_WITH_WORDS = 500
MOST_ROWS = 2000
LONGEST_WORDS = 500
LONGEST_REASON = 4000
ATTEMPTS = 20
UNDER_WAY = timedelta(days=1)
"""A snapshot that was listed here longer ago and has no manifest was never made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewRow:
    """Where the review of one snapshot stands."""

    decision: str
    """"pending", "accepted" or "declined"."""
    at: str = ""
    by: str = ""
    because: str = ""
    within: str = ""
    """Of an accepted one: the later snapshot with which it was accepted, if it is not the one that became the head."""
    reason: str = ""
    """Of a pending one whose manifest does not say why it waits: it was rejected first."""
    replaces: str = ""
    """Of an accepted one: the head that it was to replace; "" if there was none."""
    generation: int = 0
    """Of an accepted one: that head's generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reviews:
    """All rows of a memory, by snapshot."""

    rows: dict[str, ReviewRow] = field(default_factory=dict)

    def encode(self) -> bytes:
        rows = {
            snapshot: {name: value for name, value in asdict(row).items() if value}
            for snapshot, row in self.rows.items()
        }
        return encode_checksummed({"format": FORMAT, "rows": rows})

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Parse the object. Raise ``ValueError`` if it is not valid."""
        return decode_object(data, cls, FORMAT)

    def get_decision(self, snapshot: str) -> str:
        """Return what was decided about a snapshot, or that it waits; "" if nothing is known."""
        row = self.rows.get(snapshot)
        return row.decision if row else ""

    def is_pending(self, manifest: Manifest) -> bool:
        """Return whether a snapshot waits for a review."""
        return (self.get_decision(manifest.snapshot) or (PENDING if manifest.pending else "")) == PENDING

    def is_unaccepted(self, manifest: Manifest) -> bool:
        """Return whether a snapshot may not be used as if it had been the head: it waits, or was declined, or was
        accepted only as a part of a later one."""
        row = self.rows.get(manifest.snapshot)
        if row is None:
            return bool(manifest.pending)
        return row.decision != ACCEPTED or bool(row.within)

    def leave_out_unaccepted(self, manifests: Mapping[str, Manifest | SnapshotDamaged]) -> list[Manifest]:
        """Return those that can be read and may have been the head."""
        return [one for one in manifests.values() if isinstance(one, Manifest) and not self.is_unaccepted(one)]

    def find_reason(self, manifest: Manifest) -> str:
        """Return why a snapshot waits, or waited."""
        row = self.rows.get(manifest.snapshot)
        return manifest.pending or (row.reason if row else "")

    @property
    def pending(self) -> list[str]:
        """The snapshots that wait, newest first, as far as they are listed."""
        return sorted((one for one, row in self.rows.items() if row.decision == PENDING), reverse=True)

    @property
    def accepted(self) -> dict[str, datetime]:
        """The snapshots that were accepted to become the head, each with the time."""
        return {
            one: datetime.fromisoformat(row.at) if row.at else parse_snapshot_time(one)
            for one, row in self.rows.items()
            if row.decision == ACCEPTED and not row.within
        }

    @property
    def replaced(self) -> set[str]:
        """The heads that they were to replace, as far as that is known."""
        return {row.replaces for row in self.rows.values() if row.decision == ACCEPTED and row.replaces}

    @property
    def declined(self) -> set[str]:
        return {one for one, row in self.rows.items() if row.decision == DECLINED}

    def with_rows(self, rows: Mapping[str, ReviewRow | None], there: Collection[str], now: datetime) -> Self:
        """Return these and further rows, within bounds; ``None`` removes one. ``there``: the snapshots that exist."""
        merged = {one: row for one, row in {**self.rows, **rows}.items() if row is not None}
        for snapshot, row in list(merged.items()):
            fresh = snapshot in rows or now - parse_snapshot_time(snapshot) < UNDER_WAY
            if snapshot not in there and not fresh and row.decision != DECLINED:
                del merged[snapshot]
        decided = sorted((one for one, row in merged.items() if row.decision != PENDING), reverse=True)
        for snapshot in decided[MOST_WITH_WORDS:]:
            merged[snapshot] = replace(merged[snapshot], by="", because="", at="", reason="")
        gone = [one for one in decided if one not in there and one not in rows]
        for snapshot in gone[::-1][: max(0, len(merged) - MOST_ROWS)]:
            del merged[snapshot]
        return replace(self, rows=dict(sorted(merged.items())))


async def read_reviews(store: Store, memory: str) -> tuple[Reviews, str | None]:
    """Return a memory's reviews, and the version to swap. Raise ``SnapshotDamaged`` if they cannot be read: what was
    declined must not be forgotten silently."""
    key = MemoryKeys.of(memory).reviews
    stored = await store.get(key)
    if stored is None:
        return Reviews(), None
    try:
        return Reviews.decode(stored.data), stored.version
    except ValueError as problem:
        raise SnapshotDamaged(
            f"What was decided in reviews of {memory} cannot be read: {problem}.",
            hint=f"Nothing is accepted or declined until {key} is put right; removed, all that waited waits again.",
        ) from None


async def read_reviews_or_none(store: Store, memory: str, known: Iterable[str] | None = None) -> Reviews:
    """Return a memory's reviews for those who only look; none if they cannot be read. ``known``: the keys of a listing,
    which says whether there are any."""
    if known is not None and MemoryKeys.of(memory).reviews not in known:
        return Reviews()
    try:
        return (await read_reviews(store, memory))[0]
    except (SnapshotDamaged, ObjectRefused) as problem:
        LOG.warning("Ignored: %s", problem.message)
        return Reviews()


async def change_reviews(
    store: Store, memory: str, there: Collection[str], change: Callable[[Reviews], Mapping[str, ReviewRow | None]]
) -> Reviews:
    """Write the rows that ``change`` returns for the reviews as they are, and return them all; ``change`` may raise, and is
    asked again if another writer was faster. Raise ``SnapshotDamaged`` or ``StoreError``."""
    await store.prepare()
    for left in reversed(range(ATTEMPTS)):
        found, version = await read_reviews(store, memory)
        rows = change(found)
        if all(found.rows.get(snapshot) == row for snapshot, row in rows.items()):
            return found
        changed = found.with_rows(rows, there, datetime.now(UTC))
        try:
            await store.swap(MemoryKeys.of(memory).reviews, changed.encode(), expected=version)
        except SwapLost:
            if not left:
                raise
            continue
        return changed
    raise AssertionError("unreachable")


def format_now() -> str:
    """Return the present time as rows have it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
