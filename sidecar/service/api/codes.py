"""Every code that a problem or the reason in a receipt can have."""

from __future__ import annotations

from collections.abc import Iterator

from sidecar.engine.sandbox.refusals import REFUSALS
from sidecar.errors import SidecarError
from sidecar.policy.limits import CODES, PARTIAL, REASONS
from sidecar.policy.review import REVIEW_REASONS
from sidecar.search.upkeep import HeadKeepsMoving
from sidecar.store.encryption.opening import KeysLost

OVER_HTTP = {
    "bad-request": "The request is not valid.",
    "head-too-large": "The request line and headers are too long.",
    "host-not-allowed": "The service may not be called by that name.",
    "http-error": "Any other error of HTTP itself.",
    "method-not-allowed": "The address does not take this method.",
    "not-found": "There is no such address or operation.",
    "origin-not-allowed": "The request comes from a page of another site.",
    "request-timeout": "The request did not arrive in time.",
    "too-large": "The body is larger than it may be.",
    "too-many-connections": "As many connections are open as may be.",
}
"""The codes of what is wrong with a request itself, for which there is no class of error."""
BESIDE_THE_HEAD = ("diverged", "read-only", PARTIAL)
"""Why an export that no guard objected to is not the head."""
ELSEWHERE = ("sidecar.cli", "sidecar.client")
"""Rooms whose errors a service does not have."""


def list_problem_codes() -> list[str]:
    """Return the codes that a problem can have."""
    # Named, because their modules are loaded only where there is something to search or to decrypt.
    late: list[type[SidecarError]] = [HeadKeepsMoving, KeysLost]
    ours = {kind.code for kind in (*late, *_list_classes(SidecarError)) if _is_of_service(kind)}
    return sorted({*ours, *CODES.values(), *REFUSALS, *OVER_HTTP})


def list_reason_codes() -> list[str]:
    """Return the codes that the reason in a receipt can have: a guard, or the problem that an operation met."""
    return sorted({*list_problem_codes(), *REASONS, *REVIEW_REASONS, *BESIDE_THE_HEAD} - set(OVER_HTTP))


def _is_of_service(kind: type[SidecarError]) -> bool:
    return kind.__module__.startswith("sidecar.") and not kind.__module__.startswith(ELSEWHERE)


def _list_classes(kind: type[SidecarError]) -> Iterator[type[SidecarError]]:
    yield kind
    for one in kind.__subclasses__():
        yield from _list_classes(one)
