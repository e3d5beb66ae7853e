"""When a call is retried: only where that is safe, limited in attempts and time, with jitter."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tenacity import (
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    stop_before_delay,
    wait_exponential_jitter,
)

from sidecar.client.problems import PASSING, ServiceUnreachable, SidecarProblem
from sidecar.host.values import dataclass

TOO_MANY = 429


class _StopUnmet(stop_before_delay):
    """Stops after an attempt at which nothing listened."""

    def __call__(self, retry_state: RetryCallState) -> bool:
        problem = retry_state.outcome.exception() if retry_state.outcome else None
        return isinstance(problem, ServiceUnreachable) and not problem.sent and super().__call__(retry_state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How long a client retries. The defaults outlast a restart of the service for a deployment."""

    attempts: int = 8
    seconds: float = 900.0
    """From the first attempt to the last, whatever the number of attempts."""
    unmet_seconds: float = 5.0
    """Instead of ``seconds``, where nothing listens on this machine and nothing ever answered this client: most likely no
    service was started."""
    first_wait: float = 0.5
    longest_wait: float = 15.0

    def policy(self, *, repeatable: bool, unmet: bool = False) -> dict[str, Any]:
        """Return the arguments for ``tenacity.Retrying`` and ``AsyncRetrying``. ``unmet``: the service is to be on this
        machine, and never answered yet."""
        stop = stop_after_attempt(self.attempts) | stop_before_delay(self.seconds)
        return {
            "retry": retry_if_exception(_build_retry_test(repeatable)),
            "stop": stop | _StopUnmet(self.unmet_seconds) if unmet else stop,
            "wait": self.wait,
            "reraise": True,
        }

    def wait(self, state: RetryCallState) -> float:
        """Return how long to wait: as long as the service asked plus a random part, so that callers do not all return
        at once; without such a request, exponentially longer."""
        problem = state.outcome.exception() if state.outcome else None
        growing = wait_exponential_jitter(multiplier=self.first_wait, max=self.longest_wait, jitter=self.first_wait)
        if isinstance(problem, SidecarProblem) and problem.retry_after:
            return max(problem.retry_after + random.uniform(0, 1), growing(state))
        return growing(state)


PATIENT = Retries()


def _build_retry_test(repeatable: bool) -> Callable[[BaseException], bool]:
    """Return a test of exceptions. A call that may not be repeated is retried only if it certainly was not started."""

    def worth_it(problem: BaseException) -> bool:
        if isinstance(problem, ServiceUnreachable):
            return repeatable or not problem.sent
        if isinstance(problem, SidecarProblem) and problem.retryable:
            return problem.status == TOO_MANY or (repeatable and problem.status in PASSING)
        return False

    return worth_it
