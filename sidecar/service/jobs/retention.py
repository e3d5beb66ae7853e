"""The retention job: periodically apply the retention rules to the whole store."""

from __future__ import annotations

import structlog

from sidecar.host.text import parse_duration
from sidecar.service.core import Sidecar
from sidecar.service.jobs.scheduler import Jobs
from sidecar.store.retention import forget_all

SOON = 60.0
"""Seconds from the start to the first round, unless rounds are more frequent."""
JITTER = 0.1


class RetentionJob:
    """Runs the retention rules. Several services on one store may do this at once: a service finds done what another
    has done."""

    def __init__(self, sidecar: Sidecar, jobs: Jobs) -> None:
        self._sidecar = sidecar
        self._jobs = jobs
        self._log = structlog.get_logger("sidecar")

    def start(self) -> None:
        if cron := self._sidecar.settings.find_cron(self._sidecar.engine.retention.at):
            self._jobs.at("retention", cron, self._run_round)
            return
        every = parse_duration(self._sidecar.engine.retention.every).total_seconds()
        self._jobs.every("retention", every, self._run_round, jitter=every * JITTER, first=min(SOON, every))

    async def _run_round(self) -> None:
        engine = self._sidecar.engine
        done, over = await forget_all(engine.repository, engine.retention)
        for one in done:
            self._sidecar.publish_forgot(one)
            if one.problem or one.over_bytes:
                about = {"problem": one.problem, "over_bytes": one.over_bytes}
                self._log.warning("retention cannot do all it should", memory=one.memory, **about)
        if over:
            self._log.warning("what has to stay is more than store_bytes allows", over_bytes=over)
