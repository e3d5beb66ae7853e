"""Webhooks: chosen events, signed, in order, until somebody takes them."""

from __future__ import annotations

import hashlib
import hmac
import json
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.parts.homes import claude_mem_home, empty_home, observe
from tests.parts.memories import grow, plain_home
from tests.parts.services import serving, until

pytestmark = pytest.mark.usefixtures("forked_programs")

SECRET = "a-secret-that-signs-webhooks"


class Receiver:
    """Takes webhooks, after refusing the first few; while it hangs, it reads them and gives no answer."""

    def __init__(self, refuse: int) -> None:
        self.refuse = refuse
        self.works = threading.Event()
        self.works.set()
        self.hanging = 0
        self.taken: list[dict[str, Any]] = []
        self.bad_signatures = 0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                at = self.headers["Memory-Sidecar-Time"]
                wanted = hmac.new(SECRET.encode(), at.encode() + b"." + body, hashlib.sha256).hexdigest()
                if self.headers["Memory-Sidecar-Signature"] != f"sha256={wanted}":
                    receiver.bad_signatures += 1
                if not receiver.works.is_set():
                    receiver.hanging += 1
                    receiver.works.wait(60)
                    self.close_connection = True
                    return
                receiver.refuse -= 1
                status = 503 if receiver.refuse >= 0 else 204
                if status == 204:
                    receiver.taken.append(json.loads(body))
                self.send_response(status)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    started = Receiver(refuse=2)
    yield started
    started.close()


def test_chosen_events_arrive_signed_and_in_order_however_often_they_were_refused(
    receiver: Receiver, tmp_path: Path
) -> None:
    home = claude_mem_home(empty_home(tmp_path / "home") / "agent", rows=5)
    hooks = f'[[webhooks]]\nurl = "{receiver.url}"\nevents = ["export.*"]\nsecret_env = "HOOK_SECRET"\n'
    with serving(tmp_path / "s", tmp_path / "log", {"HOOK_SECRET": SECRET}, more=hooks) as service:
        for number in range(3):
            service.export("me", f"local:{home}")
            service.restore("me", f"local:{home}", attach=False)
            observe(home, 1, f"n{number}")
        deadline = time.monotonic() + 20
        while len(receiver.taken) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert SECRET not in service.log.read_text()
    assert [event["type"] for event in receiver.taken] == ["export.committed"] * 3
    numbers = [event["number"] for event in receiver.taken]
    assert numbers == sorted(numbers) and receiver.bad_signatures == 0


def test_an_event_that_was_not_sent_before_a_crash_is_sent_after_it(tmp_path: Path) -> None:
    home = claude_mem_home(empty_home(tmp_path / "home") / "agent", rows=5)
    receiver = Receiver(refuse=1000)
    hooks = f'[[webhooks]]\nurl = "{receiver.url}"\nsecret_env = "HOOK_SECRET"\n'
    with serving(tmp_path / "s", tmp_path / "log", {"HOOK_SECRET": SECRET}, more=hooks) as service:
        service.export("me", f"local:{home}")
        deadline = time.monotonic() + 10
        while receiver.refuse == 1000:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        service.kill()
        receiver.refuse = 0
        service.start()
        while not receiver.taken:
            assert time.monotonic() < deadline + 10
            time.sleep(0.05)
    assert receiver.taken[0]["type"] == "export.committed"
    receiver.close()


def test_what_waits_behind_an_event_that_hangs_is_sent_by_the_next_service(tmp_path: Path) -> None:
    homes = {name: plain_home(empty_home(tmp_path / name)) for name in ("a", "b")}
    receiver = Receiver(refuse=0)
    receiver.works.clear()
    hooks = f'[[webhooks]]\nurl = "{receiver.url}"\nevents = ["export.*"]\nsecret_env = "HOOK_SECRET"\n'
    made: list[tuple[str, str]] = []
    with serving(tmp_path / "s", tmp_path / "log", {"HOOK_SECRET": SECRET}, more=hooks) as service:
        for memory in ("a", "b", "a", "b", "a"):
            grow(homes[memory])
            made.append((memory, service.export(memory, f"local:{homes[memory]}").json()["snapshot"]))
        until(lambda: receiver.hanging)
        assert service.stop() == 0 and receiver.taken == []
        receiver.works.set()
        service.start()
        until(lambda: {(event["memory"], event["details"]["snapshot"]) for event in receiver.taken} >= set(made))
        until(lambda: not list((tmp_path / "s/outbox").rglob("*.json")))
    for memory in homes:
        arrived = [event["details"]["snapshot"] for event in receiver.taken if event["memory"] == memory]
        assert list(dict.fromkeys(arrived)) == [snapshot for name, snapshot in made if name == memory]
    receiver.close()


def test_told_twice_to_stop_it_ends_at_once(tmp_path: Path) -> None:
    home = claude_mem_home(empty_home(tmp_path / "home") / "agent", rows=5)
    with serving(tmp_path / "s", tmp_path / "log") as service:
        service.export("me", f"local:{home}")
        for number in range(8):
            body = {"sandbox": f"local:{home}"}
            service.http.post(f"/v1/memories/m{number}/exports", params={"wait": "false"}, json=body)
        service.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        began = time.monotonic()
        service.process.send_signal(signal.SIGINT)
        assert service.process.wait(20) in (0, 130)
        assert time.monotonic() - began < 8
        service.start()
        assert service.http.get("/v1/memories/me").json()["head"], "the store took no harm"
