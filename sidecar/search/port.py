"""The port to a search database. ``sidecar.wiring`` knows which adapters there are."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import field
from datetime import datetime
from typing import Protocol

from sidecar.host.values import dataclass
from sidecar.models.answers import Hit
from sidecar.records.record import Record

Still = Callable[[], Awaitable[bool]]
"""Whether the snapshot about to be written is still the head. Called while no other process can write."""


@dataclass(frozen=True, slots=True)
class MemoryRef:
    """A memory and the id of its store."""

    store: str
    memory: str


class RecordSource(Protocol):
    """The records of one snapshot.

    No two should have the same kind and key; if they do, one of them counts.
    """

    def batches(self) -> AsyncGenerator[Sequence[Record]]: ...

    @property
    def problems(self) -> list[str]:
        """What could not be read; complete once all batches were read."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCounts:
    """How many records were written and removed to make a memory's records equal to a snapshot."""

    records: int = 0
    """How many there are now."""
    written: int = 0
    removed: int = 0
    """Removed records, including the old versions of changed ones."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The next snapshot in the line of a memory whose history is kept. The first one begins the history anew."""

    created: str
    begins: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A search, in the syntax of search engines: ``"exact words" or -without``."""

    words: str
    store: str = ""
    memories: Sequence[str] = ()
    """Only in these; in all, when none is named."""
    within: str = ""
    """Only in memories whose whole ids match this regular expression, in the syntax that Python and Postgres share."""
    kinds: Sequence[str] = ()
    projects: Sequence[str] = ()
    since: datetime | None = None
    """Only what was written down then or later."""
    until: datetime | None = None
    """Only what was written down before."""
    history: bool = False
    """Also what is not known any more, of memories whose history is kept."""
    limit: int = 20
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchHits:
    """The best hits first."""

    hits: list[Hit] = field(default_factory=list)
    more: bool = False
    """There are more than were asked for."""


class SearchDatabase(Protocol):
    """A database with the records of many stores' memories. Every method raises only ``SearchError``, never an error of
    a vendor.

    Calls are independent: each connects by itself, and leaves nothing behind when it is interrupted. ``IndexReset`` says
    that what was there was lost, and that the index is empty now: call again.
    """

    async def standing(self, store: str, memory: str = "") -> Mapping[str, str]:
        """Return every memory of a store that has records (or only the one named), with the snapshot they are of;
        ``""`` if they have to be written again."""
        ...

    async def replace(
        self, place: MemoryRef, snapshot: str, records: RecordSource, still: Still, moment: Moment | None = None
    ) -> WriteCounts | None:
        """Make the records of a memory equal to a snapshot's, all or none.

        Equal records are left alone. Only one caller at a time does this for a memory; ``still`` is called once it is
        this caller's turn. If it returns false, nothing happens and ``None`` is returned.

        With a ``moment``, records that go are kept as known until the snapshot before it. Without, they are removed,
        and so is whatever is known of the past.
        """
        ...

    async def lines(self, store: str, memory: str = "") -> Mapping[str, Sequence[str]]:
        """Return the memories whose history is kept (or only the one named), each with the snapshots that were written,
        the oldest first."""
        ...

    async def forget(self, place: MemoryRef, snapshots: Collection[str]) -> None:
        """Remove what was known in these past snapshots of a memory alone."""
        ...

    async def remove(self, place: MemoryRef, still: Still) -> int | None:
        """Remove the records of a memory and return how many there were. ``None``: ``still`` returned false."""
        ...

    async def search(self, query: Query) -> SearchHits: ...
