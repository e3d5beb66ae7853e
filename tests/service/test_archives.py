"""Tarballs over HTTP: what is hostile is refused, what is lawful is adopted, and the service answers all the while."""

from __future__ import annotations

import io
import json
import os
import socket
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from sidecar.client import Client
from sidecar.service.api.uploads import MEDIA_TYPES
from tests.parts.forgery import header, zeros
from tests.parts.homes import claude_mem_home, empty_home, three_tier_home
from tests.parts.hostile_archives import ARCHIVES, ELSEWHERE, GIB, GOOD, NAME, _gz, file
from tests.parts.services import TOKEN, Service, path, serving, until

pytestmark = pytest.mark.usefixtures("forked_programs")

OCTETS = {"Content-Type": "application/octet-stream"}
LAWFUL = _gz(GOOD, file(NAME, b'{"lawful": true}'), bytes(1024))
PROMPT = 5.0
"""Seconds a probe may take on a busy machine of two cores; one that waits for hostile work takes as long as that."""
ROOM = 300 << 10
"""KiB that a service may take at its peak, whatever it is sent."""


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return empty_home(tmp_path / "spool")


@pytest.fixture
def service(tmp_path: Path, spool: Path) -> Iterator[Service]:
    with serving(tmp_path / "store", tmp_path / "service.log", {"TMPDIR": str(spool)}) as started:
        yield started


def adopt(service: Service, memory: str, archive: bytes, **params: str) -> httpx.Response:
    return service.http.post(path(memory, "archives"), content=archive, headers=OCTETS, params=params)


def probes(service: Service) -> list[float]:
    """How long each probe took; both must say that all is well."""
    taken = []
    for place in ("/healthz", "/readyz"):
        started = time.monotonic()
        answer = httpx.get(service.url + place, timeout=30)
        taken.append(time.monotonic() - started)
        assert answer.status_code == 200, answer.text
    return taken


def peak(service: Service) -> int:
    """KiB at the peak."""
    lines = Path(f"/proc/{service.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def nothing_is_left(spool: Path) -> bool:
    return not list(spool.iterdir())


@pytest.mark.parametrize("case", ["size-by-pax", "size-by-pax-left-out"])
def test_eight_archives_that_say_they_are_endless_are_refused_and_the_service_goes_on(
    case: str, service: Service, spool: Path
) -> None:
    code, make = ARCHIVES[case]
    hostile = make()
    assert len(hostile) < 10_000
    with ThreadPoolExecutor(8) as callers:
        answers = list(callers.map(lambda n: adopt(service, f"m{n}", hostile), range(8)))
    assert [(answer.status_code, answer.json()["code"]) for answer in answers] == [(424, code)] * 8
    assert max(probes(service)) < PROMPT
    assert adopt(service, "lawful", LAWFUL).json()["outcome"] == "committed"
    assert service.http.get("/v1/memories").json()["memories"][0]["memory"] == "lawful"
    assert nothing_is_left(spool)


@pytest.mark.parametrize("case", ["million-members", "long-names", "many-comments", "overlapping-records"])
def test_refusing_an_archive_takes_little_memory(case: str, service: Service, spool: Path) -> None:
    code, make = ARCHIVES[case]
    answer = adopt(service, "me", make())
    assert answer.json()["code"] == code, answer.text
    assert answer.status_code in (413, 422, 424)
    assert peak(service) < ROOM
    assert nothing_is_left(spool)


SLOW = _gz(GOOD, header(ELSEWHERE, 7 * GIB)) + zeros(7 * GIB) + _gz(bytes(1024))
"""Seven megabytes that take long to read, and are within every limit."""


def test_long_work_on_archives_keeps_nobody_waiting(tmp_path: Path, spool: Path) -> None:
    """More of them at once than asyncio has threads for everybody."""
    with serving(tmp_path / "store", tmp_path / "log", {"TMPDIR": str(spool)}, concurrency=12) as service:
        sent = [adopt(service, f"m{number}", SLOW, wait="false") for number in range(12)]
        assert [answer.status_code for answer in sent] == [202] * 12
        until(lambda: _running(service) == 12)
        took = [seconds for _ in range(5) for seconds in probes(service)]
        assert _running(service) > 6, "they ended too soon to say anything"
        assert max(took) < PROMPT, took
        service.kill()


def test_an_archive_that_takes_too_long_is_given_up(tmp_path: Path, spool: Path) -> None:
    more = "[timing]\nunpack = 2\n"
    with serving(tmp_path / "store", tmp_path / "log", {"TMPDIR": str(spool)}, more=more) as service:
        answer = adopt(service, "me", SLOW)
        problem = answer.json()
        assert (answer.status_code, problem["code"]) == (424, "unpack-timeout")
        assert "2 seconds" in problem["detail"] and "[timing] unpack" in problem["hint"]
        assert nothing_is_left(spool)
        assert adopt(service, "lawful", LAWFUL).json()["outcome"] == "committed"


def _running(service: Service) -> float:
    lines = service.http.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("memory_sidecar_operations_running"))


