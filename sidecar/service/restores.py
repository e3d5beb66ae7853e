"""One call that restores a memory into many sandboxes: fetched once, a few sandboxes at a time, each on its own.

Each sandbox has an operation of its own: what the caller may use, its turn, its line in the audit, its events. What fails
in one is its own result and changes nothing for the others. Under an idempotency key each sandbox has a key of its own,
so that a repeated call restores only where that was not done: also when the service died in between.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from functools import partial
from typing import Any

import structlog

from sidecar.engine import RestoreRequest
from sidecar.engine.restores.source import MOST_AT_ONCE, SnapshotSource, open_source
from sidecar.errors import SidecarError, UsageError
from sidecar.host.values import dataclass
from sidecar.host.work import gather_few
from sidecar.receipts import RestoreReceipt
from sidecar.service.access.grants import Caller
from sidecar.service.attachments.attachment import CareOptions
from sidecar.service.core import Group, Sidecar, encode_request
from sidecar.service.idempotency import KeyedCall
from sidecar.service.sandboxes import SandboxTarget

KIND = "restores"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """What is restored, into which sandboxes, and for whom."""

    restore: RestoreRequest
    targets: tuple[SandboxTarget, ...]
    caller: Caller
    care: CareOptions | None = None
    key: str = ""

    def derive_key(self, target: SandboxTarget) -> str:
        """Return the idempotency key of one sandbox; empty if the call has none."""
        if not self.key:
            return ""
        named = json.dumps([self.key, target.ref]).encode()
        return f"{KIND}-{hashlib.sha256(named).hexdigest()}"


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """What came of one sandbox: a receipt, or a problem."""

    sandbox: str
    receipt: RestoreReceipt | None = None
    problem: SidecarError | None = None


class RestoreGroup:
    """The restores of one call."""

    def __init__(self, sidecar: Sidecar, request: GroupRequest) -> None:
        """Raise ``UsageError`` if a sandbox is named twice."""
        refs = [target.ref for target in request.targets]
        if twice := {ref for ref in refs if refs.count(ref) > 1}:
            raise UsageError(f"The sandbox {min(twice)} is named twice.", hint="Name each sandbox once.")
        self._sidecar, self._request, self._calls = sidecar, request, sidecar.remembered_calls
        self._noted: asyncio.Future[Any] | None = None
        body = {"sandboxes": refs, **encode_request(request.restore)}
        memory = request.restore.memory
        self._asked = KeyedCall(request.key, memory, KIND, body, request.caller) if request.key else None

    async def run(self) -> list[SandboxResult]:
        """Restore into every sandbox and return the results, in the same order. It goes on when the caller is gone.

        Raise ``KeyReused`` if the key was used for another call, and what keeps all of them from being restored.
        """
        await self._sidecar.engine.repository.check_new_memory(self._request.restore.memory)
        self._sidecar.operations.check_intake(self._request.caller)
        if self._asked is not None:
            await self._calls.find(self._asked)
        return await asyncio.shield(self._sidecar.keep_running(self._restore_all()))

    async def _restore_all(self) -> list[SandboxResult]:
        async with open_source(self._sidecar.engine, self._request.restore) as source:
            return await gather_few(partial(self._restore_one, source), self._request.targets, MOST_AT_ONCE)

    async def _restore_one(self, source: SnapshotSource, target: SandboxTarget) -> SandboxResult:
        """Restore into one sandbox. Whatever goes wrong is its result."""
        request = self._request
        try:
            operation = await self._sidecar.start_restore(
                request.restore,
                target,
                key=request.derive_key(target),
                care=request.care,
                caller=request.caller,
                group=Group(source, self._note),
            )
            receipt = await operation.result()
        except SidecarError as problem:
            return SandboxResult(target.ref, problem=problem)
        except Exception as problem:  # a bug: told to the caller and logged
            structlog.get_logger("sidecar").exception("a restore broke", sandbox=target.ref)
            return SandboxResult(target.ref, problem=SidecarError(f"An unexpected {type(problem).__name__}."))
        assert isinstance(receipt, RestoreReceipt)
        return SandboxResult(target.ref, receipt)

    async def _note(self, snapshot: str) -> None:
        """Note the whole call under its key before the first sandbox is changed, so that the key cannot be used for other
        sandboxes. Raise ``KeyReused`` if another call did so meanwhile."""
        if self._asked is None:
            return
        if self._noted is None:
            self._noted = asyncio.ensure_future(self._calls.begin(self._asked))
        await asyncio.shield(self._noted)
