"""The connections of the service: how many there may be, and how long each may take.

uvicorn only closes connections that are idle between two requests. A client that opens a thousand connections and sends
half a request on each would keep them forever, and once the process may open no more files, asyncio logs a traceback
for every attempt to accept another. So connections are accepted here, around uvicorn's h11 protocol, and checked once a
second:

    waiting   no request yet, or half of its head; or a request was answered whose body still arrives. Closed after
              ``header_timeout``, and earlier if there are too many connections: the one that waits longest first.
    busy      a request is being answered. Never closed while the service works or has nothing to send (a long export, a
              stream of events); closed after ``body_timeout`` if the caller neither sends the body it announced nor reads
              what it is sent.
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

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from sidecar.host.values import dataclass
from sidecar.models.answers import Problem
from sidecar.service.api.problems import build_answer
from sidecar.service.door.door import SAFE_HEADERS
from sidecar.service.logs import log_repeats, warn

LOOK_SECONDS = 1.0
AT_ONCE = 64
"""How many connections are accepted in a row before the open ones get processing time again."""
PAUSE_SECONDS = 0.5
"""The wait before the next attempt, after no file could be opened for a connection."""
SPARE_FILES = 256
"""How many of the open files that the process may have are reserved for other uses: packs, pipes, connections to a
store."""
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
    """The most connections, and the seconds allowed for the head of a request and for no progress after it."""

    connections: int
    head: float
    body: float


def limit_connections(wanted: int) -> int:
    """Return ``wanted``, or fewer if the limit of open files does not allow as many."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, max(files - SPARE_FILES, files // 2)))


class Connection(H11Protocol):
    """uvicorn's h11 connection, extended: it reports to the listener whether it is waiting or busy, and measures how
    long it makes no progress."""

    def __init__(self, listener: Listener, server: uvicorn.Server) -> None:
        super().__init__(server.config, server.server_state, server.lifespan.state)
        self.entering: asyncio.Task[object] | None = None
        self._listener = listener
        self._busy = False
        self._waits_since = self._heard = time.monotonic()
        self._began = 0.0
        """When the first byte of a head was received; 0: none was."""
        self._unread_since = 0.0
        """Since when the caller has not read what it is sent; 0: it reads."""
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
        """Answer as a problem document, in place of uvicorn's plain text."""
        # uvicorn calls this while it handles h11's exception, which tells the kind of error; the argument does not.
        too_large = getattr(sys.exception(), "error_status_hint", 0) == HEAD_TOO_LARGE.status
        self._refuse(HEAD_TOO_LARGE if too_large else BAD_REQUEST)

    def shutdown(self) -> None:
        """Close when the service stops. h11 refuses a proper end in some states; then the transport is just closed."""
        with contextlib.suppress(h11.LocalProtocolError):
            super().shutdown()
            return
        self.transport.close()

    def drop(self) -> None:
        """Close it at once, without sending what is still buffered."""
        if self.transport is not None:
            self.transport.abort()
        elif self.entering is not None:
            self.entering.cancel()

    def look(self, now: float, allowance: ConnectionLimits) -> None:
        """Close it if it has exceeded a time limit. Called once a second."""
        if self.transport is None:
            return  # the TLS handshake has its own time limit
        if self.transport.is_closing():
            # A closing transport first sends what is buffered, which a caller that does not read could delay forever.
            self._closes_since = self._closes_since or now
            if now - self._closes_since > allowance.head:
                self.drop()
        elif not self._busy:
            if now - (self._began or self._waits_since) <= allowance.head:
                return
            if self._began:  # silent connections are not logged: browsers open some in advance
                warn("connections are closed that sent no whole request in time", seconds=allowance.head)
            if self._began and self.conn.their_state is h11.IDLE:
                self._refuse(TOO_SLOW)
            else:
                self.drop()
        elif self._unread_since and now - self._unread_since > allowance.body:
            warn("connections are closed whose callers do not read their answers", seconds=allowance.body)
            self.drop()
        elif self.flow.read_paused:
            self._heard = now  # the service paused reading, so the caller is not to blame
        elif self.cycle.more_body and now - self._heard > allowance.body:
            warn("connections are closed whose callers stopped in the middle of a body", seconds=allowance.body)
            self._refuse(TOO_SLOW)

    def _should_upgrade(self) -> bool:
        """Never upgrade: there are no WebSockets here, and uvicorn would log a warning about it."""
        return False

    def _report_state(self) -> None:
        """Tell the listener when the connection becomes busy or starts to wait."""
        busy = self.cycle is not None and not self.cycle.response_complete
        if busy is not self._busy:
            self._busy = busy
            self._began, self._waits_since = 0.0, time.monotonic()
            self._listener.sort(self, busy=busy)

    def _refuse(self, problem: Problem) -> None:
        """Send the problem, if an answer can still be sent, and close."""
        if self.cycle is not None:  # tell the application that the caller is gone
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body, headers = _build_answer(problem)
        with contextlib.suppress(h11.LocalProtocolError):
            self.transport.write(self.conn.send(h11.Response(status_code=problem.status, headers=headers)) or b"")
            self.transport.write(self.conn.send(h11.Data(data=body)) or b"")
            self.transport.write(self.conn.send(h11.EndOfMessage()) or b"")
        self.transport.close()


