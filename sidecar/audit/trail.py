"""The audit as it is written: a chain of lines per process, and records of calls that become lines.

Several processes write side by side, each its own chain, without waiting for each other. Within a process, lines that
are appended while others are being written are written together after them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from sidecar import __version__
from sidecar.audit.lines import (
    FORMAT,
    Call,
    Kind,
    Line,
    compute_digest,
    describe_call,
    encode_line,
    format_now,
)
from sidecar.audit.settings import Audit
from sidecar.audit.sinks import AuditUnwritable, FileSink, Sink, StoreSink
from sidecar.audit.verification import Cut
from sidecar.errors import SidecarError
from sidecar.ids import make_chain_id
from sidecar.ports import Store

LOG = logging.getLogger("sidecar")
LAZY_SECONDS = 5.0
"""Within so many seconds lines are written that nobody waits for: those of calls that changed nothing."""
LONGEST_PAUSE = 60.0
MOST_WAITING = 10_000
"""How many lines may wait to be written. With more, calls are refused."""
Log = Callable[[Mapping[str, Any]], None]


class Chain:
    """The lines of this process. ``append`` adds one, ``write`` returns when it is kept in every sink."""

    def __init__(self, sinks: Mapping[str, Sink], id: str) -> None:
        self.id = id
        self._sinks = sinks
        self._waiting: list[bytes] = []
        """Lines that some sink does not have yet; the first has the number ``_count - len(_waiting) + 1``."""
        self._count, self._digest = 0, ""
        self._kept = dict.fromkeys(sinks, 0)
        """How many lines each sink has."""
        self._turn = asyncio.Lock()

    def check_room(self) -> None:
        """Raise ``AuditUnwritable`` if so many lines wait to be written that no call may add one."""
        if len(self._waiting) >= MOST_WAITING:
            raise AuditUnwritable(f"{MOST_WAITING:,} lines of the audit wait to be written.")

    def append(self, **fields: Any) -> int:
        """Add a line and return its number."""
        line = Line(chain=self.id, n=self._count + 1, at=format_now(), prev=self._digest, **fields)
        data = encode_line(line)
        self._waiting.append(data)
        self._count, self._digest = line.n, compute_digest(data)
        return line.n

    async def write(self, number: int = 0) -> None:
        """Write all lines that wait, and return once line ``number`` is kept (0: the newest). Raise a ``SidecarError``;
        the lines are written with the next ones then."""
        # Whoever waits may be cancelled, the write goes on: what is half written would be written again.
        await asyncio.shield(asyncio.ensure_future(self._write(number or self._count)))

    async def _write(self, number: int) -> None:
        async with self._turn:
            # Whoever waited for its turn often finds its line written together with those before it.
            if self._count - len(self._waiting) >= number:
                return
            last, lines = self._count, self._waiting[:]
            first = last - len(lines) + 1
            for name, sink in self._sinks.items():
                if self._kept[name] < last:
                    begin = max(first, self._kept[name] + 1)
                    await sink.write(begin, lines[begin - first :])
                    self._kept[name] = last
            del self._waiting[: len(lines)]

    async def close(self) -> None:
        """Write what waits. Raise a ``SidecarError`` if that fails."""
        try:
            await self.write()
        finally:
            for sink in self._sinks.values():
                await sink.close()


class Record:
    """One call in the audit, from its beginning to its end."""

    def __init__(self, trail: Trail, call: Call) -> None:
        self._trail = trail
        self._id = secrets.token_hex(8)
        self.call = call
        self._intended: Call | None = None
        self._ended = False

    @property
    def intended(self) -> bool:
        """Whether it was announced that the call will change something."""
        return self._intended is not None

    def note(self, *, memory: str = "", also: str = "", snapshot: str = "") -> None:
        """Fill in what becomes known of the call."""
        call = self.call
        self.call = replace(
            call, memory=memory or call.memory, also=also or call.also, snapshot=snapshot or call.snapshot
        )

    async def intend(self, snapshot: str = "") -> None:
        """Record that the call will change something, before it does. Raise a ``SidecarError`` if that cannot be kept:
        then nothing may be changed."""
        self.note(snapshot=snapshot)
        if self._intended != self.call:
            self._intended = self.call
            await self._trail.write_line(Kind.INTENT, **describe_call(self._id, self.call))

    async def end(self, outcome: str, status: int = 0, *, wait: bool = True) -> None:
        """Record what came of the call. If it was announced, return once that is kept, unless ``wait`` is false. Called
        again, do nothing."""
        if self._ended:
            return
        self._ended = True
        told: dict[str, Any] = {**describe_call(self._id, self.call), "outcome": outcome, "status": status}
        if self._intended is None or not wait:
            self._trail.write_soon(Kind.OUTCOME, **told)
            return
        try:
            await self._trail.write_line(Kind.OUTCOME, **told)
        except SidecarError as problem:
            # The change was made and its intent is kept, so the audit says that it may have happened. The line is
            # written with the next ones.
            self._trail.log_failure(problem)
            self._trail.write_later()


class Trail:
    """Records calls in a chain, and in the log of a service. With neither, it records nothing."""

    def __init__(
        self,
        open_sinks: Callable[[str], Mapping[str, Sink]] | None = None,
        log: Log | None = None,
    ) -> None:
        self._open_sinks = open_sinks
        self._log = log
        self._chain: Chain | None = None
        self._later: asyncio.Task[None] | None = None

    @property
    def chain(self) -> str:
        """The id of the chain; empty if lines are not kept."""
        return self._chain.id if self._chain is not None else ""

    async def open(self) -> None:
        """Begin a chain, if lines are kept. Nothing is written yet. Raise a ``SidecarError``."""
        if self._open_sinks is None:
            return
        id = make_chain_id(datetime.now(UTC))
        sinks = self._open_sinks(id)
        after = "".join([await sink.find_latest() for sink in sinks.values()])
        self._chain = Chain(sinks, id)
        process = {"host": socket.gethostname()[:100], "pid": os.getpid(), "version": __version__}
        self._chain.append(kind=Kind.OPENED, after=after, **process, format=FORMAT)

    def begin(self, call: Call) -> Record:
        """Return the record of a call that begins. Raise ``AuditUnwritable`` if it could not be told."""
        if self._chain is not None:
            self._chain.check_room()
        return Record(self, call)

    def add(self, call: Call, outcome: str) -> None:
        """Record something that is done already, and that nobody waits for."""
        self.write_soon(Kind.OUTCOME, **describe_call(secrets.token_hex(8), call), outcome=outcome)

    def add_cuts(self, cuts: Mapping[str, Cut]) -> None:
        """Record how far chains are cut."""
        for chain, cut in cuts.items():
            if self._chain is not None:
                self._chain.append(kind=Kind.CUT, cut=chain, through=cut.through, digest=cut.digest)

    async def write(self) -> None:
        """Write all lines that wait. Raise a ``SidecarError``."""
        if self._chain is not None:
            await self._chain.write()

    async def write_line(self, kind: Kind, **fields: Any) -> None:
        """Append a line and return once it is kept. Raise a ``SidecarError``."""
        self._log_outcome(kind, fields)
        if self._chain is not None:
            await self._chain.write(self._chain.append(kind=kind, **fields))

    def write_soon(self, kind: Kind, **fields: Any) -> None:
        """Append a line that is written with the next ones, or after a few seconds."""
        self._log_outcome(kind, fields)
        if self._chain is not None:
            self._chain.append(kind=kind, **fields)
            self.write_later()

    def write_later(self, pause: float = 0.0) -> None:
        """Write what waits after a few seconds; if that fails again later, until it is done."""
        self._later = self._later or asyncio.create_task(self._write_after(pause or LAZY_SECONDS))

    async def _write_after(self, pause: float) -> None:
        await asyncio.sleep(pause)
        self._later = None  # lines that come from here on may be too late for this write
        try:
            await self.write()
        except SidecarError as problem:
            self.log_failure(problem)
            self.write_later(min(2 * pause, LONGEST_PAUSE))

    def _log_outcome(self, kind: Kind, fields: Mapping[str, Any]) -> None:
        if self._log is not None and kind is Kind.OUTCOME:
            self._log({name: value for name, value in fields.items() if value})

    def log_failure(self, problem: SidecarError) -> None:
        LOG.critical("Lines of the audit are not written yet: %s", problem)

    async def close(self) -> SidecarError | None:
        """End the chain. Return the problem if lines could not be written: they are lost then."""
        if self._later is not None:
            self._later.cancel()
        if self._chain is not None:
            chain, self._chain = self._chain, None
            chain.append(kind=Kind.CLOSED)
            try:
                await chain.close()
            except SidecarError as problem:
                return problem
        return None


def open_trail(settings: Audit, store: Store, log: Log | None) -> Trail:
    """Return the trail that the settings ask for; ``log`` is called with each outcome. It writes once it is opened."""

    def open_sinks(chain: str) -> Mapping[str, Sink]:
        sinks: dict[str, Sink] = {}
        if settings.store:
            sinks["store"] = StoreSink(store, chain)
        if settings.file:
            sinks["file"] = FileSink(settings.file)
        return sinks

    return Trail(open_sinks if settings.kept else None, log)
