"""Callers that hold connections and send nothing, half a request or endless ones; and those that rightly take their time."""

from __future__ import annotations

import io
import json
import resource
import socket
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from emulators import E2BEmulator
from tests.parts.homes import claude_mem_home, empty_home, write
from tests.parts.raw import receive, request, send
from tests.parts.services import TOKEN, Service, path, serving, until

pytestmark = pytest.mark.usefixtures("forked_programs")

HALF = b"POST /v1/memories/me/exports HTTP/1.1\r\nHost: localhost\r\nContent-"
OWN = [("Host", "localhost"), ("Authorization", f"Bearer {TOKEN}")]
QUICK: dict[str, Any] = {"header_timeout": 1, "body_timeout": 1}


@contextmanager
def opened(service: Service, count: int, data: bytes = HALF) -> Iterator[list[socket.socket]]:
    """Connections on each of which this was sent, and nothing more."""
    with ExitStack() as held:
        made = []
        for _ in range(count):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", service.port), 30))
            with suppress(ConnectionError):  # some are closed to make room for others
                connection.sendall(data)
            made.append(connection)
        yield made


def is_ended(connection: socket.socket, seconds: float = 20) -> bool:
    """Whether the service closes it."""
    connection.settimeout(seconds)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def answers(service: Service) -> bool:
    return httpx.get(f"{service.url}/readyz", timeout=10).status_code == 200


def logged(service: Service) -> list[str]:
    return [str(line["event"]) for line in service.lines()]


