"""The webhooks that the emulators send, received by a plain server."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from emulators import DaytonaEmulator, E2BEmulator

SECRET = "a secret of sixteen or more"
Received = list[tuple[bytes, dict[str, str]]]


@contextmanager
def receiving() -> Iterator[tuple[str, Received]]:
    received: Received = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((body, {name.lower(): value for name, value in self.headers.items()}))
            self.send_response(202)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook", received
    finally:
        server.shutdown()
        server.server_close()


def await_count(received: Received, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(received) < count:
        assert time.monotonic() < deadline, received
        time.sleep(0.02)


def test_e2b_tells_what_happens_to_a_sandbox_and_signs_it() -> None:
    with receiving() as (url, received), E2BEmulator() as server:
        hooks = server.send_webhooks(url, SECRET)
        sandbox = server.create(metadata={"memory": "conductor"})
        sandbox.pause()
        sandbox.resume()
        sandbox.kill()
        await_count(received, 4)
        events = [json.loads(body) for body, _ in received]
        assert [event["type"].rpartition(".")[2] for event in events] == ["created", "paused", "resumed", "killed"]
        assert {event["sandboxId"] for event in events} == {sandbox.id} and len({event["id"] for event in events}) == 4
        assert events[0]["eventData"]["sandbox_metadata"] == {"memory": "conductor"}
        for body, headers in received:
            given = headers["e2b-signature"]
            assert "=" not in given
            assert base64.urlsafe_b64decode(given + "=") == hashlib.sha256(SECRET.encode() + body).digest()
        hooks.held = True
        server.create()
        assert len(hooks.waiting) == 1 and hooks.post(hooks.waiting[0]) == 202
        await_count(received, 5)


def test_daytona_tells_what_happens_with_the_secret_in_a_header() -> None:
    with receiving() as (url, received), DaytonaEmulator() as server:
        server.send_webhooks(url, SECRET)
        sandbox = server.create(labels={"memory": "conductor"})
        sandbox.stop()
        sandbox.kill()
        await_count(received, 3)
        events = [json.loads(body) for body, _ in received]
        assert [event["event"] for event in events] == ["sandbox.created", *["sandbox.state.updated"] * 2]
        assert [event.get("newState") for event in events] == [None, "STOPPED", "DESTROYED"]
        assert {event["id"] for event in events} == {sandbox.id}
        assert {headers["authorization"] for _, headers in received} == {f"Bearer {SECRET}"}


@pytest.mark.parametrize("kind", [E2BEmulator, DaytonaEmulator])
def test_nobody_who_listens_is_no_trouble(kind: type[E2BEmulator] | type[DaytonaEmulator]) -> None:
    with kind() as server:
        hooks = server.send_webhooks("http://127.0.0.1:9/hook", SECRET)
        server.create().kill()
        deadline = time.monotonic() + 60
        while len(hooks.sent) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert {one.status for one in hooks.sent} == {0}
