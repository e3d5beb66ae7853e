"""The result of a command: one JSON document, the same for people, and an exit code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from datetime import UTC, datetime
from typing import Any, Self

from sidecar.errors import UsageError
from sidecar.host.text import parse_duration
from sidecar.host.values import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    """A table for people; ``empty`` is printed if it has no rows."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    empty: str = ""


class Line(str):
    """A line for people that a terminal shows in a colour ("red", "green", "yellow", "bold", "dim"), and cut to its
    width."""

    colour: str

    def __new__(cls, text: str, colour: str = "") -> Self:
        line = super().__new__(cls, text)
        line.colour = colour
        return line


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """What a command prints and returns. It is not to be printed itself: at the end of ``asyncio.run``, the standard
    library writes it out and throws that away, in the message of an error that nobody sees."""

    document: dict[str, Any]
    words: list[str | Table] = field(default_factory=list)
    """For people, one line each. A line break within one is part of a name, and is printed escaped."""
    exit_code: int = 0


def format_size(count: int) -> str:
    """Format a size for people: 1.2 MB."""
    amount, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while amount >= 1000 and len(units) > 1:
        amount /= 1000
        units.pop(0)
    return f"{amount:.0f} {units[0]}" if units[0] == "B" else f"{amount:.1f} {units[0]}"


def check_kinds(kinds: Sequence[str]) -> None:
    """Raise ``UsageError`` for a kind that no record has."""
    from sidecar.models.answers import RECORD_KINDS  # late: most commands do without

    if unknown := [kind for kind in kinds if kind not in RECORD_KINDS]:
        raise UsageError(f"There is no kind {unknown[0]!r}.", hint=f"Kinds are {', '.join(RECORD_KINDS)}.")


def parse_moment(text: str, option: str) -> datetime:
    """Return a moment from a time, or from a duration before now. Raise ``UsageError``, which names the option."""
    try:
        return datetime.now(UTC) - parse_duration(text)
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text.removeprefix("@"))
    except ValueError:
        hint = "Write 24h, 7d, 2026-11-16 or 2026-11-16T10:00Z."
        raise UsageError(f"{option} {text} is no time.", hint=hint) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def format_time(iso: str) -> str:
    """Format a time for people, to the second, in UTC."""
    return datetime.fromisoformat(iso).strftime("%Y-%m-%d %H:%M:%S")


Say = Callable[[str], None]
