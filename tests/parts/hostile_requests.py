"""Requests that nobody sends by mistake: made at random from odd parts, the same for the same seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

METHODS = (
    *("GET", "POST", "PUT", "DELETE") * 4,
    *(
        "PATCH",
        "HEAD",
        "OPTIONS",
        "TRACE",
        "CONNECT",
        "PRI",
        "get",
        "G E T",
        "",
        "POST\x00",
        "X" * 300,
        "GÉT",
        "M-SEARCH",
    ),
)
IDS = (
    *(
        "me",
        "acme%2Fagent-7",
        "%2e%2e",
        "..",
        ".",
        "%2F",
        "%2F%2F",
        "%00",
        "%0d%0aSet-Cookie:x",
        "%ff%fe",
        "%C0%AF",
        "%EE%80%80",
    ),
    *(
        "%ED%A0%80",
        "a" * 300,
        "%F0%9F%A6%A6",
        "con",
        "*",
        "{memory}",
        "%",
        "%zz",
        "a%2Farchives",
        "-rf",
        "%E2%80%AE",
        "e%CC%81",
    ),
)
TAILS = (
    *(
        "",
        "/exports",
        "/restores",
        "/archives",
        "/forks",
        "/head",
        "/attachment",
        "/snapshots",
        "/snapshots/latest",
        "/forget",
    ),
    *(
        "/snapshots/latest/archive",
        "/snapshots/latest/archive?codec=exe",
        "/snapshots/%2e%2e/pin",
        "/snapshots/@now",
        "/diff",
    ),
    *("/diff?from=%00&to=latest~99999999999", "/snapshots/latest/pin", "/nothing", "/", "//", "/exports/", "/;a=b"),
)
PLACES = (
    *(
        "/",
        "/page.js",
        "/healthz",
        "/readyz",
        "/metrics",
        "/openapi.json",
        "/v1/memories",
        "/v1/memories/",
        "/v1/attachments",
    ),
    *(
        "/v1/search?q=%00",
        "/v1/search?q=" + "x" * 2000,
        "/v1/search",
        "/v1/operations/%2e%2e",
        "/v1/operations/" + "9" * 400,
    ),
    *(
        "*",
        "//",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/../../etc/passwd",
        "http://evil.test/v1/memories",
        "evil.test:80",
        "?",
        "#",
        "",
    ),
    *(
        "/v1/memories?limit=-1",
        "/v1/memories?limit=99999999999999999999",
        "/v1/memories?" + "a=b&" * 3000,
        "/ HTTP/1.1 /",
        "/é",
    ),
)
HOSTS = ("localhost",) * 8 + (
    "127.0.0.1:1",
    "evil.test",
    "",
    "localhost, evil.test",
    "a@localhost",
    "[::1",
    "x" * 3000,
    "\x00",
)
HEADERS = (
    *(("Origin", value) for value in ("null", "http://localhost", "http://evil.test", "", "file://", "x" * 5000)),
    *(("Sec-Fetch-Site", value) for value in ("cross-site", "same-origin", "none", "\xff")),
    *(("Content-Type", "application/json"),) * 12,
    *(
        ("Content-Type", value)
        for value in ("text/plain", "application/gzip", "", "application/json; charset=utf-16", "a/b/c;;=")
    ),
    *(("Content-Length", value) for value in ("0", "5", "-1", "99999999999999999999", "1e3", "+5", "0x10", "3, 3", "")),
    *(
        ("Transfer-Encoding", value)
        for value in ("chunked", "gzip", "chunked, chunked", "identity", "\x0bchunked", "xchunked")
    ),
    *(("Expect", value) for value in ("100-continue", "200-ok")),
    *(("Idempotency-Key", value) for value in ("k", "x" * 300, "../../head", "ü", "", "a/b")),
    *(("Last-Event-ID", value) for value in ("0", "-1", "9" * 100, "x", "")),
    *(
        ("Connection", "Upgrade, HTTP2-Settings"),
        ("Upgrade", "websocket"),
        ("Upgrade", "h2c"),
        ("HTTP2-Settings", "AAMAAABk"),
    ),
    *(("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="), ("Sec-WebSocket-Version", "13")),
    *(
        ("Range", "bytes=0-0,-1,5-2"),
        ("Accept", "x/" + "y" * 2000),
        ("Accept-Encoding", "br;q=-1"),
        ("Cookie", "a=b; " * 500),
    ),
    *(("X-Forwarded-Host", "evil.test"), ("X-Forwarded-Proto", "gopher"), ("X-Forwarded-For", "a, b, ," + "c," * 500)),
    *(
        ("Authorization", "Bearer"),
        ("Authorization", "Basic eDp5"),
        ("Authorization", "Bearer \xff\xfe"),
        ("X-HTTP-Method-Override", "DELETE"),
    ),
    *(
        ("X-Folded", "a\r\n b"),
        ("X Space", "y"),
        ("", "no name"),
        ("X-Null", "a\x00b"),
        ("X\xe9", "y"),
        ("X-Long", "y" * 15_000),
    ),
)
PROPER_HEADERS = tuple(
    (name, value)
    for name, value in HEADERS
    if name
    not in ("Content-Length", "Origin", "Sec-Fetch-Site", "X-Folded", "X Space", "", "X-Null", "X\xe9", "X-Long")
    and value.isprintable()
)


def _values(choose: random.Random, home: str) -> object:
    """Something for a body, for what is asked for or quite different."""
    texts = (
        "",
        "local:",
        f"local:{home}",
        "local:/nonexistent",
        "e3b:x",
        "local:\x00",
        "local:" + "a/" * 3000,
        "\ud800",
        "💥" * 999,
    )
    odd: tuple[object, ...] = (None, True, -1, 1e308, 10**400, [], {}, [[]] * 50, {"": {"": {}}}, "x" * 5000, *texts)
    names: tuple[str, ...] = (
        "sandbox",
        "snapshot",
        "memory",
        "layouts",
        "projects",
        "conversation",
        "label",
        "force",
        "allow",
        "mode",
        "restore",
    )
    names += ("checkpoint_every", "dry_run", "wake", "attach", "colour", "__proto__", "")
    body = {choose.choice(names): choose.choice(odd) for _ in range(choose.randrange(6))}
    if choose.random() < 0.6:
        body["sandbox"] = choose.choice(texts)
    return body if choose.random() < 0.9 else choose.choice(odd)


def _body(choose: random.Random, home: str) -> bytes:
    made = json.dumps(_values(choose, home)).encode()
    return choose.choice(
        (
            *(
                b"",
                made,
                made,
                made,
                made,
                made[:-1],
                made + b"\n{}",
                b"\xef\xbb\xbf" + made,
                made.decode().encode("utf-16"),
            ),
            *(
                b"[" * 100_000,
                b'{"a":' * 50_000,
                b"9" * 100_000,
                b"NaN",
                b'{"sandbox": "\xff"}',
                b"\x1f\x8b\x08\x00" + b"\x00" * 99,
            ),
            *(
                b'{"sandbox": "local:/x", "sandbox": 3}',
                b'"' + b"x" * 900_000,
                b"\x00" * 1000,
                b"a=b&c=d",
                b"-",
                b'{"\\ud800": 1}',
            ),
        )
    )


def _chunked(choose: random.Random, body: bytes) -> bytes:
    size = f"{len(body):x}".encode()
    return choose.choice(
        (
            size + b"\r\n" + body + b"\r\n0\r\n\r\n",
            size + b";ext=" + b"x" * 300 + b"\r\n" + body + b"\r\n0\r\nX-Trailer: y\r\n\r\n",
            size + b"\n" + body + b"\n0\n\n",
            b"-1\r\n" + body,
            b"ffffffffffffffffffff\r\n" + body,
            b"zz\r\n" + body,
            size + b"\r\n" + body,
        )
    )


@dataclass(frozen=True)
class Hostile:
    parts: tuple[bytes, ...]
    """Sent one after the other, with a moment in between."""
    hang_up: bool
    """Whether the caller goes away without waiting for an answer."""


def hostile_requests(seed: int, count: int, token: str, home: str) -> Iterator[Hostile]:
    for number in range(count):
        yield _one(random.Random(f"{seed}/{number}"), token, home)


def _one(choose: random.Random, token: str, home: str) -> Hostile:
    if choose.random() < 0.03:
        return Hostile((choose.randbytes(choose.randrange(3000)),), choose.random() < 0.5)
    data = _request(choose, token, home)
    how = choose.random()
    if how < 0.05:  # two at once
        data += _request(choose, token, home)
    if how < 0.10:  # cut off
        return Hostile((data[: choose.randrange(len(data) + 1)],), True)
    if how < 0.15:
        place = choose.randrange(len(data) + 1)
        return Hostile((data[:place], data[place:]), False)
    return Hostile((data,), choose.random() < 0.05)


def _request(choose: random.Random, token: str, home: str) -> bytes:
    """More than half of them are proper HTTP, and what is odd about them gets further."""
    proper = choose.random() < 0.6
    ids = f"/v1/memories/{choose.choice(IDS)}{choose.choice(TAILS)}"
    target = choose.choice(PLACES) if choose.random() < (0.15 if proper else 0.4) else ids
    headers = [("Host", "localhost" if proper else choose.choice(HOSTS))]
    if choose.random() < 0.9:
        headers += [("Authorization", f"Bearer {token}")]
    if choose.random() < 0.9:
        headers += [("Connection", "close")]
    headers += [choose.choice(PROPER_HEADERS if proper else HEADERS) for _ in range(choose.randrange(4))]
    if choose.random() < 0.02:
        headers += [(f"X-{number}", "y") for number in range(2000)]
    body = _body(choose, home) if choose.random() < 0.7 else b""
    said = {name.lower(): value for name, value in headers}
    if "chunked" in said.get("transfer-encoding", ""):
        body = _chunked(choose, body)
    elif "content-length" not in said and body and (proper or choose.random() < 0.95):
        headers += [("Content-Length", str(len(body)))]
    method = choose.choice(METHODS[: METHODS.index("G E T")] if proper else METHODS)
    version = "1.1" if proper else choose.choice(("1.1",) * 6 + ("1.0", "0.9", "2.0", "3", "1.1.1"))
    lines = [f"{method} {target} HTTP/{version}", *(f"{name}: {value}" for name, value in headers)]
    end = "\r\n" if proper else choose.choice(("\r\n",) * 8 + ("\n", "\r"))
    return (end.join(lines) + end + end).encode("latin-1", "replace") + body
