"""``AsyncClient``: the same calls as ``Client``, awaited."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import BinaryIO, Self, TypeVar

import anyio
import anyio.to_thread
import httpx
from tenacity import AsyncRetrying

from sidecar.client.calls import Calls, build_events_call
from sidecar.client.conversations import ConversationPlan, ConversationState
from sidecar.client.events import PAUSE_SECONDS, SILENCE_SECONDS, EventParser
from sidecar.client.files import CHUNK, open_archive
from sidecar.client.problems import ServiceUnreachable, translate_errors
from sidecar.client.retries import PATIENT, Retries
from sidecar.client.settings import build_client_settings
from sidecar.client.termination import ASYNC_TERMINATION, LAST_RETRIES
from sidecar.client.wire import Call, check_response, join_pages
from sidecar.errors import SidecarError
from sidecar.host.files import write_whole
from sidecar.host.loopback import is_loopback
from sidecar.models.answers import Event

T = TypeVar("T")


class AsyncClient(Calls["AsyncConversation"]):
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
        self._met = False
        """Something answered."""

    async def events(self, after: int | None = None) -> AsyncIterator[Event]:
        """Yield events as they are published, and reconnect when the connection is cut. Recent events after number
        ``after`` come first."""
        listener = EventParser(after)
        while True:
            call = build_events_call(listener.last)
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

    def _converse(self, plan: ConversationPlan) -> AsyncConversation:
        return AsyncConversation(self, plan)

    def _build_retrying(self, call: Call[T], retries: Retries | None = None) -> AsyncRetrying:
        unmet = not self._met and is_loopback(self._http.base_url.host)
        return AsyncRetrying(**(retries or self._retries).policy(repeatable=call.repeatable, unmet=unmet))

    async def _send(self, call: Call[T], retries: Retries | None = None) -> T:
        retrying = self._build_retrying(call, retries)
        answer: T = await retrying(self._send_once, call)
        following = call.follow(answer)
        while following is not None:
            page: T = await retrying(self._send_once, following)
            answer, following = join_pages(answer, page), following.follow(page)
        return answer

    async def _send_once(self, call: Call[T]) -> T:
        request = call.request()
        async with AsyncExitStack() as held:
            held.enter_context(translate_errors(self.url))
            if call.file is not None:
                file, size = held.enter_context(open_archive(call.file))
                request["content"] = _read_chunks(file)
                request["headers"]["Content-Length"] = str(size)
            response = await held.enter_async_context(self._http.stream(**request))
            if call.target is None or not response.is_success:
                await response.aread()
            else:
                written = held.enter_context(write_whole(call.target))
                async for chunk in response.aiter_bytes():
                    await anyio.to_thread.run_sync(written.write, chunk)
        self._met = True
        return call.answer(response)

    async def _open_stream(self, call: Call[None]) -> httpx.Response:
        """Open a stream of events. The caller closes it."""
        request = self._http.build_request(**call.request(), timeout=SILENCE_SECONDS)
        with translate_errors(self.url):
            response = await self._http.send(request, stream=True)
            if not response.is_success:
                await response.aread()
                await response.aclose()
        self._met = True
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
