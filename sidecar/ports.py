"""The ports of the engine: a sandbox, who creates sandboxes, and a store.

Adapters implement these; only ``sidecar.wiring`` knows which there are. The contract suites in ``tests/contracts``
state what every adapter promises.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Protocol

from sidecar.host.values import dataclass


@dataclass(frozen=True, slots=True)
class CommandResult:
    """A command that has ended: its exit code and its stdout (with stderr, if a provider merges them)."""

    exit_code: int
    output: bytes
    complaint: str = ""
    trips: int = 1
    """How many requests it took."""
    uploads: int = 0
    """How many files were uploaded first, because the command was too long to be sent as one."""


@dataclass(frozen=True, slots=True)
class SandboxStatus:
    """The state of a sandbox by its provider."""

    ends_at: float | None = None
    """Seconds since the epoch when it stops unless prolonged; ``None``: it does not end by itself."""
    woken: bool = False
    """It was asleep and was woken on request."""
    slides: bool = False
    """Each use postpones its end, so needless use keeps it running."""


@dataclass(frozen=True, slots=True)
class AllowedPaths:
    """The paths of this machine that a sandbox on it may use, with all links resolved.

    Its roots are below one of ``beneath``, and never in one of ``apart``, where the sidecar has its store, its keys and
    its scratch files (an entry that ends in ``*`` is a prefix).
    """

    beneath: tuple[str, ...]
    apart: tuple[str, ...] = ()


class Sandbox(Protocol):
    """One sandbox. Paths are absolute and mean the same to a command and to the file methods.

    Every method raises only ``SandboxError``, never an error of a vendor.
    """

    ref: str

    @property
    def control_trips(self) -> int:
        """The number of requests to the provider's control plane so far: to connect, to prolong."""
        ...

    def ground(self, projects: Sequence[str] | None) -> AllowedPaths | None:
        """Return where the roots of a memory with these projects may be; ``None``: anywhere, because all files there
        belong to the sandbox.

        Raise ``SandboxNotAllowed`` if a project is where no sandbox may be.
        """
        ...

    def holds(self, path: str) -> bool:
        """Return whether a file is known to be there; a leading ``~/`` is the sandbox's home. No request is made to find
        out: false if one would be needed."""
        ...

    async def stamp(self, projects: Sequence[str] | None) -> str:
        """Return what is the same later only if nothing has changed in the home and these projects; "" if that cannot be
        told without a command or a request. Raise ``SandboxNotAllowed`` as ``ground`` does."""
        ...

    async def connect(self) -> SandboxStatus:
        """Connect to the sandbox; the result of an earlier call may be reused.

        Raise ``SandboxGone``, ``SandboxAsleep`` (it stays asleep, unless it was opened to be woken), ``SandboxDenied``,
        ``SandboxBusy`` or ``SandboxUnreachable``.
        """
        ...

    async def prolong(self, seconds: float) -> SandboxStatus:
        """Keep it running for at least ``seconds`` from now, if its provider allows; never shorten its life."""
        ...

    async def run(
        self, command: str, *, timeout: float, output_limit: int, environment: Mapping[str, str] | None = None
    ) -> CommandResult:
        """Run a POSIX shell script as the sandbox's user, in its working folder, with ``HOME`` set.

        ``environment`` is for values that other users there must not see: it is set for the script and its children,
        and never appears in a command line, as the script may. Each value has less than 128 KiB. Raise
        ``OutputTooLarge`` as soon as it printed more than ``output_limit`` bytes and ``SandboxTimeout`` after
        ``timeout`` seconds; in both cases the command is stopped.
        """
        ...

    async def upload(self, path: str, chunks: AsyncIterator[bytes]) -> None:
        """Write a file, streaming. The parent folder exists. A failed upload may leave a partial file at ``path``."""
        ...

    def download(self, path: str) -> AsyncGenerator[bytes]:
        """Stream a file; a leading ``~/`` is the sandbox's home.

        The caller checks size and hash: a truncated transfer may look like a short file.
        """
        ...

    async def remove(self, path: str) -> None:
        """Delete a file without running a command. A missing file is not an error."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxPlan:
    """A sandbox that is to be created."""

    name: str
    """By which it is found again: lower-case hexadecimal digits."""
    attempt: str
    """Likewise. A provider that can tell creates one sandbox for one attempt, however often it is asked; one that was
    ended is created again under the same name by another attempt."""
    template: str = ""
    """What it is made from, in the provider's words: a template, a snapshot. Empty: the provider's default."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    timeout: float | None = None
    """Seconds after which the provider ends it; ``None``: as the provider has it."""


