"""The page, in a real browser: what is kept and looked after, what happens, and nothing that a sandbox could run there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.parts.browser import browsing
from tests.parts.homes import claude_mem_home, empty_home, observe
from tests.parts.postgres import Database
from tests.parts.remembering import Agent
from tests.parts.services import TOKEN, path, serving, until

EVIL = "<img src=x onerror=document.title='run'>"


@pytest.fixture
def page() -> Iterator[Page]:
    with browsing() as page:
        yield page


def test_the_page_shows_what_is_kept_and_what_happens(page: Page, tmp_path: Path) -> None:
    expect.set_options(timeout=30_000)
    home = claude_mem_home(empty_home(tmp_path / "home") / "agent")
    with serving(tmp_path / "store", tmp_path / "log") as service:
        service.export("acme/agent-7", f"local:{home}", label=EVIL)
        complaints: list[str] = []
        page.on("console", lambda said: complaints.append(said.text) if "Security Policy" in said.text else None)
        page.goto(service.url)
        page.fill("#token", "not the token")
        page.click("#login button")
        expect(page.locator("#refused")).to_be_visible()
        page.fill("#token", TOKEN)
        page.click("#login button")
        expect(page.locator("#login")).to_be_hidden()
        expect(page.locator("#health")).to_contain_text("ready")
        page.click("text=acme/agent-7")
        expect(page.locator("#snapshots tbody tr")).to_have_count(1)
        expect(page.locator("#snapshots tbody")).to_contain_text(EVIL)
        attached = {"sandbox": f"local:{home}", "checkpoint_every": 3600}
        assert service.http.put(path("acme/agent-7", "attachment"), json=attached).status_code == 200
        observe(home, 2, "later")
        service.export("acme/agent-7", f"local:{home}")
        expect(page.locator("#events tbody")).to_contain_text("export.committed")
        expect(page.locator("#attached tbody")).to_contain_text(f"local:{home}")
        expect(page.locator("#snapshots tbody tr")).to_have_count(2)
        service.restore("acme/agent-7", f"local:{home}")
        expect(page.locator("#events tbody")).to_contain_text("left as it is")
        assert page.title() == "memory-sidecar" and complaints == []


@pytest.mark.slow
def test_the_page_searches_where_there_is_a_database(page: Page, tmp_path: Path, database: Database) -> None:
    expect.set_options(timeout=30_000)
    agent = Agent(tmp_path / "home")
    (agent.home / "app/MEMORY.md").write_text(f"# Habits {EVIL}\nlikes brevity {EVIL} ** and stars\n")
    with serving(tmp_path / "store", tmp_path / "log") as service:
        snapshot = service.export("acme/agent-7", f"local:{agent.home}", projects=[agent.project]).json()["snapshot"]
        until(lambda: database.heads().get("acme/agent-7") == snapshot)
        page.goto(service.url)
        page.fill("#token", TOKEN)
        page.click("#login button")
        page.fill("#words", "neverheardof")
        page.click("#search button")
        expect(page.locator("#found")).to_have_text("Nothing found.")
        page.fill("#words", "brevity")
        page.click("#search button")
        expect(page.locator("#search tbody tr")).to_have_count(1)
        expect(page.locator("#search tbody")).to_contain_text("acme/agent-7")
        expect(page.locator("#search mark").first).to_have_text("brevity")
        assert page.title() == "memory-sidecar"
    with serving(tmp_path / "store", tmp_path / "log2", {"MEMORY_SIDECAR_POSTGRES": ""}) as service:
        page.goto(service.url)
        page.fill("#token", TOKEN)
        page.click("#login button")
        expect(page.locator("#memories tbody tr")).to_have_count(1)
        expect(page.locator("#search")).to_be_hidden()


def test_the_page_asks_nobody_else(tmp_path: Path) -> None:
    with serving(tmp_path / "store", tmp_path / "log") as service:
        for name in ("/", "/page.css", "/page.js"):
            answer = service.http.get(name, headers={"Authorization": ""})
            assert answer.status_code == 200
            assert not re.search(r"https?://|//[a-z]+\.", answer.text), "something would come from elsewhere"
            assert "default-src 'none'" in answer.headers["content-security-policy"]
