"""Logs: one event per line, JSON for machines or text for a terminal, always on stderr, without secrets.

Repeated messages are logged a few times a minute, then only counted.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import structlog

from sidecar.host.text import make_printable
from sidecar.host.values import dataclass

MOST = 3
SECONDS = 60.0
KINDS = 200
REST = "other messages"


@dataclass(slots=True)
class _Kind:
    since: float
    said: int = 0
    held_back: int = 0


class LogThrottle:
    """Lets the first few messages of a kind pass in each minute, and counts the others."""

    def __init__(self, most: int = MOST, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._seconds = seconds
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}

    def may_pass(self, kind: str) -> bool:
        """Whether this message may be logged. If not, it is counted."""
        now = self._clock()
        if kind not in self._kinds and len(self._kinds) >= KINDS:
            kind = REST  # callers must not be able to fill the memory with kinds
        entry = self._kinds.setdefault(kind, _Kind(now))
        if entry.said < self._most:
            entry.said += 1
            return True
        entry.held_back += 1
        return False

    def take_counts(self, *, all_of_them: bool = False) -> list[tuple[str, int]]:
        """Return the kinds whose minute is over, or all, with the number of messages held back, and reset them."""
        now = self._clock()
        over = [kind for kind, entry in self._kinds.items() if all_of_them or now - entry.since >= self._seconds]
        counts = [(kind, self._kinds.pop(kind).held_back) for kind in over]
        return [(kind, count) for kind, count in counts if count]


SECRET_WORDS = ("token", "secret", "password", "api_key", "authorization", "url")


def configure_logs(form: str, *, beside: bool = False) -> None:
    """Configure logging as ``json``, ``console``, or ``auto`` (text if stderr is a terminal). Libraries' logs get the
    same format.

    ``beside`` another program that owns the terminal, ``auto`` means text, and only warnings and errors.
    """
    words = form == "console" or (form == "auto" and (beside or sys.stderr.isatty()))
    least = logging.WARNING if beside and form == "auto" else logging.INFO
    renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    last: list[Any] = [_make_printable, renderer] if words else [structlog.processors.JSONRenderer()]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _redact_secrets,
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        # One write per line: a process that is killed leaves no partial line that the next process would continue.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
        )
    )
    handler.addFilter(_may_pass)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


_repeats = LogThrottle()


def warn(event: str, **details: Any) -> None:
    """Log a warning that callers can cause as often as they like: logged a few times a minute, then counted."""
    if _repeats.may_pass(event):
        structlog.get_logger("sidecar").warning(event, **details)


def log_repeats(*, all_of_them: bool = False) -> None:
    """Log how many messages were held back. Called periodically and at the end."""
    for kind, count in _repeats.take_counts(all_of_them=all_of_them):
        structlog.get_logger("sidecar").warning("the same again", what=kind, times=count)


def _may_pass(record: logging.LogRecord) -> bool:
    """Whether a library's message may be logged. Its kind is the message before its values are filled in, and the place
    where an error was raised, so that two different errors with one message are both logged."""
    kind = f"{record.name}: {str(record.msg).partition(chr(10))[0][:200]}"
    if record.exc_info and record.exc_info[1] is not None:
        trace, place = record.exc_info[2], ""
        while trace is not None:
            place, trace = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}", trace.tb_next
        kind += f" ({type(record.exc_info[1]).__name__} at {place})"
    return _repeats.may_pass(kind)


def _redact_secrets(logger: Any, method: str, event: Any) -> Any:
    """Replace values whose names suggest a secret, in case one is logged by accident."""
    for name in event:
        if any(word in name.lower() for word in SECRET_WORDS):
            event[name] = "…"
    return event


def _make_printable(logger: Any, method: str, event: Any) -> Any:
    """Escape control characters, so that each event is one line whatever names it contains; a traceback is indented
    below it."""
    for name, value in event.items():
        if name in ("exception", "stack") and isinstance(value, str):
            event[name] = "\n".join(f"  {make_printable(line)}" for line in value.split("\n"))
        elif isinstance(value, str):
            event[name] = make_printable(value)
    return event