RUNNING, ASLEEP, CHANGING = "running", "asleep", "changing"
"""The states of a listed sandbox: it can be used; it is paused or stopped, and keeps its files; it is on its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSandbox:
    """A sandbox as its provider lists it."""

    ref: str
    state: str
    """``RUNNING``, ``ASLEEP`` or ``CHANGING``."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Given by whoever created it: hostile input."""
    created: float = 0.0
    """Seconds since the epoch, by the provider's clock."""
    ends_at: float | None = None
    """Seconds since the epoch when it ends unless prolonged; ``None``: it does not end by itself, or it is not known."""
    plan: str = ""
    """The name of the plan that it was created by here; empty: somebody else created it."""


@dataclass(frozen=True, slots=True)
class SandboxPage:
    """A part of a listing. ``next`` leads to the part after it; empty: this is the last."""

    sandboxes: Sequence[ListedSandbox]
    next: str = ""


class SandboxProvider(Protocol):
    """Creates, lists and ends sandboxes at one provider. Every method raises only ``SidecarError``."""

    async def create(self, plan: SandboxPlan) -> str:
        """Create a sandbox that ``find`` finds by the plan's name, and return its reference."""
        ...

    async def find(self, name: str) -> Sequence[str]:
        """Return the references of the sandboxes that were created under a name and still exist."""
        ...

    async def list(self, page: str = "") -> SandboxPage:
        """Return a page of the sandboxes that exist, the newest first, with one request. ``page``: the ``next`` of the page
        before."""
        ...

    async def look(self, ref: str) -> ListedSandbox | None:
        """Return one sandbox as a listing has it; ``None`` if it does not exist (any more). It is not woken."""
        ...

    def check_end(self, ref: str) -> None:
        """Raise a ``SidecarError`` if ``end`` would refuse this sandbox in any case. No request is made to find out."""
        ...

    async def end(self, ref: str) -> None:
        """End a sandbox for good, with all its files. One that does not exist any more is not an error."""
        ...


@dataclass(frozen=True, slots=True)
class StoredObject:
    """The bytes of a small object, with the version to pass to ``Store.swap``."""

    data: bytes
    version: str


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object in a listing."""

    key: str
    size: int
    modified: float
    """Seconds since the epoch, by the store's clock."""
    version: str = ""
    """The version that ``Store.get`` would return with it, where a listing tells; it differs if the bytes differ."""


@dataclass(frozen=True, slots=True)
class Glance:
    """What one request of a listing shows."""

    objects: Sequence[ObjectInfo]
    folders: Sequence[str] = ()
    """Where only one level was asked for: the names that are followed by more."""
    complete: bool = True
    """Nothing is missing. Otherwise ``objects`` are any about thousand of them."""


@dataclass(frozen=True, slots=True)
class Link:
    """Permission for one request that a sandbox makes itself: one object, one method, for minutes."""

    method: str
    """``GET`` or ``PUT``."""
    url: str = field(repr=False)
    """It works for everyone who has it, so it must never be logged."""
    headers: Mapping[str, str]
    """To be sent unchanged and completely."""


