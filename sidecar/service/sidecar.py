"""The service itself, without HTTP: it accepts exports and restores, and knows what goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine.guards import check_reasons
from sidecar.errors import SidecarError
from sidecar.ids import check_memory_id
from sidecar.retention.forgetting import Forgot
from sidecar.service.events import Events
from sidecar.service.metrics import Metrics
from sidecar.service.operations import Operation, Operations, Receipt
from sidecar.service.repeated import Call, Repeated
from sidecar.service.sandboxes import Sandboxes
from sidecar.service.settings import Service, local_policy
from sidecar.wiring import open_sandbox


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
        self._by_key: dict[tuple[str, str], Operation] = {}

    async def export(self, request: ExportRequest, sandbox: str, *, wake: bool = False, key: str = "") -> Operation:
        """Accept an export. Under a ``key`` that was used before, it is that one."""
        check_memory_id(request.memory)
        check_reasons(request.allow)

        async def work(operation: Operation, call: Call | None) -> Receipt:
            ours = request
            if call is not None:
                if (stored := await self.repeated.settled(call, sandbox)) is not None:
                    return stored
                ours = replace(request, snapshot=call.snapshot)
            async with self.sandboxes.use(sandbox, wake=wake) as box:
                return await export(replace(self.engine, progress=operation), box, ours)

        body = {"sandbox": sandbox, "wake": wake, **_plain(request)}
        return await self._accept(Operation("export", request.memory, sandbox, request.conversation), work, key, body)

    async def restore(
        self, request: RestoreRequest, sandbox: str, *, wake: bool = False, key: str = "", conversation: str = ""
    ) -> Operation:
        """Accept a restore. Under a ``key`` that was used before, it is that one."""
        check_memory_id(request.memory)

        async def work(operation: Operation, call: Call | None) -> Receipt:
            async with self.sandboxes.use(sandbox, wake=wake) as box:
                return await restore(replace(self.engine, progress=operation), box, request)

        body = {"sandbox": sandbox, "wake": wake, **_plain(request)}
        # What earlier versions did not count to what a call is: else a call that they remember would be another now.
        del body["conversation"]
        if not request.must_exist:
            del body["must_exist"]
        return await self._accept(Operation("restore", request.memory, sandbox, conversation), work, key, body)

    async def _accept(
        self,
        operation: Operation,
        work: Callable[[Operation, Call | None], Awaitable[Receipt]],
        key: str,
        body: dict[str, Any],
    ) -> Operation:
        if not key:
            return self.operations.start(operation, lambda started: work(started, None))
        running = self._by_key.get((operation.memory, key))
        call = await self.repeated.begin(key, operation.memory, operation.kind, body)
        if running is not None and not running.ended.is_set():
            return running
        if (answered := self.repeated.answered(call)) is not None:
            return self.operations.repeat(operation, answered)
        # From here to the start nothing else runs: two repetitions cannot both start.
        running = self._by_key.get((operation.memory, key))
        if running is not None and not running.ended.is_set():
            return running

        async def once(started: Operation) -> Receipt:
            try:
                # One that fails is not forgotten: what it may have stored already is settled by its repetition.
                receipt = await work(started, call)
                await self.repeated.end(call, receipt.as_dict())
                return receipt
            finally:
                self._by_key.pop((operation.memory, key), None)

        self._by_key[operation.memory, key] = operation
        try:
            return self.operations.start(operation, once)
        except SidecarError:
            self._by_key.pop((operation.memory, key), None)
            raise

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
    return {name: getattr(request, name) for name in request.__dataclass_fields__}
