"""Cron expressions, as ``crontab`` has them, and the times they mean on the clocks of a time zone.

APScheduler finds the next time that an expression matches. Three things of it are not as people know them from cron, and
are done here: it counts weekdays from Monday, it needs the day *and* the weekday to match, and in the nights in which
clocks are changed it leaves a time out or runs it twice. So it is asked only about times on the wall, without a zone.
"""

from __future__ import annotations

import re
import zoneinfo
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

from sidecar.host.text import suggest
from sidecar.host.values import dataclass

SHORTHANDS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
FIELDS = ("minute", "hour", "day", "month", "day_of_week")
WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
CRON_HINT = 'Write minute, hour, day, month and weekday, such as "30 2 * * *" (daily at 02:30) or "0 4 * * sun".'
_WEEKDAY_RANGE = re.compile(r"(?:(\*)|([a-z]{3}|\d)(?:-([a-z]{3}|\d))?)(?:/(\d+))?")
_SECOND = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class Cron:
    """When a job is due: an expression, and the time zone whose clocks it means.

    In the night in which clocks jump forward, a time that does not exist is due when they jump. In the night in which
    they are put back, a time that comes twice is due the first time. An expression for every hour (``*/10 * * * *``)
    follows the time that passes: it leaves nothing out, and runs in both of the hours that look the same.
    """

    text: str
    zone: tzinfo
    _patterns: tuple[Any, ...]
    """Triggers of APScheduler that know no zone. The next time is the earliest of theirs."""
    _hourly: bool

    @classmethod
    def parse(cls, text: str, zone: tzinfo = UTC) -> Cron:
        """Raise ``ValueError``, saying what is wrong, unless it is an expression that is due some day."""
        words = SHORTHANDS.get(text.strip().lower(), text).lower().split()
        if len(words) != len(FIELDS):
            raise ValueError(f"it has {len(words)} fields, not five")
        fields = dict(zip(FIELDS, words, strict=True))
        fields["day_of_week"] = _translate_weekdays(fields["day_of_week"])
        # By the rule of cron, the day or the weekday is enough if neither begins with "*".
        if words[2].startswith("*") or words[4].startswith("*"):
            choices = [fields]
        else:
            choices = [{**fields, "day_of_week": "*"}, {**fields, "day": "*"}]
        patterns = tuple(_build_pattern(choice) for choice in choices)
        hours = _build_pattern({**dict.fromkeys(FIELDS, "*"), "minute": "0", "hour": words[1]})
        day = datetime(2024, 1, 1)
        hourly = all(
            _find_next(hours, day + timedelta(hours=hour)) == day + timedelta(hours=hour) for hour in range(24)
        )
        cron = cls(text, zone, patterns, hourly)
        if all(_find_next(pattern, day) is None for pattern in patterns):
            raise ValueError("no date matches it")
        return cron

    def find_next(self, moment: datetime) -> datetime | None:
        """Return the first time after ``moment`` when it is due (UTC)."""
        for due in self._find_hourly(moment) if self._hourly else self._find_daily(moment):
            if due > moment:
                return due
        return None

    def list_next(self, moment: datetime) -> Iterator[datetime]:
        """Yield each time after ``moment`` when it is due (UTC)."""
        due: datetime | None = moment
        while due is not None and (due := self.find_next(due)) is not None:
            yield due

    def _find_daily(self, moment: datetime) -> Iterator[datetime]:
        """Yield each matching time on the wall as the moment when it is due; the first may be past."""
        wall: datetime | None = moment.astimezone(self.zone).replace(tzinfo=None)
        while wall is not None and (wall := self._find_next_wall(wall + _SECOND)) is not None:
            first = wall.replace(tzinfo=self.zone, fold=0).astimezone(UTC)
            if first.astimezone(self.zone).replace(tzinfo=None) == wall:
                yield first
            else:  # it does not exist: as the later of the two ways to read it, it is after the jump
                yield self._find_change(wall.replace(tzinfo=self.zone, fold=1).astimezone(UTC), first)

    def _find_hourly(self, moment: datetime) -> Iterator[datetime]:
        """Yield the next due moment, as long as the clocks are not changed before it; then go on from that change."""
        least = moment.astimezone(UTC) + _SECOND
        while True:
            now = least.astimezone(self.zone).replace(tzinfo=None)
            wall = self._find_next_wall(now)
            if wall is None:
                return
            due = least.replace(microsecond=0) + (wall - now.replace(microsecond=0))
            if due.astimezone(self.zone).replace(tzinfo=None) == wall:
                yield due
                return
            least = self._find_change(least, due)

    def _find_next_wall(self, least: datetime) -> datetime | None:
        """Return the first matching time on the wall that is not before ``least``, in whole seconds."""
        found = [_find_next(pattern, least.replace(microsecond=0)) for pattern in self._patterns]
        return min((wall for wall in found if wall is not None), default=None)

    def _find_change(self, before: datetime, after: datetime) -> datetime:
        """Return the moment between these two at which the clocks are changed, to the second."""
        offset = before.astimezone(self.zone).utcoffset()
        while after - before > _SECOND:
            middle = (before + (after - before) / 2).replace(microsecond=0)
            if middle <= before:
                break
            if middle.astimezone(self.zone).utcoffset() == offset:
                before = middle
            else:
                after = middle
        return after


def find_zone(name: str) -> tzinfo:
    """Return a time zone by its name, such as ``Europe/Berlin``. Raise ``ValueError`` with a hint."""
    if name.upper() == "UTC":
        return UTC

    try:
        return zoneinfo.ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise ValueError(suggest(name, sorted(zoneinfo.available_timezones()))) from None


def _build_pattern(fields: dict[str, str]) -> Any:
    """Return the trigger of APScheduler for these fields. Raise ``ValueError``."""
    from apscheduler.triggers.cron import CronTrigger  # late: commands that have no schedule do without it

    for name, word in fields.items():
        try:
            CronTrigger(**{name: word}, timezone=UTC)
        except (ValueError, TypeError) as problem:
            why = str(problem).rpartition(": ")[2]
            raise ValueError(f"{word!r} is no {name.replace('day_of_week', 'weekday')} ({why})") from None
    return CronTrigger(**fields, second="0", timezone=UTC)


def _find_next(pattern: Any, least: datetime) -> datetime | None:
    found = pattern.get_next_fire_time(None, least.replace(tzinfo=UTC))
    return None if found is None else found.replace(tzinfo=None)


def _translate_weekdays(word: str) -> str:
    """Return the weekday field of a crontab (0 and 7 are Sunday) by names. Raise ``ValueError``."""
    if word == "*":
        return word
    days: set[int] = set()
    for part in word.split(","):
        found = _WEEKDAY_RANGE.fullmatch(part)
        if found is None:
            raise ValueError(f"{word!r} is no weekday")
        star, first, last, step = found.groups()
        if step is not None and not int(step):
            raise ValueError(f"{word!r} is no weekday: a step must be at least 1")
        start = 0 if star else _number_weekday(first)
        end = 6 if star or (step and not last) else _number_weekday(last or first)
        days.update(day % 7 for day in range(start, end + (7 if end < start else 0) + 1, int(step or 1)))
    return ",".join(WEEKDAYS[day] for day in sorted(days))


def _number_weekday(name: str) -> int:
    if name in WEEKDAYS:
        return WEEKDAYS.index(name)
    if name.isdecimal() and int(name) <= 7:
        return int(name)
    raise ValueError(f"{name!r} is no weekday; write sun to sat, or 0 to 7")
