"""``AsyncClient``: the same calls as ``Client``, awaited."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Concatenate, ParamSpec, Self, TypeVar

import anyio
import anyio.to_thread
import httpx
from tenacity import AsyncRetrying

from sidecar.client import calls
from sidecar.client.answers import Event
from sidecar.client.files import CHUNK, opened
from sidecar.client.listening import PAUSE_SECONDS, SILENCE_SECONDS, Listener
from sidecar.client.methods import described
from sidecar.client.problems import ServiceUnreachable, told_plainly
from sidecar.client.retries import PATIENT, Retries
from sidecar.client.settings import client_settings
from sidecar.client.talks import Course, Plan
from sidecar.client.termination import ASYNC_TERMINATION, LAST_RETRIES
from sidecar.client.wire import Call, check
from sidecar.errors import SidecarError
from sidecar.files import written_whole

P = ParamSpec("P")
T = TypeVar("T")


def _method(build: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    async def method(client: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await client._send(build(*args, **kwargs))

    return described(method, build)


def _conversation(build: Callable[P, Plan]) -> Callable[Concatenate[AsyncClient, P], AsyncConversation]:
    def method(client: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncConversation:
        return AsyncConversation(client, build(*args, **kwargs))

    return described(method, build, name="conversation", answer="AsyncConversation")


class AsyncClient:
    """A service, for callers that await. What is not given comes from MEMORY_SIDECAR_URL and MEMORY_SIDECAR_TOKEN."""

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        read_timeout: float = 1800.0,
        retries: Retries = PATIENT,
    ) -> None:
        self._http = httpx.AsyncClient(**client_settings(url, token, read_timeout))
        self._retries = retries
        self.url = str(self._http.base_url).rstrip("/")

    export = _method(calls.export)
    restore = _method(calls.restore)
    memories = _method(calls.memories)
    memory = _method(calls.memory)
    snapshots = _method(calls.snapshots)
    snapshot = _method(calls.snapshot)
    diff = _method(calls.diff)
    adopt = _method(calls.adopt)
    fork = _method(calls.fork)
    rollback = _method(calls.rollback)
    accept = _method(calls.accept)
    pin = _method(calls.pin)
    unpin = _method(calls.unpin)
    forget = _method(calls.forget)
    delete = _method(calls.delete)
    search = _method(calls.search)
    attach = _method(calls.attach)
    attachment = _method(calls.attachment)
    attachments = _method(calls.attachments)
    detach = _method(calls.detach)
    overview = _method(calls.overview)
    operation = _method(calls.operation)
    conversation = _conversation(Plan)

    async def download(self, memory: str, snapshot: str, target: str | Path) -> Path:
        """Write a snapshot as an ordinary tarball (.tar.gz or .tar.zst), whole or not at all."""
        place = Path(target)
        call = calls.archive(memory, snapshot, place)
        await self._retrying(call)(self._fetch, call, place)
        return place

    async def events(self, after: int | None = None) -> AsyncIterator[Event]:
        """What happens, as it happens, across cut connections; first what is still known after event ``after``."""
        listener = Listener(after)
        while True:
            call = calls.events(listener.last)
            response: httpx.Response = await self._retrying(call)(self._open, call)
            try:
                listener.begin()
                with told_plainly(self.url):
                    async for line in response.aiter_lines():
                        if event := listener.hear(line):
                            yield event
            except ServiceUnreachable:
                pass  # cut: listen again, from where we were
            finally:
                await response.aclose()
            await anyio.sleep(PAUSE_SECONDS)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *problem: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def _retrying(self, call: Call[T], retries: Retries | None = None) -> AsyncRetrying:
        return AsyncRetrying(**(retries or self._retries).policy(repeatable=call.repeatable))

    async def _send(self, call: Call[T], retries: Retries | None = None) -> T:
        return await self._retrying(call, retries)(self._once, call)

    async def _once(self, call: Call[T]) -> T:
        request = call.request()
        with told_plainly(self.url), ExitStack() as files:
            if call.file is not None:
                file, size = files.enter_context(opened(call.file))
                request["content"] = _chunks(file)
                request["headers"]["Content-Length"] = str(size)
            response = await self._http.request(**request)
        return call.answer(response)

    async def _fetch(self, call: Call[None], place: Path) -> None:
        with told_plainly(self.url):
            async with self._http.stream(**call.request()) as response:
                if not response.is_success:
                    await response.aread()
                check(response)
                with written_whole(place) as file:
                    async for chunk in response.aiter_bytes():
                        await anyio.to_thread.run_sync(file.write, chunk)

    async def _open(self, call: Call[None]) -> httpx.Response:
        """A stream of events. Whoever gets it closes it."""
        request = self._http.build_request(**call.request(), timeout=SILENCE_SECONDS)
        with told_plainly(self.url):
            response = await self._http.send(request, stream=True)
            if not response.is_success:
                await response.aread()
                await response.aclose()
        check(response)
        return response


async def _chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    while chunk := await anyio.to_thread.run_sync(partial(file.read, CHUNK)):
        yield chunk


class AsyncConversation(Course):
    """``async with client.conversation(…) as memory``: see ``memory.restored`` inside, ``memory.exported`` afterwards."""

    def __init__(self, client: AsyncClient, plan: Plan) -> None:
        super().__init__(plan)
        self._client = client
        self._began = False

    async def __aenter__(self) -> Self:
        self._begin(await self._client._send(self._plan.before()))
        self._began = ASYNC_TERMINATION.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, trouble: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A conversation that was cancelled is saved all the same.
        with anyio.CancelScope(shield=True):
            async with ASYNC_TERMINATION.ending(self._began):
                try:
                    retries = LAST_RETRIES if ASYNC_TERMINATION.told else None
                    receipt = await self._client._send(self._plan.after(), retries)
                except SidecarError as problem:
                    self._tell(problem, trouble)
                else:
                    self._end(receipt, trouble)
