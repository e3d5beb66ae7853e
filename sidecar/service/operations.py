"""Exports and restores under way: so many at once, one at a time per memory, the rest in a queue that has an end."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import structlog

from sidecar.errors import SidecarError
from sidecar.receipts import ExportReceipt, RestoreOutcome, RestoreReceipt
from sidecar.service.attachments.trouble import find_save_problem
from sidecar.service.events import Events, publish_accepted

REMEMBERED = 1000
Receipt = ExportReceipt | RestoreReceipt


class TooBusy(SidecarError):
    """As much is waiting as may wait."""

    code = "too-busy"
    retryable = True
    default_hint = "Wait as long as Retry-After says, then send the same request again."


class Stopping(SidecarError):
    """The service is about to stop, or stopped before this was done."""

    code = "stopping"
    retryable = True
    default_hint = "The service is about to end; send the same request again once it is back."


class NotWanted(SidecarError):
    """What was queued was not wanted any more when its turn came. Nothing happened."""

    code = "needless"
    default_hint = "Nothing to do."


@dataclass(slots=True)
class Operation:
    """One export or restore, from the moment it was accepted. It is a ``Progress`` for the engine."""

    kind: str
    memory: str
    sandbox: str
    conversation: str = ""
    snapshot: str = ""
    """The one it makes or restores, once that is known."""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    state: str = "queued"
    """"queued", "running", "done" or "failed"."""
    created: float = field(default_factory=time.time)
    finished: float | None = None
    doing: str = ""
    done_bytes: int = 0
    total_bytes: int | None = None
    receipt: Receipt | None = None
    problem: SidecarError | None = None
    ours: bool = False
    """No caller asked for it: the service does it of itself."""
    told: str = ""
    """The trouble that an export of this sandbox is known to meet: the same again is counted, and not told once more."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    held: AsyncExitStack = field(default_factory=AsyncExitStack)
    """What it needs until it has ended, however it ends."""

    def about(self, snapshot: str) -> None:
        self.snapshot = snapshot

    def step(self, name: str, total: int | None = None) -> None:
        self.doing, self.done_bytes, self.total_bytes = name, 0, total
        structlog.get_logger("sidecar").info(name, **self.build_log_fields())

    def advance(self, count: int) -> None:
        self.done_bytes += count

    def build_log_fields(self) -> dict[str, str]:
        """What every line of the log about it says."""
        about = {
            "operation": self.id,
            "kind": self.kind,
            "memory": self.memory,
            "sandbox": self.sandbox,
            "conversation": self.conversation,
            "snapshot": self.snapshot,
        }
        return {name: value for name, value in about.items() if value}

    async def result(self) -> Receipt:
        """Wait for it. Raise what it failed with."""
        await self.ended.wait()
        if self.problem is not None:
            raise self.problem
        assert self.receipt is not None
        return self.receipt


