"""The front door, from outside: which names, pages and contents are let in, and what is on every answer."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.errors import BadConfig
from sidecar.service.door.door import Hosts
from sidecar.service.settings import Service as Settings
from sidecar.service.settings import check_service
from tests.parts.homes import claude_mem_home, empty_home, forget_caches
from tests.parts.raw import Answer, request, send
from tests.parts.services import TOKEN, Service, path, serving

pytestmark = pytest.mark.usefixtures("forked_programs")

JSON = ("Content-Type", "application/json")
BEARER = ("Authorization", f"Bearer {TOKEN}")
MEMORIES = "/v1/memories"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return claude_mem_home(empty_home(tmp_path_factory.mktemp("home") / "at") / "agent", rows=3)


@pytest.fixture(scope="module", params=["off", "token"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, home: Path) -> Iterator[Service]:
    """Once as it is without tokens, once with one, which the requests below then have: it must not matter."""
    folder = tmp_path_factory.mktemp("service")
    with_token: dict[str, Any] = {"given_token": "", "token": "off"} if request.param == "off" else {}
    with serving(folder / "store", folder / "log", **with_token) as started:
        forget_caches(home)  # it was exported to another store before
        assert started.export("acme/agent-7", f"local:{home}").status_code == 200
        yield started


def get(service: Service, place: str, *headers: tuple[str, str]) -> Answer:
    return send(service.port, request("GET", place, [*headers, BEARER]))


def code(answer: Answer) -> str:
    assert answer.headers["content-type"] == "application/problem+json"
    problem = json.loads(answer.body)
    assert problem["status"] == answer.status and problem["detail"] and problem["hint"]
    return str(problem["code"])


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LocalHost:{port}", "127.0.0.1", "127.0.0.1:{port}", "127.8.9.10:1", "[::1]", "[::1]:{port}"),
        *("[0:0:0:0:0:0:0:1]:80", "localhost.:{port}", "localhost:", "[::ffff:127.0.0.1]"),
    ],
)
def test_on_loopback_it_is_called_by_the_names_of_loopback(service: Service, host: str) -> None:
    assert get(service, MEMORIES, ("Host", host.format(port=service.port))).status == 200


@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.test",
            "evil.test:{port}",
            "localhost.evil.test",
            "evil-localhost",
            "127.0.0.1.evil.test",
            "sub.localhost",
        ),
        *("user@localhost", "localhost@evil.test", "localhost:1:2", "localhost:port", "localhost..", ".localhost", ""),
        *(
            "0.0.0.0:{port}",
            "[::]",
            "[::2]",
            "127.1",
            "0177.0.0.1",
            "2130706433",
            "::1",
            "[::1",
            "localhost/",
            "10.0.0.1",
        ),
        *("local host", "localhost,evil.test", "localhost:999999", "[::1%25lo]", "xn--lcalhost-54a"),
    ],
)
def test_on_loopback_no_other_name_is_answered(service: Service, host: str) -> None:
    for place in (MEMORIES, "/metrics", "/openapi.json", "/v1/events", "/", "/page.js", "/nowhere"):
        refused = get(service, place, ("Host", host.format(port=service.port)))
        assert (refused.status, code(refused)) == (421, "host-not-allowed"), place
        assert "hosts" in json.loads(refused.body)["hint"]


def test_a_request_has_one_host(service: Service) -> None:
    none = send(service.port, request("GET", MEMORIES, [BEARER], version="1.0"))
    assert (none.status, code(none)) == (421, "host-not-allowed")
    assert send(service.port, request("GET", MEMORIES, [BEARER])).status == 400
    assert get(service, MEMORIES, ("Host", "localhost"), ("Host", "evil.test")).status == 400
    old = send(service.port, request("GET", MEMORIES, [BEARER, ("Host", "localhost")], version="1.0"))
    assert old.status == 200


@pytest.mark.parametrize("place", [MEMORIES, "/healthz"])
def test_what_follows_a_request_of_two_lengths_is_no_request(service: Service, place: str) -> None:
    """A proxy that goes by the other length would take it for somebody's next one."""
    both = [BEARER, ("Host", "localhost"), ("Content-Length", "5"), ("Transfer-Encoding", "chunked")]
    second = request("GET", "/healthz", [("Host", "localhost")])
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as connection:
        connection.sendall(request("POST", place, both) + b"0\r\n\r\n" + second)
        said = b"".join(iter(lambda: connection.recv(65536), b""))
    assert said.startswith(b"HTTP/1.1 400 ") and said.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("place", ["/healthz", "/readyz"])
