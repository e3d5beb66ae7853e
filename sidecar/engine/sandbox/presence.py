"""One operation in a sandbox: connect, tell it what to record, keep it from ending, and clean up in it afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import field
from typing import Protocol

from sidecar.engine.core import CountedSandbox, Engine
from sidecar.engine.sandbox.delivery import build_rules
from sidecar.engine.sandbox.dialogue import ANSWER_ALLOWANCE, Asking, ask, parse_answer
from sidecar.engine.sandbox.links import NotDirect
from sidecar.errors import (
    LimitExceeded,
    ProgramFailed,
    SandboxAsleep,
    SandboxDenied,
    SandboxError,
    SandboxGone,
    SidecarError,
)
from sidecar.format.protocol import Identity, RestoreAnswer, TidyQuestion
from sidecar.host.files import Spool
from sidecar.host.values import dataclass
from sidecar.host.work import retry_safely
from sidecar.ids import build_memory_key
from sidecar.ports import SandboxStatus

WOKEN = "The sandbox was asleep and has been woken; it now runs until its provider ends it."
TIDY_SECONDS = 10.0


class Request(Protocol):
    """The fields that the requests for an export and a restore have in common."""

    @property
    def memory(self) -> str: ...
    @property
    def projects(self) -> tuple[str, ...] | None: ...
    @property
    def conversation(self) -> str: ...


@dataclass(slots=True, kw_only=True)
class SandboxRun:
    """The state of one operation in a sandbox: what an export and a restore have in common."""

    engine: Engine
    sandbox: CountedSandbox
    request: Request
    started: float
    snapshot: str = ""
    """The snapshot that is made or restored, once it is known."""
    warnings: list[str] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
    """Every path in the sandbox that was uploaded to, for cleaning up."""
    scratch: Spool = field(init=False, repr=False)
    """The scratch folder of the operation, while it is open."""

    @property
    def asking(self) -> Asking:
        """How the sandbox is asked, unless a step says otherwise."""
        return Asking(timeout=self.engine.timing.command, rules=build_rules(self.engine.layouts.values()))

    def build_identity(self, store: str) -> Identity:
        """Build what the sandbox is to record about the memory. For a folder of this machine, that includes the host
        name."""
        ours = self.sandbox.ground(self.request.projects) is not None
        return Identity(
            store=store,
            memory=self.request.memory,
            sandbox=self.sandbox.ref,
            machine=socket.gethostname() if ours else "",
            conversation=self.request.conversation,
        )


async def connect(sandbox: CountedSandbox) -> SandboxStatus:
    """Connect to the sandbox; retry if the provider is busy or cannot be reached."""
    async for attempt in retry_safely():
        with attempt:
            return await sandbox.connect()
    raise AssertionError("unreachable")


@asynccontextmanager
async def keep_alive(run: SandboxRun, presence: SandboxStatus) -> AsyncIterator[None]:
    """Prolong the sandbox in a background task whenever it would end within ``timing.keep_alive``. Add a warning if
    that fails."""
    if presence.woken:
        run.warnings.append(WOKEN)
    keeping = asyncio.create_task(_prolong_until_cancelled(run, presence.ends_at))
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.wait({keeping})


async def _prolong_until_cancelled(run: SandboxRun, ends_at: float | None) -> None:
    """Prolong the sandbox whenever less time is left than ``timing.keep_alive``. Add a warning and give up if that
    fails."""
    margin = run.engine.timing.keep_alive
    while ends_at is not None:
        if (left := ends_at - time.time()) > margin:
            await asyncio.sleep(left - margin)
        try:
            ends_at = (await run.sandbox.prolong(2 * margin)).ends_at
        except SandboxError as problem:
            run.warnings.append(
                f"The sandbox ends in {max(0, left):.0f} s and could not be prolonged: {problem.message}"
            )
            return
        if ends_at is not None and (left := ends_at - time.time()) <= margin:
            # The provider grants less time than requested: prolong again before it runs out, but not in a busy loop.
            await asyncio.sleep(max(1.0, left / 2))


async def clean_up(run: SandboxRun, *, operation: str = "", notes: str = "") -> RestoreAnswer | None:
    """Remove what an operation left in the sandbox. Errors are ignored: the operation has already failed or is done.

    ``notes`` is what a sandbox without Python is to record about the memory. Return the answer of ``operation`` if that
    was a restore that completed but whose answer was lost.
    """
    question = TidyQuestion(
        memory=run.request.memory,
        snapshot=run.snapshot,
        key=build_memory_key(run.request.memory),
        turn_wait=run.engine.timing.turn_wait,
        uploads=list(run.uploads),
        operation=operation,
    )

    def write_script() -> str:
        from sidecar.engine.shell.scripts import build_tidy_script  # late: most sandboxes have Python

        return build_tidy_script(question, notes)

    how = Asking(timeout=TIDY_SECONDS, shell=write_script)
    try:
        answer, _ = await ask(run.sandbox, question, RestoreAnswer, how)
        return answer if answer.status in ("complete", "kept") else None
    except SidecarError:
        # Commands or their answers do not get through. File access may still work, both to delete the uploads and to
        # read the answer.
        for path in run.uploads:
            with contextlib.suppress(SidecarError):
                await run.sandbox.remove(path)
        with contextlib.suppress(SidecarError):
            return await _read_written_answer(run.sandbox, question) if operation else None
        return None


async def _read_written_answer(sandbox: CountedSandbox, question: TidyQuestion) -> RestoreAnswer | None:
    """Return the answer that a restore wrote to a file when it had completed, if it is the answer of this operation."""
    text = b""
    async with contextlib.aclosing(sandbox.download(f"~/.cache/memory-sidecar/{question.key}/answer")) as chunks:
        async for chunk in chunks:
            text += chunk
            if len(text) > ANSWER_ALLOWANCE:
                return None
    try:
        operation, value = json.loads(text)
        value.update(memory=question.memory, snapshot=question.snapshot)
    except (ValueError, TypeError, AttributeError):
        return None
    return parse_answer(value, RestoreAnswer, question) if operation == question.operation else None


@asynccontextmanager
async def clean_up_on_failure(run: SandboxRun) -> AsyncIterator[None]:
    """Clean up in the sandbox if the body fails."""
    try:
        yield
    except BaseException as problem:
        if not is_clean_after(problem):
            await clean_up(run)
        raise


def is_clean_after(problem: BaseException) -> bool:
    """Whether there is nothing to remove after this error: the program ended by its own decision, or the sandbox cannot
    be entered."""
    if isinstance(problem, ProgramFailed | LimitExceeded):
        return problem.code not in (ProgramFailed.code, "limit-packed")
    return isinstance(problem, SandboxGone | SandboxAsleep | SandboxDenied | NotDirect)
