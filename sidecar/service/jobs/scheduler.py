"""The scheduler: named jobs that run periodically or once, with at most one run of each at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from sidecar.errors import SidecarError

Work = Callable[..., Awaitable[None]]
LOOK_AT_CLOCK = 2.0
"""Seconds between two checks of the clock, and by how much it may be set back unnoticed."""


class Jobs:
    """The jobs of one service, on APScheduler."""

    def __init__(self) -> None:
        self._scheduler = AsyncIOScheduler(timezone=UTC)
        self._clock: asyncio.Task[None] | None = None
        self._log = structlog.get_logger("sidecar")

    def start(self) -> None:
        self._scheduler.start()
        self._clock = asyncio.create_task(self._follow_clock())

    @property
    def running(self) -> bool:
        return bool(self._scheduler.running)

    def every(
        self, name: str, seconds: float, work: Work, *args: Any, jitter: float = 0.0, first: float | None = None
    ) -> None:
        """Run ``work`` every ``seconds``, in place of any job of that name; the first time after ``first`` seconds.

        A run that is due while the previous one is still active is skipped.
        """
        self._scheduler.add_job(
            self._run,
            "interval",
            seconds=seconds,
            jitter=jitter or None,
            args=[name, work, *args],
            id=name,
            next_run_time=_compute_time(seconds if first is None else first),
            replace_existing=True,
            coalesce=True,
            max_instances=1,
            misfire_grace_time=None,
        )

    def run_once(self, name: str, seconds: float, work: Work, *args: Any) -> None:
        """Run ``work`` once in ``seconds``, in place of any job of that name."""
        self._scheduler.add_job(
            self._run,
            "date",
            run_date=_compute_time(seconds),
            args=[name, work, *args],
            id=name,
            replace_existing=True,
            misfire_grace_time=None,
        )

    def cancel(self, *names: str) -> None:
        for name in names:
            if self._scheduler.get_job(name):
                self._scheduler.remove_job(name)

    def stop(self) -> None:
        """Start no more jobs."""
        if self._clock is not None:
            self._clock.cancel()
        if self._scheduler.running:
            self._scheduler.remove_all_jobs()
            self._scheduler.shutdown(wait=False)

    async def _follow_clock(self) -> None:
        """Move all jobs when the wall clock is set back. APScheduler computes due times by the wall clock: if it is set
        back by an hour, no job would run for that hour, so nothing would be saved and the lease would expire."""
        known = time.time() - time.monotonic()
        while True:
            await asyncio.sleep(LOOK_AT_CLOCK)
            ahead = time.time() - time.monotonic()
            if known - ahead > LOOK_AT_CLOCK:
                self._log.warning("the clock was put back", seconds=round(known - ahead, 1))
                for job in self._scheduler.get_jobs():
                    job.modify(next_run_time=job.next_run_time - timedelta(seconds=known - ahead))
            known = ahead

    async def _run(self, name: str, work: Work, *args: Any) -> None:
        """Run a job. Errors are logged, never raised: the job will run again."""
        try:
            await work(*args)
        except asyncio.CancelledError:  # the scheduler is shut down
            return
        except SidecarError as problem:
            self._log.error("a job failed", job=name, **problem.as_dict())
        except Exception:
            self._log.exception("a mistake of ours in a job", job=name)


def _compute_time(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=max(0.0, seconds))
