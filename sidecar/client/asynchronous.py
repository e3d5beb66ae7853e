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
from sidecar.client.conversations import ConversationPlan, ConversationState
from sidecar.client.events import PAUSE_SECONDS, SILENCE_SECONDS, EventParser
from sidecar.client.files import CHUNK, open_archive
from sidecar.client.methods import copy_signature
from sidecar.client.problems import ServiceUnreachable, translate_errors
from sidecar.client.retries import PATIENT, Retries
from sidecar.client.settings import build_client_settings
from sidecar.client.termination import ASYNC_TERMINATION, LAST_RETRIES
from sidecar.client.wire import Call, check_response
from sidecar.errors import SidecarError
from sidecar.host.files import write_whole

P = ParamSpec("P")
T = TypeVar("T")


def _make_method(build: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    async def method(client: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await client._send(build(*args, **kwargs))

    return copy_signature(method, build)


def _make_conversation(
    build: Callable[P, ConversationPlan],
) -> Callable[Concatenate[AsyncClient, P], AsyncConversation]:
    def method(client: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncConversation:
        return AsyncConversation(client, build(*args, **kwargs))

    return copy_signature(method, build, name="conversation", answer="AsyncConversation")


class AsyncClient:
    """A client for one service, for asyncio. What is not given is read from MEMORY_SIDECAR_URL and
    MEMORY_SIDECAR_TOKEN."""

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        read_timeout: float = 1800.0,
        retries: Retries = PATIENT,
    ) -> None:
        self._http = httpx.AsyncClient(**build_client_settings(url, token, read_timeout))
        self._retries = retries
        self.url = str(self._http.base_url).rstrip("/")

    export = _make_method(calls.export)
    restore = _make_method(calls.restore)
    memories = _make_method(calls.memories)
    memory = _make_method(calls.memory)
    snapshots = _make_method(calls.snapshots)
    snapshot = _make_method(calls.snapshot)
    diff = _make_method(calls.diff)
    adopt = _make_method(calls.adopt)
    fork = _make_method(calls.fork)
    rollback = _make_method(calls.rollback)
    accept = _make_method(calls.accept)
    pin = _make_method(calls.pin)
    unpin = _make_method(calls.unpin)
    forget = _make_method(calls.forget)
    delete = _make_method(calls.delete)
    search = _make_method(calls.search)
    attach = _make_method(calls.attach)
    attachment = _make_method(calls.attachment)
    attachments = _make_method(calls.attachments)
    detach = _make_method(calls.detach)
    overview = _make_method(calls.overview)
    operation = _make_method(calls.operation)
    conversation = _make_conversation(ConversationPlan)

    async def download(self, memory: str, snapshot: str, target: str | Path) -> Path:
        """Write a snapshot to a file as an ordinary tarball (.tar.gz or .tar.zst), completely or not at all."""
        place = Path(target)
        call = calls.archive(memory, snapshot, place)
        await self._build_retrying(call)(self._fetch, call, place)
        return place

    async def events(self, after: int | None = None) -> AsyncIterator[Event]:
        """Yield events as they are published, and reconnect when the connection is cut. Recent events after number
        ``after`` come first."""
        listener = EventParser(after)
        while True:
            call = calls.events(listener.last)
            response: httpx.Response = await self._build_retrying(call)(self._open_stream, call)
            try:
                listener.begin()
                with translate_errors(self.url):
                    async for line in response.aiter_lines():
                        if event := listener.parse_line(line):
                            yield event
            except ServiceUnreachable:
                pass  # cut: connect again and continue after the last event
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

    def _build_retrying(self, call: Call[T], retries: Retries | None = None) -> AsyncRetrying:
        return AsyncRetrying(**(retries or self._retries).policy(repeatable=call.repeatable))

    async def _send(self, call: Call[T], retries: Retries | None = None) -> T:
        return await self._build_retrying(call, retries)(self._send_once, call)

    async def _send_once(self, call: Call[T]) -> T:
        request = call.request()
        with translate_errors(self.url), ExitStack() as files:
            if call.file is not None:
                file, size = files.enter_context(open_archive(call.file))
                request["content"] = _read_chunks(file)
                request["headers"]["Content-Length"] = str(size)
            response = await self._http.request(**request)
        return call.answer(response)

    async def _fetch(self, call: Call[None], place: Path) -> None:
        with translate_errors(self.url):
            async with self._http.stream(**call.request()) as response:
                if not response.is_success:
                    await response.aread()
                check_response(response)
                with write_whole(place) as file:
                    async for chunk in response.aiter_bytes():
                        await anyio.to_thread.run_sync(file.write, chunk)

    async def _open_stream(self, call: Call[None]) -> httpx.Response:
        """Open a stream of events. The caller closes it."""
        request = self._http.build_request(**call.request(), timeout=SILENCE_SECONDS)
        with translate_errors(self.url):
            response = await self._http.send(request, stream=True)
            if not response.is_success:
                await response.aread()
                await response.aclose()
        check_response(response)
        return response


async def _read_chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    while chunk := await anyio.to_thread.run_sync(partial(file.read, CHUNK)):
        yield chunk


class AsyncConversation(ConversationState):
    """``async with client.conversation(…) as memory``: see ``memory.restored`` inside, ``memory.exported`` afterwards."""

    def __init__(self, client: AsyncClient, plan: ConversationPlan) -> None:
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
        """Export the memory, then raise ``NotSaved``, or ``SystemExit`` if SIGTERM came."""
        # A conversation that was cancelled is saved too.
        with anyio.CancelScope(shield=True):
            async with ASYNC_TERMINATION.defer_signal(self._began):
                try:
                    retries = LAST_RETRIES if ASYNC_TERMINATION.told else None
                    receipt = await self._client._send(self._plan.after(), retries)
                except SidecarError as problem:
                    self._tell(problem, trouble)
                else:
                    self._end(receipt, trouble)
