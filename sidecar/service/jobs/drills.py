"""The drill job: periodically restore a random snapshot into a scratch folder, to prove that snapshots can be restored."""

from __future__ import annotations

import random
from typing import Any

import structlog

from sidecar.audit.lines import build_own_call
from sidecar.engine.drills import choose_drills, run_drill
from sidecar.service.core import Sidecar
from sidecar.service.jobs.scheduler import Jobs

SOON = 300.0
"""Seconds from the start to the first drill, unless drills are more frequent."""
JITTER = 0.1


class DrillJob:
    """Runs a drill every ``drill_every`` seconds, or at the times of ``drill_at``, and publishes its result."""

    def __init__(self, sidecar: Sidecar, jobs: Jobs) -> None:
        self._sidecar = sidecar
        self._jobs = jobs
        self._chance = random.SystemRandom()
        self._log = structlog.get_logger("sidecar")

    def start(self) -> None:
        every = self._sidecar.settings.drill_every
        if cron := self._sidecar.settings.find_cron(self._sidecar.settings.drill_at):
            self._jobs.at("drill", cron, self._run_drill)
        elif every:
            self._jobs.every("drill", every, self._run_drill, jitter=every * JITTER, first=min(SOON, every))

    async def _run_drill(self) -> None:
        """Run one drill of a random snapshot, then log and publish its result."""
        engine, most = self._sidecar.engine, self._sidecar.settings.drill_bytes
        for memory, snapshot in await choose_drills(engine, "", 1, self._chance, most_bytes=most):
            done = await run_drill(engine, memory, snapshot)
            about: dict[str, Any] = {
                "snapshot": snapshot,
                "files": done.files,
                "bytes": done.bytes,
                "problem": done.problem,
            }
            if done.ok:
                self._log.info("a drill went well", memory=memory, **about)
            else:
                self._log.error("a snapshot does not come back", memory=memory, **about)
            outcome = "passed" if done.ok else "failed"
            self._sidecar.trail.add(build_own_call("drill", memory=memory, snapshot=snapshot), outcome)
            self._sidecar.events.publish("drill.passed" if done.ok else "drill.failed", memory=memory, **about)
