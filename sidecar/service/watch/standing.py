"""Whether the memory of a sandbox is in place, whoever restored it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from sidecar.engine.restores.sign import read_sign
from sidecar.errors import SandboxAsleep, SandboxError
from sidecar.models.answers import SandboxStanding
from sidecar.service.access.grants import Caller
from sidecar.service.attachments.keeper import Keeper
from sidecar.service.core import Sidecar
from sidecar.service.sandboxes import SandboxTarget
from sidecar.service.watch.records import FAILED, RESTORING, Notice, Notices

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 2.0
ASK_SECONDS = 5.0
"""Between two looks into a sandbox of which nothing is known here."""


class Standings:
    """Answers whether the memory of a sandbox is in place."""

    def __init__(self, sidecar: Sidecar, keeper: Keeper, caller: Caller) -> None:
        self._sidecar, self._keeper, self._caller = sidecar, keeper, caller
        self._notices = Notices(sidecar.engine.repository.store)
        self._ask_after = 0.0
        self._said: SandboxStanding | None = None
        """What the sandbox, or its provider, said last."""

    async def wait(self, ref: str, seconds: float) -> SandboxStanding:
        """Return how a sandbox stands, once its memory is in place or the time is over."""
        deadline, pause = time.monotonic() + seconds, FIRST_PAUSE
        while True:
            found = await self.find(ref)
            left = deadline - time.monotonic()
            if found.in_place or left <= 0 or self._sidecar.operations.stopping:
                return found
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)

    async def find(self, ref: str) -> SandboxStanding:
        """Return how a sandbox stands: by what is known of it here, else by its own sign. Nothing is woken."""
        notice = await self._notices.read(ref)
        known = [one for one in self._keeper.list_known() if one.sandbox == ref and self._caller.covers(one.memory)]
        living = [one for one in known if one.looked_after or one.state == "idle"]
        for one in [*living, *known]:
            return SandboxStanding(
                sandbox=ref,
                in_place=one in living,
                memory=one.memory,
                state=one.state,
                snapshot=one.snapshot or None,
                problem=one.problem,
                hint=one.hint,
            )
        if notice is not None:
            return self._describe(notice.record)
        return await self._ask(ref)

    def _describe(self, notice: Notice) -> SandboxStanding:
        """Return what is told of a sandbox that was noticed, as far as the caller may know."""
        if not self._caller.covers(notice.memory):
            return SandboxStanding(sandbox=notice.sandbox, in_place=False)
        in_place = notice.state not in (RESTORING, FAILED)
        state = notice.state if notice.state in (RESTORING, FAILED) else "reader" if notice.reader else "restored"
        return SandboxStanding(
            sandbox=notice.sandbox,
            in_place=in_place,
            memory=notice.memory,
            state=state,
            snapshot=notice.snapshot or None,
            problem=notice.problem,
            hint=notice.hint,
        )

    async def _ask(self, ref: str) -> SandboxStanding:
        """Look for the sign in a sandbox, now and then."""
        if self._said is None or self._said.sandbox != ref or time.monotonic() >= self._ask_after:
            self._said = await self._ask_now(ref)
            self._ask_after = time.monotonic() + ASK_SECONDS
        return self._said

    async def _ask_now(self, ref: str) -> SandboxStanding:
        nothing = SandboxStanding(sandbox=ref, in_place=False)
        try:
            async with self._sidecar.sandboxes.use(SandboxTarget(ref)) as box:
                await box.connect()
                sign = await read_sign(box)
        except SandboxAsleep as problem:
            return replace(nothing, state="asleep", problem=f"{problem.code}: {problem.message}", hint=problem.hint)
        except SandboxError as problem:
            return replace(nothing, problem=f"{problem.code}: {problem.message}", hint=problem.hint)
        if sign is None or not self._caller.covers(sign.memory):
            return nothing
        state = "reader" if sign.read_only else "restored"
        return replace(nothing, in_place=True, memory=sign.memory, state=state, snapshot=sign.snapshot)
