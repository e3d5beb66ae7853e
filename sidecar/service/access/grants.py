"""Callers: who calls, and what each of them may do with which memories."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import lru_cache

from sidecar.errors import AccessDenied, BadMemoryId, UsageError
from sidecar.format.patterns import compile_patterns, expand_braces
from sidecar.host.values import dataclass
from sidecar.ids import build_readable_part, check_memory_id, is_plain_id

ALL = "*"
NOT_FOR_THAT = "This token is not for that memory."
_WILD = re.compile(r"[*?{]")


class Verb(StrEnum):
    """What a call does with a memory."""

    READ = "read"
    EXPORT = "export"
    RESTORE = "restore"
    CHANGE = "change"
    """Move a head by hand, override a guard, discard what is unsaved, pin."""
    DELETE = "delete"
    ADMIN = "admin"
    """Everything, on every memory."""


ROLES = {
    "append-only": frozenset({Verb.READ, Verb.EXPORT, Verb.RESTORE}),
    "read-only": frozenset({Verb.READ}),
    "export-restore": frozenset({Verb.EXPORT, Verb.RESTORE}),
}
"""Verbs under one name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """How much one token may have and do. 0: no limit."""

    bytes: int = 0
    """What its memories may take in the store together."""
    memories: int = 0
    calls_per_minute: int = 0
    concurrent: int = 0
    """How many of its exports and restores run at once; others wait. 0: all but one of those the service runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who calls, and what it may do. Without a named token, everything."""

    name: str
    id: str = ""
    """The id of a named token, which a later token of the same name does not share; empty for all other callers."""
    memories: tuple[str, ...] = (ALL,)
    """Patterns of memory ids, see ``compile_memories``."""
    verbs: frozenset[Verb] = frozenset(Verb)
    sandboxes: tuple[str, ...] = (ALL,)
    """Patterns of sandboxes; ``*`` is any text."""
    quotas: Quotas = Quotas()
    expires: float | None = None
    """Seconds since the epoch."""

    @property
    def restricted(self) -> bool:
        """Whether there are memories that it may not know of."""
        return ALL not in self.memories or not self._may_look

    @property
    def _may_look(self) -> bool:
        return not self.verbs.isdisjoint((Verb.READ, Verb.RESTORE, Verb.ADMIN))

    def covers(self, memory: str) -> bool:
        """Whether the token is for this memory. The id must have been checked."""
        return compile_memories(self.memories)(memory)

    def sees(self, memory: str) -> bool:
        """Whether it may know that there is such a memory, and what it is called."""
        return self._may_look and self.covers(memory)

    def may_cover_folder(self, folder: str) -> bool:
        """Whether the memory in a folder of the store may be one that the token is for; the folder's name does not
        always tell the memory's id."""
        if is_plain_id(folder):
            return self.covers(folder)
        return any(folder.startswith(start) for start in _list_readable_starts(self.memories))

    def may_see_folder(self, folder: str) -> bool:
        """Whether the memory in a folder of the store may be one that it sees."""
        return self._may_look and self.may_cover_folder(folder)

    def may(self, verbs: Iterable[Verb], memory: str) -> bool:
        """Whether it may do any of these with a memory."""
        return self.covers(memory) and self.has_any(verbs)

    def has_any(self, verbs: Iterable[Verb]) -> bool:
        return Verb.ADMIN in self.verbs or not self.verbs.isdisjoint(verbs)

    def require(self, verb: Verb, memory: str, doing: str = "") -> None:
        """Raise ``AccessDenied`` unless it may do this with a memory; ``doing`` names it in the message."""
        if not self.covers(memory):
            raise AccessDenied(NOT_FOR_THAT)
        if not self.has_any([verb]):
            raise AccessDenied(f"This token may not {doing or verb.value}: it lacks the verb {verb.value!r}.")

    def may_use_sandbox(self, ref: str) -> bool:
        """Whether it may name this sandbox, by the reference that the sandbox itself has."""
        return any(fnmatchcase(ref, pattern) for pattern in self.sandboxes)

    def scope_key(self, key: str) -> str:
        """Return an idempotency key that is this token's own: nobody finds another's receipt by guessing its key."""
        return f"{self.id}\0{key}" if self.id and key else key


ADMIN = Caller(name="admin")
"""A caller with a token from ``MEMORY_SIDECAR_TOKEN`` or ``token_file``."""
LOCAL = Caller(name="local")
"""A caller with the token that is kept for this user."""
ANYONE = Caller(name="anyone")
"""A caller of a service without any token."""
ITSELF = Caller(name="service")
"""The service itself, at checkpoints and in its jobs."""
RESERVED = frozenset(caller.name for caller in (ADMIN, LOCAL, ANYONE, ITSELF))


@lru_cache(maxsize=1024)
def compile_memories(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Return a function that tells whether a memory's whole id matches one of the patterns.

    They are written as in the config (``*`` and ``?`` within one part of an id, ``**`` for any number of parts,
    ``{a,b}``), but a last part that is only ``*`` stands for all below it: ``acme/*`` is a tenant's name space.
    """
    expression = compile_patterns(_widen(pattern) for pattern in _expand(patterns))
    return lambda memory: expression.match(memory) is not None


def express_memories(patterns: tuple[str, ...]) -> str:
    """Return the patterns as one regular expression for whole ids, in the syntax that Python and Postgres share."""
    return "^" + compile_patterns(_widen(pattern) for pattern in _expand(patterns)).pattern


def check_patterns(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return patterns of memory ids. Raise ``UsageError`` for one that no id can match."""
    found = tuple(dict.fromkeys(ALL if pattern == "**" else pattern for pattern in patterns))
    for pattern in _expand(found):
        try:
            check_memory_id(pattern)
        except BadMemoryId as problem:
            hint = "Write an id, or a pattern of ids such as 'acme/*' (all below acme/) or '*' (all)."
            raise UsageError(f"{pattern!r} matches no memory: {problem.message}", hint=hint) from None
    if not found:
        raise UsageError(
            "It needs memories, and none are named.", hint="Such as --memories 'acme/*'; --memories '*' for all."
        )
    return found


def _expand(patterns: Iterable[str]) -> list[str]:
    return [full for pattern in patterns for full in expand_braces(pattern)]


def _widen(pattern: str) -> str:
    return f"{pattern}*" if pattern == ALL or pattern.endswith("/*") else pattern


@lru_cache(maxsize=1024)
def _list_readable_starts(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return what the folders of memories that match begin with, as far as no wildcard comes before."""
    return tuple(build_readable_part(_WILD.split(pattern, maxsplit=1)[0]) for pattern in _expand(patterns))
