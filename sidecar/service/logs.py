"""Logs: one event a line, JSON for machines or words for a terminal, always on stderr, never a secret."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from sidecar.characters import printable

SECRET_WORDS = ("token", "secret", "password", "api_key", "authorization", "url")


def set_up(form: str) -> None:
    """``json``, ``console``, or ``auto``: words when a person watches. What libraries log comes out the same way."""
    words = form == "console" or (form == "auto" and sys.stderr.isatty())
    last: list[Any] = [_printably, structlog.dev.ConsoleRenderer()] if words else [structlog.processors.JSONRenderer()]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _without_secrets,
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        # One write for each line: a process that is killed leaves no half ones for the next to go on with.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


def _without_secrets(logger: Any, method: str, event: Any) -> Any:
    """Nobody should log one; whoever does by accident still does not."""
    for name in event:
        if any(word in name.lower() for word in SECRET_WORDS):
            event[name] = "…"
    return event


def _printably(logger: Any, method: str, event: Any) -> Any:
    """One line for each event, whatever is in a name that it tells of; a traceback's lines are set in below it."""
    for name, value in event.items():
        if name in ("exception", "stack") and isinstance(value, str):
            event[name] = "\n".join(f"  {printable(line)}" for line in value.split("\n"))
        elif isinstance(value, str):
            event[name] = printable(value)
    return event
