"""The port to a search database. ``sidecar.wiring`` knows which adapters there are."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import field
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

    Calls are independent: each connects by itself, and leaves nothing behind when it is interrupted.
    """

    async def standing(self, store: str, memory: str = "") -> Mapping[str, str]:
        """Return every memory of a store that has records (or only the one named), with the snapshot they are of;
        ``""`` if they have to be written again."""
        ...

    async def replace(self, place: MemoryRef, snapshot: str, records: RecordSource, still: Still) -> WriteCounts | None:
        """Make the records of a memory equal to a snapshot's, all or none.

        Equal records are left alone. Only one caller at a time does this for a memory; ``still`` is called once it is
        this caller's turn. If it returns false, nothing happens and ``None`` is returned.
        """
        ...

    async def remove(self, place: MemoryRef, still: Still) -> int | None:
        """Remove the records of a memory and return how many there were. ``None``: ``still`` returned false."""
        ...

    async def search(self, query: Query) -> SearchHits: ...
