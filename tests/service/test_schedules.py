"""Cron expressions mean what people know from cron, also in the nights in which clocks are changed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path

import apscheduler.schedulers.base
import pytest

from sidecar.host.cron import SHORTHANDS, Cron, find_zone
from sidecar.policy.retention import Retention
from sidecar.service.attachments.attachment import CareOptions
from sidecar.service.attachments.keeper import Keeper
from sidecar.service.core import Sidecar
from sidecar.service.jobs.drills import DrillJob
from sidecar.service.jobs.retention import RetentionJob
from sidecar.service.jobs.scheduler import LONG_AGO, Jobs
from sidecar.service.settings import Service
from tests.parts.homes import empty_home, engine_at, write

BERLIN = find_zone("Europe/Berlin")


def due_times(text: str, first: str, last: str, zone: tzinfo = BERLIN) -> list[str]:
    """When an expression is due after ``first`` and until ``last``, as the clocks of its zone show it."""
    begin, end = (datetime.fromisoformat(one).replace(tzinfo=zone).astimezone(UTC) for one in (first, last))
    due = itertools.takewhile(lambda moment: moment <= end, Cron.parse(text, zone).list_next(begin))
    return [moment.astimezone(zone).strftime("%m-%d %H:%M %z").removesuffix("00") for moment in due]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0 4 * * 0", ["11-22 04:00"]),
        ("0 4 * * 7", ["11-22 04:00"]),
        ("0 4 * * SUN", ["11-22 04:00"]),
        ("0 4 * * 1-5", [f"11-{day} 04:00" for day in (18, 19, 20, 23, 24)]),
        ("0 4 * * fri-mon", [f"11-{day} 04:00" for day in (20, 21, 22, 23)]),
        ("0 4 * * */3", [f"11-{day} 04:00" for day in (18, 21, 22)]),
        ("0 4 20 * *", ["11-20 04:00"]),
        ("0 4 20 * sun", ["11-20 04:00", "11-22 04:00"]),  # by cron's rule either is enough
        ("0 4 */10 * sun", []),  # … unless one begins with a star: the 21st is a Saturday
        ("0,30 12 24 nov *", ["11-24 12:00", "11-24 12:30"]),
        ("@weekly", ["11-22 00:00"]),
    ],
)
def test_an_expression_is_due_when_cron_would_run_it(text: str, expected: list[str]) -> None:
    """From Wednesday, 18 November, to the Tuesday after it."""
    assert due_times(text, "2026-11-17T23:59", "2026-11-24T23:59", UTC) == [f"{one} +00" for one in expected]


@pytest.mark.parametrize("text", SHORTHANDS)
def test_the_names_of_schedules_are_known(text: str) -> None:
    assert Cron.parse(text).find_next(datetime.now(UTC)) is not None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "0 fields"),
        ("30 2 * *", "4 fields"),
        ("0 30 2 * * *", "6 fields"),
        ("60 2 * * *", "'60' is no minute"),
        ("*/0 2 * * *", "'*/0' is no minute"),
        ("0 2 0 * *", "'0' is no day"),
        ("0 2 * 13 *", "'13' is no month"),
        ("0 2 * * 8", "'8' is no weekday"),
        ("0 2 * * sunday", "'sunday' is no weekday"),
        ("0 2 * * */0", "at least 1"),
        ("0 2 30 2 *", "no date matches it"),
        ("@reboot", "1 fields"),
        ("30 2 * * * ; rm", "7 fields"),
    ],
)
def test_what_is_no_expression_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why.replace("*", r"\*")):
        Cron.parse(text)


FORWARD, BACK = ("2026-03-28T12:00", "2026-03-30T12:00"), ("2026-10-24T12:00", "2026-10-26T12:00")


@pytest.mark.parametrize(
    ("text", "night", "expected"),
    [
        ("30 2 * * *", FORWARD, ["03-29 03:00 +02", "03-30 02:30 +02"]),
        ("0,30 2 * * *", FORWARD, ["03-29 03:00 +02", "03-30 02:00 +02", "03-30 02:30 +02"]),
        ("30 2,3 * * *", FORWARD, ["03-29 03:00 +02", "03-29 03:30 +02", "03-30 02:30 +02", "03-30 03:30 +02"]),
        ("30 2 29 * *", FORWARD, ["03-29 03:00 +02"]),
        ("0 3 * * *", FORWARD, ["03-29 03:00 +02", "03-30 03:00 +02"]),
        ("30 2 * * *", BACK, ["10-25 02:30 +02", "10-26 02:30 +01"]),
        (
            "0 */2 25 * *",
            BACK,
            [f"10-25 {hour:02} +0{1 + (hour <= 2)}".replace(" +", ":00 +") for hour in range(0, 24, 2)],
        ),
        ("0 3 * * *", BACK, ["10-25 03:00 +01", "10-26 03:00 +01"]),
    ],
)
def test_a_time_of_the_day_comes_once_in_the_nights_in_which_clocks_are_changed(
    text: str, night: tuple[str, str], expected: list[str]
) -> None:
    assert due_times(text, *night) == expected


def test_what_is_due_every_hour_follows_the_time_that_passes_in_those_nights() -> None:
    assert due_times("20,50 * * * *", "2026-03-29T01:00", "2026-03-29T04:00") == [
        *("03-29 01:20 +01", "03-29 01:50 +01", "03-29 03:20 +02", "03-29 03:50 +02")
    ]
    assert due_times("20,50 * * * *", "2026-10-25T01:30", "2026-10-25T03:30") == [
        *("10-25 01:50 +02", "10-25 02:20 +02", "10-25 02:50 +02"),
        *("10-25 02:20 +01", "10-25 02:50 +01", "10-25 03:20 +01"),
    ]
    # On Lord Howe Island clocks are changed by half an hour.
    due = Cron.parse("*/30 * * * *", find_zone("Australia/Lord_Howe")).list_next(datetime(2026, 3, 1, tzinfo=UTC))
    pauses = {after - before for before, after in itertools.pairwise(itertools.islice(due, 48 * 50))}
    assert pauses == {timedelta(minutes=30)}


@pytest.mark.parametrize("zone", ["Africa/Cairo", "America/Santiago", "Asia/Beirut", "Australia/Lord_Howe"])
def test_every_day_of_a_year_has_its_run_and_none_has_two(zone: str) -> None:
    """In Cairo and Santiago it is midnight that is left out, on Lord Howe Island clocks are changed by half an hour."""
    for text in ("0 0 * * *", "15 2 * * *", "45 1 * * *", "30 23 * * *"):
        cron = Cron.parse(text, find_zone(zone))
        due = itertools.islice(cron.list_next(datetime(2026, 1, 1, 12, tzinfo=UTC)), 365)
        days = [moment.astimezone(cron.zone).date() for moment in due]
        assert [after - before for before, after in itertools.pairwise(days)] == [timedelta(days=1)] * 364


class PinnedClock:
    """The clock of the scheduler, moved by the test."""

    def __init__(self, moment: datetime) -> None:
        self.moment = moment

    def now(self, zone: tzinfo) -> datetime:
        return self.moment.astimezone(zone)


@pytest.fixture
def pin(monkeypatch: pytest.MonkeyPatch) -> Callable[[datetime], PinnedClock]:
    def at(moment: datetime) -> PinnedClock:
        clock = PinnedClock(moment)
        monkeypatch.setattr(apscheduler.schedulers.base, "datetime", clock)
        monkeypatch.setattr("sidecar.service.jobs.scheduler.datetime", clock)
        return clock

    return at


@pytest.mark.parametrize("night", [FORWARD, BACK])
async def test_a_job_runs_once_in_each_of_those_nights(
    night: tuple[str, str], pin: Callable[[datetime], PinnedClock]
) -> None:
    start, end = (datetime.fromisoformat(one).replace(tzinfo=BERLIN).astimezone(UTC) for one in night)
    clock, jobs, runs = pin(start), Jobs(), []

    async def work() -> None:
        runs.append(clock.now(BERLIN).strftime("%d %H:%M"))

    jobs.start()
    try:
        jobs.at("drill", Cron.parse("30 2 * * *", BERLIN), work)
        while clock.moment < end:
            clock.moment += timedelta(minutes=10)
            jobs._scheduler.wakeup()
            for _ in range(5):
                await asyncio.sleep(0)
        assert runs == (["29 03:00", "30 02:30"] if night is FORWARD else ["25 02:30", "26 02:30"])
        clock.moment += timedelta(days=30)  # the machine slept: all that was due is one run
        jobs._scheduler.wakeup()
        await asyncio.sleep(0.01)
        assert len(runs) == 3
    finally:
        jobs.stop()


async def test_a_clock_that_is_put_back_brings_no_second_run_and_one_that_was_wrong_no_year_without_runs(
    pin: Callable[[datetime], PinnedClock],
) -> None:
    clock, jobs = pin(datetime(2027, 11, 18, 2, 31, tzinfo=UTC)), Jobs()

    async def work() -> None: ...

    jobs.start()
    try:
        jobs.at("drill", Cron.parse("30 2 * * *"), work)
        clock.moment -= timedelta(hours=1)
        jobs._move_jobs(timedelta(hours=1))
        (job,) = jobs._scheduler.get_jobs()
        assert job.next_run_time == datetime(2027, 11, 19, 2, 30, tzinfo=UTC)
        clock.moment -= timedelta(days=365)
        jobs._move_jobs(timedelta(days=365))
        assert timedelta(days=365) > LONG_AGO and job.next_run_time == datetime(2026, 11, 18, 2, 30, tzinfo=UTC)
    finally:
        jobs.stop()


@pytest.mark.usefixtures("forked_programs")
async def test_what_has_an_expression_is_done_when_it_is_due(
    tmp_path: Path, pin: Callable[[datetime], PinnedClock]
) -> None:
    """All intervals are a day or more, so what happens a minute later happens by the expressions."""
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"learned\n")
    engine = engine_at(tmp_path / "store")
    engine = replace(engine, retention=Retention(at="* * * * *", every="1d"))
    settings = Service(checkpoint_at="* * * * *", checkpoint_every=86400, drill_at="* * * * *", drill_every=0)
    clock, jobs, seen = pin(datetime.now(UTC)), Jobs(), asyncio.Queue[str]()
    sidecar = Sidecar(engine, settings)
    sidecar.events.subscribe(lambda event: seen.put_nowait(event.type))
    keeper = Keeper(sidecar, jobs)
    await keeper.start()
    DrillJob(sidecar, jobs).start()
    RetentionJob(sidecar, jobs).start()
    jobs.start()
    try:
        await keeper.look_after(("me", f"local:{home}"), CareOptions(lasting=True))
        for expected in ("export.committed", "drill.passed"):
            clock.moment += timedelta(minutes=1)
            jobs._scheduler.wakeup()
            async with asyncio.timeout(30):
                while await seen.get() != expected:
                    pass
        assert jobs._scheduler.get_job("retention").next_run_time > clock.moment
    finally:
        await keeper.stop(5, with_callers=False)
        jobs.stop()