class Listener:
    """Accepts connections, up to the limit, and closes those that take too long."""

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[Listener], Connection],
        allowance: ConnectionLimits,
        tls: ssl.SSLContext | None,
    ) -> None:
        """Start to accept connections on ``listening`` in the running event loop."""
        self._socket = listening
        self._make = make
        self._allowance = allowance
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}
        """In the order in which they started to wait."""
        self._at_once = max(1, min(AT_ONCE, allowance.connections // 4))
        self._timer = self._loop.call_later(LOOK_SECONDS, self._check_times)
        self._pause: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Stop accepting. Open connections stay until uvicorn closes them; those still in the TLS handshake are closed
        here, because uvicorn does not know them yet."""
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
        """Put a connection among the waiting ones, at the end of the queue, or take it out when it is busy."""
        self._waiting.pop(connection, None)
        if not busy and connection in self._open:
            self._waiting[connection] = None

    def forget(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def _accept(self) -> None:
        """Accept the connections that are pending, at most ``AT_ONCE`` in a row, and refuse those above the limit."""
        for _ in range(self._at_once):
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as problem:
                self._wait_for_files(problem)
                return
            accepted.setblocking(False)
            # asyncio does this only for sockets that were made with the number of TCP, which these are not. Without it,
            # the body of each answer waits some 40 ms until the caller has confirmed its head.
            with contextlib.suppress(OSError):
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if len(self._open) < self._allowance.connections or self._make_room():
                self._start_connection(accepted)
            else:
                warn("connections are refused: all are in use", most=self._allowance.connections)
                self._turn_away(accepted)

    def _start_connection(self, accepted: socket.socket) -> None:
        """Hand an accepted socket to uvicorn's protocol, through a TLS handshake with a time limit if TLS is on."""
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
            # ``connection_lost`` is never called for a connection that was not established, so it is removed here.
            if task.cancelled() or task.exception() is not None:
                accepted.close()
                self.forget(connection)
                if self._tls is not None and not task.cancelled():
                    warn("connections are closed that did not come to speak TLS", why=str(task.exception()))

        entering.add_done_callback(entered)

    def _make_room(self) -> bool:
        """Close the connection that has waited longest. Return whether there was one."""
        longest = next(iter(self._waiting), None)
        if longest is None:
            return False
        warn("idle connections are closed to make room for others", most=self._allowance.connections)
        # Forgotten at once: the loop calls ``connection_lost`` only later, and the new connection needs the slot now.
        self.forget(longest)
        longest.drop()
        return True

    def _turn_away(self, accepted: socket.socket) -> None:
        """Answer 503 without a protocol and close. With TLS there is no answer, because that would need a handshake."""
        with accepted, contextlib.suppress(OSError):
            if self._tls is None:
                body, headers = _build_answer(FULL)
                lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
                # Read what was already sent: closing a socket with unread data resets the connection, and the caller
                # would lose the answer.
                with contextlib.suppress(BlockingIOError):
                    accepted.recv(1 << 16)
                accepted.send(b"HTTP/1.1 503 Service Unavailable\r\n" + lines + b"\r\n" + body)
                accepted.shutdown(socket.SHUT_WR)

    def _wait_for_files(self, problem: OSError) -> None:
        """Try again after ``PAUSE_SECONDS``: the socket stays readable, so an immediate attempt would fail in a busy
        loop."""
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
