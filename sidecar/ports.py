"""The two things the engine needs from the world: a sandbox and a store.

Adapters implement these; ``sidecar.wiring`` is the only place that knows which. Contract suites in ``tests/contracts``
say what every adapter promises.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CommandResult:
    """A command that ran to its end: its exit code and all it printed on stdout (stderr too where a provider merges them)."""

    exit_code: int
    output: bytes
    complaint: str = ""
    trips: int = 1
    """How many requests it took."""
    uploads: int = 0
    """How many files had to be sent before, because it was too long to be sent as a command."""


@dataclass(frozen=True, slots=True)
class SandboxStatus:
    """What a sandbox's provider says of it."""

    ends_at: float | None = None
    """Seconds since the epoch when it stops unless it is prolonged; ``None``: it has no end of its own."""
    woken: bool = False
    """It was asleep, and was woken because that was asked for."""
    slides: bool = False
    """Its end is put off by each use of it: who uses it for no reason keeps it running."""


@dataclass(frozen=True, slots=True)
class AllowedPaths:
    """Which places of this machine a sandbox on it may touch, by their real paths.

    Its roots lie beneath one of ``beneath``, after all links were followed, and never in one of ``apart``, where the sidecar
    keeps its store, its keys and what passes through (an entry that ends in ``*`` is the beginning of a path).
    """

    beneath: tuple[str, ...]
    apart: tuple[str, ...] = ()


class Sandbox(Protocol):
    """One sandbox. Paths are absolute and mean the same to a command and to the file methods.

    Every method raises a ``SandboxError`` and nothing of a vendor's.
    """

    ref: str
    control_trips: int
    """How many requests went to the provider's control plane so far: to connect, to prolong."""

    def ground(self, projects: Sequence[str] | None) -> AllowedPaths | None:
        """Where the roots of a memory with these projects may be; ``None``: anywhere, for all that is there is the sandbox's.

        Raise ``SandboxNotAllowed`` when a project is where no sandbox may be.
        """
        ...

    async def connect(self) -> SandboxStatus:
        """Reach the sandbox; what is known from an earlier call is used again.

        Raise ``SandboxGone``, ``SandboxAsleep`` (and it stays asleep, unless it was opened to be woken),
        ``SandboxDenied``, ``SandboxBusy`` or ``SandboxUnreachable``.
        """
        ...

    async def prolong(self, seconds: float) -> SandboxStatus:
        """Have it run for at least that long from now, where its provider allows; never shortens its life."""
        ...

    async def run(
        self, command: str, *, timeout: float, output_limit: int, environment: Mapping[str, str] | None = None
    ) -> CommandResult:
        """Run a POSIX shell script as the sandbox's user, in its working folder, with ``HOME`` set.

        ``environment`` is for what other users there must not see: it is set for the script and what it starts, and is
        nowhere in a command line, as the script may be. Each value has less than 128 KiB.

        Raise ``OutputTooLarge`` as soon as it printed more than ``output_limit`` bytes and ``SandboxTimeout`` after
        ``timeout`` seconds; either way the command no longer runs.
        """
        ...

    async def upload(self, path: str, chunks: AsyncIterator[bytes]) -> None:
        """Write a file, streaming. The parent folder exists. A failed upload may leave a partial file at ``path``."""
        ...

    def download(self, path: str) -> AsyncGenerator[bytes]:
        """Stream a file; ``~/`` at the beginning of its path is the sandbox's home.

        The caller checks size and hash: a truncated transfer may look like a short file.
        """
        ...

    async def remove(self, path: str) -> None:
        """Delete a file, without running a command; one that is not there is fine."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A small object's bytes with the version to hand back to ``Store.swap``."""

    data: bytes
    version: str


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    key: str
    size: int
    modified: float
    """Seconds since the epoch, by the store's clock."""


