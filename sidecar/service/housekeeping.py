"""Housekeeping: now and then, apply the retention rules to the whole store."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import structlog
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from sidecar.errors import SidecarError
from sidecar.retention.forgetting import forget_all
from sidecar.retention.settings import duration
from sidecar.service.sidecar import Sidecar

SOON = 60.0
"""Seconds from the start to the first round, unless rounds are more frequent."""
JITTER = 0.1


class Housekeeping:
    """Several services on one store may all do this at once; what one has done the others find done."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar
        self._scheduler = AsyncIOScheduler(timezone=UTC)
        self._log = structlog.get_logger("sidecar")

    def start(self) -> None:
        every = duration(self._sidecar.engine.retention.every).total_seconds()
        first = datetime.now(UTC) + timedelta(seconds=min(SOON, every))
        self._scheduler.start()
        self._scheduler.add_job(
            self._round,
            "interval",
            seconds=every,
            jitter=every * JITTER,
            next_run_time=first,
            coalesce=True,
            max_instances=1,
            misfire_grace_time=None,
        )

    def stop(self) -> None:
        """A round that is under way may be cut short anywhere."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

    async def _round(self) -> None:
        """What goes wrong is told, never raised: there will be a next time."""
        engine = self._sidecar.engine
        try:
            done, over = await forget_all(engine.repository, engine.retention)
        except asyncio.CancelledError:  # the scheduler is shut down
            return
        except SidecarError as problem:
            self._log.error("could not apply the retention rules", **problem.as_dict())
            return
        except Exception:
            self._log.exception("a mistake of ours while applying the retention rules")
            return
        for one in done:
            self._sidecar.tell_forgot(one)
            if one.problem or one.over_bytes:
                about = {"problem": one.problem, "over_bytes": one.over_bytes}
                self._log.warning("retention cannot do all it should", memory=one.memory, **about)
        if over:
            self._log.warning("what has to stay is more than store_bytes allows", over_bytes=over)
