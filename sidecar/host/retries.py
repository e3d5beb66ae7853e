"""Retries: only where they are safe, limited, with jitter."""

from __future__ import annotations

import logging

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_exponential_jitter

from sidecar.errors import SandboxTimeout, SidecarError


def _is_retryable(problem: BaseException) -> bool:
    # After a timeout the caller has already waited as long as it wanted to.
    return isinstance(problem, SidecarError) and problem.retryable and not isinstance(problem, SandboxTimeout)


def _log_retry(state: RetryCallState) -> None:
    problem = state.outcome.exception() if state.outcome else None
    if isinstance(problem, SidecarError):
        logging.getLogger("sidecar").warning("trying again: %s [%s]", problem.message, problem.code)


def retry_safely(attempts: int = 3) -> AsyncRetrying:
    """Return the retry policy for steps that change nothing, or can be repeated."""
    return AsyncRetrying(
        retry=retry_if_exception(_is_retryable),
        stop=stop_after_attempt(attempts),
        wait=wait_exponential_jitter(multiplier=0.2, max=5),
        before_sleep=_log_retry,
        reraise=True,
    )
