"""One sandbox that names its memory, from being noticed to being looked after.

Who may change the memory is decided first, then it is noted that this service restores, then the memory is restored and the
sandbox attached. A service that dies in between leaves the note: the next one goes on from what the sandbox says itself, so
that nothing is restored a second time over what an agent wrote since.
"""

from __future__ import annotations

import time
from dataclasses import replace

import structlog

from sidecar.audit.lines import build_own_call
from sidecar.engine import RestoreRequest
from sidecar.engine.restores.sign import Sign, read_sign
from sidecar.errors import SandboxAsleep, SidecarError, SwapLost
from sidecar.host.values import dataclass
from sidecar.receipts import RestoreReceipt
from sidecar.service.attachments.attachment import CareOptions
from sidecar.service.attachments.keeper import Keeper
from sidecar.service.attachments.schedule import GONE
from sidecar.service.core import Sidecar
from sidecar.service.operations import Stopping, TooBusy
from sidecar.service.sandboxes import SandboxTarget
from sidecar.service.settings import READER, Watch
from sidecar.service.starts import StartRequest, Starts
from sidecar.service.watch.records import (
    ATTACHED,
    CALLERS,
    FAILED,
    READING,
    RESTORING,
    Held,
    Notice,
    Notices,
    Writers,
)
from sidecar.service.watch.selection import Named

OVER = (ATTACHED, READING, CALLERS, FAILED)
SOON = 1.0
BUSY = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 300.0
"""Seconds until a failed attempt is repeated; doubled with each further failure."""
MOST_ATTEMPTS = 3
"""How often it is tried where a repetition is not expected to help."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be done next about a sandbox: nothing any more (``over``), look again after ``seconds``, or wait until it is
    listed again."""

    over: bool = False
    seconds: float | None = None
    notice: Notice | None = None
    """What is known of it now; ``None``: nothing that concerns anyone."""


NOTHING_MORE = Verdict(over=True)
WHEN_LISTED = Verdict()