class Locks:
    """A lock per name, kept while anybody holds it or waits for it."""

    def __init__(self) -> None:
        self._locks: dict[Hashable, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def held(self, name: Hashable) -> AsyncIterator[None]:
        lock, users = self._locks.get(name, (asyncio.Lock(), 0))
        self._locks[name] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks.pop(name)
            if users > 1:
                self._locks[name] = lock, users - 1


class Operations:
    """Accepts work, runs it, and remembers what came of the last ones."""

    def __init__(self, events: Events, *, concurrency: int, queue: int) -> None:
        self._events = events
        self._turns = asyncio.Semaphore(concurrency)
        self._most = concurrency + queue
        self._memories = Locks()
        self._open: dict[asyncio.Task[None], Operation] = {}
        self._known: OrderedDict[str, Operation] = OrderedDict()
        self.told_to_stop = asyncio.Event()
        self._log = structlog.get_logger("sidecar")

    def start(
        self, operation: Operation, work: Callable[[Operation], Awaitable[Receipt]], *, ours: bool = False
    ) -> Operation:
        """Queue it. Raise ``TooBusy`` when the queue is full and ``Stopping`` when no more is accepted.

        What the service does of itself (``ours``) is neither refused for want of room nor while it winds down.
        """
        if not ours:
            self.check_intake()
        operation.ours = ours
        self._remember(operation)
        task = asyncio.create_task(self._run(operation, work))
        self._open[task] = operation
        task.add_done_callback(lambda done: self._open.pop(done, None))
        return operation

    def check_intake(self) -> None:
        """Raise ``TooBusy`` or ``Stopping`` when nothing more is accepted now."""
        if self.stopping:
            raise Stopping("The service is about to end and takes no more work.")
        asked = sum(not operation.ours for operation in self._open.values())
        if asked >= self._most:
            raise TooBusy(f"{asked} operations run or wait already.")

    def repeat(self, operation: Operation, receipt: Receipt) -> Operation:
        """An operation that was done before: nothing happens, and its receipt is there."""
        operation.receipt, operation.state, operation.finished = receipt, "done", time.time()
        operation.ended.set()
        self._remember(operation)
        return operation

    def _remember(self, operation: Operation) -> None:
        self._known[operation.id] = operation
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def find(self, id: str) -> Operation | None:
        return self._known.get(id)

    @property
    def waiting(self) -> int:
        return sum(operation.state == "queued" for operation in self._open.values())

    @property
    def running(self) -> int:
        return sum(operation.state == "running" for operation in self._open.values())

    @property
    def stopping(self) -> bool:
        return self.told_to_stop.is_set()

    def stop(self) -> None:
        """Take no more."""
        self.told_to_stop.set()

    def unfinished(self) -> list[Operation]:
        return list(self._open.values())

    async def drain(self, seconds: float) -> list[Operation]:
        """Wait for all that is open; return what is not done by then."""
        if self._open:
            await asyncio.wait(list(self._open), timeout=max(0.0, seconds))
        return list(self._open.values())

    async def _run(self, operation: Operation, work: Callable[[Operation], Awaitable[Receipt]]) -> None:
        # Whatever is logged on the way, by a library too, says whose it is.
        structlog.contextvars.bind_contextvars(**operation.build_log_fields())
        try:
            async with self._memories.held(operation.memory), self._turns:
                operation.state = "running"
                self._log.info(f"{operation.kind} begins")
                operation.receipt = await work(operation)
                operation.state = "done"
        except SidecarError as problem:
            operation.problem, operation.state = problem, "failed"
        except asyncio.CancelledError:
            operation.problem, operation.state = Stopping("The service ended before this was done."), "failed"
        except Exception as problem:  # a mistake of ours: the caller hears of it, and so does the log
            self._log.exception(f"{operation.kind} broke")
            operation.problem, operation.state = SidecarError(f"An unexpected {type(problem).__name__}."), "failed"
        finally:
            await operation.held.aclose()
            operation.finished = time.time()
            if not isinstance(operation.problem, NotWanted):
                self._publish(operation)
            operation.ended.set()

    def _publish(self, operation: Operation) -> None:
        took = max(0.0, round((operation.finished or 0) - operation.created, 3))
        if operation.receipt is not None:
            self._publish_receipt(operation, operation.receipt, took)
        elif operation.problem is not None:
            about, again = operation.problem.as_dict(), operation.problem.code == operation.told
            log = self._log.info if again else self._log.error
            log(f"{operation.kind} failed", seconds=took, **{**about, **operation.build_log_fields()})
            publish = self._events.repeat if again else self._events.publish
            publish(
                f"{operation.kind}.failed",
                memory=operation.memory,
                sandbox=operation.sandbox,
                operation=operation.id,
                conversation=operation.conversation,
                seconds=took,
                error=about,
            )

    def _publish_receipt(self, operation: Operation, said: Receipt, took: float) -> None:
        outcome, again = said.outcome.value, False
        operation.about(said.snapshot or "")
        about: dict[str, Any] = {**({"reason": asdict(said.reason)} if said.reason else {}), **_list_spared(said)}
        log = self._log.warning if said.outcome is RestoreOutcome.INCOMPLETE else self._log.info
        if isinstance(said, RestoreReceipt) and said.wanted:
            about["wanted"], log = said.wanted, self._log.warning  # another snapshot came in its place
        if isinstance(said, ExportReceipt):
            trouble = find_save_problem(said)
            about["saved"] = said.is_saved
            if trouble is not None:
                again = trouble.kind == operation.told
                about["hint"] = trouble.hint
                log = self._log.info if again else self._log.warning
        log(f"{operation.kind} {outcome}", bytes=said.bytes, seconds=took, **about, **operation.build_log_fields())
        publish = self._events.repeat if again else self._events.publish
        publish(
            f"{operation.kind}.{outcome}",
            memory=operation.memory,
            sandbox=operation.sandbox,
            operation=operation.id,
            conversation=operation.conversation,
            snapshot=said.snapshot,
            files=said.files,
            bytes=said.bytes,
            packed_bytes=said.packed_bytes,
            seconds=took,
            warnings=said.warnings,
            **about,
        )
        if isinstance(said, ExportReceipt) and said.accepted is not None:
            publish_accepted(
                self._events,
                memory=operation.memory,
                sandbox=operation.sandbox,
                by="repetition",
                operation=operation.id,
                conversation=operation.conversation,
                snapshot=said.snapshot,
                reasons=[reason.code for reason in said.accepted.reasons],
                since=said.accepted.since,
                refusals=said.accepted.refusals,
                replaced=said.accepted.replaced,
                pinned=said.accepted.pinned,
            )


def _list_spared(receipt: Receipt) -> dict[str, Any]:
    """What a restore left as it was, saved first or set aside, if anything, and why it is incomplete if it is."""
    if not isinstance(receipt, RestoreReceipt):
        return {}
    names = ("kept", "saved_first", "saved_first_memory", "set_aside", "read_only", "reason")
    whole = receipt.as_dict()
    return {name: whole[name] for name in names if whole[name]}
