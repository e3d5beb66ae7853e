"""Where the lines of a chain are kept: in the store, and in a file of this machine.

In the store, each write is one small object that is never changed. Once they are a mebibyte together, or a day is over,
one object takes the place of the small ones, with the same lines. The tail, an object apart, says how many lines there
are at least: so it is noticed when the last ones are removed. It never says more than what was written before it, and
follows within a second. Another object names the chain that was begun last, and each chain in its first line the one
before it: so it is noticed when all of a chain is removed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Protocol

from sidecar.audit.lines import compute_digest, decode_latest, encode_latest
from sidecar.errors import ObjectRefused, SidecarError
from sidecar.format.checksums import encode_checksummed
from sidecar.host.files import open_private
from sidecar.ids import AUDIT_LATEST, AuditKeys
from sidecar.ports import Store

LOG = logging.getLogger("sidecar")
MOST_BYTES = 1 << 20
"""The size at which small objects are replaced by one."""
FEW_OBJECTS = 2
"""So many small objects stay as they are when a chain ends, as those of a command do."""
TAIL_SECONDS = 1.0


class AuditUnwritable(SidecarError):
    """The audit cannot be written, so nothing is done that it would have to tell."""

    code = "audit-unwritable"
    retryable = True
    default_hint = "Make room at the place that [audit] names, or name another one. Nothing was changed."


class Sink(Protocol):
    """A place for lines."""

    async def find_latest(self) -> str:
        """Return the chain that was begun last; empty if there is none. Raise a ``SidecarError``."""
        ...

    async def write(self, first: int, lines: Sequence[bytes]) -> None:
        """Keep these lines, from number ``first`` on, durably. Raise a ``SidecarError``. After a failure the same lines
        may come again, with more behind them."""
        ...

    async def close(self) -> None: ...


class StoreSink:
    """The objects of one chain in the store."""

    def __init__(self, store: Store, chain: str) -> None:
        self._store = store
        self._keys = AuditKeys(chain)
        self._opened = False
        self._count, self._digest = 0, ""
        self._small: list[str] = []
        """The keys of small objects that are to be replaced by one with the lines in ``_recent``."""
        self._recent: list[bytes] = []
        self._recent_bytes = 0
        self._day: date | None = None
        self._told = -1
        """How many lines the tail says there are."""
        self._named = False
        """It is named as the chain that was begun last."""
        self._tail_turn = asyncio.Lock()
        self._tail_timer: asyncio.TimerHandle | None = None
        self._tail_tasks: set[asyncio.Task[None]] = set()

    async def find_latest(self) -> str:
        try:
            stored = await self._store.get(AUDIT_LATEST)
            return "" if stored is None else decode_latest(stored.data)
        except (ValueError, ObjectRefused) as problem:  # verification names it
            LOG.warning("%s is not believed: %s", AUDIT_LATEST, problem)
            return ""

    async def write(self, first: int, lines: Sequence[bytes]) -> None:
        if not self._opened:
            # The tail comes before the first line: a chain without one has lost it.
            await self._store.prepare()
            await self._write_tail()
            self._opened = True
        last, digest = first + len(lines) - 1, compute_digest(lines[-1])
        key = self._keys.lines(first, last, digest)
        written, _ = await asyncio.gather(self._store.put(key, _join(lines)), self._try_tail(), return_exceptions=True)
        if isinstance(written, BaseException):
            raise written
        self._count, self._digest = last, digest
        self._small.append(key)
        self._recent += lines
        self._recent_bytes += sum(map(len, lines))
        today = datetime.now(UTC).date()
        if self._recent_bytes >= MOST_BYTES or (self._day or today) != today:
            await self._replace_small()
        self._day = today
        if self._tail_timer is None:
            self._tail_timer = asyncio.get_running_loop().call_later(TAIL_SECONDS, self._start_tail)

    async def _replace_small(self) -> None:
        """Write all recent lines as one object, and remove the small ones. If that fails they stay, which is as good."""
        if len(self._small) > FEW_OBJECTS:
            try:
                await self._store.put(
                    self._keys.lines(self._count - len(self._recent) + 1, self._count, self._digest),
                    _join(self._recent),
                )
                await self._store.delete(self._small)
            except SidecarError as problem:
                LOG.warning("Small objects of the audit stay: %s", problem)
        self._small, self._recent, self._recent_bytes = [], [], 0

    def _start_tail(self) -> None:
        self._tail_timer = None
        task = asyncio.create_task(self._try_tail())
        self._tail_tasks.add(task)
        task.add_done_callback(self._tail_tasks.discard)

    async def _try_tail(self) -> None:
        """Write the tail if it is behind. A failure is only logged: the next write tries again."""
        try:
            await self._write_tail()
            if self._count and not self._named:
                await self._store.put(AUDIT_LATEST, encode_latest(self._keys.chain))
                self._named = True
        except SidecarError as problem:
            LOG.warning("The tail of the audit is behind: %s", problem)

    async def _write_tail(self) -> None:
        async with self._tail_turn:  # an earlier state must not replace a later one
            count = self._count
            if count == self._told:
                return
            tail = {"chain": self._keys.chain, "lines": count, "digest": self._digest}
            await self._store.put(self._keys.tail, encode_checksummed(tail))
            self._told = count

    async def close(self) -> None:
        if self._tail_timer is not None:
            self._tail_timer.cancel()
        if self._opened:
            await self._replace_small()
            await self._try_tail()


class FileSink:
    """A file to which lines are added; other processes may add to it as well."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    async def find_latest(self) -> str:
        return ""  # a file is one place: what is removed from it is no object

    async def write(self, first: int, lines: Sequence[bytes]) -> None:
        try:
            await asyncio.to_thread(self._append, _join(lines))
        except OSError as problem:
            raise AuditUnwritable(f"The audit {self._path} cannot be written: {problem.strerror}.") from None

    def _append(self, data: bytes) -> None:
        # Opened anew each time, so that the file may be moved away (rotated) at any moment. One write, so that lines of
        # other processes do not come between.
        with open(self._path, "ab", buffering=0, opener=open_private) as file:
            if file.write(data) != len(data):
                raise OSError(0, "not all of a line could be written")
            os.fsync(file.fileno())

    async def close(self) -> None:
        """Do nothing: the file is not kept open."""


def check_audit_file(path: Path) -> None:
    """Raise ``AuditUnwritable`` if lines cannot be added to a file. It is not made."""
    place = path if path.exists() else path.parent
    why = os.strerror(errno.EISDIR) if path.is_dir() else "" if place.exists() else os.strerror(errno.ENOENT)
    if why or not os.access(place, os.W_OK):
        raise AuditUnwritable(f"The audit {path} cannot be written: {why or os.strerror(errno.EACCES)}.")


def _join(lines: Sequence[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)
