"""Count how often guards refused to replace the present head of a memory: one small object beside it, changed by
compare-and-swap.

A refused snapshot says so in its manifest, and counts even if its exporter could not record it here. But a refusal that
is repeated without any change makes no new snapshot, and retention may remove refused snapshots: so they are counted
here. The count is about one head only; when another takes its place, it starts at 0.

An export repeats an earlier refusal if it comes from the same sandbox, or from one that continued from the refused
snapshot. So do exports that each come straight from the head, from a fresh sandbox for every conversation.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, field, replace
from typing import Self

from sidecar.errors import ObjectRefused, SwapLost
from sidecar.format.checksums import encode_checksummed
from sidecar.host.values import dataclass
from sidecar.ids import MemoryKeys
from sidecar.ports import Store
from sidecar.store.manifest import Head, Manifest, decode_object

LOG = logging.getLogger("sidecar")
FORMAT = 1
MOST_LINES = 50
"""Sandboxes that are counted separately; beyond that, only what came straight from the head is still counted."""
MOST_SNAPSHOTS = 20
"""Refused snapshots remembered for each sandbox, the newest."""
MOST_CONVERSATIONS = 50
LONGEST_REF = 500
ATTEMPTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalCount:
    """How often a reason occurred, since when by the store's clock, and in which conversations (by digest)."""

    since: float
    times: int
    conversations: list[str] = field(default_factory=list)

    def with_added(self, other: RefusalCount | None) -> RefusalCount:
        """Return the sum of two counts."""
        if other is None:
            return self
        return RefusalCount(
            # A clock that was ahead for a while must not make anything wait until that time.
            since=min(self.since, other.since),
            times=self.times + other.times,
            conversations=list(dict.fromkeys([*self.conversations, *other.conversations]))[:MOST_CONVERSATIONS],
        )


Tallies = Mapping[str, RefusalCount]
"""Counts by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRefusals:
    """What was refused from one sandbox."""

    sandbox: str
    last: float
    snapshots: dict[str, list[str]]
    """Refused snapshots, each with the reasons; the newest last."""
    all: dict[str, RefusalCount] = field(default_factory=dict)
    straight: dict[str, RefusalCount] = field(default_factory=dict)
    """Counts of those that came straight from the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOrigin:
    """Where an export comes from."""

    sandbox: str
    lineage: tuple[str, ...]
    """The snapshots that the sandbox was restored from or exported to."""
    straight: bool
    """Whether it is new, and was made from the head itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedExport:
    """A snapshot that a guard kept from becoming the head."""

    snapshot: str
    reasons: Collection[str]
    conversation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """All refusals over one head: ``head`` since ``head_since``."""

    memory: str
    head: str
    head_since: str
    lines: list[SandboxRefusals] = field(default_factory=list)
    """By sandbox; that of the latest refusal last."""
    others: dict[str, RefusalCount] = field(default_factory=dict)
    """Counts of what came straight from the head out of sandboxes that are not counted separately any more."""

    @classmethod
    def over(cls, head: Head) -> Self:
        """Return an empty count for this head."""
        return cls(memory=head.memory, head=head.snapshot, head_since=head.history[0][1] if head.history else "")

    def encode(self) -> bytes:
        return encode_checksummed({"format": FORMAT, **asdict(self)})

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Parse it. Raise ``ValueError`` unless it is valid and of a known format."""
        return decode_object(data, cls, FORMAT)

    def is_over(self, head: Head) -> bool:
        """Return whether it is about this head, and not about an earlier time when the same snapshot was the head."""
        fresh = Refusals.over(head)
        return (self.memory, self.head, self.head_since) == (fresh.memory, fresh.head, fresh.head_since)

    def before(self, origin: ExportOrigin, reason: str) -> RefusalCount | None:
        """Return the earlier refusals that an export from there would repeat for this reason; ``None`` if there are none."""
        found: RefusalCount | None = None
        for line in self.lines:
            own = _is_from(line, origin)
            tally = (line.all if own else line.straight if origin.straight else {}).get(reason)
            found = tally.with_added(found) if tally is not None else found
        others = self.others.get(reason) if origin.straight else None
        return others.with_added(found) if others is not None else found

    def reasons(self, snapshot: str) -> list[str]:
        """Return why a snapshot was refused, if that is remembered."""
        return next((line.snapshots[snapshot] for line in self.lines if snapshot in line.snapshots), [])

    def list_uncounted(self, origin: ExportOrigin) -> list[str]:
        """Return the snapshots of a sandbox since the head that may have been refused without being counted, oldest first."""
        since = max((name for line in self.lines if _is_from(line, origin) for name in line.snapshots), default="")
        after = itertools.takewhile(lambda name: name != self.head, origin.lineage)
        return sorted(name for name in after if name > since)[-MOST_SNAPSHOTS:]

    def with_earlier(self, origin: ExportOrigin, earlier: Iterable[Manifest], at: float | None = None) -> Self:
        """Return the count with refusals from there that were not counted: as of ``at``, or of their manifests' time.

        The manifest's time is that of its exporter's clock, which may be wrong.
        """
        found, unknown = self, self.list_uncounted(origin)
        for manifest in earlier:
            reason = manifest.rejected.partition(": ")[0]
            if reason and manifest.snapshot in unknown:
                straight = replace(origin, straight=manifest.parent == self.head)
                made = manifest.time.timestamp() if at is None else at
                refused = RefusedExport(
                    snapshot=manifest.snapshot, reasons=[reason], conversation=manifest.conversation
                )
                found = found.with_one(straight, refused, made)
        return found

    def with_one(self, origin: ExportOrigin, refused: RefusedExport, at: float) -> Self:
        """Return the count with one more refusal. A snapshot that was refused before keeps its earlier reasons."""
        snapshot, conversation = refused.snapshot, refused.conversation
        reasons = list(dict.fromkeys([*refused.reasons, *self.reasons(snapshot)]))
        one = RefusalCount(since=at, times=1, conversations=[digest_conversation(conversation)] if conversation else [])
        ref = origin.sandbox[:LONGEST_REF]
        own = next(
            (line for line in self.lines if line.sandbox == ref), SandboxRefusals(sandbox=ref, last=at, snapshots={})
        )
        snapshots = {**{name: why for name, why in own.snapshots.items() if name != snapshot}, snapshot: reasons}
        line = SandboxRefusals(
            sandbox=ref,
            last=at,
            snapshots=dict(list(snapshots.items())[-MOST_SNAPSHOTS:]),
            all=_add_tallies(own.all, reasons, one),
            straight=_add_tallies(own.straight, reasons if origin.straight else (), one),
        )
        lines = [other for other in self.lines if other.sandbox != ref] + [line]
        others = self.others
        for old in lines[:-MOST_LINES]:
            for reason, tally in old.straight.items():
                others = _add_tallies(others, (reason,), tally)
        return replace(self, lines=lines[-MOST_LINES:], others=others)

    def without_origin(self, origin: ExportOrigin) -> Self:
        """Return the count without the refusals from there, because it has recovered. The refused snapshots are still
        remembered."""
        lines = [replace(line, all={}, straight={}) if _is_from(line, origin) else line for line in self.lines]
        return replace(self, lines=lines)


