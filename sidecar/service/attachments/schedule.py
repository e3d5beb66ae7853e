"""The export schedule of attached sandboxes: at checkpoints, and before the provider ends the sandbox."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable

import structlog

from sidecar.errors import SandboxAsleep, SandboxError, SandboxGone, SandboxNotFound, SidecarError
from sidecar.host.values import dataclass
from sidecar.ports import SandboxStatus
from sidecar.receipts import ExportOutcome, ExportReceipt
from sidecar.service.access.turns import FairTurns
from sidecar.service.attachments.attachment import FORGOTTEN_AFTER, IDLE, AttachmentKey
from sidecar.service.attachments.ledger import Ledger
from sidecar.service.core import Sidecar
from sidecar.service.jobs.scheduler import Jobs

JITTER = 0.1
GONE = (SandboxGone, SandboxNotFound)
CHECKPOINTS, TIMED, ENDS, WATCHES = "checkpoint", "checkpoint at", "end", "watch"
LOOKS, RETRIES = "look", "retry"
RETRY_SECONDS = 2.0
"""The wait after a retryable failure. It doubles with each further failure and never exceeds the time between
checkpoints."""


@dataclass(slots=True)
class _SandboxEnd:
    """When a sandbox ends, as far as it is known, and how its exports went."""

    failures: int = 0
    """The number of exports that failed in a row."""
    planned_for: float = 0.0
    """The end for which the last export is planned or was made, if it was already near when it was planned."""
    unused_until: float = 0.0
    """For a sandbox whose end moves with each use: its end after an export that found nothing new. While that end stays
    the same, the sandbox was not used."""


class ExportSchedule:
    """Plans the exports of the ledger's attachments. ``save`` exports a sandbox; ``report_gone`` is called for one that
    no longer exists."""

    def __init__(
        self,
        sidecar: Sidecar,
        jobs: Jobs,
        ledger: Ledger,
        *,
        save: Callable[[AttachmentKey], Awaitable[ExportReceipt]],
        report_gone: Callable[[AttachmentKey, SidecarError], Awaitable[None]],
    ) -> None:
        self._sidecar = sidecar
        self._jobs = jobs
        self._ledger = ledger
        self._save = save
        self._report_gone = report_gone
        self._ends: dict[AttachmentKey, _SandboxEnd] = {}
        # Checkpoints use only half of the slots, so that callers do not wait for the checkpoints of thousands of
        # sandboxes.
        turns = max(1, sidecar.settings.concurrency // 2)
        self._turns, self._most_of_one = FairTurns(turns), max(1, turns - 1)
        self._log = structlog.get_logger("sidecar")
        ledger.on_change = self.plan

    def plan(self, place: AttachmentKey) -> None:
        """Plan checkpoints for an attachment that is to be exported. For one that is idle, only check periodically
        whether its sandbox has ended."""
        attachment = self._ledger.find(place)
        self._ends.pop(place, None)
        if attachment is not None and attachment.looked_after:
            every = attachment.checkpoint_every
            self._jobs.cancel(_name_job(LOOKS, place))
            self._jobs.every(_name_job(CHECKPOINTS, place), every, self._checkpoint, place, jitter=every * JITTER)
            self._ends[place] = _SandboxEnd()
            return
        self._jobs.cancel(*(_name_job(kind, place) for kind in (CHECKPOINTS, TIMED, WATCHES, ENDS, LOOKS, RETRIES)))
        if attachment is not None and attachment.state == IDLE:
            every = attachment.checkpoint_every
            self._jobs.run_once(_name_job(LOOKS, place), every, self._check_presence, place, every)

    async def checkpoint_all(self) -> None:
        """Export every sandbox that is looked after, in jobs of their own, as many at once as at other checkpoints."""
        for attachment in self._ledger.looked_after:
            self._jobs.run_once(_name_job(TIMED, attachment.place), 0, self._checkpoint, attachment.place)

    def export_soon(self, place: AttachmentKey) -> None:
        """Export within a second, after a take-over: it is not known since when the sandbox was not exported."""
        self._jobs.run_once(_name_job(ENDS, place), random.uniform(0, 1), self._checkpoint, place)

    def watch(self, place: AttachmentKey) -> None:
        """Ask the provider when the sandbox ends."""
        self._jobs.run_once(_name_job(WATCHES, place), 0, self._watch, place)

    def plan_end(self, place: AttachmentKey, ends_at: float) -> None:
        """Plan an export ``lead`` seconds before a sandbox ends. If less time is left, plan only one, because each
        export might prolong the sandbox a little and lead to another."""
        end, left = self._ends.get(place), ends_at - time.time()
        if end is None:
            return
        lead = self._sidecar.settings.lead
        if left <= lead:
            if ends_at <= end.planned_for + 1:
                return
            end.planned_for = ends_at
        self._jobs.run_once(_name_job(ENDS, place), left - lead if left > lead else left / 2, self._export, place)

    async def _checkpoint(self, place: AttachmentKey) -> None:
        """Export when it is its turn. The many sandboxes of one named token do not hold up those of others."""
        attachment = self._ledger.find(place)
        by = attachment.by if attachment is not None else ""
        async with self._turns.held(by, self._most_of_one if by else 0):
            await self._export(place)

    async def _export(self, place: AttachmentKey) -> None:
        """Export, if the sandbox was used, and then ask again when it ends. Errors were recorded and logged by
        ``save``."""
        if await self._is_unused(place):
            return
        nothing_new, failures = False, 0
        try:
            nothing_new = (await self._save(place)).outcome is ExportOutcome.UNCHANGED
        except SidecarError as problem:
            failures = self._schedule_retry(place) if problem.retryable else 0
        if (end := self._ends.get(place)) is not None:
            end.failures = failures
        await self._watch(place, nothing_new=nothing_new)

    def _schedule_retry(self, place: AttachmentKey) -> int:
        """Plan another attempt, since the next checkpoint may be an hour away. Return how many attempts have failed in
        a row."""
        attachment, end = self._ledger.find(place), self._ends.get(place)
        if attachment is None or end is None:
            return 0
        pause = RETRY_SECONDS * 2**end.failures
        if pause < attachment.checkpoint_every:
            self._jobs.run_once(_name_job(RETRIES, place), pause, self._checkpoint, place)
        return end.failures + 1

    async def _is_unused(self, place: AttachmentKey) -> bool:
        """Whether a sandbox was not used since an export found nothing new in it. Another export would only keep it
        from ending."""
        end = self._ends.get(place)
        if end is None or not end.unused_until:
            return False
        try:
            presence = await self._read_presence(place)
        except SandboxAsleep:
            return True  # a sleeping sandbox keeps its files
        except SandboxError:
            return False  # the export will report the problem
        return presence.slides and presence.ends_at is not None and presence.ends_at <= end.unused_until + 1

    async def _watch(self, place: AttachmentKey, *, nothing_new: bool = False) -> None:
        """Ask the provider when a sandbox will end, and plan an export before that."""
        attachment = self._ledger.find(place)
        if attachment is None or not attachment.looked_after:
            return
        try:
            presence = await self._read_presence(place)
        except GONE as problem:
            await self._report_gone(place, problem)
        except SandboxError as problem:
            if attachment.problem_code != problem.code:  # otherwise it was logged already
                self._log.warning("cannot see when it ends", memory=place[0], sandbox=place[1], **problem.as_dict())
        else:
            if presence.ends_at is not None:
                self.plan_end(place, presence.ends_at)
            if (end := self._ends.get(place)) is not None:
                end.unused_until = presence.ends_at or 0.0 if presence.slides and nothing_new else 0.0

    async def _check_presence(self, place: AttachmentKey, pause: float) -> None:
        """Check whether a sandbox that its caller has exported still exists; each time after twice the pause."""
        attachment = self._ledger.find(place)
        if attachment is None or attachment.state != IDLE or attachment.lasting:
            return
        try:
            await self._read_presence(place)
        except GONE as problem:
            await self._report_gone(place, problem)
            return
        except SandboxError:
            pass  # whatever the problem is, its memory is saved
        if pause < FORGOTTEN_AFTER[IDLE]:
            self._jobs.run_once(_name_job(LOOKS, place), 2 * pause, self._check_presence, place, 2 * pause)

    async def _read_presence(self, place: AttachmentKey) -> SandboxStatus:
        async with self._sidecar.sandboxes.open_fresh(place[1]) as sandbox:
            return await sandbox.connect()


def _name_job(kind: str, place: AttachmentKey) -> str:
    return f"{kind} {place[0]} {place[1]}"
