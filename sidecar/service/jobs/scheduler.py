"""The scheduler: named jobs that run periodically or once, with at most one run of each at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.base import BaseTrigger

from sidecar.errors import SidecarError
from sidecar.host.cron import Cron

Work = Callable[..., Awaitable[None]]
LOOK_AT_CLOCK = 2.0
"""Seconds between two checks of the clock, and by how much it may be set back unnoticed."""
LONG_AGO = timedelta(days=1)
"""If the clock is put back by more than this, jobs at times of the day are planned again."""


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

    def at(self, name: str, cron: Cron, work: Work, *args: Any) -> None:
        """Run ``work`` whenever a cron expression is due, in place of any job of that name.

        What is due while the previous run is active, or while this machine sleeps, is run once afterwards.
        """
        self._scheduler.add_job(
            self._run,
            _CronTrigger(cron),
            args=[name, work, *args],
            id=name,
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
                self._move_jobs(timedelta(seconds=known - ahead))
            known = ahead

    def _move_jobs(self, back: timedelta) -> None:
        """Plan all jobs again after the clock was put back. Those at times of the day stay where they are: what has run
        before must not run again because its time comes a second time."""
        for job in self._scheduler.get_jobs():
            if not isinstance(job.trigger, _CronTrigger):
                job.modify(next_run_time=job.next_run_time - back)
            elif back > LONG_AGO:
                job.modify(next_run_time=job.trigger.get_next_fire_time(None, datetime.now(UTC)))

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


class _CronTrigger(BaseTrigger):  # type: ignore[misc]
    """The times of a cron expression for APScheduler. Of those that are past only one is run."""

    def __init__(self, cron: Cron) -> None:
        self.cron = cron

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime | None:
        return self.cron.find_next(now if previous_fire_time is None else max(previous_fire_time, now))


def _compute_time(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=max(0.0, seconds))