def digest_conversation(conversation: str) -> str:
    """Return a short digest to distinguish conversations, because their ids may have any length."""
    return hashlib.sha256(conversation.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _is_from(line: SandboxRefusals, origin: ExportOrigin) -> bool:
    """Return whether the origin is this sandbox, or continued from one of its refused snapshots."""
    return line.sandbox == origin.sandbox[:LONGEST_REF] or any(one in line.snapshots for one in origin.lineage)


def _add_tallies(tallies: Tallies, reasons: Iterable[str], one: RefusalCount) -> dict[str, RefusalCount]:
    """Return counts with one refusal added for each reason."""
    return {**tallies, **{reason: one.with_added(tallies.get(reason)) for reason in reasons}}


async def read_refusals(store: Store, head: Head) -> tuple[Refusals, str | None]:
    """Return the refusals over this head, and the version to swap. An object that cannot be read counts as empty."""
    try:
        stored = await store.get(MemoryKeys.of(head.memory).refusals)
    except ObjectRefused as refused:
        LOG.warning("Ignored: %s", refused.message)
        return Refusals.over(head), refused.version
    if stored is None:
        return Refusals.over(head), None
    try:
        found = Refusals.decode(stored.data)
    except ValueError as problem:
        LOG.warning("Ignored: the count of refused exports of %s is damaged: %s.", head.memory, problem)
        return Refusals.over(head), stored.version
    return found if found.is_over(head) else Refusals.over(head), stored.version


async def count_refusal(
    store: Store, head: Head, origin: ExportOrigin, refused: RefusedExport, earlier: Collection[Manifest] = ()
) -> Refusals:
    """Count one more refusal, and the ``earlier`` ones that are not counted yet; concurrent counts are merged by
    retrying the swap.

    Raise ``StoreError``.
    """
    await store.prepare()
    at = await read_store_time(store, MemoryKeys.of(head.memory))
    for left in reversed(range(ATTEMPTS)):
        found, version = await read_refusals(store, head)
        found = found.with_earlier(origin, earlier, at)
        if not refused.reasons and not found.reasons(refused.snapshot):
            return found
        counted = found.with_one(origin, refused, at)
        try:
            await store.swap(MemoryKeys.of(head.memory).refusals, counted.encode(), expected=version)
        except SwapLost:
            if not left:
                raise
            continue
        return counted
    raise AssertionError("unreachable")


async def forget_refusals(store: Store, head: Head, origin: ExportOrigin) -> None:
    """Stop counting earlier refusals from there, because its export was accepted. Raise ``StoreError``."""
    found, version = await read_refusals(store, head)
    left = found.without_origin(origin)
    if version is not None and left != found:
        await store.prepare()
        await store.swap(MemoryKeys.of(head.memory).refusals, left.encode(), expected=version)


async def read_store_time(store: Store, keys: MemoryKeys) -> float:
    """Return the time by the store's own clock: services whose clocks differ, or jump, must count alike."""
    await store.put(keys.clock, b"")
    times = [info.modified async for info in store.list(keys.clock)]
    if not times:  # removed by another reader of the time: the newest time of all objects is not later than now
        times = [info.modified async for info in store.list(keys.prefix)]
    await store.delete([keys.clock])
    return max(times, default=0.0)