def test_a_service_told_to_stop_does_not_wait_for_a_hostile_archive(tmp_path: Path, spool: Path) -> None:
    with serving(tmp_path / "store", tmp_path / "log", {"TMPDIR": str(spool)}, grace=1) as service:
        assert adopt(service, "me", SLOW, wait="false").status_code == 202
        until(lambda: _running(service) == 1)
        assert service.stop() == 1
        service.start()
        assert adopt(service, "lawful", LAWFUL).json()["outcome"] == "committed"
        assert nothing_is_left(spool), "also of what was given up"


@pytest.mark.parametrize("sized", [True, False], ids=["with its length", "without its length"])
def test_an_upload_beyond_the_limit_of_its_memory_is_refused(tmp_path: Path, spool: Path, sized: bool) -> None:
    more = '[limits]\npacked_bytes = 2_000_000\n[limits.memories."small/*"]\npacked_bytes = 100_000\n'
    noise = os.urandom(300_000)
    archive = _gz(GOOD, file(NAME, noise), bytes(1024))

    def sent() -> Iterator[bytes]:
        for at in range(0, len(archive), 10_000):
            yield archive[at : at + 10_000]

    with serving(tmp_path / "store", tmp_path / "log", {"TMPDIR": str(spool)}, more=more) as service:
        content = archive if sized else sent()
        refused = service.http.post(path("small/one", "archives"), content=content, headers=OCTETS)
        assert (refused.status_code, refused.json()["code"]) == (413, "limit-packed")
        assert "limits.packed_bytes allows 100,000" in refused.json()["detail"] and refused.json()["hint"]
        assert nothing_is_left(spool)
        assert service.http.get(path("small/one")).status_code == 404
        content = archive if sized else sent()
        adopted = service.http.post(path("large", "archives"), content=content, headers=OCTETS)
        assert (adopted.status_code, adopted.json()["outcome"]) == (200, "committed")


def test_an_upload_that_never_ends_is_cut_off_at_the_limit(tmp_path: Path, spool: Path) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while sent < 1 << 30:
            sent += 1 << 16
            yield bytes(1 << 16)

    more = "[limits]\npacked_bytes = 1_000_000\n"
    with serving(tmp_path / "store", tmp_path / "log", {"TMPDIR": str(spool)}, more=more) as service:
        most = 0
        ended = threading.Event()

        def watch() -> None:
            nonlocal most
            while not ended.wait(0.01):
                found = [place for place in spool.rglob("*") if place.is_file()]
                most = max(most, sum(place.stat().st_size for place in found if place.exists()))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with pytest.raises(httpx.HTTPError):  # it may be answered in the middle, or cut off
                answer = service.http.post(path("me", "archives"), content=endless(), headers=OCTETS)
                assert (answer.status_code, answer.json()["code"]) == (413, "limit-packed")
                raise httpx.HTTPError("refused")
        finally:
            ended.set()
            watcher.join()
        until(lambda: nothing_is_left(spool))
        assert most < 4_000_000
        assert max(probes(service)) < PROMPT


def test_an_upload_that_is_cut_short_leaves_nothing(service: Service, spool: Path) -> None:
    target = urlsplit(service.url)
    with socket.create_connection((target.hostname, target.port)) as line:
        head = f"POST {path('me', 'archives')} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        head += "Content-Type: application/gzip\r\nContent-Length: 1000000\r\n\r\n"
        line.sendall(head.encode() + LAWFUL)
        until(lambda: not nothing_is_left(spool))
    until(lambda: nothing_is_left(spool))
    assert adopt(service, "me", LAWFUL).json()["outcome"] == "committed"
    assert not [line for line in service.lines() if line.get("level") in ("error", "critical")]


def test_an_upload_that_stands_still_is_ended(tmp_path: Path, spool: Path) -> None:
    with serving(tmp_path / "s", tmp_path / "log", {"TMPDIR": str(spool)}, more="[timing]\nunpack = 2\n") as service:
        target = urlsplit(service.url)
        with socket.create_connection((target.hostname, target.port), timeout=30) as line:
            head = f"POST {path('me', 'archives')} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
            head += "Content-Type: application/gzip\r\nContent-Length: 1000000\r\n\r\n"
            line.sendall(head.encode() + LAWFUL)
            answer = line.recv(65536)
        assert b" 408 " in answer.split(b"\r\n")[0]
        until(lambda: nothing_is_left(spool))


