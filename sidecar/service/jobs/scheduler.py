"""What is done now and then: each job under a name, one run of it at a time."""

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
"""Seconds between two looks at the clock, and by how much it may be put back unnoticed."""


class Jobs:
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
        """Do it again and again, in place of any job of that name; the ``first`` time after so many seconds.

        A run that is still under way is not joined by another.
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
        """Do it in so many seconds, in place of any job of that name."""
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
        """No more jobs begin."""
        if self._clock is not None:
            self._clock.cancel()
        if self._scheduler.running:
            self._scheduler.remove_all_jobs()
            self._scheduler.shutdown(wait=False)

    async def _follow_clock(self) -> None:
        """Jobs are due by the clock on the wall. When that is put back, by an hour say, all of them are due an hour early:
        else nothing would be saved, and nobody told that we live, until it is as late again as it was."""
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
        """What goes wrong is told, never raised: there will be a next time."""
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
