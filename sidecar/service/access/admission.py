"""Whether an export or a restore of a caller may begin: the sandbox that it names, and its quotas; and what the engine
has to know of the caller."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from functools import partial

from sidecar.engine import Engine
from sidecar.errors import AccessDenied
from sidecar.service.access.grants import Caller
from sidecar.service.access.usage import Usage

NOT_THAT_SANDBOX = "This token may not use that sandbox."


class Admission:
    """The checks of one service."""

    def __init__(
        self, usage: Usage, name_of: Callable[[str], str], list_memories: Callable[[str], Collection[str]]
    ) -> None:
        """``name_of`` returns a sandbox's reference as the sandbox itself writes it; ``list_memories`` the memories
        that a sandbox is, or was lately, looked after for."""
        self.usage = usage
        self._name_of = name_of
        self._list_memories = list_memories

    def check_sandbox(self, caller: Caller, sandbox: str) -> None:
        """Raise ``AccessDenied`` if a caller may not use a sandbox: its token is for others, or another caller's memory
        is in it."""
        if not caller.id:
            return
        name = self._name_of(sandbox)
        if not caller.may_use_sandbox(name) or not all(map(caller.covers, self._list_memories(name))):
            raise AccessDenied(NOT_THAT_SANDBOX)

    def may_use_folder(self, caller: Caller, folder: str) -> bool:
        """Whether a caller's sandbox on this machine may have a project in this folder outside of it, or a link to it: a
        sandbox there would be the caller's too."""
        name = f"local:{folder}"
        mine = caller.may_use_sandbox(name) or caller.may_use_sandbox(f"{name}/")
        return mine and all(map(caller.covers, self._list_memories(name)))

    async def check_quotas(self, caller: Caller, memory: str, added: int = 0) -> None:
        """Raise ``QuotaBytes`` or ``QuotaMemories`` if a caller may store no more."""
        await self.usage.check(caller, memory, added)

    def narrow_engine(self, engine: Engine, caller: Caller | None) -> Engine:
        """Return the engine as it works for a caller: it tells only of memories that the caller may see, and stores
        only what its quotas allow."""
        if caller is None or not caller.id:
            return engine
        charge: Callable[[str, int], Awaitable[None]] = partial(self.usage.charge, caller)
        view, may_use_folder = caller if caller.restricted else None, partial(self.may_use_folder, caller)
        return replace(engine, view=view, charge=charge, may_use_folder=may_use_folder)
