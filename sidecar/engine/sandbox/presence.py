"""Stay with a sandbox while it is worked with: reach it, keep it from ending meanwhile, leave nothing behind in it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from sidecar.engine.core import CountedSandbox, Engine
from sidecar.engine.sandbox.dialogue import ANSWER_ALLOWANCE, ProgramAnswer, ask, parse_answer
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
from sidecar.host.retries import retry_safely
from sidecar.ids import build_memory_key
from sidecar.ports import SandboxStatus

WOKEN = "The sandbox was asleep and has been woken; it now runs until its provider ends it."
TIDY_SECONDS = 10.0


async def connect(sandbox: CountedSandbox) -> SandboxStatus:
    """Connect, again when the provider is busy or cannot be reached."""
    async for attempt in retry_safely():
        with attempt:
            return await sandbox.connect()
    raise AssertionError("unreachable")


@asynccontextmanager
async def keep_alive(
    engine: Engine, sandbox: CountedSandbox, presence: SandboxStatus, warnings: list[str]
) -> AsyncIterator[None]:
    """Prolong the sandbox's life, beside the work in the body, whenever it would end soon; say so when that cannot be."""
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
    while ends_at is not None:
        if (left := ends_at - time.time()) > margin:
            await asyncio.sleep(left - margin)
        try:
            ends_at = (await sandbox.prolong(2 * margin)).ends_at
        except SandboxError as problem:
            warnings.append(f"The sandbox ends in {max(0, left):.0f} s and could not be prolonged: {problem.message}")
            return
        if ends_at is not None and (left := ends_at - time.time()) <= margin:
            # Its provider gives it less than we would like: ask again in good time, but not without pause.
            await asyncio.sleep(max(1.0, left / 2))


async def clean_up(
    engine: Engine,
    sandbox: CountedSandbox,
    memory: str,
    snapshot: str,
    uploads: Sequence[str] = (),
    operation: str = "",
    notes: str = "",
) -> ProgramAnswer | None:
    """Remove what an operation left in the sandbox. It failed already or is done: trouble here changes nothing.

    ``notes`` are what a sandbox without Python is to note of the memory. Return the answer of that operation, if it was a
    restore that ended well and nobody heard it.
    """
    request = {
        "do": "tidy",
        "memory": memory,
        "key": build_memory_key(memory),
        "snapshot": snapshot,
        "turn_wait": engine.timing.turn_wait,
        "uploads": list(uploads),
        "operation": operation,
    }
    try:
        fallback = build_tidy_script(snapshot, uploads, build_memory_key(memory), notes)
        answer, _ = await ask(sandbox, request, ProgramAnswer, timeout=TIDY_SECONDS, fallback=fallback)
        return answer if answer.status in ("complete", "kept") else None
    except SidecarError:
        # Commands do not get through, or their answers do not: files may, both to be deleted and to be read.
        for path in uploads:
            with contextlib.suppress(SidecarError):
                await sandbox.remove(path)
        with contextlib.suppress(SidecarError):
            return await _read_written_answer(sandbox, request) if operation else None
        return None


async def _read_written_answer(sandbox: CountedSandbox, request: dict[str, Any]) -> ProgramAnswer | None:
    """What a restore wrote down of itself when it had ended well, if it is this one."""
    text = b""
    async with contextlib.aclosing(sandbox.download(f"~/.cache/memory-sidecar/{request['key']}/answer")) as chunks:
        async for chunk in chunks:
            text += chunk
            if len(text) > ANSWER_ALLOWANCE:
                return None
    try:
        operation, value = json.loads(text)
        value.update(memory=request["memory"], snapshot=request["snapshot"])
    except (ValueError, TypeError, AttributeError):
        return None
    return parse_answer(value, ProgramAnswer, request) if operation == request["operation"] else None


@asynccontextmanager
async def clean_up_on_failure(
    engine: Engine, sandbox: CountedSandbox, memory: str, snapshot: str
) -> AsyncIterator[None]:
    """Leave nothing of a body that fails in the sandbox."""
    try:
        yield
    except BaseException as problem:
        if not is_clean_after(problem):
            await clean_up(engine, sandbox, memory, snapshot)
        raise


def is_clean_after(problem: BaseException) -> bool:
    """Whether there is nothing to remove: the program ended by its own decision, or the sandbox cannot be entered."""
    if isinstance(problem, ProgramFailed | LimitExceeded):
        return problem.code not in (ProgramFailed.code, "limit-packed")
    return isinstance(problem, SandboxGone | SandboxAsleep | SandboxDenied | NotDirect)
