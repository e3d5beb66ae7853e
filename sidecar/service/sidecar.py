"""The service itself, without HTTP: it accepts exports and restores, and knows what goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine.archives import adopt
from sidecar.engine.guards import check_reasons
from sidecar.engine.parts import Reached
from sidecar.retention.forgetting import Forgot
from sidecar.service.events import Events
from sidecar.service.metrics import Metrics
from sidecar.service.operations import Operation, Operations, Receipt
from sidecar.service.repeated import Asked, Call, Repeated
from sidecar.service.sandboxes import Sandboxes
from sidecar.service.settings import Service, local_policy
from sidecar.service.uploads import Uploads
from sidecar.wiring import open_sandbox

LATER_OPTIONS = frozenset({"beside", "discard", "read_only", "in_use"})


class _Begun(Exception):
    """The call is remembered already: it is under way elsewhere, or was when a service died."""


class Sidecar:
    def __init__(self, engine: Engine, settings: Service) -> None:
        self.engine = replace(engine, forgot=self._tell_count)
        self.settings = settings
        self.events = Events()
        self.metrics = Metrics()
        self.events.tell(self.metrics.count)
        self.operations = Operations(self.events, concurrency=settings.concurrency, queue=settings.queue)
        self.sandboxes = Sandboxes(partial(open_sandbox, local=local_policy(engine.local, settings)))
        self.repeated = Repeated(engine)
        self.on_change: list[Callable[[str], None]] = []
        """Called with a memory whose head was moved, or that was deleted, other than by an export."""
        self.uploads = Uploads(settings.uploads)
        self._by_key: dict[tuple[str, str], tuple[Asked, Operation]] = {}
        """Calls under a key that wait or run."""

    async def export(self, request: ExportRequest, sandbox: str, *, wake: bool = False, key: str = "") -> Operation:
        """Accept an export. Under a ``key`` that was used before, it is that one."""
        await self.engine.repository.admit(request.memory)
        check_reasons(request.allow)

        async def work(operation: Operation, call: Call | None, reached: Reached | None) -> Receipt:
            ours = request
            if call is not None:
                if (stored := await self.repeated.settled(call, sandbox)) is not None:
                    return stored
                ours = replace(request, snapshot=call.snapshot)
            async with self.sandboxes.use(sandbox, wake=wake) as box:
                return await export(replace(self.engine, progress=operation, reached=reached), box, ours)

        body = {"sandbox": sandbox, "wake": wake, **_plain(request)}
        return await self._accept(Operation("export", request.memory, sandbox, request.conversation), work, key, body)

    async def restore(
        self, request: RestoreRequest, sandbox: str, *, wake: bool = False, key: str = "", conversation: str = ""
    ) -> Operation:
        """Accept a restore. Under a ``key`` that was used before, it is that one."""
        await self.engine.repository.admit(request.memory)

        async def work(operation: Operation, call: Call | None, reached: Reached | None) -> Receipt:
            ours = replace(request, in_use=self.sandboxes.knows(sandbox))
            async with self.sandboxes.use(sandbox, wake=wake) as box:
                return await restore(replace(self.engine, progress=operation, reached=reached), box, ours)

        body = {"sandbox": sandbox, "wake": wake, **_plain(request)}
        # What earlier versions did not count to what a call is: else a call that they remember would be another now.
        del body["conversation"]
        if not request.must_exist:
            del body["must_exist"]
        return await self._accept(Operation("restore", request.memory, sandbox, conversation), work, key, body)

    def adopt(self, archive: Path, request: ExportRequest) -> Operation:
        """Accept a tarball, to be exported as if it were a sandbox. The file must be there until that has ended."""
        check_reasons(request.allow)

        async def work(operation: Operation) -> Receipt:
            return await adopt(replace(self.engine, progress=operation), archive, request)

        return self.operations.start(Operation("export", request.memory, f"import:{archive.name}"), work)

    async def _accept(
        self,
        operation: Operation,
        work: Callable[[Operation, Call | None, Reached | None], Awaitable[Receipt]],
        key: str,
        body: dict[str, Any],
    ) -> Operation:
        if not key:
            return self.operations.start(operation, lambda started: work(started, None, None))
        asked = Asked(key, operation.memory, operation.kind, body)
        running = self._by_key.get(asked.place)
        call = await self.repeated.find(asked)
        # From here to the start nothing else runs: two repetitions cannot both start.
        running = running or self._by_key.get(asked.place)
        if running is not None:
            before, under_way = running
            asked.check_same(before)
            return under_way
        if call is not None and (answered := self.repeated.answered(call)) is not None:
            return self.operations.repeat(operation, answered)

        async def once(started: Operation) -> Receipt:
            try:
                return await self._once(started, work, asked, call)
            finally:
                self._by_key.pop(asked.place, None)

        started = self.operations.start(operation, once)
        self._by_key[asked.place] = asked, started
        return started

    async def _once(
        self,
        operation: Operation,
        work: Callable[[Operation, Call | None, Reached | None], Awaitable[Receipt]],
        asked: Asked,
        call: Call | None,
    ) -> Receipt:
        """Do it, if it was not done before, and remember the answer.

        A key is remembered from when the sandbox was reached: a call that comes to nothing before that leaves no trace. One
        that fails later is not forgotten: what it may have stored already is settled by its repetition.
        """

        async def reached(snapshot: str) -> None:
            nonlocal call
            if call is not None:  # it began anew
                return
            call, before = await self.repeated.begin(asked, snapshot)
            if before:
                raise _Begun

        try:
            receipt = await work(operation, call, None if call else reached)
        except _Begun:  # by another service, since we looked
            assert call is not None
            if (answered := self.repeated.answered(call)) is not None:
                return answered
            receipt = await work(operation, call, None)
        if call is not None:
            await self.repeated.end(call, receipt.as_dict())
        return receipt

    def changed(self, memory: str) -> None:
        for call in self.on_change:
            call(memory)

    async def look_at_heads(self) -> None:
        """Learn how old the newest snapshot of each memory is, whoever made it."""
        heads = await self.engine.repository.heads()
        self.metrics.newest({head.memory: datetime.fromisoformat(head.created) for head in heads})

    def tell_forgot(self, done: Forgot) -> None:
        """Publish what the retention rules did to a memory, if anything."""
        if done.forgotten or done.collected.objects:
            self._tell_count(done.memory, done.forgotten, done.collected.objects, done.collected.bytes)

    def _tell_count(self, memory: str, forgotten: int, objects: int = 0, size: int = 0) -> None:
        self.events.publish("retention.forgot", memory=memory, snapshots=forgotten, objects=objects, bytes=size)

    async def close(self) -> None:
        await self.sandboxes.close()


def _plain(request: ExportRequest | RestoreRequest) -> dict[str, Any]:
    """What was asked for. Options that came later are left out where they are not used, so that a call which an earlier
    version remembers under its key is still the same call."""
    fields = {name: getattr(request, name) for name in request.__dataclass_fields__}
    return {name: value for name, value in fields.items() if value or name not in LATER_OPTIONS}