@dataclass(frozen=True, slots=True)
class Link:
    """One request that a sandbox may make by itself: one object, one method, for minutes, and nothing else."""

    method: str
    """``GET`` or ``PUT``."""
    url: str = field(repr=False)
    """Whoever has it may use it, so it never gets into a log."""
    headers: Mapping[str, str]
    """To be sent exactly as they are, all of them."""


class Store(Protocol):
    """A flat space of objects under '/'-separated keys. Keys come from ``sidecar.ids`` alone and are always safe.

    An object becomes visible whole or not at all, and is durable when the call that wrote it returns.
    Every method raises a ``StoreError`` and nothing of a vendor's.
    """

    url: str
    """For people: never holds credentials."""

    @property
    def seal(self) -> str:
        """Names for whom objects are sealed that are written now; empty when they are not sealed."""
        ...

    def room(self, size: int) -> int:
        """The most that an object of ``size`` bytes takes here."""
        ...

    async def prepare(self) -> None:
        """Make sure this store may be written: reachable, allowed, and honouring conditional writes.

        Called once before the first write of a process. Creates what may be created (a folder), never what a person
        must decide on (a bucket, a mount).
        """
        ...

    async def get(self, key: str) -> StoredObject | None:
        """A small object, whole; ``None`` when there is none.

        A store that seals or signs raises ``ObjectRefused`` for one that was altered, here and when it is streamed.
        """
        ...

    async def put(self, key: str, source: bytes | Path) -> int:
        """Write an object, streaming when it comes from a file. Return how many bytes it takes here, as listed."""
        ...

    async def swap(self, key: str, data: bytes, *, expected: str | None) -> str:
        """Write a small object only if it is still at version ``expected`` (``None``: only if there is none).

        Return the new version. Raise ``HeadMoved`` when it is not, exactly one of any number of racing callers winning.
        """
        ...

    def stream(self, key: str) -> AsyncIterator[bytes]:
        """An object's bytes in chunks of at most 1 MiB. Raise ``ObjectMissing`` when there is none."""
        ...

    async def link_to_get(self, key: str, *, seconds: int) -> Link | None:
        """A link that reads this object, from now for ``seconds``. ``None``: this store has no such thing (a disk).

        Nothing is asked of the store: whether the object is there, and whether a sandbox can reach the address, shows
        when the link is used.
        """
        ...

    async def link_to_put(self, key: str, *, size: int, sha256: str, seconds: int) -> Link | None:
        """A link that writes this object, from now for ``seconds``: exactly ``size`` bytes with exactly that hash.

        ``None``: this store has no such thing (a disk), or not for so many bytes. The link may be used again while it
        lasts, with the same bytes. A server that only looks like S3 may enforce less, and what a sandbox says of its
        upload proves nothing: the caller reads the object and compares before relying on it.
        """
        ...

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Every whole object whose key starts with ``prefix`` ('…/', or a whole key), in key order."""
        ...

    async def folders(self, prefix: str, *, most: int) -> Sequence[str]:
        """The names that come next after ``prefix`` ('…/') in keys that go on after them, sorted; about ``most`` at most.

        It costs a request for each thousand, however many objects there are below them.
        """
        ...

    async def copy(self, source: str, target: str) -> None:
        """Duplicate an object inside the store. Raise ``ObjectMissing`` when there is no source."""
        ...

    async def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those not there are fine."""
        ...

    async def sweep(self, prefix: str, *, older_than: float) -> int:
        """Remove what crashed writers left unfinished under ``prefix`` before that time; return how many."""
        ...

    async def purge(self, prefix: str) -> int:
        """Remove every byte under ``prefix``: objects, their old versions, unfinished writes. Return how many."""
        ...

    async def warnings(self) -> Sequence[str]:
        """What a person should know of how this store is kept, as whole sentences: who else can read it."""
        ...

    async def safety(self) -> str:
        """What keeps two writers apart here, and how that was found out; it goes on after "can be written, and"."""
        ...

    async def close(self) -> None: ...
