"""What pages of others can do to a service on this machine, tried in a real browser: nothing. And that our own page works."""

from __future__ import annotations

import base64
import http.server
import io
import os
import re
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.parts.browser import browsing
from tests.parts.homes import claude_mem_home, empty_home, memory_tree
from tests.parts.services import Service, printed, serving

REBOUND, STRANGER = "evil.test", "stranger.test"
FLAGS = (
    f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1, MAP {STRANGER} 127.0.0.1",
    # Newer browsers ask before a page reaches into the local network. Others do not, and people say yes.
    "--disable-features=LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests,PrivateNetworkAccessSendPreflights",
)
SECRET = "secret-memory"

ATTACK = (Path(__file__).parents[1] / "parts" / "attack.js").read_text("utf-8").replace("SECRET", SECRET)


@contextmanager
def attacker() -> Iterator[int]:
    """A web server of somebody else's: every path is an empty page."""

    class Empty(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>a page</title><body>")

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browsing(*FLAGS) as page:
        yield page


@pytest.fixture(scope="module", params=["off", "auto"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("attacked")
    home = claude_mem_home(empty_home(folder / "home") / "agent", rows=3)
    state = {"XDG_STATE_HOME": str(folder / "state")}
    with serving(folder / "store", folder / "log", state, given_token="", token=request.param) as started:
        if request.param == "auto":
            token = (folder / "state" / "memory-sidecar" / "token").read_text().strip()
            started.http.headers["Authorization"] = f"Bearer {token}"
        assert started.export(SECRET, f"local:{home}").status_code == 200
        yield started


def attack(page: Page, service: Service, tmp_path: Path, host: str) -> list[str]:
    home, empty = claude_mem_home(empty_home(tmp_path / "h") / "agent", rows=1), empty_home(tmp_path / "empty")
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode="w:gz") as tar:
        entry = tarfile.TarInfo("MEMORY.md")
        entry.size = 7
        tar.addfile(entry, io.BytesIO(b"planted"))
    tarball = base64.b64encode(into.getvalue()).decode()
    seen: list[str] = page.evaluate(ATTACK, [f"http://{host}:{service.port}", str(home), str(empty), tarball])
    assert memory_tree(empty) == {}, "something was restored"
    return seen


def unchanged(service: Service) -> None:
    memories = service.http.get("/v1/memories").json()["memories"]
    assert [(row["memory"], row["snapshots"]) for row in memories] == [(SECRET, 1)]
    assert service.http.get("/metrics").text.count('outcome="committed"} 1.0') == 1


@pytest.mark.parametrize("origin", ["http://127.0.0.1:{port}", f"http://{STRANGER}:{{port}}"])
@pytest.mark.parametrize("called", ["127.0.0.1", "localhost"])
def test_a_page_of_another_origin_can_do_nothing(
    page: Page, service: Service, tmp_path: Path, origin: str, called: str
) -> None:
    with attacker() as port:
        page.goto(origin.format(port=port))
        seen = attack(page, service, tmp_path, called)
    unchanged(service)
    assert len(seen) > 30
    assert not [line for line in seen if SECRET in line.partition(" ")[2] or line.startswith("loaded")], seen
    assert not [line for line in seen if re.search(r" \d00 (basic|cors|default) ", line)], seen


def test_a_page_on_a_name_that_was_rebound_to_this_machine_can_do_nothing(
    page: Page, service: Service, tmp_path: Path
) -> None:
    address = f"http://{REBOUND}:{service.port}/"
    # First the name belonged to somebody else, whose page this is; from now on it means this machine.
    page.route(address, lambda route: route.fulfill(body="<!doctype html><body>", content_type="text/html"))
    page.goto(address)
    page.unroute(address)
    seen = attack(page, service, tmp_path, REBOUND)
    unchanged(service)
    answered = [line for line in seen if re.search(r" 421 basic ", line)]
    assert len(answered) > 10, "the service was not reached at all"
    assert not [line for line in seen if SECRET in line.partition(" ")[2] or line.startswith("loaded")], seen
    assert not [line for line in seen if re.search(r" 2\d\d ", line)], seen
    assert "framed nothing" in seen


def test_our_page_works_without_a_token_and_through_a_link_on_another_page(page: Page, service: Service) -> None:
    expect.set_options(timeout=30_000)
    token = service.http.headers.get("Authorization", "").removeprefix("Bearer ")
    with attacker() as port:
        page.goto(f"http://{STRANGER}:{port}/")
        page.evaluate(
            """(place) => { const link = document.body.appendChild(document.createElement("a"));
            link.href = place; link.textContent = "look"; }""",
            f"{service.url}/",
        )
        page.click("text=look")
        if token:
            page.fill("#token", token)
            page.click("#login button")
        expect(page.locator("#memories tbody")).to_contain_text(SECRET)
        expect(page.locator("#health")).to_contain_text("ready")


def test_the_printed_link_opens_the_page_and_the_token_goes_out_of_sight(page: Page, tmp_path: Path) -> None:
    expect.set_options(timeout=30_000)
    with printed(tmp_path, terminal=True) as said:
        link = re.search(r"http://\S+#token=(\S+)", said)
        assert link
        address = link[0].partition("#")[0]
        page.goto("about:blank")
        page.goto(link[0])
        expect(page.locator("#events")).to_be_visible()
        expect(page.locator("#login")).to_be_hidden()
        assert page.url == address
        assert page.evaluate("sessionStorage.getItem('token')") == link[1]
        page.reload()
        expect(page.locator("#events")).to_be_visible()
        page.evaluate("location.hash = 'token=not-the-right-one'")
        expect(page.locator("#refused")).to_be_visible()
        assert page.url == address
        page.evaluate(f"location.hash = 'token={link[1]}'")
        expect(page.locator("#login")).to_be_hidden()
        page.evaluate("sessionStorage.clear()")
        page.goto(address)
        expect(page.locator("#login")).to_be_visible()
        kept = Path(os.environ["XDG_STATE_HOME"]) / "memory-sidecar" / "token"
        page.fill("#token", kept.read_text().strip())
        page.click("#login button")
        expect(page.locator("#login")).to_be_hidden()
    with printed(tmp_path, terminal=True, env={"MEMORY_SIDECAR_SERVICE_TOKEN": "off"}) as said:
        plain = re.search(r"A page for people: (http://\S+)\n", said)
        assert plain
        page.goto(plain[1])
        expect(page.locator("#events")).to_be_visible()
