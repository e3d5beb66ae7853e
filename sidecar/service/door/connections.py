"""The connections of the service: how many there may be, and how long each may take.

uvicorn ends connections that idle between two requests, and nothing else: whoever opens a thousand and sends half a request on
each has them for good, and when the process may open no more files asyncio logs a traceback for every try to accept one more.
So connections are accepted here, and looked at once a second:

    waiting   no request yet, or half of its head; or a request was answered whose body still arrives. Ends after
              ``header_timeout``, and earlier when there are too many connections: the one that waits longest goes first.
    busy      a request is being answered. Never cut while the service works or has nothing to say (a long export, a stream of
              events); after ``body_timeout`` when the caller neither sends the body it announced nor reads what it is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from sidecar.service.api.problems import Problem, build_answer
from sidecar.service.door.door import SAFE_HEADERS
from sidecar.service.logs import log_repeats, warn

LOOK_SECONDS = 1.0
AT_ONCE = 64
"""So many are accepted before those that are there get a turn again."""
PAUSE_SECONDS = 0.5
"""Before the next try, when no file could be opened for a connection."""
SPARE_FILES = 256
"""Of the files that the process may have open, those which are not for connections: packs, pipes, connections to a store."""
OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
BAD_REQUEST = Problem(
    status=400, title="Bad request", detail="This is not an HTTP request.", code="bad-request", hint="Send HTTP/1.1."
)
HEAD_TOO_LARGE = Problem(
    status=431,
    title="Head too large",
    detail="The request line and the headers are too long.",
    code="head-too-large",
    hint="Send fewer or shorter headers; what is long goes into the body.",
)
TOO_SLOW = Problem(
    status=408,
    title="Too slow",
    detail="The request did not arrive in time.",
    code="request-timeout",
    hint="Send it again, at once; [service] header_timeout and body_timeout say how long it may take.",
    retryable=True,
)
FULL = Problem(
    status=503,
    title="Too many connections",
    detail="As many connections are in use as the service allows.",
    code="too-many-connections",
    hint="Try again in a moment; [service] connections says how many there may be.",
    retryable=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """How many connections, and how many seconds for the head of a request and for standing still after it."""

    connections: int
    head: float
    body: float


def limit_connections(wanted: int) -> int:
    """As many as wanted, or as the limit of open files leaves room for."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, max(files - SPARE_FILES, files // 2)))


class Connection(H11Protocol):
    """uvicorn's own, which tells the listener whether it waits or is busy, and knows how long it stands still."""

    def __init__(self, listener: Listener, server: uvicorn.Server) -> None:
        super().__init__(server.config, server.server_state, server.lifespan.state)
        self.entering: asyncio.Task[object] | None = None
        self._listener = listener
        self._busy = False
        self._waits_since = self._heard = time.monotonic()
        self._began = 0.0
        """When the first byte of a head came; 0: none did."""
        self._unread_since = 0.0
        """Since when the caller does not read what it is sent; 0: it reads."""
        self._closes_since = 0.0

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._listener.forget(self)

    def data_received(self, data: bytes) -> None:
        self._heard = time.monotonic()
        if not self._busy and not self._began:
            self._began = self._heard
        super().data_received(data)
        self._report_state()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._report_state()

    def pause_writing(self) -> None:
        self._unread_since = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._unread_since = 0.0
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        # Called while uvicorn handles h11's error, which says what kind of error it is.
        too_large = getattr(sys.exception(), "error_status_hint", 0) == HEAD_TOO_LARGE.status
        self._refuse(HEAD_TOO_LARGE if too_large else BAD_REQUEST)

    def shutdown(self) -> None:
        with contextlib.suppress(h11.LocalProtocolError):
            super().shutdown()
            return
        self.transport.close()

    def drop(self) -> None:
        """End it now, whatever is still to be sent."""
        if self.transport is not None:
            self.transport.abort()
        elif self.entering is not None:
            self.entering.cancel()

    def look(self, now: float, allowance: ConnectionLimits) -> None:
        """End it if it has taken too long."""
        if self.transport is None:
            return  # what comes before has a time limit of its own
        if self.transport.is_closing():
            # It is closed when all was sent, which a caller that does not read would put off for ever.
            self._closes_since = self._closes_since or now
            if now - self._closes_since > allowance.head:
                self.drop()
        elif not self._busy:
            if now - (self._began or self._waits_since) <= allowance.head:
                return
            if self._began:  # those that are silent are not worth a word: browsers open some in advance
                warn("connections are closed that sent no whole request in time", seconds=allowance.head)
            if self._began and self.conn.their_state is h11.IDLE:
                self._refuse(TOO_SLOW)
            else:
                self.drop()
        elif self._unread_since and now - self._unread_since > allowance.body:
            warn("connections are closed whose callers do not read their answers", seconds=allowance.body)
            self.drop()
        elif self.flow.read_paused:
            self._heard = now  # not the caller stands still, but we
        elif self.cycle.more_body and now - self._heard > allowance.body:
            warn("connections are closed whose callers stopped in the middle of a body", seconds=allowance.body)
            self._refuse(TOO_SLOW)

    def _should_upgrade(self) -> bool:
        return False  # there are no WebSockets here, and nothing to log about it

    def _report_state(self) -> None:
        busy = self.cycle is not None and not self.cycle.response_complete
        if busy is not self._busy:
            self._busy = busy
            self._began, self._waits_since = 0.0, time.monotonic()
            self._listener.sort(self, busy=busy)

    def _refuse(self, problem: Problem) -> None:
        """Answer, where an answer can still be given, and close."""
        if self.cycle is not None:  # the application learns that its answer is no longer waited for
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body, headers = _build_answer(problem)
        with contextlib.suppress(h11.LocalProtocolError):
            self.transport.write(self.conn.send(h11.Response(status_code=problem.status, headers=headers)) or b"")
            self.transport.write(self.conn.send(h11.Data(data=body)) or b"")
            self.transport.write(self.conn.send(h11.EndOfMessage()) or b"")
        self.transport.close()


