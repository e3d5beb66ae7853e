"""The connection to a sandbox during an operation: connect, keep it from ending, and clean up in it afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from sidecar.engine.core import CountedSandbox, Engine
from sidecar.engine.sandbox.dialogue import ANSWER_ALLOWANCE, Asking, ask, parse_answer
from sidecar.engine.sandbox.links import NotDirect
from sidecar.engine.shell.scripts import build_tidy_script
from sidecar.errors import (
    LimitExceeded,
    ProgramFailed,
    SandboxAsleep,
    SandboxDenied,
    SandboxError,
    SandboxGone,
    SidecarError,
)
from sidecar.format.protocol import RestoreAnswer, TidyQuestion
from sidecar.host.retries import retry_safely
from sidecar.ids import build_memory_key
from sidecar.ports import SandboxStatus

WOKEN = "The sandbox was asleep and has been woken; it now runs until its provider ends it."
TIDY_SECONDS = 10.0


async def connect(sandbox: CountedSandbox) -> SandboxStatus:
    """Connect to the sandbox; retry if the provider is busy or cannot be reached."""
    async for attempt in retry_safely():
        with attempt:
            return await sandbox.connect()
    raise AssertionError("unreachable")


@asynccontextmanager
async def keep_alive(
    engine: Engine, sandbox: CountedSandbox, presence: SandboxStatus, warnings: list[str]
) -> AsyncIterator[None]:
    """Prolong the sandbox in a background task whenever it would end within ``timing.keep_alive``. Add a warning if
    that fails."""
    if presence.woken:
        warnings.append(WOKEN)
    keeping = asyncio.create_task(
        _prolong_until_cancelled(sandbox, presence.ends_at, engine.timing.keep_alive, warnings)
    )
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.wait({keeping})


async def _prolong_until_cancelled(
    sandbox: CountedSandbox, ends_at: float | None, margin: float, warnings: list[str]
) -> None:
    """Prolong the sandbox whenever less than ``margin`` seconds are left. Add a warning and give up if that fails."""
    while ends_at is not None:
        if (left := ends_at - time.time()) > margin:
            await asyncio.sleep(left - margin)
        try:
            ends_at = (await sandbox.prolong(2 * margin)).ends_at
        except SandboxError as problem:
            warnings.append(f"The sandbox ends in {max(0, left):.0f} s and could not be prolonged: {problem.message}")
            return
        if ends_at is not None and (left := ends_at - time.time()) <= margin:
            # The provider grants less time than requested: prolong again before it runs out, but not in a busy loop.
            await asyncio.sleep(max(1.0, left / 2))


async def clean_up(
    engine: Engine,
    sandbox: CountedSandbox,
    memory: str,
    snapshot: str,
    uploads: Sequence[str] = (),
    operation: str = "",
    notes: str = "",
) -> RestoreAnswer | None:
    """Remove what an operation left in the sandbox. Errors are ignored: the operation has already failed or is done.

    ``notes`` is what a sandbox without Python is to record about the memory. Return the answer of ``operation`` if that
    was a restore that completed but whose answer was lost.
    """
    question = TidyQuestion(
        memory=memory,
        key=build_memory_key(memory),
        snapshot=snapshot,
        turn_wait=engine.timing.turn_wait,
        uploads=list(uploads),
        operation=operation,
    )
    try:
        how = Asking(timeout=TIDY_SECONDS, shell=lambda: build_tidy_script(question, notes))
        answer, _ = await ask(sandbox, question, RestoreAnswer, how)
        return answer if answer.status in ("complete", "kept") else None
    except SidecarError:
        # Commands or their answers do not get through. File access may still work, both to delete the uploads and to
        # read the answer.
        for path in uploads:
            with contextlib.suppress(SidecarError):
                await sandbox.remove(path)
        with contextlib.suppress(SidecarError):
            return await _read_written_answer(sandbox, question) if operation else None
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
async def clean_up_on_failure(
    engine: Engine, sandbox: CountedSandbox, memory: str, snapshot: str
) -> AsyncIterator[None]:
    """Clean up in the sandbox if the body fails."""
    try:
        yield
    except BaseException as problem:
        if not is_clean_after(problem):
            await clean_up(engine, sandbox, memory, snapshot)
        raise


def is_clean_after(problem: BaseException) -> bool:
    """Whether there is nothing to remove after this error: the program ended by its own decision, or the sandbox cannot
    be entered."""
    if isinstance(problem, ProgramFailed | LimitExceeded):
        return problem.code not in (ProgramFailed.code, "limit-packed")
    return isinstance(problem, SandboxGone | SandboxAsleep | SandboxDenied | NotDirect)
