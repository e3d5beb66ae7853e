"""The page, in a real browser: what is kept and looked after, what happens, and nothing that a sandbox could run there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, ViewportSize, expect

from sidecar.service.access.grants import Verb
from sidecar.service.access.token_file import TokenRecord, add_token
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
        expect(page.locator("#snapshots tbody tr").first).to_contain_text("+2 observations")
        page.locator("#snapshots tbody button").first.click()
        expect(page.locator("#changes tbody tr")).to_have_count(2)
        expect(page.locator("#changes tbody")).to_contain_text("added")
        expect(page.locator("#says tbody tr").first).to_contain_text("observation")
        expect(page.locator("#files tbody")).to_contain_text("claude-mem/claude-mem.db")
        page.locator("#snapshots tbody button").last.click()
        expect(page.locator("#untold")).to_contain_text("has no parent to compare it with")
        service.restore("acme/agent-7", f"local:{home}")
        expect(page.locator("#events tbody")).to_contain_text("left as it is")
        assert page.title() == "memory-sidecar" and complaints == []


def test_a_read_only_token_opens_the_page_with_its_own_memories(page: Page, tmp_path: Path) -> None:
    expect.set_options(timeout=30_000)
    home, file = claude_mem_home(empty_home(tmp_path / "home") / "agent", rows=5), tmp_path / "tokens.json"
    tokens = {
        role: add_token(file, TokenRecord(id="", name=role, salt="", digest="", memories=("acme/*",), verbs=verbs))
        for role, verbs in (("reads", (Verb.READ,)), ("exports", (Verb.EXPORT,)))
    }
    with serving(tmp_path / "store", tmp_path / "log", {"MEMORY_SIDECAR_SERVICE_TOKENS": str(file)}) as service:
        service.export("acme/agent-7", f"local:{home}")
        assert service.http.post(path("acme/agent-7", "forks"), json={"memory": "globex/agent"}).status_code == 201
        page.goto(f"{service.url}/#token={tokens['exports']}")
        expect(page.locator("#login")).to_be_visible()
        page.goto(f"{service.url}/#token={tokens['reads']}")
        expect(page.locator("#login")).to_be_hidden()
        expect(page.locator("#memories tbody tr")).to_have_count(1)
        page.click("text=acme/agent-7")
        expect(page.locator("#snapshots tbody tr")).to_have_count(1)
        expect(page.locator("#events tbody")).to_contain_text("export.committed")
        observe(home, 2, "later")
        service.export("acme/agent-7", f"local:{home}")
        expect(page.locator("#events tbody tr", has_text="export.committed")).to_have_count(2)
        assert "globex" not in page.content()


PHONE: ViewportSize = {"width": 390, "height": 844}
BROKEN_WORDS = """() => {
  // Words of a cell's text that are drawn on more than one line.
  const broken = [];
  for (const cell of document.querySelectorAll("td, th, h2, #health")) {
    const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    for (let node = texts.nextNode(); node; node = texts.nextNode()) {
      for (const word of node.data.matchAll(/[A-Za-z]{2,20}/g)) {
        const range = document.createRange();
        range.setStart(node, word.index);
        range.setEnd(node, word.index + word[0].length);
        const tops = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
        if (tops.size > 1) broken.push(word[0]);
      }
    }
  }
  return broken;
}"""


def test_on_a_phone_the_page_hides_nothing_and_breaks_no_word(page: Page, tmp_path: Path) -> None:
    expect.set_options(timeout=30_000)
    homes = [claude_mem_home(empty_home(tmp_path / f"home{number}") / "agent", rows=3) for number in range(4)]
    ids = [f"0b5a3c1e-77aa-4d52-9f3e-1c2d3e4f5a6{number}" for number in range(4)]
    with serving(tmp_path / "store", tmp_path / "log", checkpoint_every=1) as service:
        service.restore("acme/lost-agent", f"local:{homes[0]}", conversation=ids[0])
        service.restore("acme/open-agent", f"local:{homes[1]}", conversation=ids[1])
        service.restore("acme/idle-agent", f"local:{homes[2]}", conversation=ids[2], checkpoint_every=3600)
        service.export("acme/idle-agent", f"local:{homes[2]}")
        service.restore("acme/refused-agent", f"local:{homes[3]}", conversation=ids[3])
        until(lambda: all(row["saved"] for row in service.http.get("/v1/attachments").json()["attachments"]))
        homes[0].rename(homes[0].with_name("gone"))
        shutil.rmtree(homes[3] / ".claude-mem")
        page.set_viewport_size(PHONE)
        page.goto(service.url)
        page.fill("#token", TOKEN)
        page.click("#login button")
        shown = page.locator("#attached tbody tr")
        expect(shown).to_have_count(4)
        for agent, state in (("lost", "lost"), ("open", "open"), ("idle", "idle"), ("refused", "open")):
            line = shown.filter(has_text=f"acme/{agent}-agent")
            expect(line.locator("td[data-label=State]")).to_have_text(state)
            expect(line.locator("td[data-label=State]")).to_be_visible()
            expect(line.locator("td[data-label=Saved]")).to_contain_text("ago")
        refused = shown.filter(has_text="acme/refused-agent").locator("td[data-label=Problem]")
        expect(refused).to_contain_text("rejected (empty)")
        expect(refused).to_contain_text("memory-sidecar accept acme/refused-agent")
        expect(shown.filter(has_text="acme/lost-agent").locator("td[data-label=Problem]")).to_contain_text(
            "may be lost"
        )
        page.click("text=acme/idle-agent >> nth=1")
        expect(page.locator("#snapshots tbody tr")).to_have_count(1)
        expect(page.locator("#events tbody")).to_contain_text("export.rejected")
        assert page.evaluate(BROKEN_WORDS) == []
        for cell in page.locator("td:not(:empty)").all():
            assert cell.is_visible(), cell.inner_text()
        page.screenshot(path=tmp_path / "phone.png", full_page=True)
        page.screenshot(path=tmp_path / "top.png")
        wide = "[...document.querySelectorAll('*')].filter((one) => one.getBoundingClientRect().right > innerWidth)"
        assert page.evaluate(f"{wide}.map((one) => one.outerHTML.slice(0, 200))") == [], (
            "it has to be scrolled sideways"
        )
        page.set_viewport_size({"width": 1280, "height": 900})
        assert page.evaluate(BROKEN_WORDS) == []
        page.screenshot(path=tmp_path / "desk.png", full_page=True)


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
