"""Logs: one event a line, JSON for machines or words for a terminal, always on stderr, never a secret."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

SECRET_WORDS = ("token", "secret", "password", "api_key", "authorization", "url")


def set_up(form: str) -> None:
    """``json``, ``console``, or ``auto``: words when a person watches. What libraries log comes out the same way."""
    words = form == "console" or (form == "auto" and sys.stderr.isatty())
    last: Any = structlog.dev.ConsoleRenderer() if words else structlog.processors.JSONRenderer()
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _without_secrets,
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, last],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        # One write for each line: a process that is killed leaves no half ones for the next to go on with.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, last]
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


def _without_secrets(logger: Any, method: str, event: Any) -> Any:
    """Nobody should log one; whoever does by accident still does not."""
    for name in event:
        if any(word in name.lower() for word in SECRET_WORDS):
            event[name] = "…"
    return event