class Arrivals:
    """Takes in sandboxes that name their memory."""

    def __init__(self, sidecar: Sidecar, keeper: Keeper, starts: Starts) -> None:
        self._sidecar, self._keeper, self._starts = sidecar, keeper, starts
        store = sidecar.engine.repository.store
        self.notices, self.writers = Notices(store), Writers(store)
        self._log = structlog.get_logger("sidecar")

    async def take_in(self, named: Named, via: str) -> Verdict:
        """Restore into a sandbox and look after it, unless that was done. What fails is noted, and tried again later. Raise
        a ``SidecarError`` if the store does not answer."""
        ref, memory = named.sandbox.ref, named.memory
        held = await self.notices.read(ref)
        if held is None:
            if await self._is_known(memory, ref):
                return NOTHING_MORE  # its caller attached it, or restored into it through a service
        elif held.record.state in OVER:
            return Verdict(over=True, notice=held.record)
        elif held.record.not_before > time.time():
            return Verdict(seconds=held.record.not_before - time.time(), notice=held.record)
        elif held.record.instance and held.record.instance in await self._starts.list_others():
            return Verdict(seconds=BUSY)
        try:
            return await self._take_in(named, held, via)
        except SwapLost:
            return Verdict(seconds=SOON)  # another service is at it

    async def _take_in(self, named: Named, held: Held[Notice] | None, via: str) -> Verdict:
        ref, before = named.sandbox.ref, held.record if held is not None else None
        if before is not None and before.memory != named.memory:
            named = replace(named, memory=before.memory)  # its labels were changed half way
        begun = before is not None and before.begun
        notice = replace(
            before or Notice(sandbox=ref, memory=named.memory, state=RESTORING, noticed=time.time()),
            instance=self._keeper.lease.instance,
        )
        try:
            sign = await self._read_sign(ref, named.table.user)
            if sign is not None and not begun:
                callers = replace(notice, memory=sign.memory, state=CALLERS, instance="", problem="", hint="")
                return Verdict(over=True, notice=(await self.notices.write(callers, held)).record)
            beside = await self._find_beside(named, restored=sign is not None and not notice.reader)
            notice = replace(notice, begun=True, reader=bool(beside))
            held = await self.notices.write(notice, held)
            done = await self._put_in_place(named, notice, sign)
        except GONE as problem:
            await self.forget(ref, problem)
            return NOTHING_MORE
        except (SandboxAsleep, Stopping, TooBusy) as problem:
            await self.notices.write(replace(notice, instance=""), held)
            return WHEN_LISTED if isinstance(problem, SandboxAsleep) else Verdict(seconds=BUSY)
        except SwapLost:
            raise
        except SidecarError as problem:
            return await self._note_failure(notice, held, problem, via)
        notice = replace(
            notice,
            state=READING if beside else ATTACHED,
            instance="",
            snapshot=(done.snapshot or "") if done else (sign.snapshot or "") if sign else "",
            problem=f"{beside} has {named.memory} already: what is written here stays beside the head."
            if beside
            else "",
            hint="",
        )
        await self.notices.write(notice, held)
        self._tell(named, notice, done, via, beside)
        return Verdict(over=True, notice=notice)

    async def _is_known(self, memory: str, ref: str) -> bool:
        """Whether a sandbox is looked after, or was lately, for whatever memory."""
        if any(one.sandbox == ref for one in self._keeper.list_known()):
            return True
        return await self._starts.find_attachment(memory, ref) is not None

    async def _read_sign(self, ref: str, user: str) -> Sign | None:
        async with self._sidecar.sandboxes.use(SandboxTarget(ref, user=user)) as box:
            await box.connect()
            return await read_sign(box)

    async def _find_beside(self, named: Named, *, restored: bool) -> str:
        """Return the living sandbox that has the memory, if this one is to be a reader; empty if it may change the
        memory, which is then claimed for it. Raise ``SwapLost``, or a ``SidecarError`` if it cannot be said now.

        ``restored``: a service that died since restored into it, as the one that may. Whoever came since is a reader.
        """
        ref, memory = named.sandbox.ref, named.memory
        if restored or named.table.second != READER:
            return ""
        holder, version = await self.writers.read(memory)
        rows = [one for one in await self._keeper.find_all() if one.memory == memory and one.looked_after]
        others = dict.fromkeys([one.sandbox for one in rows] + [holder])
        for other in others:
            if other and other != ref and await self._lives(memory, other):
                return other
        if holder != ref:
            await self.writers.claim(memory, ref, version)
        return ""

    async def _lives(self, memory: str, ref: str) -> bool:
        """Whether another sandbox exists. One that is paused does. Raise a ``SidecarError`` if its provider may say soon."""
        try:
            return not await self._starts.is_gone(memory, ref)
        except SidecarError as problem:
            if problem.retryable:
                raise
            return True  # a reader does no harm, whatever that one is

    async def _put_in_place(self, named: Named, notice: Notice, sign: Sign | None) -> RestoreReceipt | None:
        """Restore the memory and look after the sandbox; return the receipt. ``None``: a service that died since restored
        it, and nothing is put over what was written there since."""
        ref, memory, table = notice.sandbox, notice.memory, named.table
        request = _build_request(named, memory, reader=notice.reader)
        if sign is None:
            return await self._restore(request, ref, reader=notice.reader)
        if notice.reader:
            return None
        if (await self._sidecar.engine.repository.head(memory)).snapshot == sign.snapshot:
            return await self._restore(request, ref, reader=False)  # it holds the head, and is left as it is
        await self._keeper.look_after((memory, ref), _build_care(table))
        self._keeper.checkpoint_soon((memory, ref))
        return None

    async def _restore(self, request: StartRequest, ref: str, *, reader: bool) -> RestoreReceipt | None:
        if reader:
            return await self._starts.restore(request, ref)
        return (await self._starts.restore_and_attach(request, ref)).restored

    async def _note_failure(
        self, before: Notice, held: Held[Notice] | None, problem: SidecarError, via: str
    ) -> Verdict:
        """Note and say that a sandbox has no memory yet, and when it is tried again."""
        failures = before.failures + 1
        pause = min(FIRST_PAUSE * 2 ** min(failures - 1, 30), LONGEST_PAUSE)
        over = not problem.retryable and failures >= MOST_ATTEMPTS
        notice = replace(
            before,
            state=FAILED if over else RESTORING,
            instance="",
            failures=failures,
            not_before=0.0 if over else time.time() + pause,
            problem=f"{problem.code}: {problem.message}",
            hint=problem.hint,
        )
        await self.notices.write(notice, held)
        if over:
            await self.writers.release(notice.memory, notice.sandbox)
        about, told = {"memory": notice.memory, "sandbox": notice.sandbox}, problem.as_dict()
        self._log.error("a sandbox that names its memory has none", **about, via=via, failures=failures, **told)
        again = before.problem == notice.problem
        self._sidecar.events.publish("sandbox.not-restored", again, **about, via=via, failures=failures, error=told)
        return Verdict(over=over, seconds=None if over else pause, notice=notice)

    def _tell(self, named: Named, notice: Notice, done: RestoreReceipt | None, via: str, beside: str) -> None:
        seconds = max(0.0, round(time.time() - named.sandbox.created, 1)) if named.sandbox.created else 0.0
        outcome = done.outcome.value if done is not None else "kept"
        log = self._log.warning if beside else self._log.info
        about = {"memory": notice.memory, "sandbox": notice.sandbox}
        self._sidecar.trail.add(build_own_call("watch", **about), "reader" if notice.reader else outcome)
        log("a sandbox that names its memory has it", **about, outcome=outcome, via=via, beside=beside, seconds=seconds)
        self._sidecar.events.publish(
            "sandbox.noticed",
            **about,
            via=via,
            outcome=outcome,
            snapshot=notice.snapshot or None,
            reader=notice.reader,
            beside=beside,
            seconds=seconds,
        )

    async def forget(self, ref: str, problem: SidecarError) -> None:
        """Note that a sandbox is gone: the keeper of each memory it was looked after for is told."""
        for memory in {one.memory for one in self._keeper.list_known() if one.sandbox == ref and one.looked_after}:
            await self._keeper.report_gone(memory, ref, problem)
        await self.notices.remove(ref)


def _build_request(named: Named, memory: str, *, reader: bool) -> StartRequest:
    """Return what is asked for, as if the sandbox had just been created by a call."""
    table = named.table
    return StartRequest(
        provider=table.provider,
        template="",
        metadata={},
        timeout=None,
        restore=RestoreRequest(
            memory=memory,
            projects=None if table.projects is None else tuple(table.projects),
            must_exist=table.must_exist,
            read_only=reader,
            announce=True,
        ),
        care=_build_care(table),
    )


def _build_care(table: Watch) -> CareOptions:
    return CareOptions(
        layouts=table.layouts,
        projects=table.projects,
        checkpoint_every=table.checkpoint_every,
        user=table.user,
        lasting=True,
    )
