"""Operations: exports and restores that wait or run. A limited number runs at once, one at a time per memory; the rest
waits in a bounded queue."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, field
from typing import Any

import structlog

from sidecar.audit.lines import build_own_call
from sidecar.audit.trail import Record, Trail
from sidecar.errors import SidecarError
from sidecar.host.values import dataclass
from sidecar.receipts import ExportReceipt, RestoreOutcome, RestoreReceipt
from sidecar.service.access.grants import ITSELF, Caller
from sidecar.service.access.turns import FairTurns
from sidecar.service.attachments.trouble import find_save_problem
from sidecar.service.calls import get_current_call
from sidecar.service.events import Events, publish_accepted

REMEMBERED = 1000
SHARE, LEAST_OF_ONE = 8, 16
"""One named token may have this part of all operations open, and always so many."""
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
    """One export or restore, from the moment it was accepted. It is the engine's ``Progress``."""

    kind: str
    memory: str
    sandbox: str
    conversation: str = ""
    snapshot: str = ""
    """The snapshot that it makes or restores, once that is known."""
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
    caller: Caller = ITSELF
    """Who asked for it."""
    ours: bool = False
    """The service started it, not a caller."""
    why: str = ""
    """Why the service started it: "checkpoint", "shutdown"."""
    side_by_side: bool = False
    """It need not wait for others of its memory, only for those in its sandbox."""
    record: Record | None = None
    """What the audit tells of it, from the moment it was accepted."""
    told: str = ""
    """The code of a problem that was already reported for this sandbox: the same problem again is counted, but not
    reported again."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    held: AsyncExitStack = field(default_factory=AsyncExitStack)
    """Resources that it needs until it has ended, however it ends."""

    def about(self, snapshot: str) -> None:
        self.snapshot = snapshot

    def step(self, name: str, total: int | None = None) -> None:
        self.doing, self.done_bytes, self.total_bytes = name, 0, total
        structlog.get_logger("sidecar").info(name, **self.build_log_fields())

    def advance(self, count: int) -> None:
        self.done_bytes += count

    def build_log_fields(self) -> dict[str, str]:
        """Return the fields for every log line about it."""
        about = {
            "operation": self.id,
            "kind": self.kind,
            "memory": self.memory,
            "sandbox": self.sandbox,
            "conversation": self.conversation,
            "snapshot": self.snapshot,
        }
        return {name: value for name, value in about.items() if value}

    async def intend(self, snapshot: str) -> None:
        """Record in the audit that it will store or change something now, before it does: the engine's ``reached``.
        Raise a ``SidecarError`` if that cannot be kept."""
        if self.record is not None:
            await self.record.intend(snapshot)

    def build_event_fields(self) -> dict[str, str]:
        """Return the fields for every event about it."""
        return {
            "memory": self.memory,
            "sandbox": self.sandbox,
            "operation": self.id,
            "conversation": self.conversation,
        }

    @property
    def place(self) -> Hashable:
        """What only one operation works with at a time."""
        return (self.memory, self.sandbox) if self.side_by_side else self.memory

    async def result(self) -> Receipt:
        """Wait until it has ended and return its receipt. Raise the error that it failed with."""
        await self.ended.wait()
        if self.problem is not None:
            raise self.problem
        assert self.receipt is not None
        return self.receipt


class Locks:
    """A lock per name, kept only while it is in use."""

    def __init__(self) -> None:
        self._locks: dict[Hashable, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def held(self, name: Hashable) -> AsyncIterator[None]:
        """Lock a name for the body."""
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
    """Accepts work, runs it, and remembers the results of the last ``REMEMBERED`` operations."""

    def __init__(self, events: Events, trail: Trail, *, concurrency: int, queue: int) -> None:
        self._events = events
        self._trail = trail
        self._turns = FairTurns(concurrency)
        self._concurrency = concurrency
        self._most = concurrency + queue
        self._most_of_one = max(LEAST_OF_ONE, self._most // SHARE)
        self._memories = Locks()
        self._open: dict[asyncio.Task[None], Operation] = {}
        self._known: OrderedDict[str, Operation] = OrderedDict()
        self.told_to_stop = asyncio.Event()
        self._log = structlog.get_logger("sidecar")

    def start(
        self, operation: Operation, work: Callable[[Operation], Awaitable[Receipt]], *, ours: bool = False
    ) -> Operation:
        """Queue an operation and return it. Raise ``TooBusy`` if the queue is full and ``Stopping`` if the service is
        stopping.

        Operations that the service itself starts (``ours``) are never refused.
        """
        if not ours:
            self.check_intake(operation.caller)
        operation.ours = ours
        operation.record = self._begin_record(operation)
        self._remember(operation)
        task = asyncio.create_task(self._run(operation, work))
        self._open[task] = operation
        task.add_done_callback(lambda done: self._open.pop(done, None))
        return operation

    def _begin_record(self, operation: Operation) -> Record:
        """Begin the record of an operation, in the name of whoever asked for it. Raise ``AuditUnwritable``."""
        current, memory, sandbox = get_current_call(), operation.memory, operation.sandbox
        # What the service does by itself may have been planned while a caller was being answered, so only ``ours`` tells.
        if operation.ours or current is None:
            call = build_own_call(operation.why or operation.kind, memory=memory, sandbox=sandbox)
        else:
            # One that is only a part of what was asked for, as the restore of an attachment, is called what it is.
            part = current.record is not None and current.record.intended
            call = current.build_call(operation.kind if part else current.what, memory=memory, sandbox=sandbox)
            current.operations += 1
        return self._trail.begin(call)

    def check_intake(self, caller: Caller = ITSELF) -> None:
        """Raise ``TooBusy`` or ``Stopping`` if no operation of a caller is accepted now. One named token cannot fill the
        queue for all others."""
        if self.stopping:
            raise Stopping("The service is about to end and takes no more work.")
        asked = [operation for operation in self._open.values() if not operation.ours]
        if len(asked) >= self._most:
            raise TooBusy(f"{self._most} operations run or wait already.")
        if caller.id and sum(one.caller.id == caller.id for one in asked) >= self._most_of_one:
            raise TooBusy(f"{self._most_of_one} operations of this token run or wait already.")

    def _count_turns(self, caller: Caller) -> int:
        """Return how many operations of a caller may run at once; 0: all. A named token always leaves one turn to
        others."""
        most = max(1, self._concurrency - 1)
        return min(caller.quotas.concurrent or most, most) if caller.id else 0

    def repeat(self, operation: Operation, receipt: Receipt) -> Operation:
        """Register an operation that was done before, with its receipt. Nothing is run."""
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
        """Accept no more operations of callers."""
        self.told_to_stop.set()

    def unfinished(self) -> list[Operation]:
        return list(self._open.values())

    async def drain(self, seconds: float) -> list[Operation]:
        """Wait at most ``seconds`` for all open operations. Return those that are not done by then."""
        if self._open:
            await asyncio.wait(list(self._open), timeout=max(0.0, seconds))
        return list(self._open.values())

    async def _run(self, operation: Operation, work: Callable[[Operation], Awaitable[Receipt]]) -> None:
        """Run one operation to its end. Errors are kept in the operation, never raised."""
        # Log lines of libraries get the operation's fields too.
        structlog.contextvars.bind_contextvars(**operation.build_log_fields())
        try:
            # The memory's lock comes first, so that an operation that waits for its memory does not occupy a slot.
            turn = self._turns.held(operation.caller.id, self._count_turns(operation.caller))
            async with self._memories.held(operation.place), turn:
                operation.state = "running"
                self._log.info(f"{operation.kind} begins")
                operation.receipt = await work(operation)
                operation.state = "done"
        except SidecarError as problem:
            operation.problem, operation.state = problem, "failed"
        except asyncio.CancelledError:
            operation.problem, operation.state = Stopping("The service ended before this was done."), "failed"
        except Exception as problem:  # a bug: reported to the caller and logged
            self._log.exception(f"{operation.kind} broke")
            operation.problem, operation.state = SidecarError(f"An unexpected {type(problem).__name__}."), "failed"
        finally:
            await operation.held.aclose()
            operation.finished = time.time()
            await self._end_record(operation)
            if not isinstance(operation.problem, NotWanted):
                self._publish(operation)
            operation.ended.set()

    async def _end_record(self, operation: Operation) -> None:
        """Record what came of an operation, before anybody is told. One that was not wanted and changed nothing leaves
        no record."""
        record, receipt, problem = operation.record, operation.receipt, operation.problem
        if record is None or (isinstance(problem, NotWanted) and not record.intended):
            return
        if receipt is not None:
            also = receipt.saved_first_memory if isinstance(receipt, RestoreReceipt) else ""
            record.note(snapshot=receipt.snapshot or "", also=also or "")
        outcome = receipt.outcome.value if receipt is not None else problem.code if problem is not None else ""
        await record.end(outcome)

    def _publish(self, operation: Operation) -> None:
        """Log and publish the end of an operation. A problem that was reported before is only counted."""
        took = max(0.0, round((operation.finished or 0) - operation.created, 3))
        if operation.receipt is not None:
            self._publish_receipt(operation, operation.receipt, took)
        elif operation.problem is not None:
            about, again = operation.problem.as_dict(), operation.problem.code == operation.told
            log = self._log.info if again else self._log.error
            log(f"{operation.kind} failed", seconds=took, **{**about, **operation.build_log_fields()})
            self._events.publish(
                f"{operation.kind}.failed", again, **operation.build_event_fields(), seconds=took, error=about
            )

    def _publish_receipt(self, operation: Operation, said: Receipt, took: float) -> None:
        """Log and publish a receipt, and separately what was accepted against guards."""
        outcome, again = said.outcome.value, False
        operation.about(said.snapshot or "")
        about: dict[str, Any] = {**({"reason": asdict(said.reason)} if said.reason else {}), **_list_spared(said)}
        log = self._log.warning if said.outcome is RestoreOutcome.INCOMPLETE else self._log.info
        if isinstance(said, RestoreReceipt) and said.wanted:
            about["wanted"], log = said.wanted, self._log.warning  # another snapshot was restored instead
        if isinstance(said, ExportReceipt):
            trouble = find_save_problem(said)
            about["saved"] = said.is_saved
            if trouble is not None:
                again = trouble.kind == operation.told
                about["hint"] = trouble.hint
                log = self._log.info if again else self._log.warning
        # A log is no place for what is in a memory.
        short = {"reason": {"code": said.reason.code, "message": said.reason.headline}} if said.reason else {}
        fields = {**about, **short, **operation.build_log_fields()}
        log(f"{operation.kind} {outcome}", bytes=said.bytes, seconds=took, **fields)
        self._events.publish(
            f"{operation.kind}.{outcome}",
            again,
            **operation.build_event_fields(),
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
                by="repetition",
                **operation.build_event_fields(),
                snapshot=said.snapshot,
                reasons=[reason.code for reason in said.accepted.reasons],
                since=said.accepted.since,
                refusals=said.accepted.refusals,
                replaced=said.accepted.replaced,
                pinned=said.accepted.pinned,
            )


def _list_spared(receipt: Receipt) -> dict[str, Any]:
    """Return the fields of a restore's receipt that say what was kept, saved first or set aside, and why it is
    incomplete."""
    if not isinstance(receipt, RestoreReceipt):
        return {}
    names = ("kept", "saved_first", "saved_first_memory", "set_aside", "read_only", "reason")
    whole = receipt.as_dict()
    return {name: whole[name] for name in names if whole[name]}