class Listener:
    """Accepts connections, as many as may be open, and ends those that take too long."""

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[Listener], Connection],
        allowance: ConnectionLimits,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._socket = listening
        self._make = make
        self._allowance = allowance
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}
        """In the order in which they began to wait."""
        self._at_once = max(1, min(AT_ONCE, allowance.connections // 4))
        self._timer = self._loop.call_later(LOOK_SECONDS, self._check_times)
        self._pause: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Accept no more. What is open stays, until uvicorn closes it."""
        self._loop.remove_reader(self._socket)
        self._timer.cancel()
        if self._pause is not None:
            self._pause.cancel()
        self._socket.close()
        for connection in list(self._waiting):
            if connection.transport is None:
                connection.drop()
        log_repeats(all_of_them=True)

    def sort(self, connection: Connection, *, busy: bool) -> None:
        self._waiting.pop(connection, None)
        if not busy and connection in self._open:
            self._waiting[connection] = None

    def forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def _accept(self) -> None:
        for _ in range(self._at_once):
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as problem:
                self._wait_for_files(problem)
                return
            accepted.setblocking(False)
            if len(self._open) < self._allowance.connections or self._make_room():
                self._start_connection(accepted)
            else:
                warn("connections are refused: all are in use", most=self._allowance.connections)
                self._turn_away(accepted)

    def _start_connection(self, accepted: socket.socket) -> None:
        connection = self._make(self)
        self._open.add(connection)
        self._waiting[connection] = None
        limit = None if self._tls is None else self._allowance.head
        entering = self._loop.create_task(
            self._loop.connect_accepted_socket(lambda: connection, accepted, ssl=self._tls, ssl_handshake_timeout=limit)
        )
        connection.entering = entering

        def entered(task: asyncio.Task[object]) -> None:
            connection.entering = None
            if task.cancelled() or task.exception() is not None:
                accepted.close()
                self.forget(connection)
                if self._tls is not None and not task.cancelled():
                    warn("connections are closed that did not come to speak TLS", why=str(task.exception()))

        entering.add_done_callback(entered)

    def _make_room(self) -> bool:
        """End the connection that has waited longest. Return whether there was one."""
        longest = next(iter(self._waiting), None)
        if longest is None:
            return False
        warn("idle connections are closed to make room for others", most=self._allowance.connections)
        self.forget(longest)
        longest.drop()
        return True

    def _turn_away(self, accepted: socket.socket) -> None:
        with accepted, contextlib.suppress(OSError):
            if self._tls is None:
                body, headers = _build_answer(FULL)
                lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
                # What was sent already is read: closing over it would take the answer away from the caller as well.
                with contextlib.suppress(BlockingIOError):
                    accepted.recv(1 << 16)
                accepted.send(b"HTTP/1.1 503 Service Unavailable\r\n" + lines + b"\r\n" + body)
                accepted.shutdown(socket.SHUT_WR)

    def _wait_for_files(self, problem: OSError) -> None:
        """Try again in a moment: at once it would fail at once, and keep the processor busy with that."""
        warn("a connection could not be accepted", why=problem.strerror, open=len(self._open))
        if problem.errno in OUT_OF_FILES:
            self._make_room()
        self._loop.remove_reader(self._socket)
        self._pause = self._loop.call_later(PAUSE_SECONDS, self._loop.add_reader, self._socket, self._accept)

    def _check_times(self) -> None:
        self._timer = self._loop.call_later(LOOK_SECONDS, self._check_times)
        now = time.monotonic()
        for connection in list(self._open):
            connection.look(now, self._allowance)
        log_repeats()


def _build_answer(problem: Problem) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    response = build_answer(problem, {"Connection": "close"})
    return bytes(response.body), [*response.raw_headers, *SAFE_HEADERS.items()]
