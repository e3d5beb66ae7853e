"""The retention job: periodically apply the retention rules to the whole store."""

from __future__ import annotations

import structlog

from sidecar.audit.lines import build_own_call
from sidecar.audit.retention import cut_audit
from sidecar.errors import SidecarError
from sidecar.host.text import parse_duration
from sidecar.service.core import Sidecar
from sidecar.service.jobs.scheduler import Jobs
from sidecar.store.retention import forget_due

SOON = 60.0
"""Seconds from the start to the first round, unless rounds are more frequent."""
JITTER = 0.1


class RetentionJob:
    """Runs the retention rules. Several services on one store may do this at once: a service finds done what another
    has done."""

    def __init__(self, sidecar: Sidecar, jobs: Jobs, *, keep_audit: float = 0.0) -> None:
        """``keep_audit``: for how many seconds lines of the audit stay; 0: for good."""
        self._sidecar = sidecar
        self._keep_audit = keep_audit
        self._jobs = jobs
        self._log = structlog.get_logger("sidecar")

    def start(self) -> None:
        if cron := self._sidecar.settings.find_cron(self._sidecar.engine.retention.at):
            self._jobs.at("retention", cron, self._run_round)
            return
        every = parse_duration(self._sidecar.engine.retention.every).total_seconds()
        self._jobs.every("retention", every, self._run_round, jitter=every * JITTER, first=min(SOON, every))

    async def _run_round(self) -> None:
        record = self._sidecar.trail.begin(build_own_call("retention"))
        await record.intend()
        outcome = "failed"
        try:
            outcome = f"forgot {await self._forget()}"
        except SidecarError as problem:
            outcome = problem.code
            raise
        finally:
            await record.end(outcome)
        if self._keep_audit:
            store = self._sidecar.engine.repository.store
            if removed := await cut_audit(store, self._sidecar.trail, self._keep_audit):
                self._log.info("old lines of the audit are removed", objects=removed)

    async def _forget(self) -> int:
        """Apply the rules to every memory of which something may be due. Return how many snapshots went."""
        engine = self._sidecar.engine
        done, over = await forget_due(engine.repository, engine.retention)
        for one in done:
            self._sidecar.publish_forgot(one)
            if one.forgotten:
                self._sidecar.trail.add(build_own_call("retention", memory=one.memory), f"forgot {one.forgotten}")
            if one.problem or one.over_bytes:
                about = {"problem": one.problem, "over_bytes": one.over_bytes}
                self._log.warning("retention cannot do all it should", memory=one.memory, **about)
        if over:
            self._log.warning("what has to stay is more than store_bytes allows", over_bytes=over)
        return sum(one.forgotten for one in done)