@pytest.mark.parametrize("kind", [*MEDIA_TYPES, "Application/GZIP; charset=binary"])
def test_archives_are_taken_under_the_types_they_have(kind: str, service: Service) -> None:
    answer = service.http.post(path("me", "archives"), content=LAWFUL, headers={"Content-Type": kind})
    assert (answer.status_code, answer.json()["outcome"]) == (200, "committed")


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "",
        "text/plain",
        "application/json",
        "multipart/form-data; boundary=x",
        "application/x-www-form-urlencoded",
    ],
)
def test_other_types_are_refused(kind: str | None, service: Service, spool: Path) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    answer = service.http.post(path("me", "archives"), content=LAWFUL, headers=headers)
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (415, "unsupported-media-type")
    assert all(known in problem["hint"] for known in MEDIA_TYPES)
    assert service.http.get("/v1/memories").json()["memories"] == []
    assert nothing_is_left(spool)


def test_the_document_names_the_types(service: Service) -> None:
    document = service.http.get("/openapi.json").json()
    asked = document["paths"]["/v1/memories/{memory}/archives"]["post"]
    assert set(asked["requestBody"]["content"]) == set(MEDIA_TYPES)
    assert {"408", "413", "415", "424", "429"} <= set(asked["responses"])


def test_the_client_sends_a_type_that_is_taken(service: Service, tmp_path: Path) -> None:
    archive = tmp_path / "home.tar.gz"
    archive.write_bytes(LAWFUL)
    with Client(service.url, token=TOKEN) as client:
        assert client.adopt("me", archive).outcome == "committed"


def test_an_archive_is_an_operation_like_any_other(service: Service, tmp_path: Path) -> None:
    home = three_tier_home(claude_mem_home(tmp_path / "home", rows=30))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        tar.add(home / ".claude-mem", ".claude-mem")
    heard: list[dict[str, object]] = []
    listening = threading.Event()

    def listen() -> None:
        with service.http.stream("GET", "/v1/events") as stream:
            for line in stream.iter_lines():
                listening.set()
                if line.startswith("data: "):
                    heard.append(json.loads(line.removeprefix("data: ")))
                    return

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    assert listening.wait(10)
    accepted = adopt(service, "me", out.getvalue(), wait="false", label="adopted")
    assert accepted.status_code == 202
    where = accepted.headers["location"]
    until(lambda: service.http.get(where).json()["state"] == "done")
    standing = service.http.get(where).json()
    assert (standing["kind"], standing["sandbox"], standing["problem"]) == ("export", "import:upload", None)
    assert (standing["receipt"]["outcome"], standing["receipt"]["label"]) == ("committed", "adopted")
    listener.join(10)
    assert (heard[0]["type"], heard[0]["memory"]) == ("export.committed", "me")
    figures = service.http.get("/metrics").text
    assert 'memory_sidecar_operations_total{kind="export",outcome="committed"} 1.0' in figures
    refused = adopt(service, "me", b"no tarball at all")
    assert (refused.status_code, refused.json()["code"]) == (422, "not-an-archive")
    figures = service.http.get("/metrics").text
    assert 'memory_sidecar_operations_total{kind="export",outcome="failed"} 1.0' in figures


def test_beyond_the_queue_archives_are_refused_before_they_are_taken(tmp_path: Path, spool: Path) -> None:
    settings: dict[str, Any] = {"concurrency": 1, "queue": 1}
    more = "[timing]\nunpack = 8\n"
    with serving(tmp_path / "store", tmp_path / "log", {"TMPDIR": str(spool)}, more=more, **settings) as service:
        first = [adopt(service, f"m{n}", SLOW, wait="false") for n in range(2)]
        assert [answer.status_code for answer in first] == [202, 202]
        refused = adopt(service, "late", LAWFUL)
        assert (refused.status_code, refused.json()["code"]) == (429, "too-busy")
        assert int(refused.headers["retry-after"]) > 0
        until(lambda: nothing_is_left(spool))
        assert adopt(service, "late", LAWFUL).json()["outcome"] == "committed"


def test_only_so_many_archives_are_on_their_way_at_once(tmp_path: Path, spool: Path) -> None:
    with serving(tmp_path / "store", tmp_path / "log", {"TMPDIR": str(spool)}, uploads=2) as service:
        target = urlsplit(service.url)
        head = f"POST {path('me', 'archives')} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        head += "Content-Type: application/gzip\r\nContent-Length: 1000000\r\n\r\n"
        lines = [socket.create_connection((target.hostname, target.port)) for _ in range(2)]
        for line in lines:
            line.sendall(head.encode() + b"x")
        until(lambda: len(list(spool.iterdir())) == 2)
        refused = adopt(service, "late", LAWFUL)
        assert (refused.status_code, refused.json()["code"]) == (429, "too-busy")
        for line in lines:
            line.close()
        until(lambda: nothing_is_left(spool))
        assert adopt(service, "late", LAWFUL).json()["outcome"] == "committed"
