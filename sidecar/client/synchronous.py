"""``Client``: the calls of the API as blocking methods."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Self, TypeVar

import httpx
from tenacity import Retrying

from sidecar.client.calls import Calls, build_events_call
from sidecar.client.conversations import ConversationPlan, ConversationState
from sidecar.client.events import PAUSE_SECONDS, SILENCE_SECONDS, EventParser
from sidecar.client.files import open_archive
from sidecar.client.problems import ServiceUnreachable, translate_errors
from sidecar.client.retries import PATIENT, Retries
from sidecar.client.settings import build_client_settings
from sidecar.client.termination import LAST_RETRIES, TERMINATION
from sidecar.client.wire import Call, check_response, join_pages
from sidecar.errors import SidecarError
from sidecar.host.files import write_whole
from sidecar.host.loopback import is_loopback
from sidecar.models.answers import Event

T = TypeVar("T")


class Client(Calls["Conversation"]):
    """A client for one service. What is not given is read from MEMORY_SIDECAR_URL and MEMORY_SIDECAR_TOKEN."""

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        read_timeout: float = 1800.0,
        retries: Retries = PATIENT,
    ) -> None:
        self._http = httpx.Client(**build_client_settings(url, token, read_timeout))
        self._retries = retries
        self.url = str(self._http.base_url).rstrip("/")
        self._met = False
        """Something answered."""

    def events(self, after: int | None = None) -> Iterator[Event]:
        """Yield events as they are published, and reconnect when the connection is cut. Recent events after number
        ``after`` come first."""
        listener = EventParser(after)
        while True:
            call = build_events_call(listener.last)
            response = self._build_retrying(call)(self._open_stream, call)
            try:
                listener.begin()
                with translate_errors(self.url):
                    for line in response.iter_lines():
                        if event := listener.parse_line(line):
                            yield event
            except ServiceUnreachable:
                pass  # cut: connect again and continue after the last event
            finally:
                response.close()
            time.sleep(PAUSE_SECONDS)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def _converse(self, plan: ConversationPlan) -> Conversation:
        return Conversation(self, plan)

    def _build_retrying(self, call: Call[T], retries: Retries | None = None) -> Retrying:
        unmet = not self._met and is_loopback(self._http.base_url.host)
        return Retrying(**(retries or self._retries).policy(repeatable=call.repeatable, unmet=unmet))

    def _send(self, call: Call[T], retries: Retries | None = None) -> T:
        retrying = self._build_retrying(call, retries)
        answer: T = retrying(self._send_once, call)
        following = call.follow(answer)
        while following is not None:
            page: T = retrying(self._send_once, following)
            answer, following = join_pages(answer, page), following.follow(page)
        return answer

    def _send_once(self, call: Call[T]) -> T:
        request = call.request()
        with translate_errors(self.url), ExitStack() as held:
            if call.file is not None:
                request["content"], _ = held.enter_context(open_archive(call.file))
            response = held.enter_context(self._http.stream(**request))
            if call.target is None or not response.is_success:
                response.read()
            else:
                file = held.enter_context(write_whole(call.target))
                for chunk in response.iter_bytes():
                    file.write(chunk)
        self._met = True
        return call.answer(response)

    def _open_stream(self, call: Call[None]) -> httpx.Response:
        """Open a stream of events. The caller closes it."""
        request = self._http.build_request(**call.request(), timeout=SILENCE_SECONDS)
        with translate_errors(self.url):
            response = self._http.send(request, stream=True)
            if not response.is_success:
                response.read()
                response.close()
        self._met = True
        check_response(response)
        return response


class Conversation(ConversationState):
    """``with client.conversation(…) as memory``: see ``memory.restored`` inside and ``memory.exported`` afterwards."""

    def __init__(self, client: Client, plan: ConversationPlan) -> None:
        super().__init__(plan)
        self._client = client
        self._began = False

    def __enter__(self) -> Self:
        self._begin(self._client._send(self._plan.before()))
        self._began = TERMINATION.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, trouble: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Export the memory, then raise ``NotSaved``, or ``SystemExit`` if SIGTERM came."""
        with TERMINATION.defer_signal(self._began):
            try:
                receipt = self._client._send(self._plan.after(), LAST_RETRIES if TERMINATION.told else None)
            except SidecarError as problem:
                self._tell(problem, trouble)
            else:
                self._end(receipt, trouble)
