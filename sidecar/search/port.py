"""The port to a database that holds records and finds them. ``sidecar.wiring`` knows which there are."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sidecar.records.record import Record

Still = Callable[[], Awaitable[bool]]
"""Whether what somebody is about to write is still what the store says. Asked while nobody else can write."""


@dataclass(frozen=True, slots=True)
class MemoryRef:
    """Whose records: a store, by the identity it carries in itself, and a memory of it."""

    store: str
    memory: str


class RecordSource(Protocol):
    """The records of one snapshot.

    No two have the same kind and key; where they do all the same, one of them counts.
    """

    def batches(self) -> AsyncGenerator[Sequence[Record]]: ...

    @property
    def problems(self) -> list[str]:
        """What could not be read, once everything was."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCounts:
    """What it took to make the rows of a memory equal to a snapshot."""

    records: int = 0
    """How many there are now."""
    written: int = 0
    removed: int = 0
    """Rows that went, those of changed records among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What to look for, in words as one types them into a search engine: ``"exact words" or -without``."""

    words: str
    store: str = ""
    memories: Sequence[str] = ()
    """Only in these; in all, when none is named."""
    kinds: Sequence[str] = ()
    limit: int = 20
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A record that was found."""

    memory: str
    kind: str
    key: str
    title: str
    snippet: str
    """Where in its text, the words between ``**``."""
    project: str = ""
    session: str = ""
    at: str | None = None
    """When it was written down, by the program that did; ISO, in UTC."""
    path: str = ""
    """The file it is in, inside the snapshot."""
    snapshot: str = ""
    """The snapshot that the rows of this memory are of: what is newer was not looked at."""
    indexed: str = ""
    """When they were made equal to it."""
    score: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchHits:
    """The best hits first."""

    hits: list[Hit] = field(default_factory=list)
    more: bool = False
    """There are more than were asked for."""


class SearchDatabase(Protocol):
    """Rows of many stores' memories. Every method raises a ``SinkError`` and nothing of a vendor's.

    Each call stands for itself: it connects, and leaves nothing behind when it is cut short.
    """

    async def standing(self, store: str, memory: str = "") -> Mapping[str, str]:
        """Every memory of a store that has rows (or only the one named, if it has), and the snapshot they are of; ``""``
        when they have to be written anew."""
        ...

    async def replace(self, place: MemoryRef, snapshot: str, records: RecordSource, still: Still) -> WriteCounts | None:
        """Make the rows of a memory equal to a snapshot's records, all of them or none.

        Rows that are equal already are left alone. Only one caller at a time does this for a memory; ``still`` is asked
        once it is this one's turn, and when it says no, nothing happens: ``None``.
        """
        ...

    async def remove(self, place: MemoryRef, still: Still) -> int | None:
        """Remove the rows of a memory; return how many there were. ``None``: ``still`` said no."""
        ...

    async def search(self, query: Query) -> SearchHits: ...
