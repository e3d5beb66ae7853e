"""The verb that each route needs, declared at the route, and the check of it before the route runs.

A route without a declaration is refused, whoever calls.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

import structlog
from fastapi import Request

from sidecar.errors import AccessDenied
from sidecar.host.values import dataclass
from sidecar.ids import check_memory_id
from sidecar.service.access.grants import ALL, NOT_FOR_THAT, Caller, Verb
from sidecar.service.api.paths import decode_segment

F = TypeVar("F", bound=Callable[..., Any])
RULE = "_access"
OPENAPI = "/openapi.json"
"""The framework's own route, which cannot be declared: every caller may read it."""


class Scope(Enum):
    """What a route is about."""

    MEMORY = "memory"
    """The memory in its path."""
    SEEN = "seen"
    """Several memories: its answer holds only what the caller may see."""
    EVERYTHING = "everything"
    """The whole service: the caller needs the verb on every memory."""
    OPEN = "open"
    """Nothing of any memory: no token is needed."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What a caller needs: one of the verbs. Without any, only a token."""

    verbs: tuple[Verb, ...]
    scope: Scope


def needs(*verbs: Verb, scope: Scope = Scope.MEMORY) -> Callable[[F], F]:
    """Declare what a route needs: one of these verbs."""

    def declare(endpoint: F) -> F:
        setattr(endpoint, RULE, Rule(verbs, scope))
        return endpoint

    return declare


def find_rule(endpoint: object) -> Rule | None:
    """Return what a route needs; ``None`` if that is not declared."""
    rule = getattr(endpoint, RULE, None)
    return rule if isinstance(rule, Rule) else None


async def check_access(request: Request) -> None:
    """Check the caller's right before a route runs. Raise ``AccessDenied``, or ``BadMemoryId`` if the path has none.

    Nothing of the store is touched here: whether a memory exists that the caller may not see makes no difference.
    """
    rule = find_rule(request.scope.get("endpoint"))
    if rule is None:
        structlog.get_logger("sidecar").error("a route has no declared verb and is refused", path=request.url.path)
        raise AccessDenied("This route is not open to anyone yet.")
    if rule.scope is Scope.OPEN:
        return
    caller = get_caller(request)
    if rule.scope is Scope.MEMORY:
        memory = check_memory_id(decode_segment(request.path_params["memory"]))
        if not caller.covers(memory):
            raise AccessDenied(NOT_FOR_THAT)
    if rule.scope is Scope.EVERYTHING and (ALL not in caller.memories):
        raise AccessDenied("This token is not for every memory, and this call is about all of them.")
    if rule.verbs and not caller.has_any(rule.verbs):
        needed = " or ".join(repr(verb.value) for verb in rule.verbs)
        raise AccessDenied(f"This token lacks the verb {needed}.")


def get_caller(request: Request) -> Caller:
    """Return who calls. Raise ``AccessDenied`` if the gate let nobody in."""
    caller = getattr(request.state, "caller", None)
    if not isinstance(caller, Caller):
        raise AccessDenied("Nobody was let in with this call.")
    return caller