class Store(Protocol):
    """A flat space of objects under '/'-separated keys. Keys are built by ``sidecar.ids`` only and are always safe.

    An object becomes visible completely or not at all, and is durable when the call that wrote it returns. Every method
    raises only ``StoreError``, never an error of a vendor.
    """

    url: str
    """For people; never contains credentials."""

    @property
    def seal(self) -> str:
        """Names the recipients for whom new objects are encrypted; empty if the store does not encrypt."""
        ...

    def room(self, size: int) -> int:
        """Return the most bytes that an object of ``size`` bytes takes in this store."""
        ...

    async def prepare(self) -> None:
        """Make sure that this store can be written: reachable, permitted, and honouring conditional writes.

        Called once before the first write of a process. Creates what may be created (a folder), never what a person
        must decide on (a bucket, a mount).
        """
        ...

    async def get(self, key: str) -> StoredObject | None:
        """Return a small object completely; ``None`` if there is none.

        A store that encrypts or signs raises ``ObjectRefused`` for an altered object, here and in ``stream``.
        """
        ...

    async def put(self, key: str, source: bytes | Path) -> int:
        """Write an object, streaming if the source is a file. Return how many bytes it takes in the store, as listed."""
        ...

    async def swap(self, key: str, data: bytes, *, expected: str | None) -> str:
        """Write a small object only if it is still at version ``expected`` (``None``: only if it does not exist).

        Return the new version. Raise ``SwapLost`` otherwise. Of any number of concurrent callers exactly one wins.
        """
        ...

    def stream(self, key: str) -> AsyncIterator[bytes]:
        """Yield an object's bytes in chunks of at most 1 MiB. Raise ``ObjectMissing``."""
        ...

    async def link_to_get(self, key: str, *, seconds: int) -> Link | None:
        """Return a link to read this object, valid for ``seconds``. ``None``: this store has no links (a disk).

        No request is made: whether the object exists, and whether a sandbox can reach the address, shows when the link
        is used.
        """
        ...

    async def link_to_put(self, key: str, *, size: int, sha256: str, seconds: int) -> Link | None:
        """Return a link to write this object, valid for ``seconds``: exactly ``size`` bytes with exactly that hash.

        ``None``: this store has no links (a disk), or not for that size. The link may be used again while it is valid,
        with the same bytes. A server that is only similar to S3 may enforce less, and a sandbox's claims about its
        upload prove nothing: the caller reads the object and compares before relying on it.
        """
        ...

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yield every complete object whose key starts with ``prefix`` ('…/', a whole key, or the beginning of the last
        part of one), in key order."""
        ...

    async def glance(self, prefix: str, *, after: str = "", level: bool = False) -> Glance:
        """Return what one request shows of the objects whose key starts with ``prefix`` ('…/') and is greater than
        ``after``; ``level``: of those below, only the names of their folders.

        A store whose names are encrypted may need more requests for ``after``.
        """
        ...

    async def folders(self, prefix: str, *, most: int) -> Sequence[str]:
        """Return the sorted names that follow ``prefix`` ('…/') in keys, as far as they are followed by more; about
        ``most`` at most.

        It costs one request per thousand names, however many objects are below them.
        """
        ...

    async def copy(self, source: str, target: str) -> None:
        """Copy an object within the store. Raise ``ObjectMissing`` if there is no source."""
        ...

    async def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. Missing ones are not an error."""
        ...

    async def sweep(self, prefix: str, *, older_than: float) -> int:
        """Remove unfinished writes of crashed writers under ``prefix`` from before that time. Return how many."""
        ...

    async def purge(self, prefix: str) -> int:
        """Remove every byte under ``prefix``: objects, their old versions, unfinished writes. Return how many."""
        ...

    async def warnings(self) -> Sequence[str]:
        """Return whole sentences on what a person should know about this store, such as who else can read it."""
        ...

    async def safety(self) -> str:
        """Return how concurrent writers are kept apart here, and how that was verified, as a continuation of "can be
        written, and"."""
        ...

    async def close(self) -> None: ...


class StoreLayer:
    """A store around another one: what a layer does not change is left to the store inside."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.url = inner.url

    @property
    def inner(self) -> Store:
        """The store around which this is."""
        return self._inner

    @property
    def seal(self) -> str:
        return self._inner.seal

    def room(self, size: int) -> int:
        return self._inner.room(size)

    async def prepare(self) -> None:
        await self._inner.prepare()

    async def warnings(self) -> Sequence[str]:
        return await self._inner.warnings()

    async def safety(self) -> str:
        return await self._inner.safety()

    async def close(self) -> None:
        await self._inner.close()