def test_probes_may_call_by_any_name_and_from_anywhere(service: Service, place: str) -> None:
    for headers in ([("Host", "10.1.2.3:8077")], [("Host", "localhost"), ("Sec-Fetch-Site", "cross-site")]):
        assert send(service.port, request("GET", place, headers)).status == 200
    assert send(service.port, request("GET", place, [], version="1.0")).status == 200


def test_names_can_be_allowed_and_on_other_addresses_any_may_be_used(tmp_path: Path) -> None:
    def status(service: Service, host: str) -> int:
        return get(service, MEMORIES, ("Host", host)).status

    with serving(tmp_path / "a", tmp_path / "a.log", hosts=["Sidecar.Internal", "[fd00::7]", "pinned:8077"]) as service:
        for host in ("sidecar.internal", "SIDECAR.internal.:99", "[fd00:0::7]:1", "pinned:8077", "localhost"):
            assert status(service, host) == 200, host
        for host in ("evil.sidecar.internal", "sidecar.internal.evil", "pinned", "pinned:8078", "[fd00::8]"):
            assert status(service, host) == 421, host
    with serving(tmp_path / "b", tmp_path / "b.log", bind="0.0.0.0:0") as service:
        assert status(service, "anything.example") == 200
    named = Hosts(["sidecar"], "0.0.0.0")
    assert [named.allow([host]) for host in ("sidecar:8077", "127.0.0.1", "other")] == [True, True, False]
    assert not named.allow(["sidecar", "sidecar"]) and not named.allow([])
    assert Hosts(["*"], "127.0.0.1").allow(["anything.example"])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"hosts": ["http://sidecar"]}, "hosts"),
        ({"hosts": ["user@sidecar"]}, "hosts"),
        ({"hosts": [""]}, "hosts"),
        ({"token": "a-secret-that-somebody-put-here"}, 'token must be "auto" or "off"'),
        ({"connections": 3}, "connections must be at least"),
        ({"header_timeout": 0}, "header_timeout must be at least"),
        ({"tls_cert": "cert.pem"}, "tls_key is missing"),
        ({"tls_key": "key.pem"}, "tls_cert is missing"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(BadConfig) as refused:
        check_service(Settings(**wrong))  # type: ignore[arg-type]
    assert words in refused.value.message
    assert "a-secret" not in str(refused.value.as_dict())


FOREIGN = [
    [("Origin", "http://evil.test")],
    [("Origin", "null")],
    [("Origin", "")],
    [("Origin", "http://localhost:1")],
    [("Origin", "http://localhost")],
    [("Origin", "http://localhost:{port}.evil.test")],
    [("Origin", "http://evil.localhost:{port}")],
    [("Origin", "http://localhost@evil.test:{port}")],
    [("Origin", "http://127.0.0.1:{port}")],
    [("Origin", "chrome-extension://localhost:{port}")],
    [("Origin", "localhost:{port}")],
    [("Origin", "http://localhost:{port}/")],
    [("Origin", "http://localhost:{port}"), ("Origin", "http://evil.test")],
    [("Sec-Fetch-Site", "cross-site")],
    [("Sec-Fetch-Site", "same-site")],
    [("Sec-Fetch-Site", "something-new")],
    [("Origin", "http://localhost:{port}"), ("Sec-Fetch-Site", "same-site")],
    [("Origin", "http://evil.test"), ("Sec-Fetch-Site", "same-origin")],
]
OWN = [
    [],
    [("Origin", "http://localhost:{port}")],
    [("Origin", "HTTP://LocalHost:{port}")],
    [("Origin", "https://localhost:{port}")],
    [("Sec-Fetch-Site", "same-origin")],
    [("Sec-Fetch-Site", "none"), ("Sec-Fetch-Mode", "navigate")],
    [("Origin", "http://localhost:{port}"), ("Sec-Fetch-Site", "same-origin")],
]


def filled(service: Service, headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    own = [("Host", f"localhost:{service.port}"), BEARER]
    return own + [(name, value.format(port=service.port)) for name, value in headers]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_a_page_of_another_origin_reads_and_changes_nothing(
    service: Service, home: Path, headers: list[tuple[str, str]]
) -> None:
    sent = filled(service, headers)
    export = json.dumps({"sandbox": f"local:{home}"}).encode()
    snapshots = path("acme/agent-7", "snapshots")
    for method, place, body in (
        *(("GET", place, b"") for place in (MEMORIES, snapshots, f"{snapshots}/latest/archive", "/v1/attachments")),
        *(("GET", place, b"") for place in ("/metrics", "/openapi.json", "/v1/events", "/v1/search?q=x")),
        ("POST", path("planted", "exports"), export),
        ("POST", path("planted", "archives"), b"a tarball, perhaps"),
        ("POST", path("acme/agent-7", "forks"), b'{"memory": "planted"}'),
        ("PUT", path("acme/agent-7", "head"), b'{"snapshot": "latest"}'),
        ("DELETE", path("acme/agent-7"), b""),
        ("OPTIONS", MEMORIES, b""),
    ):
        answer = send(service.port, request(method, place, [*sent, JSON], body))
        assert (answer.status, code(answer)) == (403, "origin-not-allowed"), (method, place)
        assert not [name for name in answer.headers if name.startswith("access-control")]
    kept = service.http.get(MEMORIES).json()["memories"]
    assert [(row["memory"], row["snapshots"]) for row in kept] == [("acme/agent-7", 1)]


@pytest.mark.parametrize("headers", OWN, ids=str)
def test_our_own_page_and_programs_are_let_in(service: Service, headers: list[tuple[str, str]]) -> None:
    sent = filled(service, headers)
    assert send(service.port, request("GET", MEMORIES, sent)).status == 200
    body = b'{"dry_run": true}'
    assert send(service.port, request("POST", path("acme/agent-7", "forget"), [*sent, JSON], body)).status == 200


def test_behind_a_proxy_that_speaks_tls_the_page_is_still_our_own(tmp_path: Path) -> None:
    def status(service: Service, host: str, origin: str) -> int:
        return get(service, MEMORIES, ("Host", host), ("Origin", origin)).status

    with serving(tmp_path / "store", tmp_path / "log", hosts=["sidecar.example"]) as service:
        assert status(service, "sidecar.example", "https://sidecar.example") == 200
        assert status(service, "sidecar.example:443", "https://sidecar.example") == 200
        assert status(service, "sidecar.example:8443", "https://sidecar.example:8443") == 200
        assert status(service, "sidecar.example", "https://sidecar.example:8443") == 403
        assert status(service, "sidecar.example", "https://evil.sidecar.example") == 403
        assert status(service, "sidecar.example", "https://xsidecar.example") == 403


@pytest.mark.parametrize("place", ["/", "/page.css", "/page.js"])
def test_the_page_may_be_linked_to_from_elsewhere(service: Service, place: str) -> None:
    link = [("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "document")]
    answer = send(service.port, request("GET", place, [("Host", "localhost"), *link]))
    assert answer.status == 200
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/json"]
)
def test_a_body_that_is_not_said_to_be_json_is_refused(service: Service, home: Path, kind: str) -> None:
    own = [("Host", "localhost"), BEARER, *([("Content-Type", kind)] if kind else [])]
    body = json.dumps({"sandbox": f"local:{home}"}).encode()
    chunked = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    for verb in ("exports", "restores"):
        for data in (
            request("POST", path("planted", verb), own, body),
            request("POST", path("planted", verb), [*own, ("Transfer-Encoding", "chunked")]) + chunked,
            request("POST", path("planted", verb), [*own, JSON, ("Content-Type", "text/plain")], body),
        ):
            answer = send(service.port, data)
            assert (answer.status, code(answer)) == (415, "unsupported-media-type")
    assert service.http.get(path("planted")).status_code == 404


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "application/merge-patch+json"]
)
def test_json_is_taken_under_its_names(service: Service, kind: str) -> None:
    own = [("Host", "localhost"), BEARER, ("Content-Type", kind)]
    answer = send(service.port, request("POST", path("acme/agent-7", "forget"), own, b'{"dry_run": true}'))
    assert answer.status == 200


def test_a_call_without_a_body_needs_no_content_type(service: Service) -> None:
    pin = path("acme/agent-7", "snapshots", "latest", "pin")
    for method in ("PUT", "DELETE"):
        assert send(service.port, request(method, pin, [("Host", "localhost"), BEARER])).status == 200
    empty = request(
        "PUT", pin, [("Host", "localhost"), BEARER, ("Content-Length", "0"), ("Content-Type", "text/plain")]
    )
    assert send(service.port, empty).status == 200
    assert service.http.delete(pin).status_code == 200


def test_every_answer_says_what_browsers_may_not_do_with_it(service: Service) -> None:
    own = [("Host", "localhost"), BEARER]
    archive = path("acme/agent-7", "snapshots", "latest", "archive")
    asked = [
        (200, request("GET", MEMORIES, own)),
        (200, request("GET", archive, own)),
        (200, request("GET", "/metrics", own)),
        (200, request("GET", "/openapi.json", own)),
        (200, request("GET", "/readyz", own)),
        (404, request("GET", "/nothing/here", own)),
        (405, request("PATCH", MEMORIES, own)),
        (422, request("POST", path("me", "exports"), [*own, JSON], b"{")),
        (400, request("POST", path("a//b", "exports"), [*own, JSON], b'{"sandbox": "local:/tmp"}')),
        (413, request("POST", path("me", "exports"), [*own, JSON, ("Content-Length", "2000000")])),
        (415, request("POST", path("me", "exports"), own, b"{}")),
        (421, request("GET", MEMORIES, [("Host", "evil.test")])),
        (403, request("GET", MEMORIES, [*own, ("Origin", "null")])),
        (400, b"nonsense\r\n\r\n"),
        (431, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000),
    ]
    for status, data in asked:
        answer = send(service.port, data)
        assert answer.status == status, data[:80]
        assert answer.headers["x-content-type-options"] == "nosniff", data[:80]
        assert answer.headers["cache-control"] == "no-store", data[:80]
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
    page = send(service.port, request("GET", "/", own))
    assert (
        page.headers["cache-control"] == "no-cache" and "script-src 'self'" in page.headers["content-security-policy"]
    )
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]