@pytest.fixture
def many_files() -> Iterator[int]:
    """How many files this process may have open: as many as it can be allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("count", [1100, 5000])
def test_half_sent_requests_stop_nothing_and_fill_no_log(tmp_path: Path, many_files: int, count: int) -> None:
    if many_files < count + 500:
        pytest.skip(f"this process may not have {count} connections open")
    home = claude_mem_home(empty_home(tmp_path / "home") / "agent", rows=3)
    with serving(tmp_path / "store", tmp_path / "log", files=1024, header_timeout=3) as service:
        with opened(service, count) as held:
            for _ in range(3):
                assert answers(service)
            assert service.export("me", f"local:{home}").json()["outcome"] == "committed"
            assert all(is_ended(connection) for connection in held)
        assert answers(service)
        text = service.log.read_text()
        assert "Traceback" not in text and len(text) < 20_000
        trouble = [event for event in logged(service) if event.startswith(("idle", "connections"))]
        assert 1 <= len(trouble) < 10
        service.stop()
        assert [line["times"] > count / 2 for line in service.lines() if line["event"] == "the same again"].count(True)


def test_without_files_to_open_it_waits_quietly_for_better_times(tmp_path: Path) -> None:
    with serving(tmp_path / "store", tmp_path / "log", files=40, header_timeout=60) as service:
        with opened(service, 200):
            before = _processor_seconds(service)
            time.sleep(2)
            assert _processor_seconds(service) - before < 1.5, "it tries again and again"
        until(lambda: answers(service), seconds=20)
        text = service.log.read_text()
        assert "Traceback" not in text and len(text) < 20_000


def _processor_seconds(service: Service) -> float:
    fields = Path(f"/proc/{service.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def test_a_head_must_be_whole_in_time_however_it_trickles(tmp_path: Path) -> None:
    with serving(tmp_path / "store", tmp_path / "log", **QUICK) as service:
        with opened(service, 1, b"GET / HTTP/1.1\r\n") as (slow,):
            ended = threading.Event()

            def trickle() -> None:
                with suppress(OSError):
                    while not ended.wait(0.2):
                        slow.sendall(b"X: y\r\n")

            threading.Thread(target=trickle, daemon=True).start()
            answer = receive(slow)
            ended.set()
        assert (answer.status, json.loads(answer.body)["code"]) == (408, "request-timeout")
        with opened(service, 1, b"") as (silent,):
            assert is_ended(silent)


def test_a_body_may_be_slow_but_not_stand_still(tmp_path: Path) -> None:
    home = three_files(tmp_path)
    with serving(tmp_path / "store", tmp_path / "log", **QUICK) as service:
        head = [*OWN, ("Content-Type", "application/gzip"), ("Content-Length", str(len(home)))]
        start = request("POST", path("me", "archives"), head)
        with opened(service, 1, start + home[:20]) as (stuck,):
            answer = receive(stuck)
            assert (answer.status, json.loads(answer.body)["code"]) == (408, "request-timeout")
        with opened(service, 1, start) as (steady,):
            step = len(home) // 12 + 1
            for place in range(0, len(home), step):
                steady.sendall(home[place : place + step])
                time.sleep(0.3)
            answer = receive(steady)
        assert (answer.status, json.loads(answer.body)["outcome"]) == (200, "committed")
        assert "Traceback" not in service.log.read_text()


def test_an_upload_that_is_cut_off_is_nobodys_failure(tmp_path: Path) -> None:
    with serving(tmp_path / "store", tmp_path / "log") as service:
        head = [*OWN, ("Content-Type", "application/gzip"), ("Content-Length", "1000000")]
        for verb in ("archives", "exports"):
            with opened(
                service, 5, request("POST", path("me", verb), [*head, ("Content-Type", "application/json")][1:])
            ):
                pass
        for kind, verb in (("application/gzip", "archives"), ("application/json", "exports")):
            sent = [*OWN, ("Content-Type", kind), ("Content-Length", "900000")]
            with opened(service, 5, request("POST", path("me", verb), sent) + b"x" * 10):
                time.sleep(0.2)
        assert answers(service)
        assert service.http.get(path("me")).status_code == 404
        assert "Traceback" not in service.log.read_text()


def test_who_does_not_read_answers_holds_nothing_up(tmp_path: Path) -> None:
    page = request("GET", "/page.js", [("Host", "localhost")]).replace(b"Connection: close\r\n", b"")
    with serving(tmp_path / "store", tmp_path / "log", connections=8, **QUICK) as service:
        with ExitStack() as held:
            for _ in range(8):
                greedy = held.enter_context(socket.create_connection(("127.0.0.1", service.port)))
                greedy.setblocking(False)
                deadline = time.monotonic() + 2
                while time.monotonic() < deadline:
                    try:
                        greedy.send(page * 200)
                    except BlockingIOError:
                        break
                    except ConnectionError:
                        break
            until(lambda: _is_answered(service), seconds=30)
        assert "Traceback" not in service.log.read_text()


def _is_answered(service: Service) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{service.url}/readyz", timeout=5).status_code == 200
    return False


def test_idle_connections_make_room_and_busy_ones_do_not(tmp_path: Path) -> None:
    with serving(tmp_path / "store", tmp_path / "log", connections=8) as service, ExitStack() as streams:
        with opened(service, 30, b""):
            assert answers(service)
        heard = []
        for _ in range(8):
            stream = streams.enter_context(service.http.stream("GET", "/v1/events"))
            heard.append(stream.iter_lines())
            assert next(heard[-1]) == ": listening"
        full = send(service.port, request("GET", "/readyz", [("Host", "localhost")]))
        assert (full.status, json.loads(full.body)["code"]) == (503, "too-many-connections")
        assert json.loads(full.body)["retryable"] and full.headers["retry-after"]
        assert full.headers["x-content-type-options"] == "nosniff"
        stream.close()
        until(lambda: _is_answered(service))


def test_streams_and_long_answers_are_not_cut(tmp_path: Path) -> None:
    home = claude_mem_home(empty_home(tmp_path / "home") / "agent", rows=3)
    with E2BEmulator() as e2b:
        box = e2b.create()
        write(box.home / "MEMORY.md", b"# remembered\n")
        env = e2b.environment()
        with serving(tmp_path / "store", tmp_path / "log", env, connections=8, **QUICK) as service:
            with service.http.stream("GET", "/v1/events") as stream:
                lines = stream.iter_lines()
                assert next(lines) == ": listening"
                e2b.latency = 5
                begun = time.monotonic()
                receipt = service.export("far", f"e2b:{box.id}").json()
                e2b.latency = 0
                assert time.monotonic() - begun > 4, "it was not slow enough to show anything"
                assert receipt["outcome"] == "committed"
                with opened(service, 30):  # nor by those that want in
                    fresh = httpx.Client(base_url=service.url, headers=dict(OWN[1:]), timeout=60)
                    fresh.post(path("near", "exports"), json={"sandbox": f"local:{home}"}).raise_for_status()
                    assert any('"memory": "near"' in line for line in lines)
            assert not [event for event in logged(service) if "do not read" in event or "middle of a body" in event]


def test_bad_requests_are_answered_and_logged_a_few_times(tmp_path: Path) -> None:
    bomb = b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X-%d: %s\r\n" % (n, b"y" * 999) for n in range(200))
    line = b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(tmp_path / "store", tmp_path / "log") as service:
        for _ in range(60):
            assert send(service.port, b"\x16\x03\x01 not plain HTTP\r\n\r\n").status == 400
        for data in (bomb, line):
            refused = send(service.port, data)
            assert refused.status == 431 and json.loads(refused.body)["code"] == "head-too-large"
        late = request("GET", "/readyz", [("Host", "localhost"), ("Transfer-Encoding", "chunked")])
        assert send(service.port, late + b"no chunk at all\r\n").status in (200, 400)
        assert answers(service)
        assert len([event for event in logged(service) if "Invalid HTTP" in event]) <= 3
        service.stop()
        counts = [row["times"] for row in service.lines() if row["event"] == "the same again"]
        assert sum(counts) >= 55
        assert "Traceback" not in service.log.read_text()


def three_files(tmp_path: Path) -> bytes:
    """A tarball of a home."""
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode="w:gz") as tar:
        for name in ("MEMORY.md", "SESSION-STATE.md", "memory/notes.md"):
            entry = tarfile.TarInfo(name)
            entry.size = 5
            tar.addfile(entry, io.BytesIO(b"notes"))
    return into.getvalue()
