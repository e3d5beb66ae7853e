"""A wire between a client and a server on loopback that breaks when a test says so."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit


class Wire:
    """Passes bytes both ways. A test sets one of the two faults; they hold until it takes them back."""

    def __init__(self, endpoint: str) -> None:
        server = urlsplit(endpoint)
        self._server = (server.hostname or "", server.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cut_request: Callable[[bytes], bool] = lambda sent: False
        """Break the connection instead of passing on these bytes of the client."""
        self.lose_answers = 0
        """So many answers are yet to be lost: the server acts, and the client never hears of it."""
        self.answer_limit: int | None = None
        """Break the connection after so many bytes of answers."""
        self.answer_after = 0.0
        """So many seconds late each answer begins: a server far away."""

    def run(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                threading.Thread(target=self._pass_requests, args=(client, server), daemon=True).start()
                threading.Thread(target=self._pass_answers, args=(client, server), daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _pass_requests(self, client: socket.socket, server: socket.socket) -> None:
        with _both_closed(client, server), suppress(OSError):
            while sent := client.recv(65536):
                if self.cut_request(sent):
                    return
                server.sendall(sent)

    def _pass_answers(self, client: socket.socket, server: socket.socket) -> None:
        passed = 0
        with _both_closed(client, server), suppress(OSError):
            while answer := server.recv(65536):
                if self.answer_after and answer.startswith(b"HTTP/"):
                    time.sleep(self.answer_after)
                # "100 Continue" is no answer yet: the server has not acted.
                if self.lose_answers and not answer.startswith(b"HTTP/1.1 100"):
                    self.lose_answers -= 1
                    return
                if self.answer_limit is not None and passed + len(answer) > self.answer_limit:
                    client.sendall(answer[: max(0, self.answer_limit - passed)])
                    return
                client.sendall(answer)
                passed += len(answer)


@contextmanager
def wire_to(endpoint: str) -> Iterator[Wire]:
    wire = Wire(endpoint)
    threading.Thread(target=wire.run, daemon=True).start()
    try:
        yield wire
    finally:
        wire.close()


@contextmanager
def _both_closed(*sockets: socket.socket) -> Iterator[None]:
    try:
        yield
    finally:
        for end in sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