def test_a_private_character_in_a_path_is_no_slash(service: Service, home: Path) -> None:
    own = [("Host", "localhost"), BEARER]
    known = send(service.port, request("GET", "/v1/memories/acme%2Fagent-7", own))
    assert known.status == 200
    export = json.dumps({"sandbox": f"local:{home}"}).encode()
    for name in ("acme%EE%80%80agent-7", "acme%ee%80%80agent-7", "acme%2Fagent%EE%80%80seven"):
        for data in (
            request("GET", f"/v1/memories/{name}", own),
            request("DELETE", f"/v1/memories/{name}", own),
            request("POST", f"/v1/memories/{name}/exports", [*own, JSON], export),
        ):
            refused = send(service.port, data)
            assert (refused.status, code(refused)) == (400, "bad-memory-id")
            assert refused.headers["x-content-type-options"] == "nosniff"
    raw = send(service.port, request("GET", "/v1/memories/acme\ue000agent-7", own))
    assert raw.status == 400
    assert send(service.port, request("GET", "/v1/memories/acme%2Fagent-7", own)).status == 200
    assert [row["memory"] for row in service.http.get(MEMORIES).json()["memories"]] == ["acme/agent-7"]


def test_the_door_is_documented(service: Service) -> None:
    document = service.http.get("/openapi.json").json()
    for place, operations in document["paths"].items():
        for operation in operations.values():
            if not re.fullmatch("/healthz|/readyz", place):
                assert {"401", "403", "421"} <= set(operation["responses"]), place
            if "application/json" in operation.get("requestBody", {}).get("content", {}):
                assert "415" in operation["responses"], place
