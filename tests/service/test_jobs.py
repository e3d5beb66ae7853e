"""Jobs are done in time, also when the clock on the wall is put back."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from sidecar.service.jobs import scheduler
from sidecar.service.jobs.scheduler import Jobs

pytestmark = pytest.mark.usefixtures("forked_programs")


async def test_what_is_due_in_an_hour_is_due_now_when_the_clock_is_put_back_by_an_hour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    back = 0.0
    clock = SimpleNamespace(time=lambda: time.time() - back, monotonic=time.monotonic)
    monkeypatch.setattr(scheduler, "time", clock)
    monkeypatch.setattr(scheduler, "LOOK_AT_CLOCK", 0.05)
    done, scheduled = asyncio.Event(), Jobs()

    async def work() -> None:
        done.set()

    scheduled.start()
    try:
        scheduled.run_once("in an hour", 3600, work)
        await asyncio.sleep(0.2)  # it has looked at the clock
        assert not done.is_set()
        back = 3600.0
        async with asyncio.timeout(30):
            await done.wait()
    finally:
        scheduled.stop()
